"""What ranks that stand still are doing is collected from their processes, whether they can still speak or not."""

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

from hpcdist.files.atomic import read_json
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.hang import collect as collect_module
from hpcdist.supervisor.hang import node
from hpcdist.supervisor.hang.collect import collect
from hpcdist.supervisor.hang.node import py_spy
from hpcdist.supervisor.hang.processes import find_ranks, state_of
from hpcdist.supervisor.process_guard import Guard

NOT_ALLOWED = """#!/bin/sh
printf 'Error: Failed to get process executable\\n\\nCaused by:\\n    Permission denied (os error 13)\\n' >&2
exit 1
"""


def never() -> bool:
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
def test_what_ranks_tell_where_nobody_may_look_into_them(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under yama's ptrace_scope, or in a container without the right: faulthandler speaks."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "py-spy").write_text(NOT_ALLOWED)
    (tmp_path / "bin" / "py-spy").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with hung_ranks(attempt, tmp_path, 4) as ranks:
        processes = find_ranks(attempt.path.parent.parent, attempt.number)
        assert [process.rank for process in processes] == [0, 1, 2, 3], "and none of what they have forked"
        assert [len(process.children) for process in processes] == [0, 1, 0, 0]
        assert find_ranks(attempt.path.parent.parent, 2) == []
        assert find_ranks(attempt.path.parent, attempt.number) == []
        summary = collect(attempt, ranks, limit_s=20, interrupted=never)
        assert ranks.running == [0, 1, 2, 3], "nothing was killed"
    assert summary is not None
    assert summary.suspects == (1,)
    assert summary.odd_first == (1, 0, 2, 3)
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
        # The call that torch's own analyzer needs; a real one needs a GPU.
        assert (attempt.path / f"flight-rank-{rank}").read_text() == "(True, True, False)"
    left = {path.name for path in attempt.path.iterdir()}
    assert not [name for name in left if name.startswith("node-") or name == "stacks.log"], left


@pytest.mark.processes
def test_a_rank_that_is_stopped_tells_nothing_and_py_spy_does(
    attempt: Attempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if py_spy(os.environ) is None:
        pytest.skip("py-spy is not installed; `make install` brings it")
    with hung_ranks(attempt, tmp_path, 3) as ranks:
        processes = find_ranks(attempt.path.parent.parent, attempt.number)
        stop(processes[2].pid)
        summary = collect(attempt, ranks, limit_s=20, interrupted=never)
        # Nobody waits for what cannot come: this returns.
        monkeypatch.setattr(node, "PRINT_S", 10_000.0)
        looks = node.take_snapshots(processes, attempt, "n1", time.monotonic() + 10_000)
        assert [look.process.state for look in looks] == ["S", "R", "T"]
    assert summary is not None
    assert summary.suspects == (2,)
    assert summary.sentence.startswith(
        "rank 2 differs from the others: state T (stopped) at Condition.wait (threading.py:"
    )
    stopped = attempt.stacks(2).read_text()
    assert ": state T (stopped), in " in stopped
    assert "stacks by py-spy:\n\nProcess" in stopped
    assert "    train (" in stopped
    assert "wait_for_work" in attempt.stacks(1).read_text(), "the child's stack, too"
    assert not attempt.flight(2).exists()


@pytest.mark.processes
def test_without_an_answer_of_any_node_the_logs_have_the_stacks(attempt: Attempt, tmp_path: Path) -> None:
    """No Python where the supervisor has one, no more tasks in the job: as it was before there was a collector."""

    class Unwilling:
        def __init__(self, ranks: object) -> None:
            self.ranks = ranks

        def __getattr__(self, name: str) -> object:
            return getattr(self.ranks, name)

        def examine(self, command: list[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
            output.write_text("srun: error: Unable to create step\n")

    with hung_ranks(attempt, tmp_path, 2) as ranks:
        assert collect(attempt, Unwilling(ranks), limit_s=20, interrupted=never) is None  # type: ignore[arg-type]
        assert "Current thread" in attempt.log(0).read_text()
    assert (attempt.path / "stacks.log").read_text() == "srun: error: Unable to create step\n"
    assert not attempt.stacks_summary.exists()


def test_a_full_disk_keeps_nobody_from_ending_the_ranks(attempt: Attempt, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        running = (0,)

        def signal(self, number: int) -> None: ...

        def examine(self, command: list[str], **_: object) -> None:
            raise OSError(28, "No space left on device")

    assert collect(attempt, Full(), limit_s=5, interrupted=never) is None  # type: ignore[arg-type]
    assert "stack traces cannot be collected in " in caplog.text
    assert "No space left on device" in caplog.text


def test_files_for_64_ranks_are_kept_the_odd_ones_first(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as MLflow gets; the summary is of all."""

    class Gone:
        running: tuple[int, ...] = tuple(range(8))

        def host_of(self, rank: int) -> str:
            return "n9"

        def signal(self, number: int) -> None: ...

        def wait(self, timeout_s: float) -> None:
            time.sleep(timeout_s)

        def examine(self, command: list[str], *, output: Path, limit_s: float, interrupted: Callable[[], bool]) -> None:
            assert [sys.executable, "-P", "-m", "hpcdist.supervisor.hang.node", str(attempt.path)] == command[:-1]
            facts = {"state": "S", "wchan": "", "threads": 1, "cpu_s": 0.0, "half_closed": []}
            for number in range(2):
                looks = []
                for rank in range(3 * number, 3 * number + 3):
                    frames = [["wait", "/me/net.py", 9 if rank == 4 else 3]]
                    look = {"rank": rank, "host": f"n{number}", "pid": 1, "frames": frames, "text": "t"}
                    more = {"source": "py-spy", "problem": "", "calls": [], "process": facts, "cpu_s": 0, "over_s": 1}
                    looks.append({**look, **more})
                    attempt.flight(rank).write_text("{}")
                attempt.node_stacks(f"n{number}").write_text(json.dumps({"ranks": looks}))

    monkeypatch.setattr(collect_module, "MAX_RANKS", 3)
    summary = collect(attempt, Gone(), limit_s=5, interrupted=never)  # type: ignore[arg-type]
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
def test_a_node_that_does_not_answer_is_not_waited_for(ending: str, tmp_path: Path) -> None:
    guard = Guard()
    try:
        pids = tmp_path / "pids"
        # srun hears SIGTERM; this does not, and has a child.
        script = f"trap '' TERM; sleep 1000 & echo $! $$ > {pids}.partial; mv {pids}.partial {pids}; wait"
        guard.run(
            ["sh", "-c", script],
            env=os.environ,
            cwd=tmp_path,
            output=tmp_path / "output",
            limit_s=1.0 if ending == "limit" else 1000,
            interrupted=pids.exists if ending == "interrupted" else never,
        )
        for pid in map(int, pids.read_text().split()):
            end = time.monotonic() + 10
            while (facts := state_of(pid)) is not None and facts.state != "Z":
                assert time.monotonic() < end, "its whole group is gone"
                time.sleep(0.01)
    finally:
        guard.close()


def test_where_py_spy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "beside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "py-spy").write_text("")
        (tmp_path / name / "py-spy").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    assert py_spy({"PATH": str(tmp_path / "here")}) == str(tmp_path / "here" / "py-spy")
    assert py_spy({"PATH": str(tmp_path)}) == str(tmp_path / "beside" / "py-spy")
    shutil.rmtree(tmp_path / "beside")
    assert py_spy({"PATH": str(tmp_path)}) is None
