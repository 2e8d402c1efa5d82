"""Ranks that a parent process forks. Replacements of torch and of the worker make the imports short.

The worker executes the file of its rank and attempt. Named pipes show which processes are alive.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from named_pipe import NamedPipe

import hpcdist
from hpcdist.config.schema import Config, LaunchConfig, TrainerConfig
from hpcdist.config.written import to_yaml
from hpcdist.machine import process_record
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.hang.processes import find_ranks
from hpcdist.supervisor.local_launcher import LocalLauncher, LocalRanks
from hpcdist.supervisor.plan import PARENT_MODULE, Plan

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SOON_S = 20.0
SHADOW = "from pathlib import Path\n__path__ = [str(Path(__file__).parent), {real!r}]\n__version__ = '0'\n"
TORCH = "from types import SimpleNamespace\ncuda = SimpleNamespace(_is_in_bad_fork=lambda: False)\n"
WORKER = """
import os, sys
def main():
    place = f"{os.environ['HPCDIST_ATTEMPT']}.{os.environ['HPCDIST_RANK']}"
    code = open(sys.argv[1] + "/code-" + place).read()
    exec(code, {})
    sys.stdout.flush()
    os._exit(0)
if __name__ == "__main__":
    main()
"""
#: Writes a line to the pipe, and holds it open until the process is killed.
HELD = "pipe = open({pipe!r}, 'w', buffering=1); pipe.write('up\\n'); import time; time.sleep(600)"


class Scene:
    """A run with a launcher whose ranks execute the code that a test gives them."""

    def __init__(
        self,
        folder: Path,
        runs_dir: Path,
        torch: str = TORCH,
        init_timeout_s: float = LaunchConfig.init_timeout_s,
    ) -> None:
        self.run = RunDir.create(runs_dir / "exp" / "first")
        self.run.effective_config.write_text(to_yaml(Config(trainer=TrainerConfig(script=["train.py"]))))
        real = Path(hpcdist.__file__).parent
        for name in ("", "rank"):
            package = folder / "hpcdist" / name
            package.mkdir(parents=True)
            (package / "__init__.py").write_text(SHADOW.format(real=str(real / name)))
        (folder / "hpcdist" / "rank" / "worker.py").write_text(WORKER)
        (folder / "torch.py").write_text(torch)
        self.env = {"PATH": os.environ["PATH"], "INHERITED": "as it was"}
        plan = Plan(num_ranks=2, device="cpu", backend="gloo", threads=1, env={"PYTHONUNBUFFERED": "1"})
        self.launcher = LocalLauncher(
            self.run,
            plan,
            env=self.env,
            import_path=[str(folder)],
            cwd=folder,
            fork=True,
            init_timeout_s=init_timeout_s,
        )

    def start(self, *codes: str) -> tuple[Attempt, LocalRanks]:
        """Start an attempt; returns at once, perhaps before the ranks are forked."""
        attempt = self.run.new_attempt()
        for rank, code in enumerate(codes):
            (self.run.path / f"code-{attempt.number}.{rank}").write_text(code)
        return attempt, self.launcher.start(attempt)

    def finish(self, *codes: str) -> tuple[Attempt, dict[int, int]]:
        attempt, ranks = self.start(*codes)
        try:
            while ranks.running:
                ranks.wait(SOON_S)
        finally:
            ranks.close()
        return attempt, ranks.exits

    def parents(self) -> list[int]:
        """Return the processes that fork the ranks of this run."""
        words = [PARENT_MODULE, str(self.run.path)]
        found = psutil.process_iter(["cmdline"])
        return [process.pid for process in found if (process.info["cmdline"] or [])[-2:] == words]


@pytest.fixture
def scene(tmp_path: Path, runs_dir: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "code", runs_dir)
    with scene.launcher:
        yield scene
    assert scene.parents() == []


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    with NamedPipe(tmp_path / "pipe") as pipe:
        yield pipe


def wait_for_fork(ranks: LocalRanks, pipe: NamedPipe, count: int = 2) -> None:
    """Let the ranks start, and wait for a line from each of them."""
    while not ranks._processes:
        ranks.wait(SOON_S)
    assert [pipe.line() for _ in range(count)] == ["up"] * count


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
    monkeypatch.setattr(process_record, "_overwrite", lambda start, end, old, new: overwritten.append(new))
    process_record.show_variables({"HPCDIST_JOB_ID": "x" * process_record.SPACE_BYTES})
    assert overwritten == []
    process_record.show_variables({"HPCDIST_JOB_ID": "x" * 100})
    (new,) = overwritten
    assert len(new) == len(process_record.SPACE) + 1 + process_record.SPACE_BYTES


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


def test_ranks_end_with_their_parent_which_is_replaced(
    scene: Scene, pipe: NamedPipe, caplog: pytest.LogCaptureFixture
) -> None:
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    wait_for_fork(ranks, pipe)
    (parent,) = scene.parents()
    os.kill(parent, signal.SIGKILL)
    while ranks.running:
        ranks.wait(SOON_S)
    ranks.close()
    assert ranks.exits == {0: -9, 1: -9}
    assert pipe.is_released(SOON_S)
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert scene.parents() not in ([], [parent])
    assert "the parent process of the ranks has ended and is started again" in caplog.text


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (
            TORCH + "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "started 1 threads",
        ),
        (TORCH + "import threading\nthreading.Thread(target=threading.Event().wait).start()", "started 1 threads"),
        ("raise ImportError('no such library')", "ImportError: no such library"),
        ("from types import SimpleNamespace\ncuda = SimpleNamespace(_is_in_bad_fork=lambda: True)", "initialised CUDA"),
        ("print('at import')\nimport os; os._exit(0)", "at import"),
    ],
    ids=["thread", "waited-thread", "error", "cuda", "exit"],
)
def test_ranks_are_started_by_their_command_if_the_parent_cannot_fork(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture, torch: str, reason: str
) -> None:
    scene = Scene(tmp_path / "code", runs_dir, torch)
    with scene.launcher:
        code = "import os, sys; sys.exit(os.getppid() % 100)"
        for _ in range(2):
            assert scene.finish(code, code)[1] == dict.fromkeys(range(2), os.getpid() % 100)
            assert scene.parents() == []
    assert [record for record in caplog.text.splitlines() if reason in record], caplog.text
    assert "is started again" not in caplog.text


def test_parent_that_is_never_ready_is_given_up(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "code", runs_dir, "import time\ntime.sleep(600)", init_timeout_s=0.5)
    with scene.launcher:
        for _ in range(2):
            assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
            assert scene.parents() == []
    assert "it was not ready within launch.init_timeout_s=0.5 s" in caplog.text


def test_next_attempt_does_not_wait_for_a_parent_that_was_not_ready(tmp_path: Path, runs_dir: Path) -> None:
    scene = Scene(tmp_path / "code", runs_dir, "import time\ntime.sleep(600)")
    with scene.launcher:
        scene.start("pass", "pass")[1].close()
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
        assert scene.parents() == []


def test_output_of_the_start_of_the_interpreter_is_no_answer(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "code", runs_dir)
    (tmp_path / "code" / "sitecustomize.py").write_text("import os\nos.write(1, b'7 files')")
    (tmp_path / "code" / "torch.py").write_text("import time\ntime.sleep(600)")
    with scene.launcher:
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert "the start of its interpreter prints '7 files'" in caplog.text


def test_exit_codes_do_not_wait_for_the_parent(scene: Scene, pipe: NamedPipe) -> None:
    """It may be importing for a long time, or be stopped."""
    code = HELD.format(pipe=str(pipe.path))
    _, ranks = scene.start(code, code)
    wait_for_fork(ranks, pipe)
    parent = psutil.Process(*scene.parents())
    parent.suspend()
    ranks.signal(signal.SIGTERM)
    while ranks.running:
        ranks.wait(SOON_S)
    ranks.close()
    assert ranks.exits == {0: -15, 1: -15}
    parent.resume()
    assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert scene.parents() == [parent.pid]


def test_parent_that_cannot_fork_any_more_has_no_successor(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scene.finish("pass", "pass")[1] == {0: 0, 1: 0}
    assert scene.launcher._parent is not None
    monkeypatch.setattr(scene.launcher._parent, "is_alive", lambda: True)
    os.kill(*scene.parents(), signal.SIGKILL)
    for _ in range(2):
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
        assert scene.parents() == []


def test_launcher_does_without_a_parent_that_cannot_be_started(
    tmp_path: Path, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(tmp_path / "code", runs_dir)
    scene.run.path.joinpath("attempts").mkdir(exist_ok=True)
    scene.run.path.joinpath("attempts", "rank-parent.log").mkdir()
    with scene.launcher:
        assert scene.finish("import sys; sys.exit(3)", "pass")[1] == {0: 3, 1: 0}
    assert "their parent process cannot be started: [Errno 21]" in caplog.text


def test_process_that_cannot_be_created_fails_the_attempt(scene: Scene) -> None:
    assert scene.finish("pass", "pass")[1] == {0: 0, 1: 0}
    (parent,) = scene.parents()
    psutil.Process(parent).rlimit(psutil.RLIMIT_NOFILE, (3, 99))  # the parent cannot receive the files of a rank
    with pytest.raises(OSError, match="Too many open files"):
        scene.start("pass", "pass")
    psutil.Process(parent).rlimit(psutil.RLIMIT_NOFILE, (99, 99))
    assert scene.finish("pass", "pass")[1] == {0: 0, 1: 0}


SUPERVISOR = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from test_forked_ranks import HELD, Scene
scene = Scene(Path(sys.argv[1]), Path(sys.argv[2]))
with scene.launcher:
    code = HELD.format(pipe=sys.argv[3])
    _, ranks = scene.start(code, code)
    while True:
        ranks.wait(600)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped-parent"])
def test_ranks_and_parent_end_with_a_killed_supervisor(
    tmp_path: Path, runs_dir: Path, pipe: NamedPipe, stopped: bool
) -> None:
    """Also if the parent is stopped, and cannot notice the death of the supervisor."""
    program = SUPERVISOR.format(path=sys.path)
    words = [sys.executable, "-c", program, str(tmp_path / "code"), str(runs_dir), str(pipe.path)]
    with subprocess.Popen(words) as supervisor:
        assert [pipe.line() for _ in range(2)] == ["up"] * 2
        (parent,) = [child for child in psutil.Process(supervisor.pid).children() if PARENT_MODULE in child.cmdline()]
        if stopped:
            parent.suspend()
        supervisor.kill()
    assert pipe.is_released(SOON_S)
    assert psutil.wait_procs([parent], SOON_S)[1] == []
