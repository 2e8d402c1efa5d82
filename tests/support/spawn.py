"""Start real ranks for a test: processes with a process group whose store is a file, so that no port is needed.

def add(here: Rank) -> float: ...            # at the top level of a test file; runs in every rank
results = spawn_ranks(add, num_ranks=3)      # by rank; or the first failing rank's traceback
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
#: Time in seconds for the other ranks to report their failures after the first one.
PEER_GRACE_S = 3.0


@dataclass(frozen=True)
class Rank:
    """The first argument of a function of `spawn_ranks`."""

    rank: int
    world_size: int
    folder: Path  #: an empty folder, the same for all ranks


def rank_env() -> dict[str, str]:
    """Return this environment for a rank: one thread, only loopback."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def spawn_ranks(
    function: Callable[..., Any],
    num_ranks: int = 2,
    *,
    killed: Collection[int] = (),
    timeout_s: float = 240.0,
    **arguments: Any,
) -> list[Any]:
    """Run `function(Rank(…), **arguments)` in `num_ranks` processes of one gloo group; return its results by rank.

    Args:
        function: a function at module level of a test file; its arguments and results are pickled.
        killed: ranks that the function kills by SIGKILL; their result is None.

    Raises AssertionError with the log of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        folder = Path(temporary)
        (folder / "shared").mkdir()
        job = (inspect.getsourcefile(function), function.__name__, num_ranks, not killed, arguments)
        (folder / "job.pickle").write_bytes(pickle.dumps(job))
        exits = _run(folder, num_ranks, timeout_s)
        for rank, code in exits.items():
            if code != (-signal.SIGKILL if rank in killed else 0):
                text = (folder / f"{rank}.log").read_text(errors="replace")
                raise AssertionError(f"rank {rank} of {num_ranks} failed first (exit code {code}):\n{text}")
        return [
            None if rank in killed else pickle.loads((folder / f"{rank}.result").read_bytes())
            for rank in range(num_ranks)
        ]


def _run(folder: Path, num_ranks: int, timeout_s: float) -> dict[int, int]:
    """Return exit codes by rank, in the order in which the ranks ended; ranks beyond the time limit are killed."""
    processes: dict[int, subprocess.Popen[bytes]] = {}
    descriptors: dict[int, int] = {}
    exits: dict[int, int] = {}
    try:
        for rank in range(num_ranks):
            with open(folder / f"{rank}.log", "wb") as log:
                processes[rank] = subprocess.Popen(
                    [sys.executable, __file__, str(folder), str(rank)], env=rank_env(), stdout=log, stderr=log
                )
            descriptors[rank] = os.pidfd_open(processes[rank].pid)
        end = time.monotonic() + timeout_s
        while len(exits) < num_ranks and time.monotonic() < end:
            poll = select.poll()
            for rank in processes.keys() - exits.keys():
                poll.register(descriptors[rank], select.POLLIN)
            poll.poll(1000 * (end - time.monotonic()))
            for rank in sorted(processes.keys() - exits.keys()):
                if (code := processes[rank].poll()) is not None:
                    exits[rank] = code
                    if code > 0:
                        end = min(end, time.monotonic() + PEER_GRACE_S)
    finally:
        for rank, process in processes.items():
            if process.poll() is None:
                process.kill()
            exits.setdefault(rank, process.wait())
        for descriptor in descriptors.values():
            os.close(descriptor)
    return exits


def _be_rank(folder: Path, rank: int) -> None:
    import torch.distributed as dist

    file, name, num_ranks, all_live, arguments = pickle.loads((folder / "job.pickle").read_bytes())
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    result = getattr(module, name)(sys.modules["spawn"].Rank(rank, num_ranks, folder / "shared"), **arguments)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    if all_live:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)  # destroying a group with dead members would hang


if __name__ == "__main__":
    sys.modules["spawn"] = sys.modules["__main__"]
    _be_rank(Path(sys.argv[1]), int(sys.argv[2]))
