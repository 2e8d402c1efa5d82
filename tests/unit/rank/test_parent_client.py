"""Tasks whose rank the parent process on their node forks, without Slurm: the tests start both with their commands."""

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
from forked_scene import HELD, REPORT, SOON_S, TORCH, new_run, parents_of, write_package
from hpcdist_runs import wait_for
from supervisor_scene import NamedPipe

from hpcdist.rank.processes import CANNOT_FORK
from hpcdist.slurm.job.node_steps import kill_ranks
from hpcdist.supervisor.hang import find_ranks
from hpcdist.supervisor.plan import forked_task_command, parent_command

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURMD_NODENAME": "n1",
    "SLURM_NODEID": "0",
}


class Node:
    """A node with a parent process, which ends with a shell that stands in for slurmstepd."""

    def __init__(self, folder: Path, runs_dir: Path) -> None:
        self.run = new_run(runs_dir)
        self.folder = folder
        self.name = f"7-{os.getpid()}-{folder.parent.name}"
        self.slurmstepd: subprocess.Popen[bytes] | None = None
        self.tasks: list[Task] = []
        #: As srun passes it to all tasks of a job, which differ in the variables of their step.
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            "HPCDIST_ATTEMPT": "1",
            "PYTHONUNBUFFERED": "1",
            **STEP,
        }

    def start_parent(
        self, torch: str = TORCH, *earlier: str, output: str = "rank-parent-n1.log", limit_s: float = 600.0
    ) -> None:
        if not (self.folder / "torch.py").exists():
            write_package(self.folder, torch)
        command = parent_command(self.run.path, f"{limit_s:g}", self.name, *earlier)
        env = self.env | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
        with open(self.run.path / output, "wb") as log:
            shell = ["sh", "-c", '"$@" & wait $!; exit $?', "sh", *command]
            self.slurmstepd = subprocess.Popen(
                shell, env=env, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start(self, rank: int, code: str, *, ignored: str = "USR2", connect_s: float = SOON_S, **env: str) -> Task:
        self.run.path.joinpath(f"code-1.{rank}").write_text(code)
        self.tasks.append(Task(self, rank, ignored, connect_s, self.env | env))
        return self.tasks[-1]

    def close(self) -> None:
        for pid in parents_of(self.run):
            os.kill(pid, signal.SIGKILL)
        for task in self.tasks:
            task.process.kill()
            task.process.wait()
        if self.slurmstepd is not None:
            self.slurmstepd.kill()
            self.slurmstepd.wait()


class Task:
    """A task as slurmstepd starts it, with a log of its own."""

    def __init__(self, node: Node, rank: int, ignored: str, connect_s: float, env: dict[str, str]) -> None:
        self.log = node.run.path / f"rank-{rank:05d}.log"
        task = forked_task_command(node.run.path, node.name, connect_s, SOON_S, sys.executable)
        env = env | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_STEP_ID": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f'trap "" {ignored}; exec "$@"', "sh", *task],
                env=env,
                cwd=node.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self) -> tuple[int, str]:
        """Wait for the end of the task. Returns its exit code, negative for a signal, and its log."""
        return self.process.wait(SOON_S), self.log.read_text()


@pytest.fixture
def node(tmp_path: Path, runs_dir: Path) -> Iterator[Node]:
    node = Node(tmp_path / "code", runs_dir)
    yield node
    node.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    with NamedPipe(tmp_path / "pipe") as pipe:
        yield pipe


