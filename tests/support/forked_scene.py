"""Ranks with a replacement of the worker, which imports no torch: forked by a parent process, or hung.

A forked rank executes the file of its rank and attempt. Named pipes show which processes are alive.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from supervisor_scene import NamedPipe

import hpcdist
from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.config.written import to_yaml
from hpcdist.rank.parent import TRAINER_MODULES
from hpcdist.rank.processes import PARENT_MODULE, shown_place
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.supervisor.children import Guard
from hpcdist.supervisor.local import LocalLauncher, LocalRanks
from hpcdist.supervisor.plan import Plan, rank_command

SOON_S = 20.0
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
    "handlers": {name: str(signal.getsignal(getattr(signal, name)))
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
    """Create a run whose parent imports torch only."""
    run = RunDir.create(runs_dir / "exp" / "first")
    run.config.write_text(to_yaml(Config(trainer=TrainerConfig(target="train:train"))))
    return run


def parents_of(run: RunDir) -> list[int]:
    """Return the processes that fork the ranks of a run."""
    found = psutil.process_iter(["cmdline", "name"])
    words = [PARENT_MODULE, str(run.path)]
    parents = [process for process in found if (process.info["cmdline"] or [])[3:5] == words]
    return [process.pid for process in parents if shown_place(process.info["name"]) is None]


class Scene:
    """A run with a launcher whose ranks execute the code that a test gives them."""

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
        """Start an attempt; returns at once, perhaps before the ranks are forked."""
        attempt = self.run.new_attempt()
        for rank, code in enumerate(codes):
            (self.run.path / f"code-{attempt.number}.{rank}").write_text(code)
        return attempt, self.launcher.start(attempt)

    def finish(self, *codes: str) -> tuple[Attempt, dict[int, int]]:
        attempt, ranks = self.start(*codes)
        try:
            while ranks.remaining:
                ranks.wait(SOON_S)
        finally:
            ranks.close()
        return attempt, ranks.exits

    def parents(self) -> list[int]:
        """Return the processes that fork the ranks of this run."""
        return parents_of(self.run)


def wait_for_fork(ranks: LocalRanks, pipe: NamedPipe, count: int = 2) -> None:
    """Let the ranks start, and wait for a line from each of them."""
    while not ranks._processes:
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
    logs = [attempt.log(rank) for rank in range(num_ranks)]
    ranks = LocalRanks(rank_command(attempt.path.parent.parent), envs, logs, guard, cwd=folder)
    try:
        end = time.monotonic() + 30
        while not all("up\n" in log.read_text() for log in logs):
            assert time.monotonic() < end, [log.read_text() for log in logs]
            time.sleep(0.01)
        yield ranks
    finally:
        ranks.close()
        guard.close()
