"""Search for the unfinished run of a config."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.host.files import write_json
from hpcdist.run import lease
from hpcdist.run.create import create_run
from hpcdist.run.folder import RunDir
from hpcdist.run.lookup import find_unfinished

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

Make = Callable[..., RunDir]


@pytest.fixture
def config(runs_dir: Path) -> Config:
    return load_config("ddp_digits", [f"runs_dir={runs_dir}", "tracking.tags={api_token: hidden}"])


@pytest.fixture
def make(config: Config, tmp_path: Path) -> Make:
    def make(name: str, status: Any, *, created: float = 1.0, **changes: Any) -> RunDir:
        run = create_run(replace(config, name=name, **changes), tmp_path)
        run.write_state(replace(run.read_state(), status=status, created=created))
        return run

    return make


def write_container_lease(run: RunDir, *, renewed: float) -> None:
    """Write the lease of another container with this host's name, as with `--network=host`."""
    facts = {
        "host": socket.gethostname(),
        "processes": "pid:[1]",
        "pid": 7,
        "started": 1.0,
        "user": "ada",
        "job_id": None,
    }
    write_json(run.lease, {**facts, "acquired": renewed, "renewed": renewed})


def test_newest_stopped_run_of_the_config_is_found(config: Config, make: Make) -> None:
    make("old", "stopped", created=1)
    make("new", "stopped", created=2)
    make("other", "stopped", created=3, seed=1)
    found = find_unfinished(config)
    assert found is not None
    assert found.name == "new"


def test_run_of_a_killed_supervisor_is_found(config: Config, make: Make) -> None:
    make("killed", "running")
    assert find_unfinished(config) is not None


@pytest.mark.parametrize("status", ["finished", "failed", "cancelled", "created", "queued"])
def test_ended_and_unstarted_runs_do_not_count(config: Config, make: Make, status: str) -> None:
    make("first", status)
    assert find_unfinished(config) is None


def test_slurm_runs_do_not_count(config: Config, make: Make) -> None:
    write_json(make("queued-once", "stopped").path / "slurm.json", {"job_id": "1"})
    assert find_unfinished(config) is None


def test_configured_name_selects_the_run(config: Config, make: Make) -> None:
    make("one", "stopped", created=1)
    make("two", "stopped", created=2)
    found = find_unfinished(replace(config, name="one"))
    assert found is not None
    assert found.name == "one"
    assert find_unfinished(replace(config, name="three")) is None


def test_run_with_an_unreadable_config_is_skipped(config: Config, make: Make) -> None:
    run = make("old", "stopped")
    run.config.write_text("no_such_key: 1\n")
    assert find_unfinished(config) is None


def test_run_held_on_this_host_is_skipped(config: Config, make: Make) -> None:
    run = make("busy", "running")
    with lease.hold(run):
        assert find_unfinished(config) is None


def test_run_held_in_another_container_is_skipped(config: Config, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make("busy", "running")
    write_container_lease(run, renewed=time.time() - 9)
    monkeypatch.setattr(lease.time, "sleep", lambda _: write_container_lease(run, renewed=time.time()))
    assert find_unfinished(config) is None


def test_run_with_a_stale_lease_of_another_container_is_found(
    config: Config, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("killed", "running")
    write_container_lease(run, renewed=time.time() - 9)
    pauses = []
    now = time.time()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        monkeypatch.setattr(lease.time, "time", lambda: now + lease.STALE_S)

    monkeypatch.setattr(lease.time, "sleep", sleep)
    found = find_unfinished(config)
    assert found is not None
    assert found.name == "killed"
    assert len(pauses) == 1