def test_forked_rank_has_what_the_rank_of_a_task_has(node: Node) -> None:
    """Environment, processors, folder, log, signals and descriptors; the other rank is one without a parent.

    An import changes variables, as that of torch does.
    """
    node.env |= {"CHANGED": "before", "REMOVED": "before"}
    changes = "os.environ |= {'TORCHINDUCTOR_CACHE_DIR': '/cache', 'CHANGED': 'after', 'OWN': 'after'}"
    node.start_parent(f"{TORCH}import os\n{changes}\ndel os.environ['REMOVED']\n")
    node.env["OWN"] = "of the task"
    (core, *_) = sorted(os.sched_getaffinity(0))
    bound = f"import os; os.sched_setaffinity(0, {{{core}}})"
    node.folder.joinpath("sitecustomize.py").write_text(f"import os\nif 'BOUND' in os.environ:\n    {bound}\n")
    reports = []
    for task in (node.start(0, REPORT, BOUND="yes"), node.start(1, REPORT, BOUND="yes")):
        code, log = task.end()
        line, error = log.splitlines()
        assert (code, error) == (0, "error"), log
        reports.append(json.loads(line))
    assert len({report["parent"] for report in reports}) == 1
    assert [report["env"]["SLURM_PROCID"] for report in reports] == ["0", "1"]
    assert {tuple(report["affinity"]) for report in reports} == {(core,)}
    assert parents_of(node.run) == [reports[0]["parent"]]
    assert os.sched_getaffinity(reports[0]["parent"]) == os.sched_getaffinity(0), "of all ranks"
    node.name = "nobody"
    code, log = node.start(0, REPORT, BOUND="yes", connect_s=0.0).end()
    reason, line, error = log.splitlines()
    assert reason == "hpcdist: this rank imports torch itself: no parent process of ranks listens on this node"
    started = json.loads(line)
    own = {name: started["env"].pop(name) for name in ("CHANGED", "REMOVED")}
    assert own == {"CHANGED": "before", "REMOVED": "before"}, "the replacement of the worker has no imports"
    assert reports[0]["env"].pop("TORCHINDUCTOR_CACHE_DIR") == "/cache"
    assert reports[0]["env"].pop("CHANGED") == "after"
    assert reports[0]["env"].pop("SLURM_TASK_PID") == str(reports[0]["pid"])
    for report in (reports[0], started):
        del report["parent"], report["pid"]
    assert started == reports[0]
    assert started["env"]["SLURM_STEP_TASKS_PER_NODE"] == "2(x2)"


def test_task_ends_as_its_rank(node: Node) -> None:
    """The parent is not affected, and forks the ranks of the next step."""
    node.start_parent()
    tell = "import os, sys; print(os.getppid(), flush=True);"
    ends = [
        node.start(0, f"{tell} sys.exit(5)").end(),
        node.start(0, f"{tell} os.kill(os.getpid(), 9)").end(),
        node.start(0, f"{tell} import signal; signal.signal(11, signal.SIG_DFL); os.kill(os.getpid(), 11)").end(),
        node.start(0, tell).end(),
    ]
    assert [code for code, _ in ends] == [5, -9, -11, 0]
    assert {log for _, log in ends} == {f"{parents_of(node.run)[0]}\n"}


def test_rank_is_found_and_killed_with_its_task(node: Node, pipe: NamedPipe) -> None:
    """Also its child processes; `find_ranks` finds the rank, but neither the task nor the parent."""
    node.start_parent()
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HELD.format(pipe=str(pipe.path))!r}]);"
    task = node.start(1, child + HELD.format(pipe=str(pipe.path)))
    assert [pipe.line(), pipe.line()] == ["up", "up"]
    (found,) = find_ranks(node.run.path, 1, "n1")
    assert (found.rank, psutil.Process(found.pid).ppid()) == (1, parents_of(node.run)[0])
    assert find_ranks(node.run.path, 1, "n2") == []
    task.process.kill()
    assert pipe.is_released(SOON_S)
    assert node.start(0, "import sys; sys.exit(3)").end()[0] == 3


def test_task_that_waits_for_its_rank_is_killed_with_the_ranks(node: Node) -> None:
    """It would become a rank of an earlier attempt later on. Slurm cannot end its step if a node is lost."""
    node.start_parent("import time\ntime.sleep(600)")
    task = node.start(1, "pass")
    wait_for(lambda: find_ranks(node.run.path, 1, "n1", with_tasks=True) != [], "the task", timeout_s=SOON_S)
    assert find_ranks(node.run.path, 1, "n1") == [], "it has no stack to be shown"
    assert kill_ranks(node.run.path, "n1") == []
    assert task.end()[0] == -signal.SIGKILL


@pytest.mark.parametrize("killed", ["parent", "slurmstepd"])
def test_rank_and_task_end_with_their_parent(node: Node, pipe: NamedPipe, killed: str) -> None:
    """Slurm could not end a parent whose slurmstepd has died."""
    node.start_parent()
    task = node.start(0, HELD.format(pipe=str(pipe.path)))
    assert pipe.line() == "up"
    (parent,) = parents_of(node.run)
    assert node.slurmstepd is not None
    os.kill(parent if killed == "parent" else node.slurmstepd.pid, signal.SIGKILL)
    assert task.end()[0] == -signal.SIGKILL
    assert pipe.is_released(SOON_S)
    assert parents_of(node.run) == []


