"""StopAgreement: all ranks stop at the same step, whichever rank gets the request; with a dead peer, no rank saves."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from spawn import Rank, spawn_ranks

from hpcdist.rank.processes import StopFlag
from hpcdist.rank.stopping import REQUEST_INTERVAL_S, StopAgreement
from hpcdist.run.commands import RequestReader
from hpcdist.run.folder import Attempt

REQUEST_AT = 6
MAX_STEPS = 200_000


def train_until_stopped(stop: StopAgreement, act: Callable[[int], None], *, pace: int = 1) -> int | None:
    """Step until the ranks agree to stop. Returns the number of steps, or None if they do not agree in time."""
    weights = torch.rand(40, 40)
    until = time.monotonic() + 30
    for step in range(1, MAX_STEPS):
        for _ in range(pace):
            weights = torch.tanh(weights @ weights)
        act(step)
        if stop.at_boundary(step):
            assert stop.agreed
            assert stop.at_boundary(step), "an agreed stop is not revoked"
            return step
        if time.monotonic() > until:
            return None
    return None


def _installed() -> StopFlag:
    flag = StopFlag()
    flag.install()
    return flag


def stop_scenarios(here: Rank) -> dict[str, int | None]:
    """Return the step at which this rank stopped in each scenario."""
    group = dist.new_group(backend="gloo")
    (here.folder / "001").mkdir(exist_ok=True)
    (here.folder / "002").mkdir(exist_ok=True)
    no_request, attempt = Attempt(here.folder / "001"), Attempt(here.folder / "002")
    stopped: dict[str, int | None] = {}

    def scenario(name: str, flag: StopFlag, attempt: Attempt, act: Callable[[int], None]) -> None:
        dist.barrier()  # scenarios begin together; the ranks have different step times
        stop = StopAgreement(group, flag, RequestReader(attempt) if here.rank == 0 else None)
        stopped[name] = train_until_stopped(stop, act, pace=1 + here.rank)
        stop.close()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        for target in range(here.world_size):

            def send(step: int, number: int = number, target: int = target) -> None:
                if step == REQUEST_AT and here.rank == target:
                    os.kill(os.getpid(), number)

            scenario(f"{signal.Signals(number).name} to rank {target}", _installed(), no_request, send)

    def write_request(step: int) -> None:
        if step == REQUEST_AT and here.rank == 1:  # rank 0 reads the request
            attempt.request.write_text("{}")

    scenario("request", _installed(), attempt, write_request)

    early = _installed()
    if here.rank == here.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    scenario("flag set before the first step", early, no_request, lambda _: None)
    return stopped


def test_all_ranks_stop_at_the_same_step() -> None:
    by_rank = spawn_ranks(stop_scenarios, 3)
    assert len(by_rank[0]) == 8
    for name, step in by_rank[0].items():
        assert step is not None, f"{name}: no agreement"
        assert [other[name] for other in by_rank] == [step] * 3, name
    first = by_rank[0].pop("flag set before the first step")
    assert first == 2, "the first exchange"
    assert all(step > REQUEST_AT for step in by_rank[0].values())


def peer_dies(here: Rank) -> tuple[str, bool]:
    """Return the error of a surviving rank, and whether it would have saved."""
    group = dist.new_group(backend="gloo")
    flag = _installed()

    def act(step: int) -> None:
        if step == REQUEST_AT:
            # As with `srun --kill-on-bad-exit`: one rank has died, and the others get SIGTERM.
            os.kill(os.getpid(), signal.SIGKILL if here.rank == 2 else signal.SIGTERM)

    stop = StopAgreement(group, flag, None)
    saved = False
    try:
        train_until_stopped(stop, act)
        saved = True
    except RuntimeError as error:
        assert not stop.agreed
        return str(error), saved
    return "", saved


def test_no_rank_saves_after_the_death_of_a_peer() -> None:
    *survivors, dead = spawn_ranks(peer_dies, 3, killed=[2])
    assert dead is None
    for message, saved in survivors:
        assert not saved
        assert "Connection" in message or "closed" in message


def test_single_rank_stops_without_communication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    (folder := tmp_path / "001").mkdir()
    flag, attempt = StopFlag(), Attempt(folder)

    def boundaries(stop: StopAgreement, num: int) -> list[bool]:
        answers = []
        for _ in range(num):
            clock[0] += REQUEST_INTERVAL_S  # a slow step, so that each boundary checks the request
            answers.append(stop.at_boundary(1))
        return answers

    stop = StopAgreement(None, flag, RequestReader(attempt))
    assert boundaries(stop, 3) == [False] * 3
    attempt.request.write_text("{}")
    assert boundaries(stop, 2) == [True] * 2
    attempt.request.unlink()
    stop = StopAgreement(None, flag, RequestReader(attempt))
    assert boundaries(stop, 2) == [False] * 2
    flag.is_set = True
    assert boundaries(stop, 2) == [True] * 2
    stop.close()


def test_request_is_checked_at_most_once_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    checks: list[float] = []
    monkeypatch.setattr(Path, "exists", lambda self: checks.append(clock[0]))
    stop = StopAgreement(None, StopFlag(), RequestReader(Attempt(tmp_path / "001")))
    for _ in range(10_000):
        clock[0] += 0.001
        stop.at_boundary(1)
    times = sorted(set(checks))
    assert 9 <= len(times) <= 10
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert min(gaps) >= REQUEST_INTERVAL_S - 1e-9
