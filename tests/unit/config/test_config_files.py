"""A config is the merge of defaults, site profile, file and overrides; its schema."""

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from config_files import Write

from hpcdist.config.cluster_schema import ClusterConfig, RoleRequest
from hpcdist.config.conversion import exact
from hpcdist.config.describe import describe, json_schema
from hpcdist.config.document import find_config, shipped_configs
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.schema import Config, cross_check, largest_world_size, new_run_problems, role_device
from hpcdist.config.training_schema import DataConfig, ElasticConfig
from hpcdist.config.written import to_yaml
from hpcdist.errors import ConfigError
from hpcdist.run.create import check_trainer


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optim.max_grad_norm=null", lambda config: config.optim.max_grad_norm is None),
        ("optim.lr=3e-4", lambda config: config.optim.lr == 3e-4),
        ("trainer=pkg.mod:train", lambda config: config.trainer.target == "pkg.mod:train"),
        ("params.a.b=[1, x]", lambda config: config.params == {"a": {"b": [1, "x"]}}),
        ("params.a={b: 1}", lambda config: config.params == {"a": {"b": 1}}),
        ("params.a=b=c", lambda config: config.params == {"a": "b=c"}),
        ("params.a={unbalanced", lambda config: config.params == {"a": "{unbalanced"}),
        ("launch.env.NUMBER=1", lambda config: config.launch.env == {"NUMBER": "1"}),
        ("tracking.tags={a.b: c}", lambda config: config.tracking.tags == {"a.b": "c"}),
        ("params.warm=${data.batch_size}", lambda config: config.params == {"warm": 64}),
    ],
)
def test_overrides_are_read_as_yaml(write: Write, override: str, read: Callable[[Config], bool]) -> None:
    assert read(load_config(write("trainer: ddp\n"), [override]))


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
    monkeypatch.setenv("HPCDIST_DATA_DIR", "/srv/data")
    monkeypatch.setenv("HPCDIST_RUNS_DIR", "/srv/runs")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    config = load_config(write(""))
    found = (config.data.root, config.runs_dir, config.tracking.uri)
    assert found == ("/srv/data", "/srv/runs", "http://mlflow:5000")


def test_name_is_that_of_a_file_or_of_a_shipped_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("ddp_digits").experiment == "digits"
    assert find_config("ddp_digits") == shipped_configs()["ddp_digits"]
    Path("ddp_digits").write_text("experiment: mine\n")
    assert load_config("ddp_digits").experiment == "mine"
    assert load_config("ddp_mnist", cluster="devcluster").cluster.partition == "main"
    assert "devcluster" in shipped_configs("cluster").keys() - shipped_configs().keys()


