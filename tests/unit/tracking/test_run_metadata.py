"""Parameters and tags of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcdist.config.loading import load_config
from hpcdist.config.schema import trainer_sections
from hpcdist.config.written import to_yaml
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import is_allowed
from hpcdist.tracking.run_metadata import fixed_tags, names, params


@pytest.mark.parametrize(
    ("config", "used"),
    [
        (["ddp_digits"], {"model", "data", "optim", "schedule", "precision"}),
        (["rl_cartpole"], {"rl", "optim", "schedule"}),
    ],
)
def test_params_contain_only_sections_that_the_trainer_uses(config: list[str], used: set[str], tmp_path: Path) -> None:
    tree = yaml.safe_load(to_yaml(load_config(config[0], config[1:])))
    found = {key.partition(".")[0] for key in params(RunDir(tmp_path), tree)}
    trained = {*trainer_sections(), "model", "data", "optim", "schedule", "precision"}
    assert found & trained == used
    assert {"seed", "trainer", "stop", "checkpoint", "launch"} <= found


def test_tags_contain_the_image_of_the_container(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not [tag for tag in fixed_tags(run, {}) if "image" in tag or "container" in tag]
    facts = {"runtime": "podman", "image": "hpcdist:0.1.0", "image_digest": "sha256:ab", "torch": "2.15", "cuda": None}
    write_json(run.container, facts)
    found = {key: text for key, text in fixed_tags(run, {}).items() if "image" in key or "container" in key}
    assert found == {
        "hpcdist.image": "hpcdist:0.1.0",
        "hpcdist.image_digest": "sha256:ab",
        "hpcdist.container.runtime": "podman",
        "hpcdist.container.torch": "2.15",
    }


def test_cores_of_the_machine_that_created_the_run_are_not_taken_for_those_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.environment, {"cores": 2, "host": "login1"})
    found = {key: text for key, text in fixed_tags(run, {}).items() if "cores" in key or key == "hpcdist.host"}
    assert found == {"hpcdist.host": "login1", "hpcdist.host_cores": "2"}


def test_cleaned_params_and_tags_stay_unique(tmp_path: Path) -> None:
    long = "k" * 249
    config = {
        "trainer": {"target": "mine:train"},
        "launch": {"env": {"A%": "1", "A#": "2", "A_": "3"}},
        "tracking": {"tags": {"owner%": "x", "owner#": "y", "owner_": "z"}},
    }
    found = params(RunDir(tmp_path), config)
    assert sorted(text for key, text in found.items() if key.startswith("launch.env.")) == ["1", "2", "3"]
    run = RunDir(tmp_path)
    write_json(run.environment, {long: "1", f"{long}2": "2"})
    tags = fixed_tags(run, config)
    assert sorted(text for key, text in tags.items() if key.startswith("owner")) == ["x", "y", "z"]
    assert sorted(text for key, text in tags.items() if key.startswith("hpcdist.kkk")) == ["1", "2"]
    assert all(is_allowed(key) for key in {**found, **tags})
    changed = {key for key, clean in names(RunDir(tmp_path), config) if key != clean}
    assert changed >= {"launch.env.A%", "launch.env.A#", "owner%", "owner#", "tracking.tags.owner%"}
