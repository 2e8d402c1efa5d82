"""Communication benchmarks on real ranks: three, so that sizes do not divide."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_scene import new_run, open_context
from spawn import Rank, spawn_ranks

from hpcdist.bench import overlap
from hpcdist.bench.comm_config import CommConfig
from hpcdist.bench.correctness import OperationVariant, check
from hpcdist.bench.data_movement import AllToAll, Barrier, Broadcast
from hpcdist.bench.groups import WORLD, ControlGroup, Team, make_teams
from hpcdist.bench.measurement import Stopwatch, caller, measure
from hpcdist.bench.measurement_plan import points
from hpcdist.bench.operation import Works
from hpcdist.bench.operations import OPERATIONS, AllReduce
from hpcdist.bench.patterns import REDUCTIONS
from hpcdist.bench.results import CheckResult, read_results
from hpcdist.bench.ring import Ring
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.errors import CommError
from hpcdist.rank.stop_signals import StopFlag
from hpcdist.run.folder import RunDir
from hpcdist.trainers.comm import train

TIMEOUT = timedelta(seconds=60)
NODES = ["n1", "n1", "n2"]
#: Of dtypes: with and without a sign, short and long, whole or not.
ALL_KINDS = ("uint8", "int64", "bfloat16", "float32")


def teams() -> dict[str, Team]:
    return make_teams(NODES, "gloo", torch.device("cpu"), TIMEOUT, with_groups=True)


# --- operations that are wrong


class LastOneLate(AllReduce):
    """Leaves out one element of the last rank's."""

    def run(self) -> None:
        if self.team.index == self.team.size - 1 and self.count > 5:
            self.data[5] = 0
        super().run()

    def call(self, *, async_op: bool) -> Works:
        if self.team.index == self.team.size - 1 and self.count > 5:
            self.data[5] = 0
        return super().call(async_op=async_op)


class Swapped(AllToAll):
    """Two parts arrive in each other's place at rank 1."""

    def call(self, *, async_op: bool) -> Works:
        works = super().call(async_op=False)
        if self.team.index == 1 and self.team.size == 3:
            parts = self.output.view(3, -1)
            parts[[0, 1]] = parts[[1, 0]].clone()
        return works


class Idle(Broadcast):
    """Does nothing."""

    def call(self, *, async_op: bool) -> Works:
        return []


class OpenDoor(Barrier):
    """Lets everyone through."""

    def call(self, *, async_op: bool) -> Works:
        return []


class Missing(Broadcast):
    """The backend cannot."""

    def call(self, *, async_op: bool) -> Works:
        raise RuntimeError("Backend gloo does not support teleport\nat somewhere")


def scene(here: Rank) -> dict[str, Any]:
    """What comes of all operations, and of those that are wrong; of our ring; of measuring."""
    words, store = ControlGroup(TIMEOUT), dist.distributed_c10d._get_default_store()
    made = teams()

    def found(variant: OperationVariant, team: str, dtype: str) -> CheckResult:
        return check(variant, made[team], dtype, words, store, node=NODES[here.rank])

    right = [
        found(OperationVariant(kind=kind, reduction=one), team, dtype)
        for team in made
        for kind in OPERATIONS.values()
        for one in (REDUCTIONS if kind.reduces else (None,))
        for dtype in (ALL_KINDS if team == WORLD and kind is not Barrier else ("float32",))
    ]
    wrong = [
        found(OperationVariant(kind=kind), WORLD, dtype)
        for kind, dtype in ((LastOneLate, "bfloat16"), (Swapped, "uint8"), (Idle, "int32"), (OpenDoor, "uint8"))
    ]
    missing = found(OperationVariant(kind=Missing), WORLD, "uint8")
    mine = {"ring": rings(here, made[WORLD]), "timed": timed(here, made[WORLD], words)}
    return {"checked": {"right": right, "wrong": wrong, "missing": missing}} | mine


