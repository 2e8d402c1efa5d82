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
        if stop.at_boundary():
            assert stop.agreed
            assert stop.at_boundary(), "an agreed stop is not revoked"
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
    no_request = here.folder / "no-request"
    stopped: dict[str, int | None] = {}

    def scenario(name: str, flag: StopFlag, request: Path, act: Callable[[int], None]) -> None:
        dist.barrier()  # scenarios begin together; the ranks have different step times
        stop = StopAgreement(group, flag, request, watch_request=here.rank == 0)
        stopped[name] = train_until_stopped(stop, act, pace=1 + here.rank)
        stop.close()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        for target in range(here.world_size):

            def send(step: int, number: int = number, target: int = target) -> None:
                if step == REQUEST_AT and here.rank == target:
                    os.kill(os.getpid(), number)

            scenario(f"{signal.Signals(number).name} to rank {target}", _installed(), no_request, send)

    request = here.folder / "request.json"

    def write_request(step: int) -> None:
        if step == REQUEST_AT and here.rank == 1:  # rank 0 reads the request
            request.write_text("{}")

    scenario("request", _installed(), request, write_request)

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

    stop = StopAgreement(group, flag, here.folder / "no-request", watch_request=here.rank == 0)
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
    flag, request = StopFlag(), tmp_path / "request.json"

    def boundaries(stop: StopAgreement, num: int) -> list[bool]:
        answers = []
        for _ in range(num):
            clock[0] += REQUEST_INTERVAL_S  # a slow step, so that each boundary checks the request
            answers.append(stop.at_boundary())
        return answers

    stop = StopAgreement(None, flag, request, watch_request=True)
    assert boundaries(stop, 3) == [False] * 3
    request.write_text("{}")
    assert boundaries(stop, 2) == [True] * 2
    request.unlink()
    stop = StopAgreement(None, flag, request, watch_request=True)
    assert boundaries(stop, 2) == [False] * 2
    flag.is_set = True
    assert boundaries(stop, 2) == [True] * 2
    stop.close()


def test_request_is_checked_at_most_once_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    checks: list[float] = []
    monkeypatch.setattr(Path, "exists", lambda self: checks.append(clock[0]))
    stop = StopAgreement(None, StopFlag(), tmp_path / "request.json", watch_request=True)
    for _ in range(10_000):
        clock[0] += 0.001
        stop.at_boundary()
    assert 9 <= len(checks) <= 10
    gaps = [later - earlier for earlier, later in itertools.pairwise(checks)]
    assert min(gaps) >= REQUEST_INTERVAL_S - 1e-9
