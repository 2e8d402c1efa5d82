"""A config is the merge of defaults, site profile, file and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_files import Write, problems

from hpcdist.config.conversion import exact
from hpcdist.config.describe import describe
from hpcdist.config.launch_schema import RoleRequest
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config, role_device, trainer_sections
from hpcdist.config.shipped import find_config, shipped_configs
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError


def test_overrides_take_precedence_over_file_and_defaults(write: Write) -> None:
    assert load_config(write("# nothing\n")).optim == Config().optim
    config = load_config(write("optim:\n  lr: 0.5\n  momentum: 0.8\n"), ["optim.lr=3e-4", "stop.max_steps=7"])
    assert (config.optim.lr, config.optim.momentum, config.optim.name) == (3e-4, 0.8, "adam")
    assert config.stop.max_steps == 7


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optim.max_grad_norm=null", lambda config: config.optim.max_grad_norm is None),
        ("optim.max_grad_norm=2", lambda config: config.optim.max_grad_norm == 2.0),
        ("trainer=pkg.mod:train", lambda config: config.trainer.target == "pkg.mod:train"),
        ("trainer.target=pkg.mod:train", lambda config: config.trainer.target == "pkg.mod:train"),
        ("params.a.b=[1, x]", lambda config: config.params == {"a": {"b": [1, "x"]}}),
        ("params.a={b: 1}", lambda config: config.params == {"a": {"b": 1}}),
        ("params.a=b=c", lambda config: config.params == {"a": "b=c"}),
        ("params.a='{unbalanced'", lambda config: config.params == {"a": "{unbalanced"}),
        ("params.a={unbalanced", lambda config: config.params == {"a": "{unbalanced"}),
        ("launch.env.NUMBER=1", lambda config: config.launch.env == {"NUMBER": "1"}),
        ("tracking.tags={a.b: c}", lambda config: config.tracking.tags == {"a.b": "c"}),
        ("params.warm=${data.batch_size}", lambda config: config.params == {"warm": 64}),
    ],
)
def test_overrides_are_read_as_yaml(write: Write, override: str, read: Callable[[Config], bool]) -> None:
    assert read(load_config(write("trainer: ddp\n"), [override]))


def test_folders_and_tracking_uri_default_to_environment_variables(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCDIST_DATA_DIR", "/srv/data")
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "/srv/runs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    config = load_config(write(""))
    found = (config.data.root, config.runs_dir, config.tracking.uri)
    assert found == ("/srv/data", "/srv/runs", "http://mlflow:5000")


def test_relative_paths_become_absolute(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert load_config(write(""), ["tracking.uri=sqlite:////srv/x.db"]).tracking.uri == "sqlite:////srv/x.db"


def test_name_is_that_of_a_file_or_of_a_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("ddp_digits").experiment == "digits"
    assert find_config("ddp_digits") == shipped_configs()["ddp_digits"]
    Path("ddp_digits").write_text("experiment: mine\n")
    assert load_config("ddp_digits").experiment == "mine"
    assert load_config("ddp_mnist", cluster="devcluster").cluster.partition == "main"
    assert "devcluster" in shipped_configs("cluster").keys() - shipped_configs().keys()


def test_describe_lists_every_key_with_type_default_and_documentation() -> None:
    def leaves(section: Any, prefix: str = "") -> set[str]:
        found: set[str] = set()
        for field in dataclasses.fields(section):
            value = getattr(section, field.name)
            name = prefix + field.name
            if name == "sections":
                for key, kind in trainer_sections().items():
                    found |= leaves(kind(), f"{key}.")
                continue
            if name == "secret_texts":
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


def test_config_overrides_its_site_profile(write: Write, tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("partition: gpu\nnodes: 8\ntasks_per_node: 4\nenv: {A: site, B: site}\n")
    path = write("cluster:\n  nodes: 2\n  env: {B: run}\n")
    cluster = load_config(path, ["cluster.tasks_per_node=1"], cluster=profile).cluster
    assert (cluster.partition, cluster.nodes, cluster.tasks_per_node) == ("gpu", 2, 1)
    assert cluster.env == {"B": "run"}, "the values of a key are not merged"
    assert load_config(write("seed: 1\n"), cluster=profile).cluster.nodes == 8
    assert load_config(path).cluster.partition is None


def test_texts_are_taken_as_they_are_written(write: Write, tmp_path: Path) -> None:
    path = write(
        "trainer: {script: [a.py, --amp, no, --seed, 010, --lr, 0.10, --day, 2026-01-02, --at, 12:30, --none, null]}\n"
        "launch: {env: {DEBUG: no, VERSION: 1.10}, num_ranks: 2}\n"
        "cluster: {roles: {trainer: {mem: 0x10}}, sbatch: {time: 10:00:00}}\n"
        "preflight: {mode: off}\n"
        "roles: {trainer: 2}\n"
        "experiment: 007\n"
        "params: {debug: no, lr: 0.10, step: 010}\n"
    )
    profile = tmp_path / "site.yaml"
    profile.write_text("qos: 010\nenv: {SITE: on}\ncontainer: {extra_args: [010]}\n")
    arguments = "--amp no --seed 010 --lr 0.10 --day 2026-01-02 --at 12:30 --none null"
    config = load_config(path, cluster=profile)
    assert config.trainer.script[1:] == arguments.split()
    assert config.launch.env == {"DEBUG": "no", "VERSION": "1.10"}
    assert (config.cluster.roles["trainer"].mem, config.cluster.sbatch) == ("0x10", {"time": "10:00:00"})
    assert (config.preflight.mode, config.experiment, config.launch.num_ranks) == ("off", "007", 2)
    assert config.params == {"debug": False, "lr": 0.1, "step": 8}, "free keys are read as YAML"
    assert (config.cluster.qos, config.cluster.env, config.container.extra_args) == ("010", {"SITE": "on"}, ["010"])
    words = ["trainer.script=[a.py, --n, 010, no]", "launch.env.DEBUG=off", "cluster={qos: 0.10}", "name=1e3"]
    config = load_config(path, words)
    assert config.trainer.script[1:] == ["--n", "010", "no"]
    assert (config.launch.env["DEBUG"], config.cluster.qos, config.name) == ("off", "0.10", "1e3")
    assert load_config(path, ["trainer={script: [a.py, 010, ~]}"]).trainer.script[1:] == ["010", "~"]


def test_value_of_another_key_is_converted_to_the_type_of_its_key(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "12")
    monkeypatch.setenv("SWITCH", "yes")
    config = load_config(
        write(
            "{seed: '${oc.env:MINE}', optim: {lr: '${seed}'}, data: {download: '${oc.env:SWITCH}'},"
            " trainer: {script: [a.py, '${optim.lr}', '${params.x}']}, params: {x: '${roles}'}, roles: {trainer: 2}}"
        ),
        ["params.x=${seed}"],
    )
    assert (config.seed, config.optim.lr, config.data.download) == (12, 12.0, True)
    assert config.trainer.script[1:] == ["12", "12"]


# --- The sections `roles` and `cluster.roles`, and the devices of roles.


ROLES = "roles: {server: 1, worker: 4}\ncluster:\n  roles:\n    worker: {gpus_per_node: 2, nodes: 2}\n"


def test_roles_keep_the_order_of_the_file(write: Write) -> None:
    config = load_config(write(ROLES), ["roles.server=2", "roles.judge=1", "cluster.roles.server.cpus_per_task=8"])
    assert list(config.roles.items()) == [("server", 2), ("worker", 4), ("judge", 1)]
    assert list(yaml.safe_load(to_yaml(config))["roles"]) == ["server", "worker", "judge"]
    assert config.cluster.roles == {
        "worker": RoleRequest(gpus_per_node=2, nodes=2),
        "server": RoleRequest(cpus_per_task=8),
    }


@pytest.mark.parametrize(
    ("more", "devices"),
    [
        ("", ("cpu", "auto")),  # GPUs are requested for the workers only
        ("launch: {device: cpu}", ("cpu", "cpu")),
        ("launch: {device: cuda}", ("cpu", "cuda")),
        ("launch: {devices: {server: auto, worker: cpu}}", ("auto", "cpu")),
    ],
)
def test_role_without_requested_gpus_uses_the_cpu(write: Write, more: str, devices: tuple[str, str]) -> None:
    config = load_config(write(f"{ROLES}{more}\n"))
    assert tuple(role_device(config, role) for role in config.roles) == devices


def test_role_with_zero_gpus_uses_the_cpu(write: Write) -> None:
    config = load_config(write("roles: {server: 1, worker: 4}\ncluster: {roles: {server: {gpus_per_node: 0}}}\n"))
    assert [role_device(config, role) for role in config.roles] == ["cpu", "auto"]


# --- A config that is written to a run folder loads as an equal config, also after edits.


#: Values that OmegaConf reads as another type than they are written.
AMBIGUOUS = """\
trainer: {script: [train.py, "1e5", "0x10", "1_000", "12:30", "null", "yes", "~", ""]}
launch: {env: {COMMIT: "12e5", DAY: "2026-01-02", EMPTY: "", COLON: "a: b", EURO: "€ \\U0001F600"}}
optim: {lr: 1e-30, max_grad_norm: 1}
data: {image_size: null}
params: {half: 1e-5, inf: .inf, text: "1e-5", deep: [{a: [1, 1.0, true, null, "on"]}, {}], lines: "a\\nb\\n"}
"""


def test_written_config_keeps_the_types_of_values(write: Write, tmp_path: Path) -> None:
    config = load_config(write(AMBIGUOUS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert repr(load_run_config(path, [], {})) == repr(config)
    assert repr(load_run_config(path, ["seed=7"], {})) == repr(dataclasses.replace(config, seed=7))
    assert config.trainer.script[1] == "1e5"


@pytest.mark.parametrize("name", shipped_configs())
def test_written_shipped_config_loads_without_omegaconf(name: str) -> None:
    config = load_config(name)
    assert exact(yaml.safe_load(to_yaml(config))) == config


def edited(write: Write, tmp_path: Path, before: str, after: str) -> Path:
    """Return a run folder's config after an edit."""
    text = to_yaml(load_config(write("seed: 0\n")))
    assert before in text
    path = tmp_path / "config.yaml"
    path.write_text(text.replace(before, after))
    return path


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        ("lr: 0.001", "lr: 1e-2", lambda config: config.optim.lr == 0.01),
        ("lr: 0.001", "lr: 1", lambda config: repr(config.optim.lr) == "1.0"),
        ("seed: 0\n", "", lambda config: config.seed == 0),
        ("params: {}", "params: {twice: '${seed}${seed}'}", lambda config: "${seed}" in config.params["twice"]),
        ("target: ddp", "target: 'own.module:train'", lambda config: config.trainer.target == "own.module:train"),
    ],
    ids=["number", "whole number", "missing key", "interpolation", "own trainer"],
)
def test_edited_config_of_a_run_folder_loads(
    write: Write, tmp_path: Path, before: str, after: str, read: Callable[[Config], bool]
) -> None:
    assert read(load_run_config(edited(write, tmp_path, before, after), [], {}))


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ("lr: 0.001", "lr: -1.0", "optim.lr must be > 0, got -1.0"),
        ("lr: 0.001", "lr: fast", "optim.lr must be float, got 'fast'"),
        ("seed: 0\n", "seed: 0\nseed: 1\n", "found duplicate key seed"),
        ("seed: 0\n", "seed: true\nmodell: {}\n", "modell is not a key: did you mean 'model'?"),
        ("target: ddp\n  script: []", "target: own:train\n  script: [x]", "trainer.script and trainer.target exclude"),
        ("name: simple_cnn", "name: resnet17", "model.name"),
    ],
)
def test_mistakes_in_an_edited_config_of_a_run_folder_are_reported(
    write: Write, tmp_path: Path, before: str, after: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(edited(write, tmp_path, before, after), [], {})
    assert problem in str(caught.value)


# --- Ranges of numbers of nodes in a config: `cluster.nodes: 2-8` and `cluster.min_nodes`.


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("nodes: 2-8", [], (8, 2)),
        ("nodes: 4", ["cluster.nodes=2-8"], (8, 2)),
        ("nodes: 2-8", ["cluster.nodes=4"], (4, None)),
        ("nodes: 2-8", ["cluster.nodes=3-6"], (6, 3)),
        ("nodes: 2-8", ["cluster.nodes=4", "cluster.min_nodes=3"], (4, 3)),
        ("nodes: 2-8", ["cluster.min_nodes=4"], (8, 4)),
        ("nodes: 2-8", ["cluster.time_limit_min=9"], (8, 2)),
        ("nodes: 8, min_nodes: 2", [], (8, 2)),
        ("nodes: 8", [], (8, None)),
    ],
)
def test_range_sets_both_numbers_and_is_replaced_as_a_whole(
    tmp_path: Path, text: str, overrides: list[str], expected: tuple[int, int | None], is_stored: bool
) -> None:
    (tmp_path / "config.yaml").write_text(f"trainer: ddp\ncluster: {{{text}}}\n")
    if is_stored:
        (tmp_path / "stored.yaml").write_text(to_yaml(load_config(tmp_path / "config.yaml")))
        cluster = load_run_config(tmp_path / "stored.yaml", overrides, {}).cluster
    else:
        cluster = load_config(tmp_path / "config.yaml", overrides).cluster
    assert (cluster.nodes, cluster.min_nodes) == expected
    assert cluster.outlives_nodes == (expected[1] is not None)


