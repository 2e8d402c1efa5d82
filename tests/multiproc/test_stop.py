"""Ranks agree on the boundary to stop at, whoever was asked; with a dead peer nobody agrees on anything."""

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

from hpcdist.rank.stop_agreement import REQUEST_INTERVAL_S, StopAgreement
from hpcdist.rank.stop_signals import StopFlag

ASK_AT = 6
MAX_STEPS = 200_000


def train_until_stopped(stop: StopAgreement, act: Callable[[int], None], *, pace: int = 1) -> int | None:
    """Step until the ranks agree; returns the number of steps, or None when they never did."""
    weights = torch.rand(40, 40)
    until = time.monotonic() + 30
    for step in range(1, MAX_STEPS):
        for _ in range(pace):
            weights = torch.tanh(weights @ weights)
        act(step)
        if stop.at_boundary():
            assert stop.agreed
            assert stop.at_boundary(), "a stop that was agreed on is not taken back"
            return step
        if time.monotonic() > until:
            return None
    return None


def _installed() -> StopFlag:
    flag = StopFlag()
    flag.install()
    return flag


def stop_scenarios(here: Rank) -> dict[str, int | None]:
    """The step that this rank stopped at in each scenario."""
    group = dist.new_group(backend="gloo")
    nowhere = here.folder / "nobody-asks"
    stopped: dict[str, int | None] = {}

    def scenario(name: str, flag: StopFlag, request: Path, act: Callable[[int], None]) -> None:
        dist.barrier()  # scenarios begin together; within one the ranks are of different speed
        stop = StopAgreement(group, flag, request, watch_request=here.rank == 0)
        stopped[name] = train_until_stopped(stop, act, pace=1 + here.rank)
        stop.close()

    for number in (signal.SIGTERM, signal.SIGUSR2):
        for who in range(here.world_size):

            def send(step: int, number: int = number, who: int = who) -> None:
                if step == ASK_AT and here.rank == who:
                    os.kill(os.getpid(), number)

            scenario(f"{signal.Signals(number).name} to rank {who}", _installed(), nowhere, send)

    request = here.folder / "request.json"

    def ask(step: int) -> None:
        if step == ASK_AT and here.rank == 1:  # a rank that does not look at it itself
            request.write_text("{}")

    scenario("request", _installed(), request, ask)

    early = _installed()
    if here.rank == here.world_size - 1:
        os.kill(os.getpid(), signal.SIGTERM)
    scenario("flag set before the agreement was there", early, nowhere, lambda _: None)
    return stopped


def test_all_ranks_stop_at_the_same_step_whoever_was_asked() -> None:
    by_rank = spawn_ranks(stop_scenarios, 3)
    assert len(by_rank[0]) == 8
    for name, step in by_rank[0].items():
        assert step is not None, f"{name}: never agreed"
        assert [other[name] for other in by_rank] == [step] * 3, name
    first = by_rank[0].pop("flag set before the agreement was there")
    assert first == 2, "the first round tells it"
    assert all(step > ASK_AT for step in by_rank[0].values())


def peer_dies(here: Rank) -> tuple[str, bool]:
    """What a survivor sees, and whether it would have saved."""
    group = dist.new_group(backend="gloo")
    flag = _installed()

    def act(step: int) -> None:
        if step == ASK_AT:
            # As under --kill-on-bad-exit: one has died, and the others get SIGTERM for it.
            os.kill(os.getpid(), signal.SIGKILL if here.rank == 2 else signal.SIGTERM)

    stop = StopAgreement(group, flag, here.folder / "nobody-asks", watch_request=here.rank == 0)
    saved = False
    try:
        train_until_stopped(stop, act)
        saved = True
    except RuntimeError as error:
        assert not stop.agreed
        return str(error), saved
    return "", saved


def test_nobody_saves_when_a_peer_has_died() -> None:
    *survivors, dead = spawn_ranks(peer_dies, 3, killed=[2])
    assert dead is None
    for message, saved in survivors:
        assert not saved
        assert "Connection" in message or "closed" in message


def test_a_world_of_one_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    flag, request = StopFlag(), tmp_path / "request.json"

    def boundaries(stop: StopAgreement, num: int) -> list[bool]:
        answers = []
        for _ in range(num):
            clock[0] += REQUEST_INTERVAL_S  # a slow step: every boundary looks
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


def test_the_request_is_looked_at_once_a_second_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    looks: list[float] = []
    monkeypatch.setattr(Path, "exists", lambda self: looks.append(clock[0]))
    stop = StopAgreement(None, StopFlag(), tmp_path / "request.json", watch_request=True)
    for _ in range(10_000):
        clock[0] += 0.001
        stop.at_boundary()
    assert 9 <= len(looks) <= 10
    gaps = [later - earlier for earlier, later in itertools.pairwise(looks)]
    assert min(gaps) >= REQUEST_INTERVAL_S - 1e-9
