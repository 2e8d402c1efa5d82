"""Malformed YAML ends in a ConfigError of bounded length."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Write, problems

from hpcdist.config.document import MAX_BYTES
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError, shown


def test_deep_and_recursive_documents_are_rejected(write: Write) -> None:
    for text in ("[" * 50_000, "{a: " * 50_000, "- " * 50_000 + "a", "a: " + "[" * 41 + "]" * 41):
        (problem,) = problems(write(text))
        # libyaml has a limit of its own since PyYAML 6.0.4.
        assert problem == "line 1: nested more than 40 levels deep" or "maximum nesting depth" in problem
    (problem,) = problems(write("params: &a {b: *a}"))
    assert problem == "an alias contains itself"


def test_a_config_file_is_limited_in_size(write: Write) -> None:
    path = write("")
    path.write_text("#" * (MAX_BYTES + 1))
    assert problems(path) == (f"cannot be read: {MAX_BYTES + 1} bytes, more than {MAX_BYTES}",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: " + "9" * 30, "seed must fit in 64 bits, got 999999999999999999999999999999"),
        ("params: {1: a, '1': b}", "the key '1' occurs twice, as text and as a number"),
        ("params: {1.0: a, '1.0': b}", "the key '1.0' occurs twice, as text and as a number"),
        ("params: {true: a}", "the key True is a bool: put it in quotes"),
        ("params: {a: !!bool x}", "line 1: explicit tags are not supported: put a value"),
        ('params: {a: "x\\0y"}', "params.a must not contain a NUL character, got 'x\\x00y'"),
        ("params: {a: '${'}", "params.a: malformed interpolation"),
        ("roles: {a: {b: 1}}", "roles.a must be int, got {'b': 1}"),
        ("hybrid: {hidden_sizes: [[1]]}", "hybrid.hidden_sizes.0 must be int, got [1]"),
        ("seed: ${seed}", "seed: Recursive interpolation detected"),
        ("comm: {max_bytes: " + "9" * 99 + "G}", "comm.max_bytes: '" + "9" * 99 + "G' is not a number of bytes"),
    ],
)
def test_malformed_values_are_rejected(write: Write, text: str, expected: str) -> None:
    (problem,) = problems(write(text))
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (r"checkpoint=\${x}", "checkpoint is a section: give it keys, got '${x}'"),
        (r"trainer.target=\${x}", None),
        (r"params=\${x}", "params must be dict[str, Any], got '${x}'"),
        (r"params.a=\${x}", None),
    ],
)
def test_escaped_interpolation_is_text(write: Write, tmp_path: Path, override: str, expected: str | None) -> None:
    if expected is None:
        config = load_config(write(""), [override])
        written = tmp_path / "written.yaml"
        written.write_text(to_yaml(config))
        assert load_run_config(written, [], {}) == config
    else:
        assert problems(write(""), override) == (expected,)


@pytest.mark.parametrize(
    "override",
    [
        "runs_dir=~nosuchuser/x",
        "data.root=~nosuchuser/x",
        "rnn.files=[~nosuchuser/x]",
        "hybrid.file=~nosuchuser/x",
        "trainer.script=[~nosuchuser/x]",
        "tracking.uri=sqlite:///~nosuchuser/x",
        "container={runtime: apptainer, image: ~nosuchuser/x}",
        "container.mounts=[~nosuchuser/x:/x]",
    ],
)
def test_home_folder_of_an_unknown_user_is_rejected(write: Write, override: str) -> None:
    (problem,) = problems(write(""), override)
    assert problem.endswith(": the home folder of '~nosuchuser' is unknown: use an absolute path")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("experiment=!!bool x", "experiment must be a plain folder name"),
        ("seed=${", "seed: malformed interpolation"),
        ("seed=" + "9" * 5000, "seed must be int, got '999"),
        ("params.a=\udcff", "params.a must be UTF-8 text, got '\\udcff'"),
        ("params.\udcff=1", "params: a key must be UTF-8 text, got '\\udcff'"),
        ("roles=[1]", "roles must be dict[str, int], got [1]"),
    ],
)
def test_malformed_overrides_are_rejected(write: Write, override: str, expected: str) -> None:
    (problem,) = problems(write(""), override)
    assert problem.startswith(expected)


def test_invalid_file_names_are_rejected() -> None:
    for source in ("~nosuchuser/x", "x" * 5000, "a\0b", "\udcff"):
        with pytest.raises(ConfigError, match=r"cannot be a config file|no such config file") as caught:
            load_config(source)
        assert len(str(caught.value)) <= 500
        str(caught.value).encode()


def test_config_error_is_bounded_in_length(write: Write) -> None:
    path = write("".join(f"key{number}: 1\n" for number in range(25)))
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"seed={'x' * 9000}", "params.\x1b[31m.a=${nosuch:" + "y" * 9000])
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 27
    assert lines[0] == f"{path}: 27 mistakes"
    assert (len(lines), lines[-1]) == (22, "  - and 7 more")
    assert max(map(len, lines)) <= 500
    assert all(line.isprintable() for line in lines)


def test_long_secret_is_not_shown_in_part(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cret" * 200
    monkeypatch.setenv("MY_KEY", secret)
    path = write(
        f"params: {{my_token: {secret}}}\noptim: {{lr: '${{oc.env:MY_KEY}}'}}\nstop: {{epochs_token: {secret}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"seed={secret}", f"launch.env={{A_TOKEN: [{secret}]}}"])
    assert "s3crets3cret" not in str(caught.value)


def test_shown_shortens_long_and_nested_values() -> None:
    assert shown("a" * 60) == repr("a" * 60)
    assert shown("a" * 5000) == "'" + "a" * 44 + "..." + "a" * 11 + "' (5,000 characters)"
    assert shown(10**5000) == "an integer of 16,610 bits"
    assert shown({"a": [1, {"b": [2, [3]]}]}) == "{'a': [1, {'b': [...]}]}"
    assert shown([["x" * 100] * 9] * 9).endswith(" (9 entries)")
