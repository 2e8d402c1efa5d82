"""ConfigError has one line for each mistake: key, value, expectation and fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_files import Write, problems

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.shipped import shipped_configs
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # An unknown key suggests the nearest one, at any level.
        ("lr: 1", "lr is not a key: did you mean 'optim.lr'?"),
        ('"\\u200bseed": 1', "'\\u200bseed' is not a key: did you mean 'seed'?"),
        ("sed: 1", "sed is not a key: did you mean 'seed'?"),
        ("modl: x", "modl is not a key: did you mean 'model'?"),
        ("modle: {name: x}", "modle.name is not a key: did you mean 'model.name'?"),
        ("optim: {lrr: 1}", "optim.lrr is not a key: did you mean 'optim.lr'?"),
        ("launch: {hang_timeout: 1}", "launch.hang_timeout is not a key: did you mean 'launch.hang_timeout_s'?"),
        ("seed: {x: 1}", "seed.x is not a key: did you mean 'seed'?"),
        ("qqqqqq: 1", "qqqqqq is not a key: `hpcdist config --schema` lists all keys"),
        # Wrong types.
        ("seed: abc", "seed must be int, got 'abc'"),
        ("optim: {lr: true}", "optim.lr must be float, got True"),
        ("stop: {max_epochs: null}", "stop.max_epochs must be int, got None"),
        ("data: {batch_size: 3.5}", "data.batch_size must be int, got 3.5"),
        ("optim: {name: sgdd}", "optim.name must be one of adam, adamw, sgd, got 'sgdd'"),
        ("optim: 3", "optim is a section: give it keys, got 3"),
        ("optim: null", "optim is a section: give it keys, got None"),
        ("trainer: 3", "trainer is a section: give it keys, got 3"),
        ("trainer: {script: train.py}", "trainer.script must be list[str], got 'train.py'"),
        ("params: 3", "params must be dict[str, Any], got 3"),
        (
            "launch: {env: {X: null}}",
            """launch.env.X must be str, got None: write '' for an empty string ("''" in a shell)""",
        ),
        ("launch: {env: {X: [1]}}", "launch.env.X must be str, got [1]"),
        ("tracking: {tags: {X: [1]}}", "tracking.tags.X must be str, got [1]"),
        # Values out of range.
        ("launch: {num_ranks: 1000000000000}", "launch.num_ranks must be <= 1024, got 1000000000000"),
        ("cluster: {tasks_per_node: 1025}", "cluster.tasks_per_node must be <= 1024, got 1025"),
        ("cluster: {roles: {trainer: {nodes: 300000}}}", "cluster.roles.trainer.nodes must be <= 262144, got 300000"),
        ("seed: -1", "seed must be >= 0, got -1"),
        ("optim: {lr: -1}", "optim.lr must be > 0, got -1.0"),
        ("optim: {lr: .nan}", "optim.lr must be > 0, got nan"),
        ("optim: {weight_decay: .nan}", "optim.weight_decay must be >= 0, got nan"),
        ("optim: {max_grad_norm: 0}", "optim.max_grad_norm must be > 0, got 0.0"),
        ("optim: {grad_accum_steps: 0}", "optim.grad_accum_steps must be >= 1, got 0"),
        ("schedule: {warmup_steps: -1}", "schedule.warmup_steps must be >= 0, got -1"),
        ("data: {num_classes: 1}", "data.num_classes must be >= 2, got 1"),
        ("stop: {patience: 0}", "stop.patience must be >= 1, got 0"),
        ("checkpoint: {keep_last: 1}", "checkpoint.keep_last must be >= 2, got 1"),
        ("checkpoint: {every_steps: 0}", "checkpoint.every_steps must be >= 1, got 0"),
        ("tracking: {log_every_steps: 0}", "tracking.log_every_steps must be >= 1, got 0"),
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
def test_mistake_names_key_value_expectation_and_fix(write: Write, text: str, expected: str) -> None:
    (problem,) = problems(write(text))
    assert problem.startswith(expected)


def test_all_mistakes_of_a_file_are_reported_at_once(write: Write) -> None:
    text = """
        seed: x
        experiment: a/b
        optim: {lrr: 1, name: sgdd, momentum: -1}
        data: {batch_size: 0, num_classes: 1}
        launch: {env: {X: null}}
        unknown: {a: 1}
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
        "launch.env.X",
        "unknown.a",
        "params.x",
        "checkpoint.keep_last",
        "'no-equals-sign'",
        "optim.weight_decay",
    ):
        lines = [line.removeprefix("command line: ") for line in found]
        assert [line for line in lines if line.startswith((f"{key} ", f"{key}:"))], key
    assert len(found) == 13


