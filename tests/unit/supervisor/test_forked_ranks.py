"""Ranks that a parent process forks have what started ranks have."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from forked_scene import HELD, SOON_S, Scene, wait_for_fork
from named_pipe import NamedPipe

from hpcdist.rank import processes
from hpcdist.supervisor.hang_node import find_ranks

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


def test_exit_codes_and_signals_are_those_of_the_ranks(scene: Scene) -> None:
    """A rank that is killed does not affect the parent, which also forks the next attempt."""
    assert scene.finish("import sys; sys.exit(5)", "import os; os.kill(os.getpid(), 9)")[1] == {0: 5, 1: -9}
    (parent,) = scene.parents()
    code = "import os; assert os.getppid() == {}; os.kill(os.getpid(), {})"
    assert scene.finish(code.format(parent, "15"), code.format(parent, "10"))[1] == {0: -15, 1: -10}
    assert scene.finish("raise ValueError('of the rank')", "pass")[1] == {0: 1, 1: 0}
    assert scene.parents() == [parent]


REPORT = """
import json, os, signal, sys
print(json.dumps({
    "env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "orig_argv": sys.orig_argv[1:],
    "pid": os.getpid(), "session": os.getsid(0), "group": os.getpgid(0), "input": os.read(0, 9).decode(),
    "files": sorted(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "handlers": {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGINT", "SIGHUP")},
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
}))
print("error", file=sys.stderr)
"""


def test_forked_rank_has_what_a_started_one_has(scene: Scene) -> None:
    """Environment, folder, log, session, signals and descriptors equal those of ranks that a command starts."""
    forked_attempt, exits = scene.finish(REPORT, REPORT)
    assert exits == {0: 0, 1: 0}
    scene.launcher._fork = False
    scene.launcher._close_parent()
    started_attempt, exits = scene.finish(REPORT, REPORT)
    assert exits == {0: 0, 1: 0}
    for rank in range(2):
        reports = []
        for attempt in (forked_attempt, started_attempt):
            line, *others = attempt.log(rank).read_text().splitlines()
            assert others == ["error"]
            report = json.loads(line)
            assert report["env"].pop("HPCDIST_RANK") == str(rank)
            assert report["env"].pop("HPCDIST_ATTEMPT") == str(attempt.number)
            report["env"].pop("HPCDIST_MASTER_PORT")
            pid = report.pop("pid")
            assert (pid, pid) == (report.pop("session"), report.pop("group"))
            reports.append(report)
        assert reports[0] == reports[1]
        assert reports[0]["env"]["INHERITED"] == "as it was"


def test_ps_shows_the_rank_but_not_its_parent(scene: Scene, pipe: NamedPipe) -> None:
    code = HELD.format(pipe=str(pipe.path))
    attempt, ranks = scene.start(code, code)
    try:
        wait_for_fork(ranks, pipe)
        found = find_ranks(scene.run.path, attempt.number)
        assert [(process.rank, process.pid) for process in found] == [
            (rank, process.pid) for rank, process in enumerate(ranks._processes)
        ]
        env = psutil.Process(found[1].pid).environ()
        assert (env["HPCDIST_RANK"], env["INHERITED"]) == ("1", "as it was")
    finally:
        ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
    assert pipe.is_released(SOON_S)


def test_shown_variables_may_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are not shown, because they would overwrite other memory."""
    overwritten: list[bytes] = []
    monkeypatch.setattr(processes, "_overwrite", lambda start, end, old, new: overwritten.append(new))
    processes.show_variables({"HPCDIST_JOB_ID": "x" * processes.SPACE_BYTES})
    assert overwritten == []
    processes.show_variables({"HPCDIST_JOB_ID": "x" * 100})
    (new,) = overwritten
    assert len(new) == len(processes.SPACE) + 1 + processes.SPACE_BYTES


def test_signals_reach_forked_ranks(scene: Scene, pipe: NamedPipe) -> None:
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    try:
        wait_for_fork(ranks, pipe)
        ranks.signal(signal.SIGTERM)
        while ranks.running:
            ranks.wait(SOON_S)
        assert ranks.exits == {0: -15, 1: -15}
    finally:
        ranks.close()


def test_stop_before_the_ranks_are_forked(scene: Scene) -> None:
    """A signal ends ranks that are being started, whatever their parent is doing."""
    _, ranks = scene.start("pass", "pass")
    assert (ranks.running, ranks.absent(), ranks._processes) == ([0, 1], [], [])
    ranks.signal(signal.SIGUSR1)
    assert ranks.running == [0, 1]
    ranks.signal(signal.SIGTERM)
    assert (ranks.running, ranks.exits) == ([], {0: -15, 1: -15})
    ranks.close()
    _, ranks = scene.start("pass", "pass")
    ranks.close()
    assert ranks.exits == {0: -9, 1: -9}


def test_parent_imports_for_a_restart_what_the_first_ranks_have_imported(scene: Scene, tmp_path: Path) -> None:
    module = "hpcdist.rank.step_timing"
    (tmp_path / "code" / "hpcdist" / "rank" / "step_timing.py").touch()
    code = f"import sys; sys.exit({module!r} in sys.modules)"
    assert scene.finish(code, code)[1] == {0: 0, 1: 0}
    assert scene.finish(code, code)[1] == {0: 1, 1: 1}