@pytest.mark.parametrize("torch", [TORCH, "raise ImportError('no such library')"], ids=["forked", "started"])
def test_stop_signal_waits_until_the_rank_has_a_handler(node: Node, tmp_path: Path, torch: str) -> None:
    """The parent is still importing torch when it arrives."""
    os.mkfifo(begin := tmp_path / "begin")
    node.start_parent(f"open({str(begin)!r}).read()\n{torch}")
    task = node.start(0, "import signal; print(signal.sigwait([signal.SIGTERM]) == 15)")
    wait_for(lambda: "SigBlk:\t0000000000000000" not in status_of(task), "the task to block signals", timeout_s=SOON_S)
    task.process.send_signal(signal.SIGTERM)
    begin.write_text("")
    code, log = task.end()
    assert (code, log.splitlines()[-1:]) == (0, ["True"]), log


def status_of(task: Task) -> str:
    return Path(f"/proc/{task.process.pid}/status").read_text()


COUNT = """
import signal, sys
count, awaited = 0, (signal.SIGUSR2, signal.SIGTERM)
signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # a handler just before signal.pause would leave it waiting
print("up", file=open({pipe!r}, "w", buffering=1), flush=True)
while signal.sigwait(awaited) == signal.SIGUSR2:
    count += 1
    print("got", file=open({pipe!r}, "w", buffering=1), flush=True)
sys.exit(10 + count)
"""


def test_signals_to_a_task_reach_its_rank_once(node: Node, tmp_path: Path) -> None:
    """Those that the task ignores at its start as well, because the rank may handle them. The parent ignores all."""
    node.start_parent()
    with NamedPipe(tmp_path / "told", reopened=True) as pipe:
        task = node.start(0, COUNT.format(pipe=str(pipe.path)))
        assert pipe.line() == "up"
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            os.kill(parents_of(node.run)[0], number)
        task.process.send_signal(signal.SIGUSR2)
        assert pipe.line() == "got"
        task.process.send_signal(signal.SIGTERM)
        assert task.end()[0] == 11


@pytest.mark.parametrize(
    ("torch", "limit_s", "exit_code", "reason"),
    [
        ("raise ImportError('no such library')", 600.0, CANNOT_FORK, "ImportError: no such library"),
        # By this limit the parent must have begun to import, on a busy machine, too. Its log shows where it stands.
        ("import time\ntime.sleep(600)", 5.0, 128 + signal.SIGALRM, 'torch.py", line 2 in <module>'),
    ],
    ids=["failed import", "long import"],
)
def test_task_becomes_the_rank_if_the_parent_cannot_fork(
    node: Node, torch: str, limit_s: float, exit_code: int, reason: str
) -> None:
    node.start_parent(torch, limit_s=limit_s)
    code, log = node.start(0, "import sys; sys.exit(6)").end()
    assert (code, log.startswith("hpcdist: this rank imports torch itself: ")) == (6, True), log
    assert node.slurmstepd is not None
    assert node.slurmstepd.wait(SOON_S) == exit_code
    assert reason in (node.run.path / "rank-parent-n1.log").read_text()


def test_parent_ends_those_before_it(node: Node, pipe: NamedPipe) -> None:
    """Slurm cannot end a step with a lost node. An earlier name without a parent does not matter."""
    node.start_parent()
    first, shell = node.name, node.slurmstepd
    task = node.start(0, HELD.format(pipe=str(pipe.path)))
    assert pipe.line() == "up"
    (before,) = parents_of(node.run)
    node.name += "-2"
    node.start_parent(TORCH, "nobody", first)
    assert node.start(1, "import os; print(os.getppid())").end() == (0, f"{parents_of(node.run)[0]}\n")
    assert before not in parents_of(node.run)
    assert task.end()[0] == -signal.SIGKILL
    assert pipe.is_released(SOON_S)
    assert shell is not None
    assert shell.wait(SOON_S) == 0


@pytest.mark.parametrize(("name", "value"), [("OMP_NUM_THREADS", "2"), ("CUDA_VISIBLE_DEVICES", "1")])
def test_variables_that_libraries_have_read_and_gpus_may_not_differ(node: Node, name: str, value: str) -> None:
    node.env["CUDA_VISIBLE_DEVICES"] = "0,1"
    node.start_parent()
    code, log = node.start(0, "import sys; sys.exit(4)", **{name: value}).end()
    reason = f"hpcdist: this rank imports torch itself: {name} differs from that of its parent process\n"
    assert (code, log) == (4, reason)
    assert node.start(0, "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])").end() == (0, "0,1\n")
