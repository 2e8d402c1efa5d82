"""A config file's way into a frozen Config, every mistake on that way, and back to YAML without secrets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcdist.config.loading import (
    find_config,
    load_config,
    load_run_config,
    redacted_argument,
    secrets_of,
    shipped_configs,
    to_yaml,
)
from hpcdist.config.schema import Config, RoleRequest, describe, exact, role_device
from hpcdist.config.schema.declaration import trainer_sections
from hpcdist.errors import ConfigError, shown

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"{path}: ")
    return caught.value.problems


# --- what is right


def test_defaults_yaml_and_overrides_win_in_this_order(write: Write) -> None:
    config = load_config(write("optim:\n  lr: 0.5\n  momentum: 0.8\n"), ["optim.lr=3e-4", "stop.steps=7"])
    assert (config.optim.lr, config.optim.momentum, config.optim.name) == (3e-4, 0.8, "adam")
    assert config.stop.steps == 7


def test_an_empty_file_is_all_defaults(write: Write) -> None:
    config = load_config(write("# nothing\n"))
    assert config.optim == Config().optim
    assert config.launch == Config().launch


def test_a_config_is_frozen(write: Write) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(write("")).optim.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optim.clip_norm=null", lambda config: config.optim.clip_norm is None),
        ("optim.clip_norm=2", lambda config: config.optim.clip_norm == 2.0),
        ("trainer=pkg.mod:train", lambda config: config.trainer.target == "pkg.mod:train"),
        ("trainer.target=pkg.mod:train", lambda config: config.trainer.target == "pkg.mod:train"),
        ("params.a.b=[1, x]", lambda config: config.params == {"a": {"b": [1, "x"]}}),
        ("params.a={b: 1}", lambda config: config.params == {"a": {"b": 1}}),
        ("params.a=b=c", lambda config: config.params == {"a": "b=c"}),
        ("params.a='{unbalanced'", lambda config: config.params == {"a": "{unbalanced"}),
        ("params.a={unbalanced", lambda config: config.params == {"a": "{unbalanced"}),
        ("launch.env.NUMBER=1", lambda config: config.launch.env == {"NUMBER": "1"}),
        ("tracking.tags={a.b: c}", lambda config: config.tracking.tags == {"a.b": "c"}),
        ("data.image_size=32", lambda config: config.data.image_size == 32),
    ],
)
def test_overrides_are_read_as_yaml(write: Write, override: str, read: Callable[[Config], bool]) -> None:
    assert read(load_config(write("trainer: ddp\n"), [override]))


def test_interpolation_reaches_params(write: Write) -> None:
    config = load_config(write("params:\n  warm: ${optim.lr}\n"), ["optim.lr=0.25"])
    assert config.params == {"warm": 0.25}


def test_the_environment_fills_folders_and_uri(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCDIST_DATA_DIR", "/srv/data")
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "/srv/runs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    config = load_config(write(""))
    assert (config.data.root, config.runs_dir, config.tracking.uri) == (
        "/srv/data",
        "/srv/runs",
        "http://mlflow:5000",
    )


def test_paths_become_absolute(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    config = load_config(
        write("trainer:\n  script: [train.py, --lr, '0.1']\n"),
        ["runs_dir=~/runs", "data.root=data", "tracking.uri=sqlite:///db/mlflow.db"],
    )
    assert config.runs_dir == "/home/ada/runs"
    assert config.data.root == str(tmp_path / "data")
    assert config.tracking.uri == f"sqlite:///{tmp_path}/db/mlflow.db"
    assert config.trainer.script == [str(tmp_path / "train.py"), "--lr", "0.1"]


def test_an_absolute_sqlite_uri_stays(write: Write) -> None:
    assert load_config(write(""), ["tracking.uri=sqlite:////srv/x.db"]).tracking.uri == "sqlite:////srv/x.db"


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_config_loads_by_its_name(name: str) -> None:
    assert load_config(name).experiment
    assert find_config(name) == shipped_configs()[name]


def test_a_file_wins_over_a_shipped_config_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ddp_digits").write_text("experiment: mine\n")
    assert load_config("ddp_digits").experiment == "mine"


def test_describe_lists_every_leaf_with_type_default_and_a_line() -> None:
    def leaves(section: Any, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            name = prefix + field.name
            if name == "sections":
                for key, kind in trainer_sections().items():
                    found |= leaves(kind(), f"{key}.")
                continue
            found |= leaves(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
        return found

    rows = describe()
    assert [row[0] for row in rows] == list(dict.fromkeys(row[0] for row in rows))
    roles = {f"cluster.roles.ROLE.{field.name}" for field in dataclasses.fields(RoleRequest)}
    assert {row[0] for row in rows} == leaves(Config()) | roles
    for path, kind, _, documentation in rows:
        assert kind, path
        assert documentation.strip(), path
        assert "\n" not in documentation, path
    assert ("optim.lr", "float", 0.001, "Peak learning rate.") in rows


# --- every mistake is one line of key path, value, expectation and fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # An unknown key suggests the nearest one, at any level.
        ("lr: 1", "lr is not a key: did you mean 'optim.lr'?"),
        ("sed: 1", "sed is not a key: did you mean 'seed'?"),
        ("modl: x", "modl is not a key: did you mean 'model'?"),
        ("modle: {name: x}", "modle.name is not a key: did you mean 'model.name'?"),
        ("optim: {lrr: 1}", "optim.lrr is not a key: did you mean 'optim.lr'?"),
        ("launch: {hang_timeout: 1}", "launch.hang_timeout is not a key: did you mean 'launch.hang_timeout_s'?"),
        ("seed: {x: 1}", "seed.x is not a key: did you mean 'seed'?"),
        ("qqqqqq: 1", "qqqqqq is not a key: `hpcdist config --schema` lists all keys"),
        # Wrong types.
        ("seed: abc", "seed must be int, got 'abc' (Value 'abc' of type 'str' could not be converted to Integer)"),
        ("optim: {lr: true}", "optim.lr must be float, got True"),
        ("stop: {epochs: null}", "stop.epochs must be int, got None"),
        ("data: {batch_size: 3.5}", "data.batch_size must be int, got 3.5"),
        ("optim: {name: sgdd}", "optim.name must be Literal['adam', 'adamw', 'sgd'], got 'sgdd'"),
        ("optim: 3", "optim is a section: give it keys, got 3"),
        ("optim: null", "optim is a section: give it keys, got None"),
        ("trainer: 3", "trainer is a section: give it keys, got 3"),
        ("trainer: {script: train.py}", "trainer.script must be list[str], got 'train.py'"),
        ("params: 3", "params must be dict[str, Any], got 3"),
        ("launch: {env: {X: null}}", "launch.env must be dict[str, str], got None for launch.env.X"),
        ("launch: {env: {X: [1]}}", "launch.env.X must be a string, got [1]"),
        ("tracking: {tags: {X: [1]}}", "tracking.tags.X must be a string, got [1]"),
        # Values out of range.
        ("seed: -1", "seed must be >= 0, got -1"),
        ("optim: {lr: -1}", "optim.lr must be > 0, got -1.0"),
        ("optim: {lr: .nan}", "optim.lr must be > 0, got nan"),
        ("optim: {weight_decay: .nan}", "optim.weight_decay must be >= 0, got nan"),
        ("optim: {clip_norm: 0}", "optim.clip_norm must be > 0, got 0.0"),
        ("optim: {accumulate: 0}", "optim.accumulate must be >= 1, got 0"),
        ("schedule: {warmup_steps: -1}", "schedule.warmup_steps must be >= 0, got -1"),
        ("data: {num_classes: 1}", "data.num_classes must be >= 2, got 1"),
        ("stop: {patience: 0}", "stop.patience must be >= 1, got 0"),
        ("checkpoint: {keep_last: 1}", "checkpoint.keep_last must be >= 2, got 1"),
        ("checkpoint: {every_steps: 0}", "checkpoint.every_steps must be >= 1, got 0"),
        ("tracking: {log_every: 0}", "tracking.log_every must be >= 1, got 0"),
        ("launch: {max_restarts: -1}", "launch.max_restarts must be >= 0, got -1"),
        ("launch: {hang_timeout_s: 0}", "launch.hang_timeout_s must be > 0, got 0.0"),
        ("experiment: a/b", "experiment must be a plain folder name (letters, digits, '.', '_', '-'), got 'a/b'"),
        ("experiment: ''", "experiment must not be empty"),
        ("name: ..", "name must be a plain folder name (letters, digits, '.', '_', '-'), got '..'"),
        ("trainer: 'a b:c'", "trainer.target must look like package.module:function, got 'a b:c'"),
        ("trainer: 'a.:c'", "trainer.target must look like package.module:function, got 'a.:c'"),
        # Interpolations.
        ("params: {x: '${nope}'}", "params.x: Interpolation key 'nope' not found"),
        ("name: ${nope}", "name: Interpolation key 'nope' not found"),
        ("optim: {lr: '${nope}'}", "optim.lr: Interpolation key 'nope' not found"),
        ("params: {x: '${oc.env:NO_SUCH}'}", "params.x: KeyError raised while resolving interpolation"),
        # Keys that exclude each other.
        (
            "trainer: {target: 'a:b', script: [x.py]}",
            "trainer.script and trainer.target exclude each other: remove one of them",
        ),
        (
            "launch: {device: cpu, backend: nccl}",
            "launch.backend=nccl needs GPUs, but launch.device=cpu: use launch.backend=gloo",
        ),
        (
            "{launch: {device: cpu}, precision: {dtype: fp16}}",
            "precision.dtype=fp16 needs a GPU, but launch.device=cpu: use precision.dtype=bf16",
        ),
        (
            "{launch: {device: cpu}, model: {sync_batch_norm: true}}",
            "model.sync_batch_norm needs GPUs, but launch.device=cpu: set it to false",
        ),
    ],
)
def test_a_mistake_names_key_value_expectation_and_fix(write: Write, text: str, expected: str) -> None:
    (problem,) = problems(write(text))
    assert problem.startswith(expected)


def test_all_mistakes_of_a_file_are_told_at_once(write: Write) -> None:
    text = """
        seed: x
        experiment: a/b
        optim: {lrr: 1, name: sgdd, momentum: -1}
        data: {batch_size: 0, num_classes: 1}
        launch: {env: {X: null}}
        unheard_of: {a: 1}
        params: {x: "${nope}"}
    """
    found = problems(write(text), "checkpoint.keep_last=0", "no-equals-sign", "optim.weight_decay=abc")
    for key in (
        "seed",
        "experiment",
        "optim.lrr",
        "optim.name",
        "optim.momentum",
        "data.batch_size",
        "data.num_classes",
        "launch.env",
        "unheard_of.a",
        "params.x",
        "checkpoint.keep_last",
        "'no-equals-sign'",
        "optim.weight_decay",
    ):
        assert [line for line in found if line.startswith((f"{key} ", f"{key}:"))], key
    assert len(found) == 13


def test_many_mistakes_read_as_a_list(write: Write) -> None:
    path = write("seed: -1\nlr: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: 2 mistakes\n  - lr is not a key: did you mean 'optim.lr'?\n  - seed must be >= 0, got -1"
    )


@pytest.mark.parametrize("override", ["optim.lr", "=3", "--lr=3", ""])
def test_an_override_without_a_key_or_a_value(write: Write, override: str) -> None:
    assert problems(write(""), override) == (f"{override!r} is no override: write key=value, as in optim.lr=0.01",)


def test_an_override_below_a_value(write: Write) -> None:
    (problem,) = problems(write("optim: {lr: 1.0}"), "optim.lr.x=1")
    assert problem == "optim.lr.x: a part of this path is a value already, not a section"


def test_a_duplicate_key_is_told_with_its_line(write: Write) -> None:
    (problem,) = problems(write("seed: 1\noptim:\n  lr: 1\n  lr: 2\n"))
    assert "found duplicate key lr" in problem
    assert "line 4" in problem
    assert "\n" not in problem


def test_a_syntax_error_is_told_with_its_line(write: Write) -> None:
    (problem,) = problems(write("seed: 1\noptim: [1\nname: x\n"))
    assert "did not find expected ',' or ']'" in problem
    assert "line 3" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a\n- b\n", "must hold keys and values, but its top level is of type list"),
        ("5\n", "must hold keys and values, but its top level is of type int"),
    ],
)
def test_a_file_without_keys(write: Write, text: str, expected: str) -> None:
    assert problems(write(text)) == (expected,)


def test_documents_that_overflow_a_parser(write: Write) -> None:
    for text in ("[" * 50_000, "{a: " * 50_000, "- " * 50_000 + "a", "a: " + "[" * 41 + "]" * 41):
        assert problems(write(text)) == ("line 1: nested more than 40 levels deep",)
    (problem,) = problems(write("# comment\n" * 110_000))
    assert problem == "is larger than 1 MiB, the limit for a config"
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{name}: &{name} [{', '.join([f'*{above}'] * 9)}]\n" for above, name in itertools.pairwise("abcdefg")
    )
    (problem,) = problems(write(bomb))
    assert "YAML node expansion exceeds the configured limit of 10000" in problem
    (problem,) = problems(write("params: &a {b: *a}"))
    assert "recursive aliases are not supported" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nparams: {a: " + "9" * 5000 + "}", "line 2: a number of 5,000 characters: the limit is 100"),
        ("seed: " + "9" * 30, "seed must fit in 64 bits, got 999999999999999999999999999999"),
        ("params: {1: a, '1': b}", "params.1: Conflicting integer and string keys: 1 and '1'"),
        ("params: {1.0: a, '1.0': b}", "the key '1.0' occurs twice, as text and as a number"),
        ("params: {true: a}", "the key True is a bool: put it in quotes"),
        ("params: {a: !!bool x}", "line 1: explicit tags are not supported: put a value"),
        ('params: {a: "x\\0y"}', "params.a must not hold a NUL character, got 'x\\x00y'"),
        ("params: {a: '${'}", "params.a: malformed interpolation"),
        ("roles: {a: {b: 1}}", "roles.a must be int, got {'b': 1}"),
        ("hybrid: {hidden: [[1]]}", "hybrid.hidden.0 must be int, got [1]"),
        ("seed: ${seed}", "seed: Recursive interpolation detected"),
        ("comm: {max_bytes: " + "9" * 99 + "G}", "comm.max_bytes: '" + "9" * 99 + "G' is not a number of bytes"),
    ],
)
def test_values_that_broke_a_parser(write: Write, text: str, expected: str) -> None:
    (problem,) = problems(write(text))
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    "override",
    [
        "runs_dir=~nosuchuser/x",
        "data.root=~nosuchuser/x",
        "rnn.files=[~nosuchuser/x]",
        "hybrid.data=~nosuchuser/x",
        "trainer.script=[~nosuchuser/x]",
        "tracking.uri=sqlite:///~nosuchuser/x",
        "container={runtime: apptainer, image: ~nosuchuser/x}",
        "container.mounts=[~nosuchuser/x:/x]",
    ],
)
def test_the_home_folder_of_an_unknown_user(write: Write, override: str) -> None:
    (problem,) = problems(write(""), override)
    assert problem.endswith(": no home folder is known for '~nosuchuser': write the whole path")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("experiment=!!bool x", "experiment must be a plain folder name"),
        ("seed=${", "seed must be int, got '${'"),
        ("seed=" + "9" * 5000, "seed must be int, got '999"),
        ("params." + "a." * 2000 + "b=1", "params.a.a.a."),
        ("params.a=\udcff", "params.a must be UTF-8 text, got '\\udcff'"),
        ("params.\udcff=1", "params: a key must be UTF-8 text, got '\\udcff'"),
        ("roles=[1]", "roles must be dict[str, int], got [1]"),
    ],
)
def test_overrides_that_broke_a_parser(write: Write, override: str, expected: str) -> None:
    (problem,) = problems(write(""), override)
    assert problem.startswith(expected)


def test_a_name_that_no_file_can_have() -> None:
    for source in ("~nosuchuser/x", "x" * 5000, "a\0b", "\udcff"):
        with pytest.raises(ConfigError, match=r"cannot be a config file|no such config file") as caught:
            load_config(source)
        assert len(str(caught.value)) <= 500
        str(caught.value).encode()


def test_messages_are_bounded(write: Write) -> None:
    path = write("".join(f"key{number}: 1\n" for number in range(100)))
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"seed={'x' * 9000}", "params.\x1b[31m.a=${nosuch:" + "y" * 9000])
    lines = str(caught.value).splitlines()
    assert len(caught.value.problems) == 102
    assert lines[0] == f"{path}: 102 mistakes"
    assert (len(lines), lines[-1]) == (22, "  - and 82 more")
    assert max(map(len, lines)) <= 500
    assert all(line.isprintable() for line in lines)


def test_a_long_secret_is_not_shown_in_part(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "s3cret" * 200
    monkeypatch.setenv("MY_KEY", secret)
    path = write(
        f"params: {{my_token: {secret}}}\noptim: {{lr: '${{oc.env:MY_KEY}}'}}\nstop: {{epochs_token: {secret}}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, [f"seed={secret}", f"launch.env={{A_TOKEN: [{secret}]}}"])
    assert "s3crets3cret" not in str(caught.value)


def test_how_a_message_shows_values() -> None:
    assert shown("a" * 60) == repr("a" * 60)
    assert shown("a" * 5000) == "'" + "a" * 44 + "..." + "a" * 11 + "' (5,000 characters)"
    assert shown(10**5000) == "an integer of 16,610 bits"
    assert shown({"a": [1, {"b": [2, [3]]}]}) == "{'a': [1, {'b': [...]}]}"
    assert shown([["x" * 100] * 9] * 9).endswith(" (9 entries)")


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes("name: größe".encode("latin-1"))
    assert problems(path) == ("is not UTF-8 text",)


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("ddp_digit", "did you mean 'ddp_digits'?"),
        ("/no/such/run.yaml", f"shipped configs are {', '.join(shipped_configs())}"),
    ],
)
def test_a_missing_file_suggests_a_shipped_config(source: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="no such config file") as caught:
        load_config(source)
    assert str(caught.value) == f"{source}: no such config file: {hint}"


def test_a_run_folder_without_its_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.yaml: no such file$"):
        load_run_config(tmp_path / "config.yaml", [], {})


def test_an_unknown_model_of_a_shipped_trainer_suggests_the_nearest(write: Write) -> None:
    (problem,) = problems(write("model: {name: resnet81}"))
    assert problem.startswith("model.name")
    assert "resnet18" in problem


def test_a_trainer_of_ones_own_may_call_its_model_as_it_likes(write: Write) -> None:
    assert load_config(write("{trainer: 'a:b', model: {name: mine}}")).model.name == "mine"


# --- secrets


SECRETS = """
tracking:
  uri: http://ada:p@ss-w0rd@mlflow:5000/x
  tags: {mlflow.note.content: "see the wiki", team.token: tag-s3cret}
