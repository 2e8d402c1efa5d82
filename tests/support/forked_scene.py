"""Ranks with a replacement of the worker, which imports no torch, and their parent processes, local or in a step.

A rank executes the file of its rank and attempt. Named pipes show which processes are alive.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import psutil
from supervisor_scene import NamedPipe

import hpcdist
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.config.written import to_yaml
from hpcdist.rank.parent import TRAINER_MODULES
from hpcdist.rank.processes import PARENT_MODULE, shown_place
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.local_launcher import LocalLauncher, LocalRanks
from hpcdist.supervisor.parents import ParentRanks, RankParents
from hpcdist.supervisor.plan import Plan, parent_command, rank_command

FAKE_SRUN = Path(__file__).with_name("fake_srun.py")
#: Time limit of a wait for a start or an end, which a busy machine delays.
SOON_S = 60.0
SHADOW = "from pathlib import Path\n__path__ = [str(Path(__file__).parent), {real!r}]\n__version__ = '0'\n"
TORCH = "from types import SimpleNamespace\ncuda = SimpleNamespace(_is_in_bad_fork=lambda: False)\n"
WORKER = """
import os, sys
def main():
    rank = os.environ.get("SLURM_PROCID") or os.environ["HPCDIST_RANK"]
    place = f"{os.environ['HPCDIST_ATTEMPT']}.{rank}"
    code = open(sys.argv[1] + "/code-" + place).read()
    exec(code, {})
    sys.stdout.flush()
    os._exit(0)
if __name__ == "__main__":
    main()
