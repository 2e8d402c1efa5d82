"""The communication benchmark on three real ranks, so that sizes do not divide evenly."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from context_scene import new_run, open_context
from hpcdist_runs import Runs
from spawn import Rank, spawn_ranks

from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.errors import CommError
from hpcdist.rank.collective_check import Stopwatch, measure
from hpcdist.rank.context import close
from hpcdist.rank.process_group import Groups
from hpcdist.rank.processes import StopFlag
from hpcdist.run.folder import RunDir
from hpcdist.trainers.comm import CommConfig, operations, train
from hpcdist.trainers.comm.operations import CALLS, OPERATIONS, Operation, check
from hpcdist.trainers.comm.results import CheckResult, read_results

CPU = torch.device("cpu")
NODES = ["n1", "n1", "n2"]
#: Signed and unsigned, short and long, integers and floating-point numbers.
DTYPES = ("uint8", "int64", "bfloat16", "float32")


CONFIG = Config(
    trainer=TrainerConfig(target="comm"),
    sections={"comm": CommConfig(operations=["all_reduce", "all_gather", "send_recv", "barrier"], max_bytes="4K")},
)


# --- faulty operations


def wrong_all_reduce(op: Operation) -> None:
    """Omits one element of the last rank."""
    if op.rank == op.size - 1 and op.count > 5:
        op.source[5] = 0
    dist.all_reduce(op.source)


def swapping_all_to_all(op: Operation) -> None:
    """Exchanges two parts at rank 1."""
    dist.all_to_all_single(op.result, op.source)
    if op.rank == 1:
        parts = op.result.view(3, -1)
        parts[[0, 1]] = parts[[1, 0]].clone()


def idle(_op: Operation) -> None:
    """Sends nothing, or does not wait for the other ranks."""


def unsupported(_op: Operation) -> None:
    """Fails as a backend without the operation does."""
    raise RuntimeError("Backend gloo does not support teleport\nat somewhere")


def check_and_measure(here: Rank, path: Path) -> dict[str, Any]:
    """Return the results of checks of all operations and of faulty ones, a timing, and the error of a benchmark."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    groups = Groups(control, dist.distributed_c10d._get_default_store())

    def check_operation(name: str, dtype: str) -> CheckResult:
        return check(OPERATIONS[name], dtype, CPU, groups, node=NODES[here.rank])

    def check_faulty(name: str, call: Callable[[Operation], None], dtype: str) -> CheckResult:
        # The late rank of a barrier leaves a busy machine time to run the others.
        with mock.patch.dict(CALLS, {name: call}), mock.patch.object(operations, "_BARRIER_DELAY_S", 1.0):
            return check_operation(name, dtype)

    correct = [
        check_operation(name, dtype) for name in OPERATIONS for dtype in (DTYPES if name != "barrier" else ("float32",))
    ]
    wrong = [
        check_faulty("all_reduce", wrong_all_reduce, "bfloat16"),
        check_faulty("all_to_all", swapping_all_to_all, "uint8"),
        check_faulty("broadcast", idle, "int32"),
        check_faulty("barrier", idle, "uint8"),
    ]
    return {
        "correct": correct,
        "wrong": wrong,
        "unsupported": check_faulty("broadcast", unsupported, "uint8"),
        "timing": measure(
            Operation(OPERATIONS["all_reduce"], 100, torch.float32, CPU).run,
            Stopwatch(CPU, "gloo"),
            groups,
            budget_s=0.005,
            longest_s=1.0,
            divided_by=3,
        ),
        "run": run_with_wrong_all_reduce(here, path),
    }


def run_with_wrong_all_reduce(here: Rank, path: Path) -> str:
    """Return the error message of a benchmark with a wrong all-reduce."""
    CALLS["all_reduce"] = wrong_all_reduce
    config = replace(CONFIG, sections={"comm": replace(CONFIG.section(CommConfig), operations=["all_reduce"])})
    with open_context(here, RunDir(path), config) as ctx, pytest.raises(CommError) as caught:
        train.train(ctx, config)
    return str(caught.value)