def test_config_overrides_its_site_profile(write: Write, tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("partition: gpu\nnodes: 8\ntasks_per_node: 4\nenv: {A: site, B: site}\n")
    path = write("cluster:\n  nodes: 2\n  env: {B: run}\n")
    cluster = load_config(path, ["cluster.tasks_per_node=1"], cluster=profile).cluster
    assert (cluster.partition, cluster.nodes, cluster.tasks_per_node) == ("gpu", 2, 1)
    assert cluster.env == {"B": "run"}, "the values of a key are not merged"
    assert load_config(path).cluster.partition is None
    assert load_config(write("# nothing\n")).optim == Config().optim


@pytest.mark.parametrize(
    ("text", "value"),
    [("010", 10), ("08", 8), ("1_000", 1000), ("+3", 3), ("3e-4", 0.0003), ("1.", 1.0), (".inf", math.inf)],
)
def test_numbers_are_decimal(write: Write, text: str, value: float) -> None:
    for config in (load_config(write(f"params: {{x: {text}}}\n")), load_config(write(""), [f"params.x={text}"])):
        assert config.params == {"x": value}


@pytest.mark.parametrize("text", ["30:00", "1:30.5", "0x10", "0b11", "08", "1e5", "1_0", "2026-01-01", "no", "~"])
def test_written_text_is_read_as_the_same_text(write: Write, text: str) -> None:
    """Also where YAML 1.1, or hpcdist itself, would read a number."""
    config = load_config(write(to_yaml(Config(params={"x": text}))))
    assert config.params == {"x": text}


@pytest.mark.parametrize(("text", "minutes"), [("30:00", 30), ("1-00:00:00", 1440), ("01:30:01", 91)])
def test_message_converts_a_time_limit_in_slurms_notation(write: Write, text: str, minutes: int) -> None:
    with pytest.raises(ConfigError, match=f"must be a whole number of minutes, got '{text}': write {minutes}$"):
        load_config(write(""), [f"cluster.time_limit_min={text}"])


def test_keys_are_the_texts_that_are_written(write: Write) -> None:
    config = load_config(write("params: {1.10: a, on: b, ~: c, 2020-01-01: d}\n"))
    assert config.params == {"1.10": "a", "on": "b", "~": "c", "2020-01-01": "d"}


def test_texts_are_taken_as_they_are_written(write: Write, tmp_path: Path) -> None:
    path = write(
        "trainer: {script: [a.py, --amp, no, --seed, 010, --lr, 0.10, --day, 2026-01-02, --at, 12:30, --none, null]}\n"
        "launch: {env: {DEBUG: no, VERSION: 1.10}, num_ranks: 2}\n"
        "cluster: {mem: 0x10, sbatch: {time: 10:00:00}}\n"
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
    assert (config.cluster.mem, config.cluster.sbatch) == ("0x10", {"time": "10:00:00"})
    assert (config.preflight.mode, config.experiment, config.launch.num_ranks) == ("off", "007", 2)
    assert config.params == {"debug": False, "lr": 0.1, "step": 10}, "free keys are read as YAML"
    assert (config.cluster.qos, config.cluster.env, config.container.extra_args) == ("010", {"SITE": "on"}, ["010"])
    words = [
        "trainer.script=[a.py, --n, 010, no]",
        "launch.env.DEBUG=off",
        "cluster={qos: 0.10}",
        "name=1e3",
        "preflight=on",
    ]
    config = load_config(path, words)
    assert config.trainer.script[1:] == ["--n", "010", "no"]
    assert (config.launch.env["DEBUG"], config.cluster.qos, config.name) == ("off", "0.10", "1e3")
    assert config.preflight.mode == "on"
    assert load_config(path, ["trainer={script: [a.py, 010, ~]}"]).trainer.script[1:] == ["010", "~"]


def test_value_from_another_key_is_converted_to_the_keys_type(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "12")
    monkeypatch.setenv("SWITCH", "yes")
    config = load_config(
        write(
            "{seed: '${oc.env:MINE}', optim: {lr: '${seed}'}, data: {augment: '${oc.env:SWITCH}'},"
            " trainer: {script: [a.py, '${optim.lr}', '${params.x}']}, params: {x: '${roles}'}, roles: {trainer: 2}}"
        ),
        ["params.x=${seed}"],
    )
    assert (config.seed, config.optim.lr, config.data.augment) == (12, 12.0, True)
    assert config.trainer.script[1:] == ["12", "12"]


# --- The sections `roles` and `cluster.roles`, and the devices of roles.


ROLES = "roles: {server: 1, worker: 4}\ncluster: {roles: {worker: {gpus_per_node: 2, nodes: 2}}}\n"


def test_roles_keep_the_order_of_the_file(write: Write) -> None:
    config = load_config(write(ROLES), ["roles.server=2", "roles.judge=1", "cluster.roles.server.cpus_per_task=8"])
    assert list(config.roles.items()) == [("server", 2), ("worker", 4), ("judge", 1)]
    assert list(yaml.safe_load(to_yaml(config))["roles"]) == ["server", "worker", "judge"]
    assert config.cluster.roles == {
        "worker": RoleRequest(gpus_per_node=2, nodes=2),
        "server": RoleRequest(cpus_per_task=8),
    }


def test_role_without_requested_gpus_uses_the_cpu(write: Write) -> None:
    for more, devices in (
        ("", ["cpu", "auto"]),  # GPUs are requested for the workers only
        ("launch: {device: cuda}", ["cpu", "cuda"]),
        ("launch: {devices: {server: auto, worker: cpu}}", ["auto", "cpu"]),
    ):
        config = load_config(write(f"{ROLES}{more}\n"))
        assert [role_device(config, role) for role in config.roles] == devices
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


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_config_runs_as_it_is(name: str, tmp_path: Path) -> None:
    check_trainer(load_config(name), tmp_path)


def test_edited_config_of_a_run_folder_loads(write: Write, tmp_path: Path) -> None:
    text = to_yaml(load_config(write("seed: 0\n")))
    path = tmp_path / "config.yaml"
    checks: list[tuple[str, str, Callable[[Config], bool]]] = [
        ("lr: 0.001", "lr: 1", lambda config: repr(config.optim.lr) == "1.0"),
        ("seed: 0\n", "", lambda config: config.seed == 0),
        ("params: {}", "params: {twice: '${seed}${seed}'}", lambda config: "${seed}" in config.params["twice"]),
        ("target: ddp", "target: 'own.module:train'", lambda config: config.trainer.target == "own.module:train"),
    ]
    for before, after, read in checks:
        path.write_text(text.replace(before, after))
        assert read(load_run_config(path, [], {})), after


# --- GPUs of one type: `cluster.gpus_per_node: a100:4` and `cluster.gpu_type`.


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "request_"),
    [
        ("gpus_per_node: a100:4", [], "a100:4"),
        ("gpus_per_node: 4", ["cluster.gpus_per_node=a100:2"], "a100:2"),
        ("gpus_per_node: a100:4", ["cluster.gpus_per_node=2"], "a100:2"),
        ("gpus_per_node: a100:4", ["cluster.gpus_per_node=1g.5gb:7"], "1g.5gb:7"),
        ("gpus_per_node: a100:4", ["cluster.gpu_type=null"], "4"),
        ("gpus_per_node: 4, gpu_type: 100", [], "100:4"),
        ("gpus_per_node: a100:4, gpu_type: a100", ["cluster.gpu_type=h100"], "h100:4"),
        ("gpus_per_node: 'a100:${params.n}'", [], "a100:3"),
        ("gpus_per_node: a100:4", ["cluster.gpus_per_node=${params.kind}:${params.n}"], "v1:3"),
        ("gpus_per_node: '${params.gpus}'", [], "v1:2"),
    ],
)
def test_typed_gpus_set_number_and_type(
    tmp_path: Path, text: str, overrides: list[str], request_: str, is_stored: bool
) -> None:
    params = "params: {n: 3, kind: v1, gpus: 'v1:2'}"
    (tmp_path / "config.yaml").write_text(f"trainer: x:y\n{params}\ncluster: {{{text}}}\n")
    if is_stored:
        (tmp_path / "stored.yaml").write_text(to_yaml(load_config(tmp_path / "config.yaml")))
        config = load_run_config(tmp_path / "stored.yaml", overrides, {})
    else:
        config = load_config(tmp_path / "config.yaml", overrides)
    assert config.cluster.gpu_request == request_