def test_several_mistakes_are_a_list(write: Write) -> None:
    path = write("seed: -1\nlr: 1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == (
        f"{path}: 2 mistakes\n  - lr is not a key: did you mean 'optim.lr'?\n  - seed must be >= 0, got -1"
    )


def test_valid_keys_beside_a_mistake_are_not_reported(write: Write) -> None:
    text = """
        launch: {hang: 1, env: {A: x, B: y}, devices: {trainer: cpu}}
        cluster: {roles: {a: {nodes: x}, b: {nodes: 2}}, env: {C: z}}
        params: {a: {b: [1, {c: 2}]}}
        nope: {a: 1, b: {c: 2}}
    """
    assert [line.partition(" ")[0] for line in problems(write(text))] == [
        "launch.hang",
        "cluster.roles.a.nodes",
        "nope.a",
        "nope.b.c",
    ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["stop.max_steps=abc"],
            "stop.max_steps must be int | None, got 'abc'",
        ),
        (["data.root="], """data.root must be str, got None: write '' for an empty string ("''" in a shell)"""),
        (["seed="], "seed must be int, got None"),
        (["optim.lr=-1"], "optim.lr must be > 0, got -1.0"),
        (["optim={lr: -1}"], "optim.lr must be > 0, got -1.0"),
        (["launch.env.a b=1"], "launch.env: 'a b' is not a valid variable name: use letters, digits and '_', not"),
        (["cluster.roles.x.nodes=2"], "cluster.roles.x: no such role, `roles` has trainer"),
        (["launch.device=cpu"], "launch.backend=nccl needs GPUs, but launch.device=cpu: use launch.backend=gloo"),
        (["seed=${optim.name}"], "seed must be int, got 'adam'"),
        (["runs_dir=~nosuchuser/x"], "runs_dir: the home folder of '~nosuchuser' is unknown: use an absolute path"),
        (["seed"], "'seed' is no override: write key=value, as in optim.lr=0.01"),
        (
            ["nope=1", "seed=-1"],
            "2 mistakes\n  - nope is not a key: `hpcdist config --schema` lists all keys\n  - seed",
        ),
    ],
)
def test_mistake_of_an_override_names_the_command_line(write: Write, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write("launch: {backend: nccl}"), overrides)
    assert str(caught.value).startswith(f"command line: {expected}")


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("seed: x", ["optim.lr=1"], ["seed must be int, got 'x'"]),
        ("sed: 1", ["seed=1"], ["sed is not a key: did you mean 'seed'?"]),
        ("launch: {env: {a b: x}}", ["launch.env.B=x"], ["launch.env: 'a b' is not a valid variable name"]),
        # The override corrects a mistake that hid another one.
        (
            "{seed: x, launch: {backend: nccl, device: cpu}}",
            ["seed=1"],
            ["launch.backend=nccl needs GPUs, but launch.device=cpu"],
        ),
        (
            "optim: 3",
            ["optim.lr=1"],
            ["command line: optim.lr: a part of this path is a value already", "optim is a section: give it keys"],
        ),
        ("seed: -1", ["optim.lr=-1"], ["command line: optim.lr must be > 0", "seed must be >= 0, got -1"]),
    ],
)
def test_mistake_of_a_file_names_the_file_whatever_the_overrides(
    write: Write, text: str, overrides: list[str], expected: list[str]
) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.source == str(path)
    for problem, beginning in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(beginning)


