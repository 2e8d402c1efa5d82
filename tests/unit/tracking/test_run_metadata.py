"""Parameters and tags of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.config.launch_schema import TrackingConfig
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config, TrainerConfig, trainer_sections
from hpcdist.config.tree import flat
from hpcdist.config.written import StoredConfig, flat_values
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
    loaded = load_config(config[0], config[1:])
    stored = StoredConfig(config=loaded, values=flat_values(loaded))
    found = {key.partition(".")[0] for key in params(RunDir(tmp_path), stored)}
    trained = {*trainer_sections(), "model", "data", "optim", "schedule", "precision"}
    assert found & trained == used
    assert {"seed", "trainer", "stop", "checkpoint", "launch"} <= found


def test_tags_contain_the_image_of_the_container(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not [tag for tag in fixed_tags(run, StoredConfig()) if "image" in tag or "container" in tag]
    facts = {"runtime": "podman", "image": "hpcdist:0.1.0", "image_digest": "sha256:ab", "torch": "2.15", "cuda": None}
    write_json(run.container, facts)
    found = {key: text for key, text in fixed_tags(run, StoredConfig()).items() if "image" in key or "container" in key}
    assert found == {
        "hpcdist.image": "hpcdist:0.1.0",
        "hpcdist.image_digest": "sha256:ab",
        "hpcdist.container.runtime": "podman",
        "hpcdist.container.torch": "2.15",
    }


def test_cores_of_the_machine_that_created_the_run_are_not_taken_for_those_of_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.environment, {"cores": 2, "host": "login1"})
    found = {
        key: text for key, text in fixed_tags(run, StoredConfig()).items() if "cores" in key or key == "hpcdist.host"
    }
    assert found == {"hpcdist.host": "login1", "hpcdist.host_cores": "2"}


def test_cleaned_params_and_tags_stay_unique(tmp_path: Path) -> None:
    long = "k" * 249
    env, own = {"A%": "1", "A#": "2", "A_": "3"}, {"owner%": "x", "owner#": "y", "owner_": "z"}
    config = StoredConfig(
        config=Config(trainer=TrainerConfig(target="mine:train"), tracking=TrackingConfig(tags=own)),
        values=flat({"launch": {"env": env}, "tracking": {"tags": own}}),
    )
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