def test_type_of_gpus_that_contradicts_another_is_a_mistake(tmp_path: Path) -> None:
    text = "{gpus_per_node: a100:4, gpu_type: h100}"
    (tmp_path / "config.yaml").write_text(f"trainer: {{script: [x.py]}}\ncluster: {text}\n")
    form = "must be a number, or TYPE:NUMBER such as a100:4 without spaces, got"
    with pytest.raises(ConfigError, match=f"cluster.gpus_per_node {form} 'a100:4 beside gpu_type=h100'"):
        load_config(tmp_path / "config.yaml")


def test_gpu_count_of_a_config_keeps_the_gpu_type_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("gpus_per_node: a100:4\n")
    for text, request in (("2", "a100:2"), ("h100:2", "h100:2"), ("{gpus_per_node: 1, gpu_type: null}", "1")):
        section = text if text.startswith("{") else f"{{gpus_per_node: {text}}}"
        (tmp_path / "config.yaml").write_text(f"trainer: ddp\ncluster: {section}\n")
        config = load_config(tmp_path / "config.yaml", cluster=tmp_path / "site.yaml")
        assert config.cluster.gpu_request == request


# --- Ranges of numbers of nodes in a config: `cluster.nodes: 2-8` and `cluster.min_nodes`.


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("nodes: 2-8", [], (8, 2)),
        ("nodes: 4", ["cluster.nodes=2-8"], (8, 2)),
        ("nodes: 2-8", ["cluster.nodes=4"], (4, None)),
        ("nodes: 2-8", ["cluster.nodes=3-6"], (6, 3)),
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
    site.write_text("partition: gpu\ncontainer: {runtime: apptainer, image: /theirs, extra_args: [--userns]}\n")
    config = load_config(write("container: {image: /mine}\n"), cluster=site)
    assert (config.cluster.partition, config.container.runtime) == ("gpu", "apptainer")
    assert (config.container.image, config.container.extra_args) == ("/mine", ["--userns"])
    site.write_text("environment: {kind: venv, modules: [cuda/13.0]}\n")
    environment = load_config(write("cluster: {environment: {path: a}}\n"), cluster=site).cluster.environment
    assert (environment.kind, environment.path) == ("venv", str(Path.cwd() / "a"))
    assert environment.modules == ["cuda/13.0"]


