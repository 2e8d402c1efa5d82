"""A config is the merge of defaults, site profile, file and overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_files import Write, problems

from hpcdist.config.describe import describe
from hpcdist.config.launch_schema import RoleRequest
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config, trainer_sections
from hpcdist.config.shipped import find_config, shipped_configs
from hpcdist.errors import ConfigError


def test_overrides_take_precedence_over_file_and_defaults(write: Write) -> None:
    config = load_config(write("optim:\n  lr: 0.5\n  momentum: 0.8\n"), ["optim.lr=3e-4", "stop.max_steps=7"])
    assert (config.optim.lr, config.optim.momentum, config.optim.name) == (3e-4, 0.8, "adam")
    assert config.stop.max_steps == 7


def test_empty_file_gives_defaults(write: Write) -> None:
    config = load_config(write("# nothing\n"))
    assert config.optim == Config().optim
    assert config.launch == Config().launch


def test_config_is_frozen(write: Write) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(write("")).optim.lr = 1.0  # type: ignore[misc]


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
        ("data.image_size=32", lambda config: config.data.image_size == 32),
    ],
)
def test_overrides_are_read_as_yaml(write: Write, override: str, read: Callable[[Config], bool]) -> None:
    assert read(load_config(write("trainer: ddp\n"), [override]))


def test_interpolation_is_resolved_after_overrides(write: Write) -> None:
    config = load_config(write("params:\n  warm: ${optim.lr}\n"), ["optim.lr=0.25"])
    assert config.params == {"warm": 0.25}


def test_folders_and_tracking_uri_default_to_environment_variables(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCDIST_DATA_DIR", "/srv/data")
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "/srv/runs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    config = load_config(write(""))
    assert (config.data.root, config.runs_dir, config.tracking.uri) == (
        "/srv/data",
        "/srv/runs",
        "http://mlflow:5000",
    )


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


def test_absolute_sqlite_uri_is_unchanged(write: Write) -> None:
    assert load_config(write(""), ["tracking.uri=sqlite:////srv/x.db"]).tracking.uri == "sqlite:////srv/x.db"


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_shipped_config_loads_by_name(name: str) -> None:
    assert load_config(name).experiment
    assert find_config(name) == shipped_configs()[name]


def test_file_takes_precedence_over_a_shipped_config_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ddp_digits").write_text("experiment: mine\n")
    assert load_config("ddp_digits").experiment == "mine"


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


def test_shipped_profile_loads_by_name(write: Write) -> None:
    cluster = load_config(write("seed: 1\n"), cluster="devcluster").cluster
    assert (cluster.partition, cluster.nodes, cluster.tasks_per_node) == ("main", 2, 2)
    assert "devcluster" in shipped_configs("cluster")
    assert "devcluster" not in shipped_configs()


def test_mistakes_in_profiles_are_reported(write: Write, tmp_path: Path) -> None:
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
def test_cluster_values_out_of_range_are_rejected(write: Write, override: str, problem: str) -> None:
    assert problems(write("seed: 1\n"), override) == (problem,)


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
