"""`hpcdist resume`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import Cli, job, one_line

from hpcdist.host.files import read_json, write_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lease import hold
from hpcdist.run.records import kept
from hpcdist.slurm.client import JobSnapshot
from hpcdist.supervisor import local

#: These tests may start processes.
pytestmark = pytest.mark.processes


def test_resume_uses_the_config_of_the_run(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]
) -> None:
    run = make("first", "seed=7", status="failed", attempt=1)
    before = run.config.read_text()
    assert hpcdist("resume", "fi").code == 0
    assert supervised["run"].path == run.path
    assert supervised["config"].seed == 7
    assert run.config.read_text() == before
    assert not run.lease.exists()


def test_detached_resume_prints_where_it_continues(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "detach", lambda run, env: 4711)
    run = make("first", status="failed", attempt=1)
    (run.checkpoints / "step-00000190").mkdir(parents=True)
    (run.checkpoints / "step-00000190" / "manifest.json").write_text("{}")
    write_json(run.attempt(1).outcome(0), {"outcome": "failed", "step": 204})
    result = hpcdist("resume", "first", "--detach")
    assert re.search(r"resuming at step 190, checkpoint of \d\d:\d\d:\d\d, 14 steps lost\n", result.out)


def test_resume_saves_overrides(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    run = make("first", status="finished", attempt=1)
    assert hpcdist("resume", "first", "stop.max_epochs=20").code == 0
    assert supervised["config"].stop.max_epochs == 20
    assert yaml.safe_load(run.config.read_text())["stop"]["max_epochs"] == 20


def test_resume_rejects_a_finished_run(hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]) -> None:
    make("first", status="finished", attempt=1)
    message = one_line(hpcdist("resume", "first"))
    assert message == "run first is finished: to train longer, add an override such as stop.max_epochs=20"
    assert "run" not in supervised


def test_resume_rejects_a_held_run_and_keeps_its_config(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any]
) -> None:
    run = make("first", status="running", attempt=1)
    before = run.config.read_text()
    with hold(run):
        message = one_line(hpcdist("resume", "first", "seed=9"))
    assert message.startswith(f"run first is held by process {os.getpid()} of ")
    assert run.config.read_text() == before
    assert "run" not in supervised


@pytest.mark.parametrize("current", [False, True])
def test_resume_uses_the_code_snapshot_unless_current_code_is_requested(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any], tmp_path: Path, current: bool
) -> None:
    code = tmp_path / "train.py"
    code.write_text("old")
    run = make("first", "trainer=train:train", status="failed", attempt=1)
    assert "changed" not in hpcdist("resume", "first").out
    code.write_text("new")
    result = hpcdist("resume", "first", *["--with-current-code"] * current)
    assert result.code == 0
    hint = (
        "changed since the run copied the code: train.py; this resume runs the copy, --with-current-code runs the new"
    )
    assert (hint in " ".join(result.out.split())) == (not current)
    run.write_state(replace(run.read_state(), status="stopped"))
    assert "changed" not in hpcdist("resume", "first").out
    assert (run.code / "train.py").read_text() == ("new" if current else "old")
    command = (read_json(run.environment) or {})["command"]
    assert ("--with-current-code" in command) == current


def test_current_code_with_a_syntax_error_is_refused_before_it_replaces_the_snapshot(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any], tmp_path: Path
) -> None:
    code = tmp_path / "train.py"
    code.write_text("old")
    run = make("first", "trainer=train:train", status="failed", attempt=1)
    code.write_text("print(\n")
    result = hpcdist("resume", "first", "--with-current-code")
    assert result.code == 2
    assert one_line(result).startswith(f"trainer.target: {code}:1: SyntaxError: '(' was never closed in `print(`")
    assert (run.code / "train.py").read_text() == "old"
    assert "run" not in supervised


def test_resume_after_the_end_requires_the_secrets_again(
    hpcdist: Cli, make: Callable[..., RunDir], supervised: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make("first", "launch.env.API_KEY=s3cret", status="failed", attempt=1)
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "s3cret"}
    run.write_state(replace(run.read_state(), status="cancelled"))
    assert not run.secrets.exists()
    assert "launch.env.API_KEY was redacted when the run was written: set API_KEY in the environment" in one_line(
        hpcdist("resume", "first")
    )
    monkeypatch.setenv("API_KEY", "s3cret")
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "s3cret"}
    assert "s3cret" not in run.config.read_text()
    monkeypatch.setenv("API_KEY", "another")
    assert hpcdist("resume", "first").code == 0
    assert supervised["config"].launch.env == {"API_KEY": "another"}
    assert kept(run) == {"API_KEY": "another"}


def test_resume_rejects_a_queued_run(
    hpcdist: Cli, make: Callable[..., RunDir], slurm: Callable[[JobSnapshot], None]
) -> None:
    run = make("first", status="queued")
    write_json(run.path / "slurm.json", {"job_id": "7"})
    slurm(job("PENDING"))
    assert one_line(hpcdist("resume", "first")) == ("run first is queued and cannot be resumed: `hpcdist follow first`")
