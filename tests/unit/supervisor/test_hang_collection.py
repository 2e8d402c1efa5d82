"""Stack traces of hung ranks, collected from their processes by py-spy or from their logs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hung_ranks import hung_ranks

from hpcdist.host.files import read_json
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.supervisor import hang as collect_module
from hpcdist.supervisor import hang_node
from hpcdist.supervisor.hang import busy_ranks, collect, read_activities
from hpcdist.supervisor.hang_node import find_ranks, py_spy, state_of
from hpcdist.supervisor.launcher import Guard

NOT_ALLOWED = """#!/bin/sh
printf 'Error: Failed to get process executable\\n\\nCaused by:\\n    Permission denied (os error 13)\\n' >&2
exit 1
"""


def not_interrupted() -> bool:
    return False


@pytest.fixture
def attempt(runs_dir: Path) -> Attempt:
    return RunDir.create(runs_dir / "exp" / "run").new_attempt()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 10
    while (facts := state_of(pid)) is None or facts.state != "T":
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.processes
def test_faulthandler_stacks_are_used_if_py_spy_is_not_permitted(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with yama's ptrace_scope, or in a container without the capability."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py-spy").write_text(NOT_ALLOWED)
    (tmp_path / "bin" / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with hung_ranks(attempt, tmp_path, 4) as ranks:
        processes = find_ranks(attempt.path.parent.parent, attempt.number)
        assert [process.rank for process in processes] == [0, 1, 2, 3], "ranks without their forked children"
        assert [len(process.children) for process in processes] == [0, 1, 0, 0]
        assert find_ranks(attempt.path.parent.parent, 2) == []
        assert find_ranks(attempt.path.parent, attempt.number) == []
        summary = collect(attempt, ranks, limit_s=20, interrupted=not_interrupted)
        assert ranks.running == [0, 1, 2, 3], "no rank was killed"
    assert summary is not None
    assert summary.suspects == (1,)
    assert summary.odd_first == (1, 0, 2, 3)
    assert summary.pending_s[0] > 3600, "since the call that the record shows"
    assert summary.pending_s[1] == 0
    assert summary.sentence.startswith("rank 1 differs from the others: in compute (worker.py:")
    assert "; ranks 0, 2-3 in wait (threading.py:" in summary.sentence
    assert summary.sentence.endswith(
        "rank 1 has not called gloo all_reduce [2] (number 7 of the default group), which ranks 0, 2-3 wait in"
    )
    assert attempt.stacks_summary.read_text() == summary.text
    assert "connections closed by the other side" in summary.text
    busy = attempt.stacks(1).read_text()
    assert busy.startswith(f"rank 1 on {os.uname().nodename}, process {processes[1].pid}: state R (running)")
    assert "py-spy could not read the process: Permission denied (os error 13)" in busy
    assert "stacks by faulthandler:\n\nThread 0x" in busy
    assert "in _write_at_signals" in busy, "stacks of all threads"
    assert float(busy.split(" s of CPU in ")[0].rpartition(" ")[2]) > 0
    for rank in range(4):
        record = read_json(attempt.flight(rank)) or {}
        assert set(record["recorders"]) == {"gloo", "nccl"}
        # Arguments that torch's trace analyzer needs; a real dump would need a GPU.
        assert (attempt.path / f"flight-rank-{rank}").read_text() == "(True, True, False)"
    left = {path.name for path in attempt.path.iterdir()}
    assert not [name for name in left if name.startswith("node-") or name == "stacks.log"], left


@pytest.mark.processes
def test_activity_shows_the_rank_that_computes_without_a_signal(attempt: Attempt, tmp_path: Path) -> None:
    with hung_ranks(attempt, tmp_path, 2) as ranks:
        before = after = read_activities(attempt, ranks, limit_s=60, interrupted=not_interrupted)
        assert set(before) == {0, 1}
        end = time.monotonic() + 60
        while after[1].cpu_s < before[1].cpu_s + 0.5 and time.monotonic() < end:
            after = read_activities(attempt, ranks, limit_s=60, interrupted=not_interrupted)
        since = {rank: one._replace(time=after[rank].time - 1.0) for rank, one in before.items()}
        assert busy_ranks(since, after) == {1}
        assert busy_ranks({}, after) == set(), "unknown"
        assert busy_ranks({}, {0: after[0]._replace(on_gpu=True)}) == {0}
    assert "Current thread" not in attempt.log(0).read_text()
    assert not list(attempt.path.glob("activity*"))


def test_activity_is_unknown_without_an_answer(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    class Silent:
        def examine(self, command: list[str], **_: object) -> None: ...

    assert read_activities(attempt, Silent(), limit_s=5, interrupted=not_interrupted) == {}  # type: ignore[arg-type]
    assert "the CPU time of the ranks is unknown: " in caplog.text


@pytest.mark.processes
def test_py_spy_reads_the_stack_of_a_stopped_rank(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if py_spy(os.environ) is None:
        pytest.skip("py-spy is not installed; `make install` brings it")
    with hung_ranks(attempt, tmp_path, 3) as ranks:
        processes = find_ranks(attempt.path.parent.parent, attempt.number)
        stop(processes[2].pid)
        summary = collect(attempt, ranks, limit_s=20, interrupted=not_interrupted)
        # A stopped rank cannot print its stacks, so this must return without a wait for them.
        monkeypatch.setattr(hang_node, "PRINT_S", 10_000.0)
        snapshots = hang_node.take_snapshots(processes, attempt, "n1", time.monotonic() + 10_000)
        assert [snapshot.process.state for snapshot in snapshots] == ["S", "R", "T"]
    assert summary is not None
    assert summary.suspects == (2,)
    assert summary.sentence.startswith(
        "rank 2 differs from the others: state T (stopped) at Condition.wait (threading.py:"
    )
    stopped = attempt.stacks(2).read_text()
    assert ": state T (stopped), in " in stopped
    assert "stacks by py-spy:\n\nProcess" in stopped
    assert "    train (" in stopped
    assert "wait_for_work" in attempt.stacks(1).read_text(), "stack of the child process"
    assert not attempt.flight(2).exists()


@pytest.mark.processes
def test_stacks_are_in_the_logs_if_the_command_fails_on_all_nodes(attempt: Attempt, tmp_path: Path) -> None:
    class FailingExamine:
        def __init__(self, ranks: object) -> None:
            self.ranks = ranks

        def __getattr__(self, name: str) -> object:
            return getattr(self.ranks, name)

        def examine(self, command: list[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
            output.write_text("srun: error: Unable to create step\n")

    with hung_ranks(attempt, tmp_path, 2) as ranks:
        assert collect(attempt, FailingExamine(ranks), limit_s=20, interrupted=not_interrupted) is None  # type: ignore[arg-type]
        assert "Current thread" in attempt.log(0).read_text()
    assert (attempt.path / "stacks.log").read_text() == "srun: error: Unable to create step\n"
    assert not attempt.stacks_summary.exists()


def test_full_disk_during_the_collection_is_logged(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk:
        running = (0,)

        def signal(self, number: int) -> None: ...

        def examine(self, command: list[str], **_: object) -> None:
            raise OSError(28, "No space left on device")

    assert collect(attempt, FullDisk(), limit_s=5, interrupted=not_interrupted) is None  # type: ignore[arg-type]
    assert "stack traces cannot be collected in " in caplog.text
    assert "No space left on device" in caplog.text


def test_files_of_at_most_max_ranks_are_kept_suspects_first(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary covers all ranks."""

    class RanksOnTwoNodes:
        running: tuple[int, ...] = tuple(range(8))

        def host_of(self, rank: int) -> str:
            return "n9"

        def signal(self, number: int) -> None: ...

        def wait(self, timeout_s: float) -> None:
            time.sleep(timeout_s)

        def examine(self, command: list[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
            assert [sys.executable, "-P", "-m", "hpcdist.supervisor.hang_node", str(attempt.path)] == command[:-1]
            facts = {"state": "S", "wchan": "", "threads": 1, "cpu_s": 0.0, "half_closed": []}
            for number in range(2):
                snapshots = []
                for rank in range(3 * number, 3 * number + 3):
                    frames = [["wait", "/me/net.py", 9 if rank == 4 else 3]]
                    snapshot = {"rank": rank, "host": f"n{number}", "pid": 1, "frames": frames, "text": "t"}
                    more = {"source": "py-spy", "problem": "", "calls": [], "process": facts, "cpu_s": 0, "over_s": 1}
                    snapshots.append({**snapshot, **more})
                    attempt.flight(rank).write_text("{}")
                attempt.node_stacks(f"n{number}").write_text(json.dumps({"ranks": snapshots}))

    monkeypatch.setattr(collect_module, "MAX_RANKS", 3)
    summary = collect(attempt, RanksOnTwoNodes(), limit_s=5, interrupted=not_interrupted)  # type: ignore[arg-type]
    assert summary is not None
    assert (summary.suspects, summary.odd_first) == ((4,), (4, 0, 1, 2, 3, 5))
    assert "no snapshot of ranks 6-7 (n9)" in summary.sentence
    assert sorted(path.name for path in attempt.path.glob("*stacks*")) == [
        "rank-00000.stacks.txt",
        "rank-00001.stacks.txt",
        "rank-00004.stacks.txt",
        "stacks.txt",
    ]
    assert [rank for rank in range(6) if attempt.flight(rank).exists()] == [0, 1, 4]


@pytest.mark.processes
@pytest.mark.parametrize("ending", ["limit", "interrupted"])
def test_command_on_a_node_is_killed_with_its_children(ending: str, tmp_path: Path) -> None:
    guard = Guard()
    try:
        pids = tmp_path / "pids"
        # Ignores SIGTERM, and has a child.
        script = f"trap '' TERM; sleep 1000 & echo $! $$ > {pids}.partial; mv {pids}.partial {pids}; wait"
        guard.run(
            ["sh", "-c", script],
            env=os.environ,
            cwd=tmp_path,
            output=tmp_path / "output",
            limit_s=1.0 if ending == "limit" else 1000,
            interrupted=pids.exists if ending == "interrupted" else not_interrupted,
        )
        for pid in map(int, pids.read_text().split()):
            end = time.monotonic() + 10
            while (facts := state_of(pid)) is not None and facts.state != "Z":
                assert time.monotonic() < end, f"process {pid} is alive"
                time.sleep(0.01)
    finally:
        guard.close()


def test_py_spy_is_found_in_path_or_beside_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("path", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py-spy").write_text("")
        (tmp_path / name / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert py_spy({"PATH": str(tmp_path / "path")}) == str(tmp_path / "path" / "py-spy")
    assert py_spy({"PATH": str(tmp_path)}) == str(tmp_path / "beside" / "py-spy")
    shutil.rmtree(tmp_path / "beside")
    assert py_spy({"PATH": str(tmp_path)}) is None
