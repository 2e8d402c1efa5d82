"""The shipper imports MLflow, which takes seconds of CPU time, when the ranks have started to train."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking import shipper
from hpcdist.tracking.shipper import _Parent, _wait_for_first_step


class Parent:
    """A supervisor that does something at each poll."""

    def __init__(self, *actions: Callable[[], bool | None]) -> None:
        self.actions = list(actions)
        self.gone = False
        self.num_polls = 0

    def wait(self, _seconds: float) -> bool:
        self.num_polls += 1
        return bool(self.actions.pop(0)()) if self.actions else False

    def leave(self) -> None:
        self.gone = True


def num_polls(run: RunDir, parent: Parent) -> int:
    _wait_for_first_step(run, cast(_Parent, parent))
    return parent.num_polls


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    run = RunDir.create(runs_dir / "exp" / "run")
    run.new_attempt()
    run.write_state(State(status="running", attempt=1))
    return run


def beat(run: RunDir, step: int, age_s: float = 0.0) -> None:
    write_json(run.attempt(1).beat(0), {"step": step, "time": time.time() - age_s, "metrics": {}})


def test_shipper_waits_for_the_first_step(run: RunDir) -> None:
    """A step of an earlier start of the supervisor does not count."""
    beat(run, 7, age_s=60.0)
    parent = Parent(lambda: None, lambda: beat(run, 0), lambda: beat(run, 1, age_s=-1.0))
    assert num_polls(run, parent) == 3


@pytest.mark.parametrize("status", ["finished", "failed", "cancelled", "queued"])
def test_shipper_does_not_wait_after_the_end_of_the_run(run: RunDir, status: str) -> None:
    parent = Parent(lambda: run.write_state(State(status=status, attempt=1)))  # type: ignore[arg-type]
    assert num_polls(run, parent) == 1


def test_signal_and_the_end_of_the_supervisor_end_the_wait(run: RunDir) -> None:
    assert num_polls(run, Parent(lambda: False, lambda: True)) == 2
    parent = Parent()
    parent.actions = [lambda: None, parent.leave]
    assert num_polls(run, parent) == 2


def test_wait_has_a_limit(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts may report no steps."""
    monkeypatch.setattr(shipper, "IMPORT_WITHIN_S", 0.0)
    assert num_polls(run, Parent()) == 0
