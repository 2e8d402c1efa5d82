"""Hung ranks for tests: processes without torch that hang and write diagnostics at SIGUSR1, as real ranks do.

A package `hpcdist` at the front of the import path replaces only the worker; all other modules are the real ones.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hpcdist
from hpcdist.run.folder import Attempt
from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.local import LocalRanks
from hpcdist.supervisor.plan import rank_command

#: Rank 1 has a child and computes; rank 0 waits in a collective that rank 1 has not called.
WORKER = """
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
        _dump_nccl_trace=lambda *flags: repr(flags).encode(),
    )
    attempt = RunDir(Path(sys.argv[1])).attempt(int(os.environ["HPCDIST_ATTEMPT"]))
    dump_on_signal(attempt, rank, int(os.environ["HPCDIST_WORLD_SIZE"]))
    print("up", flush=True)
    train(rank)

if __name__ == "__main__":
    main()
"""
SHADOW = "from pathlib import Path\n__path__ = [str(Path(__file__).parent), {real!r}]\n__version__ = '0'\n"


@contextmanager
def hung_ranks(attempt: Attempt, folder: Path, num_ranks: int) -> Iterator[LocalRanks]:
    """Yield the ranks of an attempt after all of them have started and hang."""
    real = Path(hpcdist.__file__).parent
    for name in ("", "rank"):
        package = folder / "hpcdist" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(SHADOW.format(real=str(real / name)))
    (folder / "hpcdist" / "rank" / "worker.py").write_text(WORKER)
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