"""
#: Prints the facts of a rank that a forked and a started one have in common, and a line to standard error.
REPORT = """
import json, os, signal, sys
print(json.dumps({
    "parent": os.getppid(), "pid": os.getpid(), "is_leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "env": dict(os.environ), "cwd": os.getcwd(), "argv": sys.argv, "orig_argv": sys.orig_argv[1:],
    "input": os.read(0, 9).decode(), "files": sorted(os.listdir("/proc/self/fd")),
    "affinity": sorted(os.sched_getaffinity(0)), "threads": len(os.listdir("/proc/self/task")),
    "handlers": {name: repr(signal.getsignal(getattr(signal, name)))
                 for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")},
    "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
}))
print("error", file=sys.stderr)
"""
#: Writes a line to the pipe, and holds it open until the process is killed.
HELD = "pipe = open({pipe!r}, 'w', buffering=1); pipe.write('up\\n'); import time; time.sleep(600)"


def write_package(folder: Path, torch: str = "", worker: str = WORKER) -> None:
    """Write replacements of the worker, and of torch with what needs it, to a folder, the first one in PYTHONPATH."""
    real = Path(hpcdist.__file__).parent
    for name in ("", "rank"):
        package = folder / "hpcdist" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(SHADOW.format(real=str(real / name)))
    (folder / "hpcdist" / "rank" / "worker.py").write_text(worker)
    if torch:
        (folder / "torch.py").write_text(torch)
        for name in TRAINER_MODULES:  # they need the real torch
            (folder / f"{name.replace('.', '/')}.py").touch()


def new_run(runs_dir: Path) -> RunDir:
    """Create a run with a parent that imports torch only."""
    run = RunDir.create(runs_dir / "exp" / "first")
    run.config.write_text(to_yaml(Config(trainer=TrainerConfig(target="train:train"))))
    return run


def parents_of(run: RunDir) -> list[int]:
    """Return the parents of the ranks of a run; those of a step in the order of their ranks."""
    found = psutil.process_iter(["cmdline", "name"])
    words = [PARENT_MODULE, str(run.path)]
    parents = [process for process in found if (process.info["cmdline"] or [])[3:5] == words]
    parents = [process for process in parents if shown_place(process.info["name"]) is None]
    by_rank: dict[int, int] = {}
    for process in parents:
        with suppress(psutil.NoSuchProcess):
            by_rank[process.pid] = int(process.environ().get("SLURM_PROCID", "0"))
    return sorted(by_rank, key=lambda pid: by_rank[pid])


class Scene:
    """A run with a launcher; its ranks execute the code that a test gives them."""

    def __init__(
        self, folder: Path, runs_dir: Path, torch: str = TORCH, init_timeout_s: float = LaunchConfig.init_timeout_s
    ) -> None:
        self.run = new_run(runs_dir)
        write_package(folder, torch)
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
        """Start an attempt; returns at once, perhaps before the ranks have started."""
        attempt = new_attempt(self.run, *codes)
        return attempt, self.launcher.start(attempt)

    def finish(self, *codes: str) -> tuple[Attempt, dict[int, int]]:
        attempt, ranks = self.start(*codes)
        return attempt, end_of(ranks)

    def parents(self) -> list[int]:
        return parents_of(self.run)


class StepScene:
    """A run with ranks that the tasks of a step start, two on each node, with a fake srun.

    Args:
        command: of a rank that its parent does not fork.
    """

    def __init__(
        self,
        folder: Path,
        runs_dir: Path,
        torch: str = TORCH,
        *,
        fork: bool = True,
        limit_s: float = 600.0,
        num_tasks: int = 2,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        self.run = new_run(runs_dir)
        self.num_tasks = num_tasks
        self.folder = folder
        self.limit_s = limit_s
        self.env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1", **(env or {})}
        self.command = command or rank_command(self.run.path)
        self.log = self.run.path / "attempts" / "rank-%5t.log"
        self.log.parent.mkdir(exist_ok=True)
        write_package(folder, torch)
        self._guard = Guard()
        self.parents = self.start_parents(fork=fork)

    def start_parents(self, *, fork: bool) -> RankParents:
        srun = [sys.executable, "-IS", str(FAKE_SRUN), f"--ntasks={self.num_tasks}", f"--nodes={self.num_tasks // 2}"]
        return RankParents(
            [*srun, f"--error={self.log}", *parent_of(self.run, "task", self.command, fork=fork, limit_s=self.limit_s)],
            self._guard,
            env=self.env,
            cwd=self.folder,
            output=self.run.path / "attempts" / "srun.log",
            num_parents=self.num_tasks,
        )

    def execute_ranks(self) -> None:
        """Replace the parents by others that do not fork."""
        self.parents.close()
        self.parents = self.start_parents(fork=False)

    def start(self, *codes: str) -> tuple[Attempt, "StepRanks"]:
        """Start an attempt; returns at once, perhaps before the ranks have started."""
        attempt = new_attempt(self.run, *codes)
        env = {"HPCDIST_ATTEMPT": str(attempt.number)}
        return attempt, StepRanks(self.parents, attempt, self.num_tasks, env=env)

    def finish(self, *codes: str) -> tuple[Attempt, dict[int, int]]:
        attempt, ranks = self.start(*codes)
        return attempt, end_of(ranks)

    def pids(self) -> list[int]:
        """Wait for the parents, and return them in the order of their ranks."""
        while not self.parents.are_ready:
            self.parents.receive(SOON_S)
            assert not self.parents.have_ended, self.parents.output.read_text()
        return parents_of(self.run)

    def log_of(self, task: int) -> str:
        """Return the standard error of a task."""
        return Path(str(self.log).replace("%5t", f"{task:05d}")).read_text()

    def close(self) -> None:
        self.parents.close()
        self._guard.close()
        # As Slurm does: a parent that imports, or has a rank, continues.
        for pid in parents_of(self.run):
            os.kill(pid, signal.SIGKILL)


class StepRanks(ParentRanks):
    """The ranks of a step, without what Slurm reports."""

    def _note_end_of_parents(self) -> None:
        self.exits |= dict.fromkeys(self.remaining, -signal.SIGKILL)


def parent_of(
    run: RunDir, scope: Literal["all", "task"], rank: Sequence[str], *, fork: bool = False, limit_s: float = 600.0
) -> list[str]:
    """Return the command of a parent for ranks that need not execute Python."""
    *parent, _ = parent_command(run.path, scope, [sys.executable], fork=fork, limit_s=limit_s)
    return [*parent, *rank]


def new_attempt(run: RunDir, *codes: str) -> Attempt:
    """Create an attempt with ranks that execute the codes."""
    attempt = run.new_attempt()
    for rank, code in enumerate(codes):
        (run.path / f"code-{attempt.number}.{rank}").write_text(code)
    return attempt


def end_of(ranks: ParentRanks) -> dict[int, int]:
    """Wait for the end of all ranks; returns their exit codes."""
    try:
        while ranks.remaining:
            ranks.wait(SOON_S)
    finally:
        ranks.close()
    return ranks.exits


def reports_of(scene: Scene | StepScene) -> list[dict[str, Any]]:
    """Let the two ranks of an attempt report what they have."""
    attempt, exits = scene.finish(REPORT, REPORT)
    assert exits == {0: 0, 1: 0}
    reports = []
    for rank in range(2):
        line, *others = attempt.log(rank).read_text().splitlines()
        assert others == ["error"]
        reports.append(json.loads(line))
    return reports


def wait_for_start(ranks: ParentRanks, pipe: NamedPipe, count: int = 2) -> None:
    """Let the ranks start, and wait for a line from each of them."""
    while ranks.absent():
        ranks.wait(SOON_S)
    assert [pipe.line() for _ in range(count)] == ["up"] * count


# --- Ranks that hang and write diagnostics at SIGUSR1, as real ranks do.

#: Rank 1 has a child and computes; rank 0 waits in a collective that rank 1 has not called.
HUNG_WORKER = """
import json, os, signal, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from hpcdist.run.folder import RunDir
from hpcdist.rank.telemetry import dump_on_signal

def train(rank):
    if rank == 1:
        if os.fork() == 0:
            wait_for_work()
        while True:
            compute()
    threading.Event().wait()

def compute():
    end = time.monotonic() + 1000
    while time.monotonic() < end:
        pass

def wait_for_work():
    time.sleep(1000)

def recorded(rank, backend):
    entry = {
        "collective_seq_id": 7 - (rank == 1), "input_sizes": [[2]], "is_p2p": False, "retired": rank == 1,
        "process_group": ["0", "default_pg"], "profiling_name": f"{backend}:all_reduce", "state": "scheduled",
        "time_created_ns": 1,
    }
    return json.dumps({"entries": [entry], "version": "2.10"}).encode()

def main():
    rank = int(os.environ["HPCDIST_RANK"])
    sys.modules["torch._C._distributed_c10d"] = SimpleNamespace(
        _dump_fr_trace_json=lambda: recorded(rank, "gloo"),
        _dump_nccl_trace_json=lambda: recorded(rank, "nccl"),
    )
    attempt = RunDir(Path(sys.argv[1])).attempt(int(os.environ["HPCDIST_ATTEMPT"]))
    dump_on_signal(attempt, rank)
    print("up", flush=True)
    train(rank)

if __name__ == "__main__":
    main()
"""


@contextmanager
def hung_ranks(attempt: Attempt, folder: Path, num_ranks: int) -> Iterator[LocalRanks]:
    """Yield the ranks of an attempt after all of them have started and hang."""
    write_package(folder, worker=HUNG_WORKER)
    guard = Guard()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 20500, "JOB_ID": "still", "ATTEMPT": attempt.number}
    meeting |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "NODE_RANK": 0, "NUM_NODES": 1}
    envs = []
    for rank in range(num_ranks):
        place = {**meeting, "RANK": rank, "LOCAL_RANK": rank}
        own = {f"HPCDIST_{name}": str(value) for name, value in place.items()}
        envs.append({"PATH": os.environ["PATH"], "PYTHONPATH": str(folder), **own})
    run, logs = attempt.path.parent.parent, [attempt.log(rank) for rank in range(num_ranks)]
    parents = RankParents(
        parent_command(run, "all", rank_command(run), fork=False, limit_s=600.0),
        guard,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)},
        cwd=folder,
        output=attempt.path.parent / "rank-parent.log",
    )
    ranks = LocalRanks(parents, attempt, envs, guard)
    try:
        end = time.monotonic() + SOON_S
        while ranks.absent() or not all("up\n" in log.read_text() for log in logs):
            ranks.wait(0.01)
            assert time.monotonic() < end, parents.output.read_text()
        yield ranks
    finally:
        ranks.close()
        parents.close()
        guard.close()
