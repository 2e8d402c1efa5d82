"""RPC between real ranks: names, commands, remote errors, stop requests, and the death of a rank."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import RPC_TIMED_OUT, new_run, open_context
from spawn import Rank, spawn_ranks
from torch.distributed import rpc

from hpcdist.config.schema import Config
from hpcdist.errors import PeerLost, RemoteError
from hpcdist.rank.context import Context
from hpcdist.rank.network.rpc import remote, rpc_group
from hpcdist.run.folder import RunDir

NAMES = ["agent:0", "observer:0", "observer:1"]
CONFIG = Config(roles={"agent": 1, "observer": 2})


class CodeError(Exception):
    """An exception that cannot be created from a single string."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


@remote
def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


@remote
def fail(_: int) -> None:
    raise CodeError(7, "no such environment")


@remote
def fail_at(name: str) -> None:
    rpc.rpc_sync(name, fail, (0,))


def commands_and_errors(here: Rank, path: Path) -> dict[str, Any]:
    done: list[tuple[str, int]] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        open_context(here, RunDir(path), CONFIG) as ctx,
        rpc_group(ctx) as group,
    ):
        warnings.simplefilter("always")
        found: dict[str, Any] = {"name": group.name, "observers": group.of_role("observer"), "peers": group.peers}
        if not ctx.is_main:
            group.serve({"save": lambda step: done.append(("save", step)), "sum": lambda: sums(ctx, done)})
        else:
            found["doubled"] = rpc.rpc_sync("observer:1", double, (torch.ones(2),)).tolist()
            for target, function in (("observer:0", fail), ("observer:0", fail_at)):
                try:
                    rpc.rpc_sync(target, function, (0,) if function is fail else ("observer:1",))
                except RuntimeError as error:
                    found[function.__name__] = str(RemoteError.received(error))
            group.order("save", 3)
            group.order("sum")
            sums(ctx, done)
            group.order("save", 4)
            group.order("save", 5, to=["observer:1"])
    return {**found, "done": done, "warned": [str(warning.message) for warning in warned]}


def sums(ctx: Context, done: list[tuple[str, int]]) -> None:
    done.append(("sum", int(ctx.sum_over_ranks([ctx.rank])[0])))


def test_ranks_call_each_other_by_role_and_execute_commands_of_rank_0(tmp_path: Path) -> None:
    agent, first, second = spawn_ranks(commands_and_errors, 3, path=new_run(tmp_path).path)
    assert (agent["name"], first["name"], second["name"]) == tuple(NAMES)
    assert agent["observers"] == ["observer:0", "observer:1"]
    assert first["peers"] == ["agent:0", "observer:1"]
    assert agent["doubled"] == [2.0, 2.0]
    # In order, in the main thread: the sum is a collective of all three.
    assert first["done"] == [("save", 3), ("sum", 3), ("save", 4)]
    assert second["done"] == [*first["done"], ("save", 5)], "the last command was sent only to this rank"
    assert [rank["warned"] for rank in (agent, first, second)] == [[], [], []]
    # The error has the rank and the remote traceback once, also after two hops.
    assert agent["fail"].startswith("observer:0 (rank 1 on ")
    assert agent["fail_at"].startswith("observer:1 (rank 2 on ")
    for text in (agent["fail"], agent["fail_at"]):
        assert text.count("Traceback (most recent call last)") == 1
        assert text.count("raise CodeError(7") == 1
        assert "CodeError: (7, 'no such environment')" in text.splitlines()[0]


def step_until_stop(here: Rank, path: Path) -> int:
    with open_context(here, RunDir(path), CONFIG) as ctx, rpc_group(ctx) as group:
        ctx.agree_among([0])
        if not ctx.is_main:
            if ctx.rank == 2:
                ctx.request_stop()  # as the signal handler does
            group.serve({})
            return -1
        step = 0
        until = time.monotonic() + 30
        while not ctx.should_stop(step) and time.monotonic() < until:
            step += 1
        assert ctx.stop_agreed
    return step


def test_stop_request_on_any_rank_stops_rank_0(tmp_path: Path) -> None:
    steps, *others = spawn_ranks(step_until_stop, 3, path=new_run(tmp_path).path)
    assert steps > 0
    assert others == [-1, -1]


def lose_rank(here: Rank, path: Path, victim: int) -> str:
    """Return the error with which this rank leaves `rpc_group`."""
    try:
        with open_context(here, RunDir(path), CONFIG) as ctx, rpc_group(ctx) as group:
            ctx.barrier()
            if ctx.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if not ctx.is_main:
                group.serve({})
            while ctx.is_main:
                for name in group.peers:
                    rpc.rpc_sync(name, double, (torch.ones(1),))
    except (PeerLost, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_death_of_a_rank_ends_the_others_soon(tmp_path: Path, victim: int) -> None:
    outcomes = spawn_ranks(lose_rank, 3, killed=[victim], path=new_run(tmp_path).path, victim=victim)
    # Rank 0 calls the others. The others serve, and notice only the death of rank 0 or its end after an error.
    servers = [rank for rank in (1, 2) if rank != victim]
    for rank in servers:
        assert outcomes[rank].startswith("PeerLost: agent:0 (rank 0) does not answer: ")
    if victim == 1:
        assert outcomes[0].startswith("RuntimeError: ")
    assert not [text for text in outcomes if text is not None and RPC_TIMED_OUT in text], (
        "noticed by the connection's end"
    )