@pytest.mark.parametrize(
    ("profile", "text", "overrides", "expected"),
    [
        ("nodes: 0", "", [], "{site}: cluster.nodes must be"),
        ("container: {runtime: dockr}", "", [], "{site}: container.runtime must be one of none, docker,"),
        ("container: podman", "", [], "{site}: container is a section"),
        ("partiton: gpu", "", [], "{site}: cluster.partiton is not a key: did you mean 'cluster.partition'?"),
        ("nodes: 0", "cluster: {nodes: 1, time_limit: -1}", [], "{path}: cluster.time_limit"),
        ("nodes: 0", "", ["cluster.nodes=-1"], "command line: cluster.nodes must be"),
        (
            "nodes: 0",
            "seed: -1",
            ["optim.lr=-1"],
            "{path}: 3 mistakes\n  - {site}: cluster.nodes must be >= 1, got 0\n  - command line: optim.lr must be > 0",
        ),
        ("nodes: 2", "container: podman", [], "{path}: container is a section"),
    ],
)
def test_mistake_of_a_site_profile_names_the_profile(
    write: Write, tmp_path: Path, profile: str, text: str, overrides: list[str], expected: str
) -> None:
    path, site = write(text), tmp_path / "site.yaml"
    site.write_text(profile)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, cluster=site)
    assert str(caught.value).startswith(expected.format(path=path, site=site))


def test_override_of_a_run_names_the_command_line(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(write(""))))
    for text, source in (("", "command line"), ("sed: 1\n", str(path))):
        path.write_text(path.read_text() + text)
        with pytest.raises(ConfigError, match=r"optim\.lr must be > 0, got -1\.0") as caught:
            load_run_config(path, ["optim.lr=-1"], {})
        assert caught.value.source == source


@pytest.mark.parametrize("override", ["optim.lr", "=3", "--lr=3", ""])
def test_override_without_a_key_or_value_is_rejected(write: Write, override: str) -> None:
    assert problems(write(""), override) == (f"{override!r} is no override: write key=value, as in optim.lr=0.01",)


def test_override_below_a_value_is_rejected(write: Write) -> None:
    (problem,) = problems(write("optim: {lr: 1.0}"), "optim.lr.x=1")
    assert problem == "optim.lr.x: a part of this path is a value already, not a section"


def test_duplicate_key_is_reported_with_its_line(write: Write) -> None:
    (problem,) = problems(write("seed: 1\noptim:\n  lr: 1\n  lr: 2\n"))
    assert "found duplicate key lr" in problem
    assert "line 4" in problem
    assert "\n" not in problem


def test_syntax_error_is_reported_with_its_line(write: Write) -> None:
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
def test_file_without_keys_is_rejected(write: Write, text: str, expected: str) -> None:
    assert problems(write(text)) == (expected,)


def test_file_that_is_not_utf_8_is_rejected(tmp_path: Path) -> None:
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
def test_missing_file_suggests_a_shipped_config(source: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="no such config file") as caught:
        load_config(source)
    assert str(caught.value) == f"{source}: no such config file: {hint}"


def test_run_folder_without_a_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.yaml: no such file$"):
        load_run_config(tmp_path / "config.yaml", [], {})


def test_unknown_model_of_a_shipped_trainer_is_rejected(write: Write) -> None:
    (problem,) = problems(write("model: {name: resnet81}"))
    assert problem.startswith("model.name")
    assert "resnet18" in problem


def test_own_trainer_accepts_any_model_name(write: Write) -> None:
    assert load_config(write("{trainer: 'a:b', model: {name: mine}}")).model.name == "mine"