def test_paths_of_image_files_become_absolute(write: Write) -> None:
    for container, image in (
        ("runtime: apptainer, image: a.sif", f"{Path.cwd()}/a.sif"),
        ("runtime: enroot, image: ~/a", f"{Path.home()}/a"),
        ("runtime: pyxis, image: a.sqsh", f"{Path.cwd()}/a.sqsh"),
        ("runtime: pyxis, image: nvcr.io#a/b:1", "nvcr.io#a/b:1"),
        ("runtime: apptainer, image: 'docker://a/b'", "docker://a/b"),
    ):
        assert load_config(write(f"container: {{{container}}}\n")).container.image == image


# --- Elastic runs


def elastic(size: int | None, num_ranks: int = 0, micro_batches: int | None = None) -> Config:
    return Config(
        data=DataConfig(global_batch_size=size),
        launch=LaunchConfig(num_ranks=num_ranks),
        elastic=ElasticConfig(micro_batches=micro_batches),
    )


def test_default_micro_batches_need_a_divisible_global_batch() -> None:
    three = elastic(256, 3)
    (problem,) = new_run_problems(three)
    message = "data.global_batch_size=256 cannot be divided into 3 equal micro-batches: use 255, or set"
    assert problem.startswith(message)
    assert cross_check(three) == [], "its checkpoint has the number of the first start"
    assert len(new_run_problems(elastic(256), num_ranks=3)) == 1
    for config in (elastic(256), elastic(None, 3), elastic(256, 3, 8)):
        assert new_run_problems(config) == []
    for size, suggestion in ((1, 3), (4, 3), (5, 6)):
        assert f"use {suggestion}," in new_run_problems(elastic(size, 3))[0]


def test_largest_world_size_is_that_of_any_machine() -> None:
    assert largest_world_size(Config()) == 1
    assert largest_world_size(elastic(None, 6)) == 6
    cluster = ClusterConfig(nodes=4, min_nodes=2, tasks_per_node=2)
    assert largest_world_size(Config(launch=LaunchConfig(num_ranks=6), cluster=cluster)) == 8


# --- The JSON Schema of a config: it is complete and accepts the shipped configs

ROOT = Path(__file__).parents[3]

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def properties(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key that is not a section, with its schema."""
    for name, inner in schema["properties"].items():
        section = next((one for one in [inner, *inner.get("anyOf", ())] if "properties" in one), None)
        if section is None:
            yield prefix + name, inner
        else:
            yield from properties(section, f"{prefix}{name}.")


def test_json_schema_documents_every_key_with_its_default() -> None:
    found = dict(properties(SCHEMA))
    rows = {path: row for path, *row in describe() if ".ROLE." not in path}
    assert found.keys() == rows.keys()
    for path, (_, default, documentation) in rows.items():
        assert (found[path]["default"], found[path]["description"]) == (default, documentation)
    assert found["optim.name"]["anyOf"][0] == {"enum": ["adam", "adamw", "sgd"]}


@pytest.mark.parametrize("path", [*shipped_configs().values(), *sorted(ROOT.glob("examples/*/*.yaml"))], ids=str)
def test_json_schema_accepts_shipped_configs_which_refer_to_it(path: Path) -> None:
    text = path.read_text()
    assert VALIDATOR.is_valid(yaml.safe_load(text))
    modeline, _, target = text.splitlines()[0].partition("$schema=")
    assert modeline == "# yaml-language-server: "
    assert (path.parent / target).resolve() == ROOT / "docs" / "config.schema.json"


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("{seed: 1, trainer: ddp, preflight: off}", True),
        ("{seed: '${oc.env:SEED}', cluster: {roles: {trainer: {nodes: 2}}}}", True),
        ("{seed: one}", False),
        ("{sed: 1}", False),
        ("{optim: {name: sgdd}}", False),
        ("{trainer: {targt: ddp}}", False),
    ],
)
def test_json_schema_rejects_mistakes(text: str, is_valid: bool) -> None:
    assert VALIDATOR.is_valid(yaml.safe_load(text)) == is_valid


# --- The tests of configs also pass with the omegaconf that hpcdist gets without hydra-core


#: Made by scripts/install.sh.
NEWEST = Path(sys.prefix) / "omegaconf"


@pytest.mark.processes
@pytest.mark.slow
def test_configs_load_with_the_newest_omegaconf() -> None:
    if not NEWEST.is_dir():
        pytest.skip(f"{NEWEST} is missing: `make install` creates it")
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(NEWEST)
    version = "import omegaconf; print(omegaconf.__file__)"
    done = subprocess.run([sys.executable, "-c", version], env=env, capture_output=True, text=True, check=True)
    assert Path(done.stdout).is_relative_to(NEWEST)
    names = ("config_files", "config_mistakes", "redaction")
    tests = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *tests], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
