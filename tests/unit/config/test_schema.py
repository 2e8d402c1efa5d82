"""The schema: its JSON form, elastic runs, and versions of OmegaConf."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcdist.config.describe import describe, json_schema
from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig
from hpcdist.config.schema import (
    Config,
    DataConfig,
    ElasticConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    cross_check,
    division_problems,
    largest_world_size,
    new_run_problems,
)
from hpcdist.config.shipped import shipped_configs

# --- The JSON Schema of a config: it is complete, it accepts the shipped configs, and docs/ publishes this version

ROOT = Path(__file__).parents[3]

SCHEMA = json_schema()


def properties(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key that is not a section, with its schema."""
    for name, inner in schema["properties"].items():
        section = next((one for one in [inner, *inner.get("anyOf", ())] if "properties" in one), None)
        if section is None:
            yield prefix + name, inner
        else:
            yield from properties(section, f"{prefix}{name}.")


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Validate the keywords that the schema uses."""
    if "$ref" in schema:
        return isinstance(value, str) and "${" in value
    if "anyOf" in schema:
        return any(accepts(one, value) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    kinds |= {"array": list, "object": dict}  # type: ignore[dict-item]
    names = schema.get("type", list(kinds))
    if not any(isinstance(value, kinds[name]) for name in ([names] if isinstance(names, str) else names)):
        return False
    if isinstance(value, dict) and "properties" in schema:
        return all(key in schema["properties"] and accepts(schema["properties"][key], value[key]) for key in value)
    return True


def test_json_schema_has_every_key_with_documentation_and_default() -> None:
    found = dict(properties(SCHEMA))
    rows = {path: row for path, *row in describe() if ".ROLE." not in path}
    assert found.keys() == rows.keys()
    for path, (_, default, documentation) in rows.items():
        assert (found[path]["default"], found[path]["description"]) == (default, documentation)
    assert found["optim.name"]["anyOf"][0] == {"enum": ["adam", "adamw", "sgd"]}


@pytest.mark.parametrize("path", [*shipped_configs().values(), *sorted(ROOT.glob("examples/*/*.yaml"))], ids=str)
def test_json_schema_accepts_shipped_configs_which_refer_to_it(path: Path) -> None:
    text = path.read_text()
    assert accepts(SCHEMA, yaml.safe_load(text))
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
    assert accepts(SCHEMA, yaml.safe_load(text)) == is_valid


def test_published_json_schema_is_current() -> None:
    text = json.dumps(SCHEMA, indent=2, ensure_ascii=False) + "\n"
    assert (ROOT / "docs" / "config.schema.json").read_text() == text, (
        "run: hpcdist config --json-schema > docs/config.schema.json"
    )


# --- Keys of elastic runs: which combinations are mistakes, and their messages


def of(batch_size: int | None, **sections: Any) -> Config:
    return Config(data=DataConfig(global_batch_size=batch_size), **sections)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (of(None, elastic=ElasticConfig(exact=True)), "elastic.exact needs data.global_batch_size: set it"),
        (of(None, elastic=ElasticConfig(micro_batches=4)), "elastic.micro_batches needs data.global_batch_size"),
        (
            of(8, trainer=TrainerConfig(script=["train.py"])),
            "data.global_batch_size is not for scripts, which divide their batches themselves: remove it",
        ),
        (of(8, trainer=TrainerConfig(target="comm")), "data.global_batch_size is not for trainer comm: remove it"),
        (
            of(8, optim=OptimConfig(grad_accum_steps=2)),
            "optim.grad_accum_steps=2 and data.global_batch_size exclude each other: set elastic.micro_batches instead",
        ),
        (of(8, trainer=TrainerConfig(target="mine:train"), roles={"a": 1, "b": 1}), "roles and data.global_batch_size"),
        (of(8, model=ModelConfig(sync_batch_norm=True)), "set model.sync_batch_norm=false"),
        (
            of(8, elastic=ElasticConfig(micro_batches=2), launch=LaunchConfig(num_ranks=4)),
            "elastic.micro_batches=2 is less than the 4 ranks of the config: raise it, or use fewer ranks",
        ),
        (
            of(100, elastic=ElasticConfig(micro_batches=8), cluster=ClusterConfig(nodes=4, tasks_per_node=2)),
            "data.global_batch_size=100 cannot be divided into 8 equal micro-batches: use 96, or set",
        ),
        (
            of(None, elastic=ElasticConfig(min_ranks=3), launch=LaunchConfig(num_ranks=2)),
            "launch.num_ranks=2 is less than elastic.min_ranks=3: change one of them",
        ),
        (
            of(None, elastic=ElasticConfig(min_ranks=8), cluster=ClusterConfig(nodes=4, min_nodes=2, tasks_per_node=3)),
            "cluster.min_nodes=2 allows 6 ranks, fewer than elastic.min_ranks=8: change one of them",
        ),
    ],
)
def test_mistakes(config: Config, problem: str) -> None:
    (found,) = cross_check(config)
    assert problem in found


def test_elastic_run_of_ddp_and_of_an_own_trainer() -> None:
    elastic = ElasticConfig(micro_batches=8, exact=True, min_ranks=2)
    for target in ("ddp", "mine:train"):
        assert cross_check(of(64, elastic=elastic, trainer=TrainerConfig(target=target))) == []


def test_new_run_without_a_number_of_micro_batches_needs_a_global_batch_that_its_ranks_can_divide() -> None:
    three = of(256, launch=LaunchConfig(num_ranks=3))
    (problem,) = new_run_problems(three)
    assert problem.startswith(
        "data.global_batch_size=256 cannot be divided into 3 equal micro-batches: use 255, or set"
    )
    assert cross_check(three) == [], "its checkpoint has the number of the first start"
    assert new_run_problems(of(256)) == []
    assert len(new_run_problems(of(256), num_ranks=3)) == 1
    assert new_run_problems(of(None, launch=LaunchConfig(num_ranks=3))) == []
    assert new_run_problems(dataclasses.replace(three, elastic=ElasticConfig(micro_batches=8))) == []


def test_largest_world_size_is_that_of_any_machine() -> None:
    assert largest_world_size(Config()) == 1
    assert largest_world_size(Config(launch=LaunchConfig(num_ranks=6))) == 6
    cluster = ClusterConfig(nodes=4, min_nodes=2, tasks_per_node=2)
    assert largest_world_size(Config(launch=LaunchConfig(num_ranks=6), cluster=cluster)) == 8


def test_suggested_batch_size_can_be_divided() -> None:
    assert division_problems(64, 8) == []
    for size, suggestion in ((1, 3), (4, 3), (5, 6)):
        assert f"use {suggestion}," in division_problems(size, 3)[0]


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