def rings(here: Rank, world: Team) -> dict[str, Any]:
    """Our ring's results: of floats that round, by rank; and of whole numbers in every length and cut."""
    generator = torch.Generator().manual_seed(here.rank)
    floats = torch.randn(10_007, generator=generator)
    exact = floats.double()
    dist.all_reduce(exact)
    Ring(world, floats, "sum", piece_bytes=600).run()
    wrong = []
    for count in (1, 2, 3, 4, 31, 1000):
        for piece_bytes in (1, 8, 40, 1 << 20):
            data = torch.arange(count) * (here.rank + 1)
            ring = Ring(world, data, "sum", piece_bytes)
            ring.run()
            ring.run()  # again, with the same buffers
            if not torch.equal(data, torch.arange(count) * 18):
                wrong.append((count, piece_bytes))
    return {"bytes": floats.numpy().tobytes(), "off": float((floats - exact).abs().max()), "wrong": wrong}


def timed(here: Rank, world: Team, control: ControlGroup) -> list[Any]:
    """Timings, and the slowest rank's of two numbers."""
    operations = [AllReduce(world, 100, torch.float32) for _ in range(3)]
    together = measure(caller(operations), Stopwatch(world), control, budget_s=0.005, longest_s=1.0, divided_by=3)
    one_way = measure(
        caller([Broadcast(world, 100, torch.uint8)]),
        Stopwatch(world),
        control,
        budget_s=0.005,
        longest_s=1.0,
        after_barrier=True,
    )
    mine = [0.1 * here.rank, 0.2 - 0.1 * here.rank]
    return [together, one_way, control.max(mine)]


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return spawn_ranks(scene, 3)


def test_operations_are_right_and_wrong_ones_are_named(by_rank: list[dict[str, Any]]) -> None:
    checked = by_rank[0]["checked"]
    assert by_rank[1]["checked"] == by_rank[2]["checked"] == checked, "all ranks know the same"
    right, wrong, missing = checked["right"], checked["wrong"], checked["missing"]
    assert [one for one in right if one.ok is not True] == []
    assert {one.group for one in right} == {"world", "within nodes", "across nodes", "halves"}
    assert len({one.operation for one in right}) == 24
    late, swapped, idle, door = (one.error for one in wrong)
    assert "rank 0 on n1: all_reduce[sum] of 7 x bfloat16 is wrong: at index 5 expected" in late
    assert "(1 of 7 differ); 2 more of 3 ranks have wrong results" in late
    assert swapped.startswith(
        "rank 1 on n1: all_to_all of 3 x uint8 is wrong: at index 0 expected 37, got 35 (2 of 3 differ)"
    )
    assert idle == (
        "rank 0 on n1: broadcast of 1 x int32 (root is rank 2) is wrong: at index 0 expected 74, got 119"
        " (1 of 1 differ); 2 more of 3 ranks have wrong results"
    )
    assert "a rank left the barrier of 3 ranks when" in door
    assert [one.ok for one in wrong] == [False] * 4
    assert (missing.ok, missing.error) == (
        None,
        "gloo does not support broadcast of uint8: Backend gloo does not support teleport at somewhere",
    )


def test_our_ring_is_exact_and_equal_on_all_ranks(by_rank: list[dict[str, Any]]) -> None:
    rings_by_rank = [one["ring"] for one in by_rank]
    assert [one["wrong"] for one in rings_by_rank] == [[], [], []]
    assert len({one["bytes"] for one in rings_by_rank}) == 1, "bit by bit"
    assert rings_by_rank[0]["off"] < 1e-5


def test_times_are_the_slowest_ranks(by_rank: list[dict[str, Any]]) -> None:
    together, one_way, largest = by_rank[0]["timed"]
    assert by_rank[0]["timed"] == by_rank[1]["timed"] == by_rank[2]["timed"]
    assert largest == [0.2, 0.2]
    for timing in (together, one_way):
        assert 3 <= timing.iterations <= 1000
        assert 0 < timing.min_s <= timing.median_s <= timing.p99_s


# --- the trainer