def test_each_collective_is_checked_and_errors_name_the_rank(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    by_rank = spawn_ranks(check_and_measure, 3, path=run.path)
    for key in ("correct", "wrong", "unsupported", "timing", "run"):
        assert by_rank[0][key] == by_rank[1][key] == by_rank[2][key], "all ranks have the same results"
    found = by_rank[0]
    assert [result for result in found["correct"] if result.ok is not True] == []
    assert {result.operation for result in found["correct"]} == set(OPERATIONS)
    assert [result.ok for result in found["wrong"]] == [False] * 4
    wrong, swapped, idle, barrier = (result.error for result in found["wrong"])
    assert "rank 0 on n1: all_reduce of 7 x bfloat16 is wrong: at index 5 expected" in wrong
    assert "(1 of 7 differ); 2 more of 3 ranks have wrong results" in wrong
    assert swapped.startswith(
        "rank 1 on n1: all_to_all of 3 x uint8 is wrong: at index 0 expected 37, got 35 (2 of 3 differ)"
    )
    assert "broadcast of 1 x int32 (root is rank 2) is wrong: at index 0 expected 74, got 119" in idle
    assert "a rank left the barrier of 3 ranks when" in barrier
    assert (found["unsupported"].ok, found["unsupported"].error) == (
        None,
        "gloo does not support broadcast of uint8: Backend gloo does not support teleport at somewhere",
    )
    assert 3 <= found["timing"].iterations <= 1000
    assert 0 < found["timing"].min_s <= found["timing"].median_s <= found["timing"].p99_s
    # A wrong result ends a benchmark.
    assert "all_reduce of 7 x uint8 is wrong: at index 5" in found["run"]
    results = read_results(run.artifacts)
    assert [(result.ok, result.error) for result in results.checked] == [(False, found["run"])]


# --- the trainer


def run_benchmark(here: Rank, path: Path, stop_after: int | None = None) -> str:
    """Run to the end, or to a stop signal after `stop_after` checks and measurements; return the reason of the end."""
    flag = StopFlag()
    with open_context(here, RunDir(path), CONFIG, flag) as ctx:
        should_stop = ctx.should_stop

        def counted(step: int) -> bool:
            flag.is_raised = flag.is_raised or step == stop_after
            return should_stop(step)

        ctx.should_stop = counted  # type: ignore[assignment,method-assign]
        train.train(ctx, CONFIG)
        close(ctx)
    return ctx.end_reason


@pytest.mark.faults
def test_stopped_benchmark_keeps_its_results_and_starts_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    spawn_ranks(run_benchmark, 3, path=run.path, stop_after=1)
    before = read_results(run.artifacts)
    assert not before.complete
    assert before.checked
    second = spawn_ranks(run_benchmark, 3, path=run.path)
    results = read_results(run.artifacts)
    assert results.complete
    keys = [(one.operation, one.dtype) for one in results.checked]
    assert len(keys) == len(set(keys)) > len(before.checked)
    assert [place.rank for place in results.ranks] == [0, 1, 2]
    measured = {row.operation for row in results.rows}
    assert measured == {key[0] for key in keys} == {"all_reduce", "all_gather", "send_recv", "barrier"}
    sums = [row for row in results.rows if row.operation == "all_reduce"]
    assert [row.bytes for row in sums] == [1 << power for power in range(2, 13)]
    parts = [row for row in results.rows if row.operation == "all_gather"]
    assert [(row.size, row.bytes) for row in parts[:5]] == [(1, 3), (4, 6), (8, 9), (16, 18), (32, 33)]
    assert all(row.busbw == pytest.approx(row.bytes / row.median_s * 2 / 3) for row in parts)
    assert "all_reduce of 4096 B" in second[0]


# --- `hpcdist bench comm` on this machine writes a report and measurements.


def test_local_benchmark_writes_report_and_measurements(runs: Runs, benchmark: tuple[str, str]) -> None:
    name, output = benchmark
    artifacts = runs.run_dir(name).artifacts
    results = read_results(artifacts)
    assert results.complete
    assert {row.operation for row in results.rows} == {"send_recv", "all_reduce"}
    assert all(check.ok for check in results.checked)
    report = (artifacts / "comm" / "report.txt").read_text()
    assert "2 ranks on 1 node (" in report
    assert "\nbandwidth: algorithm / bus" in report
    printed = [line.rstrip() for line in output.splitlines()]
    assert [line for line in report.splitlines() if line not in printed] == [], "the same report is printed and written"
    assert runs.mlflow_status(name) == "FINISHED"
    assert runs.param(name, "trainer.target") == "comm", "identifies benchmarks in MLflow"
