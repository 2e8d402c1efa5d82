"""`spawn_ranks` itself: environment and folder of the ranks, errors, hanging and killed ranks."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from spawn import Rank, spawn_ranks


def environment(here: Rank) -> tuple[int, str | None, str]:
    return here.rank, os.environ.get("MARKED"), os.getcwd()


def fail(here: Rank) -> None:
    if here.rank == 0:
        raise ValueError("simulated failure")


def hang(here: Rank) -> None:
    threading.Event().wait()


def kill_rank_1(here: Rank) -> str:
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_ranks_have_environment_and_folder_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARKED", "yes")
    monkeypatch.chdir(tmp_path)
    assert spawn_ranks(environment, 3) == [(rank, "yes", str(tmp_path)) for rank in range(3)]


def test_first_failed_rank_is_reported_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^rank 0 of 2 failed first .*ValueError: simulated failure"):
        spawn_ranks(fail)


def test_hanging_ranks_are_killed_and_the_next_ones_start() -> None:
    with pytest.raises(AssertionError, match=r"failed first \(exit code -9\)"):
        spawn_ranks(hang, timeout_s=1)
    assert spawn_ranks(kill_rank_1, killed=[1]) == ["alive", None]