CONFIG = Config(
    trainer=TrainerConfig(target="comm"),
    sections={
        "comm": CommConfig(
            operations=[
                "all_reduce",
                "ring_all_reduce",
                "all_gather",
                "send_recv",
                "barrier",
                "async",
                "groups",
                "pairs",
                "overlap",
                "rpc",
            ],
            max_bytes="4K",
            budget_s=0.0,
        )
    },
)


def whole_run(here: Rank, path: Path, stop_after: int | None = None) -> tuple[int, str]:
    """Steps done, and the sentence at the end."""
    flag = StopFlag()
    overlap.SIZES = (4096,)
    with open_context(here, RunDir(path), CONFIG, flag) as ctx:
        do, count = train.Bench.do, 0

        def counted(bench: train.Bench, point: Any) -> None:
            nonlocal count
            do(bench, point)
            count += 1
            if count == stop_after:
                flag.is_set = True

        train.Bench.do = counted  # type: ignore[method-assign]
        train.train(ctx, CONFIG)
        ctx.close()
    return count, ctx.end_reason


def wrong_run(here: Rank, path: Path) -> str:
    """What the run ends with when an operation is wrong."""
    OPERATIONS["all_reduce"] = LastOneLate
    config = replace(CONFIG, sections={"comm": replace(CONFIG.section(CommConfig), operations=["all_reduce"])})
    with open_context(here, RunDir(path), config) as ctx, pytest.raises(CommError) as caught:
        train.train(ctx, config)
    return str(caught.value)


def test_a_stopped_benchmark_goes_on_with_its_next_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "SIZES", (4096,))
    run = new_run(tmp_path)
    first = spawn_ranks(whole_run, 3, path=run.path, stop_after=40)
    assert len({count for count, _ in first}) == 1
    stopped_at = first[0][0]
    assert 40 <= stopped_at < 60
    before = read_results(run.artifacts)
    assert not before.complete
    second = spawn_ranks(whole_run, 3, path=run.path)
    results = read_results(run.artifacts)
    places = results.ranks
    total = len(points(CONFIG.section(CommConfig), [place.node for place in places]))
    assert [count for count, _ in second] == [total - stopped_at] * 3
    assert results.complete
    assert results.checked[: len(before.checked)] == before.checked
    assert results.rows[: len(before.rows)] == before.rows

    assert [place.rank for place in places] == [0, 1, 2]
    assert {(row.operation, row.mode, row.group) for row in results.rows} >= {
        ("all_reduce", "blocking", "world"),
        ("all_reduce", "async", "world"),
        ("all_reduce", "blocking", "halves"),
        ("ring_all_reduce", "blocking", "world"),
        ("barrier", "blocking", "world"),
    }
    ours = [row for row in results.rows if row.operation == "ring_all_reduce" and row.variant == "sum"]
    assert [row.bytes for row in ours] == [1 << power for power in range(2, 13)]
    parts = [row for row in results.rows if (row.operation, row.mode, row.group) == ("all_gather", "blocking", "world")]
    assert [(row.size, row.bytes) for row in parts[:5]] == [(1, 3), (4, 6), (8, 9), (16, 18), (32, 33)]
    assert all(row.busbw == pytest.approx(row.bytes / row.median_s * 2 / 3) for row in parts)
    assert sorted((pair.source, pair.target) for pair in results.pairs) == [
        (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)
    ]  # fmt: skip
    assert {(one.operation, one.bytes) for one in results.overlap} == {("all_reduce", 4096), ("all_gather", 4098)}
    assert [(one.target.partition("/")[2], one.bytes) for one in results.rpc] == [
        (rank, size) for rank in "12" for size in (4, 4096)
    ]
    assert "all_reduce of 4096 B" in second[0][1]


def test_a_wrong_result_ends_the_run_on_every_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    said = spawn_ranks(wrong_run, 3, path=run.path)
    assert len(set(said)) == 1
    assert "all_reduce[sum] of 7 x uint8 is wrong: at index 5" in said[0]
    results = read_results(run.artifacts)
    assert [one.ok for one in results.checked] == [False]
    assert results.checked[0].error == said[0]