# --- The sections `container` and `cluster.environment`.


def test_site_profile_may_contain_both_sections(write: Write, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("partition: gpu\ncontainer: {runtime: podman, image: theirs, extra_args: [--cgroups=disabled]}\n")
    config = load_config(write("container: {image: mine}\n"), cluster=site)
    assert (config.cluster.partition, config.container.runtime) == ("gpu", "podman")
    assert (config.container.image, config.container.extra_args) == ("mine", ["--cgroups=disabled"])
    site.write_text("environment: {kind: uv, local_dir: $SLURM_TMPDIR}\n")
    environment = load_config(write("cluster: {environment: {path: a}}\n"), cluster=site).cluster.environment
    assert (environment.kind, environment.path) == ("uv", str(Path.cwd() / "a"))
    assert environment.local_dir == "$SLURM_TMPDIR"


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
def test_paths_of_image_files_become_absolute(write: Write, container: str, image: str) -> None:
    config = load_config(write(f"container: {{{container}}}\n"))
    assert config.container.image == image.format(cwd=Path.cwd(), home=Path.home())


def test_environment_outlives_the_longest_job(write: Write) -> None:
    text = "cluster: {time_limit_min: 2880, environment: {kind: venv, path: /a, max_age_days: %d}}\n"
    assert any("environment.max_age_days must be > 2, got 2.0" in line for line in problems(write(text % 2)))
    load_config(write(text % 3))