launch:
  env: {WANDB_API_KEY: env-s3cret, PLAIN: visible}
params:
  hf_token: param-s3cret
  nested: {token: nested-s3cret}
  my.password: dotted-s3cret
  credentials: {user: ada, code: below-s3cret}
  mirrors: ["ftp://bob:list-s3cret@mirror/", plain]
  api_keys: [one-s3cret, two-s3cret]
  tokenizer: visible-too
  empty_secret: ""
"""


def test_no_secret_is_in_what_is_written(write: Write) -> None:
    written = to_yaml(load_config(write(SECRETS)))
    assert "s3cret" not in written
    assert "w0rd" not in written
    shown = yaml.safe_load(written)
    assert shown["tracking"]["uri"] == "http://ada:***@mlflow:5000/x"
    assert shown["tracking"]["tags"] == {"mlflow.note.content": "see the wiki", "team.token": "***"}
    assert shown["launch"]["env"] == {"WANDB_API_KEY": "***", "PLAIN": "visible"}
    assert shown["params"] == {
        "hf_token": "***",
        "nested": {"token": "***"},
        "my.password": "***",
        "credentials": {"user": "***", "code": "***"},
        "mirrors": ["ftp://bob:***@mirror/", "plain"],
        "api_keys": ["***", "***"],
        "tokenizer": "visible-too",
        "empty_secret": "",
    }


def test_the_environment_gives_secrets_back(write: Write, tmp_path: Path) -> None:
    config = load_config(write(SECRETS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    env = secrets_of(config)
    assert env["WANDB_API_KEY"] == "env-s3cret"
    assert env["HPCDIST_TRACKING_URI"] == "http://ada:p@ss-w0rd@mlflow:5000/x"
    assert load_run_config(path, [], {"HOME": "/", **env}) == config


def test_a_missing_secret_says_which_variable_to_set(write: Write, tmp_path: Path) -> None:
    config = load_config(write(SECRETS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    env = secrets_of(config)
    del env["WANDB_API_KEY"], env["HPCDIST_PARAMS_HF_TOKEN"]
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [], env)
    assert caught.value.problems == (
        "launch.env.WANDB_API_KEY was redacted when the run was written: set WANDB_API_KEY in the environment",
        "params.hf_token was redacted when the run was written: set HPCDIST_PARAMS_HF_TOKEN in the environment",
    )
    left = load_run_config(path, [], env, require_secrets=False)
    assert (left.launch.env["WANDB_API_KEY"], left.params["hf_token"]) == ("***", "***")
    assert left.params["nested"] == {"token": "nested-s3cret"}
    config = load_run_config(path, ["launch.env.WANDB_API_KEY=new", "params.hf_token=new"], env)
    assert (config.launch.env["WANDB_API_KEY"], config.params["hf_token"]) == ("new", "new")


def test_numbers_and_cluster_variables_come_back_as_they_were(write: Write, tmp_path: Path) -> None:
    config = load_config(
        write("""
            params: {pin_pwd: 1234, my_key: "1234", ratio_key: 1.5, use_auth: true, words: [--token, s3cret]}
            cluster: {env: {WANDB_API_KEY: s3cret-1, BOTH_KEY: s3cret-2, HTTPS_PROXY: "http://u:s3cret@proxy"}}
            launch: {env: {BOTH_KEY: s3cret-3}}
        """)
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert "s3cret" not in path.read_text()
    assert "1234" not in path.read_text()
    env = secrets_of(config)
    assert env["WANDB_API_KEY"] == "s3cret-1"
    assert (env["BOTH_KEY"], env["HPCDIST_CLUSTER_ENV_BOTH_KEY"]) == ("s3cret-3", "s3cret-2")
    assert env["HTTPS_PROXY"] == "http://u:s3cret@proxy"
    assert load_run_config(path, [], env) == config
    with pytest.raises(ConfigError, match=r"HPCDIST_PARAMS_PIN_PWD in the environment must hold JSON, such as 3"):
        load_run_config(path, [], {**env, "HPCDIST_PARAMS_PIN_PWD": "[1"})


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("launch: {env: {API_KEY: {x: hunter-s3cret}}}", []),
        ("launch: {env: {API_KEY: [hunter-s3cret]}}", []),
        ("", ["launch.env.API_KEY={a: hunter-s3cret}"]),
        ("launch: {env: ['API_KEY=hunter-s3cret']}", []),
        ("launch: {env: [{API_KEY: hunter-s3cret}]}", []),
        ("params: {password: *hunter-s3cret}", []),
        ("tracking: {uri: 'http://u:hunter-s3cret@h', log_every: 'http://u:hunter-s3cret@h'}", []),
        ("params: {my_key: hunter-s3cret}\nseed: ${params.my_key}", []),
        ("params: {my_key: hunter-s3cret}\nexperiment: a/${params.my_key}", []),
        ("seed: ${oc.env:MINE}", []),
        ("experiment: ${oc.env:MINE}", []),
        ("launch: {device: '${oc.env:MINE}'}", []),
        ("launch: {devices: {trainer: '${oc.env:MINE}'}}", []),
        ("container: {env: ['${oc.env:MINE}'], mounts: ['${oc.env:MINE}'], runtime: podman}", []),
        ("params: {a: '${oc.decode:${oc.env:MINE}}'}", []),
        ("params: {which: MINE}\nseed: ${oc.env:${params.which}}", []),
        ("model: {name: '${oc.env:MINE}'}", []),
        ("", ["seed=${oc.env:MINE}"]),
        ("", ["roles.trainer=${oc.env:MINE}"]),
        ("", ["token hunter-s3cret", "API_KEY:hunter-s3cret", "--password=hunter-s3cret"]),
    ],
)
def test_no_error_shows_a_secret_or_a_variable_of_the_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch, text: str, overrides: list[str]
) -> None:
    monkeypatch.setenv("MINE", "{a/hunter-s3cret")
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), overrides)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None or "s3cret" not in str(caught.value.__cause__)


def test_a_short_value_from_the_environment_leaves_the_message_readable(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "0")
    assert problems(write("cluster: {nodes: '${oc.env:MINE}'}")) == ("cluster.nodes must be >= 1, got ${oc.env:MINE}",)


def test_a_config_survives_being_written_and_read(write: Write, tmp_path: Path) -> None:
    config = load_config(write("params: {text: 'größe: 3', list: [1, {a: null}]}\n"), ["name=first", "seed=3"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_run_config(path, [], {}) == config


#: Where what is written and what OmegaConf would read of it differ, or might.
TRICKY = """\
trainer: {script: [train.py, "1e5", "0x10", "1_000", "12:30", "null", "yes", "~", ""]}
launch: {env: {COMMIT: "12e5", DAY: "2026-01-02", EMPTY: "", COLON: "a: b", EURO: "€ \\U0001F600"}}
optim: {lr: 1e-30, clip_norm: 1}
data: {image_size: null}
params: {half: 1e-5, inf: .inf, text: "1e-5", deep: [{a: [1, 1.0, true, null, "on"]}, {}], lines: "a\\nb\\n"}
"""


def test_a_config_is_read_back_as_it_was_written(write: Write, tmp_path: Path) -> None:
    """To the type: a commit `12e5` is not a number, whoever reads it."""
    config = load_config(write(TRICKY))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert repr(load_run_config(path, [], {})) == repr(config)
    assert repr(load_run_config(path, ["seed=7"], {})) == repr(dataclasses.replace(config, seed=7))
    assert config.trainer.script[1] == "1e5"


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_is_read_back_without_omegaconf(name: str) -> None:
    config = load_config(name)
    assert exact(yaml.safe_load(to_yaml(config))) == config


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        ("lr: 0.001", "lr: 1e-2", lambda config: config.optim.lr == 0.01),
        ("lr: 0.001", "lr: 1", lambda config: repr(config.optim.lr) == "1.0"),
        ("seed: 0\n", "", lambda config: config.seed == 0),
        ("params: {}", "params: {twice: '${seed}${seed}'}", lambda config: "${seed}" in config.params["twice"]),
        ("target: ddp", "target: 'own.module:train'", lambda config: config.trainer.target == "own.module:train"),
    ],
    ids=["number", "whole number", "missing key", "interpolation", "plain"],
)
def test_what_someone_has_changed_in_a_run_folder_is_read_as_any_config(
    write: Write, tmp_path: Path, before: str, after: str, read: Callable[[Config], bool]
) -> None:
    text = to_yaml(load_config(write("seed: 0\n")))
    assert before in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(before, after))
    assert read(load_run_config(path, [], {}))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("lr: 0.001", "lr: -1.0", "optim.lr must be > 0, got -1.0"),
        ("lr: 0.001", "lr: fast", "optim.lr must be float, got 'fast'"),
        ("lr: 0.001", "learning_rate: 1.0", "optim.learning_rate is not a key"),
        ("seed: 0\n", "seed: 0\nseed: 1\n", "found duplicate key seed"),
        ("seed: 0\n", "seed: true\nmodell: {}\n", "modell is not a key: did you mean 'model'?"),
        ("name: adam", "name: adagrad", "optim.name must be Literal['adam', 'adamw', 'sgd'], got 'adagrad'"),
        ("target: ddp\n  script: []", "target: own:train\n  script: [x]", "trainer.script and trainer.target exclude"),
        ("name: simple_cnn", "name: resnet17", "model.name"),
    ],
)
def test_mistakes_that_someone_has_made_in_a_run_folder(
    write: Write, tmp_path: Path, before: str, after: str, problem: str
) -> None:
    text = to_yaml(load_config(write("seed: 0\n")))
    assert before in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(before, after))
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [], {})
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("run", "run"),
        ("--dry-run", "--dry-run"),
        ("optim.lr=0.1", "optim.lr=0.1"),
        ("params.tokenizer=gpt2", "params.tokenizer=gpt2"),
        ("launch.env.API_TOKEN=abc", "launch.env.API_TOKEN=***"),
        ("launch.env={API_TOKEN: abc}", "launch.env=***"),
        ("tracking.uri=http://u:p@h", "tracking.uri=***"),
        ("http://u:p@h/?a=b", "http://u:***@h/?a=b"),
    ],
)
def test_secrets_on_the_command_line(argument: str, shown: str) -> None:
    assert redacted_argument(argument) == shown


# --- a site's profile under the config's own `cluster` section


def test_a_profile_stands_under_the_config_and_both_under_overrides(write: Write, tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("partition: gpu\nnodes: 8\ntasks_per_node: 4\nenv: {A: site, B: site}\n")
    path = write("cluster:\n  nodes: 2\n  env: {B: run}\n")
    cluster = load_config(path, ["cluster.tasks_per_node=1"], cluster=profile).cluster
    assert (cluster.partition, cluster.nodes, cluster.tasks_per_node) == ("gpu", 2, 1)
    assert cluster.env == {"B": "run"}, "a key of the config's own wins whole"
    assert load_config(write("seed: 1\n"), cluster=profile).cluster.nodes == 8
    assert load_config(path).cluster.partition is None


def test_a_shipped_profile_goes_by_its_name(write: Write) -> None:
    cluster = load_config(write("seed: 1\n"), cluster="devcluster").cluster
    assert (cluster.partition, cluster.nodes, cluster.tasks_per_node) == ("main", 2, 2)
    assert "devcluster" in shipped_configs("cluster")
    assert "devcluster" not in shipped_configs()


def test_mistakes_around_profiles(write: Write, tmp_path: Path) -> None:
    path = write("seed: 1\n")
    with pytest.raises(ConfigError, match=r"^devclustr: no such config file: did you mean 'devcluster'\?$"):
        load_config(path, cluster="devclustr")
    profile = tmp_path / "site.yaml"
    profile.write_text("partion: gpu\n")
    with pytest.raises(ConfigError, match=r"cluster\.partion is not a key: did you mean 'cluster\.partition'\?"):
        load_config(path, cluster=profile)
    profile.write_text("- a\n- list\n")
    with pytest.raises(ConfigError, match=r"site\.yaml: must hold keys and values, but its top level is of type list$"):
        load_config(path, cluster=profile)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("cluster.nodes=0", "cluster.nodes must be >= 1, got 0"),
        ("cluster.signal_lead_s=-1", "cluster.signal_lead_s must be >= 0, got -1"),
    ],
)
def test_impossible_requests(write: Write, override: str, problem: str) -> None:
    assert problems(write("seed: 1\n"), override) == (problem,)


# --- roles

ROLES = "roles: {server: 1, worker: 4}\ncluster:\n  roles:\n    worker: {gpus_per_node: 2, nodes: 2}\n"


def test_roles_keep_the_order_in_which_they_are_written(write: Write) -> None:
    config = load_config(write(ROLES), ["roles.server=2", "roles.judge=1", "cluster.roles.server.cpus_per_task=8"])
    assert list(config.roles.items()) == [("server", 2), ("worker", 4), ("judge", 1)]
    assert config.cluster.roles == {
        "worker": RoleRequest(gpus_per_node=2, nodes=2),
        "server": RoleRequest(cpus_per_task=8),
    }


def test_roles_come_back_from_their_yaml(write: Write, tmp_path: Path) -> None:
    config = load_config(write(ROLES))
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert load_run_config(again, [], {}) == config
    assert list(load_run_config(again, [], {}).roles) == ["server", "worker"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("roles: {a-b: 1}", "roles: 'a-b' is no name for a role: letters, digits and '_', a letter first"),
        ("roles: {a: 0}", "roles.a must be >= 1, got 0"),
        (
            "roles: {a: many}",
            "roles must be dict[str, int], got 'many' for roles.a",
        ),
        ("cluster: {roles: {worker: {nodes: 2}}}", "cluster.roles.worker: no such role, `roles` has trainer"),
        ("roles: {a: 1}\nlaunch: {devices: {b: cpu}}", "launch.devices.b: no such role, `roles` has a"),
        (
            "roles: {a: 1, b: 1}\nlaunch: {backend: nccl, devices: {b: cpu}}",
            "launch.backend=nccl needs GPUs for all ranks, but b has none: use gloo",
        ),
        ("launch: {devices: {trainer: gpu}}", "launch.devices.trainer must be auto, cpu or cuda, got 'gpu'"),
        (
            "cluster: {roles: {trainer: {nodez: 2}}}",
            "cluster.roles.trainer.nodez is not a key: did you mean 'cluster.roles.trainer.nodes'?",
        ),
        (
            "cluster: {roles: {trainer: {nodes: x}}}",
            "cluster.roles.trainer.nodes must be int | None, got 'x'"
            " (Value 'x' of type 'str' could not be converted to Integer)",
        ),
        (
            "cluster: {roles: {trainer: {nodes: 2}}}",
            "cluster.roles.trainer: `roles` is empty: say how many ranks it has, such as roles.trainer=2",
        ),
        ("cluster: {roles: {trainer: 2}}", "cluster.roles.trainer is a section: give it keys, got 2"),
        ("cluster: {roles: {trainer: {nodes: 0}}}", "cluster.roles.trainer.nodes must be >= 1, got 0"),
        (
            "cluster: {roles: {trainer: {gpus_per_node: -1}}}",
            "cluster.roles.trainer.gpus_per_node must be >= 0, got -1",
        ),
    ],
)
def test_mistakes_in_roles(write: Write, text: str, expected: str) -> None:
    assert problems(write(text)) == (expected,)


def test_het_is_on_off_or_open(write: Write) -> None:
    assert [load_config(write(f"cluster: {{het: {word}}}")).cluster.het for word in ("on", "off", "null")] == [
        True,
        False,
        None,
    ]


@pytest.mark.parametrize(
    ("more", "devices"),
    [
        ("", ("cpu", "auto")),  # GPUs are asked for, and not for the server
        ("launch: {device: cpu}", ("cpu", "cpu")),
        ("launch: {device: cuda}", ("cpu", "cuda")),
        ("launch: {devices: {server: auto, worker: cpu}}", ("auto", "cpu")),
    ],
)
def test_a_role_that_asks_for_no_gpus_needs_none(write: Write, more: str, devices: tuple[str, str]) -> None:
    config = load_config(write(f"{ROLES}{more}\n"))
    assert tuple(role_device(config, role) for role in config.roles) == devices


def test_no_gpus_can_be_said_of_one_role_alone(write: Write) -> None:
    config = load_config(write("roles: {server: 1, worker: 4}\ncluster: {roles: {server: {gpus_per_node: 0}}}\n"))
    assert [role_device(config, role) for role in config.roles] == ["cpu", "auto"]


def test_the_schema_lists_what_a_role_can_ask_for() -> None:
    rows = {path: documentation for path, _, _, documentation in describe()}
    assert rows["cluster.roles.ROLE.nodes"].startswith("Number of nodes for this role")


# --- containers


def test_a_sites_profile_may_name_its_container_runtime(write: Write, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("partition: gpu\ncontainer: {runtime: podman, image: theirs, extra_args: [--cgroups=disabled]}\n")
    config = load_config(write("container: {image: mine}\n"), cluster=site)
    assert (config.cluster.partition, config.container.runtime) == ("gpu", "podman")
    assert (config.container.image, config.container.extra_args) == ("mine", ["--cgroups=disabled"])


@pytest.mark.parametrize(
    ("container", "image"),
    [
        ("runtime: apptainer, image: a.sif", "{cwd}/a.sif"),
        ("runtime: charliecloud, image: ~/a", "{home}/a"),
        ("runtime: pyxis, image: a.sqsh", "{cwd}/a.sqsh"),
        ("runtime: pyxis, image: nvcr.io#a/b:1", "nvcr.io#a/b:1"),
        ("runtime: podman, image: a/b", "a/b"),
        ("runtime: apptainer, image: 'docker://a/b'", "docker://a/b"),
    ],
)
def test_images_that_are_files_get_whole_paths(write: Write, container: str, image: str) -> None:
    config = load_config(write(f"container: {{{container}}}\n"))
    assert config.container.image == image.format(cwd=Path.cwd(), home=Path.home())


@pytest.mark.parametrize(
    ("container", "told"),
    [
        ("runtime: podman", "container.image must say what to start"),
        (
            "runtime: podman, image: a, mounts: [data]",
            "container.mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with whole paths, got 'data'",
        ),
        (
            "env: [TOKEN=abc]",
            "container.env must hold names such as WANDB_MODE or UCX_*, never values, got 'TOKEN'",
        ),
        (
            "runtime: charliecloud, image: a, mounts: ['/a:/b:ro']",
            "container.mounts: charliecloud mounts nothing read-only: leave out ':ro'",
        ),
    ],
)
def test_mistakes_about_containers(write: Write, container: str, told: str) -> None:
    assert problems(write(f"container: {{{container}}}\n")) == (told,)


def test_an_unknown_runtime_is_told_in_one_line_with_those_there_are(write: Write) -> None:
    (told,) = problems(write("container: {runtime: singularity, image: a}\n"))
    assert told.startswith("container.runtime must be Literal['none', 'docker', 'podman', 'apptainer', ")
    assert "got 'singularity'" in told
    assert "\n" not in told
