"""Start real ranks for a test: processes with a process group whose store is a file, so that no port is needed.

def add(here: Rank) -> float: ...            # at the top level of a test file; runs in every rank
results = spawn_ranks(add, num_ranks=3)      # by rank; or the first failing rank's traceback

One process per pytest session imports torch and the test files, and forks the ranks: the imports take longer than most
functions that are tested. It has no threads and never runs a function of a test.
"""

import atexit
import gc
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parent
#: Time in seconds for the other ranks to report their failures after the first one.
PEER_GRACE_S = 3.0
#: Imported before the first fork. DistributedDataParallel and optimizers import torch._dynamo on first use.
IMPORTS = ("torch._dynamo", "context_scene", "hpcdist.rank.step_timing")
MESSAGE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Rank:
    """The first argument of a function of `spawn_ranks`."""

    rank: int
    world_size: int
    folder: Path  #: an empty folder, the same for all ranks


@dataclass(frozen=True)
class Job:
    """What the ranks of one call of `spawn_ranks` run, in the file `job.pickle`."""

    file: str
    function: str
    num_ranks: int
    all_live: bool
    cwd: str
    env: dict[str, str]
    #: Pickled: their classes may be those of the test file.
    arguments: bytes


def rank_env() -> dict[str, str]:
    """Return this environment for a rank: one thread, only loopback."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
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
    file = inspect.getsourcefile(function)
    assert file is not None
    with tempfile.TemporaryDirectory(prefix="ranks-") as temporary:
        folder = Path(temporary)
        (folder / "shared").mkdir()
        job = Job(file, function.__name__, num_ranks, not killed, os.getcwd(), rank_env(), pickle.dumps(arguments))
        (folder / "job.pickle").write_bytes(pickle.dumps(vars(job)))
        exits = _parent().run(folder, num_ranks, timeout_s)
        for rank, code in exits.items():
            if code != (-signal.SIGKILL if rank in killed else 0):
                text = (folder / f"{rank}.log").read_text(errors="replace")
                raise AssertionError(f"rank {rank} of {num_ranks} failed first (exit code {code}):\n{text}")
        return [
            None if rank in killed else pickle.loads((folder / f"{rank}.result").read_bytes())
            for rank in range(num_ranks)
        ]


class Parent:
    """The process that forks the ranks, seen from pytest."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, __file__, str(number)]
            self._process = subprocess.Popen(command, env=rank_env(), stdin=subprocess.DEVNULL, pass_fds=[number])

    def run(self, folder: Path, num_ranks: int, timeout_s: float) -> dict[int, int]:
        """Return exit codes by rank, in the order in which the ranks ended; ranks beyond the time limit are killed.

        After an interruption or an error, the next test has a new parent, and the ranks of this one are killed.
        """
        try:
            return self._run(folder, num_ranks, timeout_s)
        except BaseException:
            self.close()
            _parent.cache_clear()
            raise

    def _run(self, folder: Path, num_ranks: int, timeout_s: float) -> dict[int, int]:
        exits: dict[int, int] = {}
        self._socket.send(json.dumps({"folder": str(folder)}).encode())
        end: float | None = time.monotonic() + timeout_s
        while len(exits) < num_ranks:
            if not self._is_ready(end):
                self._socket.send(b'{"kill": true}')
                end = None  # the kernel ends them
                continue
            answer = self._socket.recv(MESSAGE_BYTES)
            assert answer, f"the parent of the ranks ended with exit code {self._process.wait()}"
            rank, code = json.loads(answer)
            exits[rank] = code
            if code > 0 and end is not None:
                end = min(end, time.monotonic() + PEER_GRACE_S)
        return exits

    def _is_ready(self, end: float | None) -> bool:
        timeout = None if end is None else max(0.0, end - time.monotonic())
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@cache
def _parent() -> Parent:
    parent = Parent()
    atexit.register(parent.close)
    return parent


# --- in the process that forks the ranks


def _serve(control: socket.socket) -> NoReturn:
    """Fork the ranks of each request, and report exit codes; end when pytest has closed the socket or ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    for name in IMPORTS:
        importlib.import_module(name)
    modules: dict[str, ModuleType] = {}
    ranks: dict[int, tuple[int, int]] = {}  # by pidfd: pid and rank
    while True:
        poll = select.poll()
        for descriptor in (control.fileno(), *ranks):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            if descriptor in ranks:
                pid, rank = ranks.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # pytest has ended: the next poll reports it
                    control.send(json.dumps([rank, code]).encode())
                continue
            request = _request(control)
            if "kill" in request:
                for pid, _ in ranks.values():
                    os.kill(pid, signal.SIGKILL)
            if "end" in request:
                os._exit(0)
            if "folder" in request:
                ranks |= _fork(Path(request["folder"]), modules, control)


def _request(control: socket.socket) -> dict[str, Any]:
    with suppress(ConnectionResetError):
        if message := control.recv(MESSAGE_BYTES):
            request: dict[str, Any] = json.loads(message)
            return request
    return {"kill": True, "end": True}


def _fork(folder: Path, modules: dict[str, ModuleType], control: socket.socket) -> dict[int, tuple[int, int]]:
    job = Job(**pickle.loads((folder / "job.pickle").read_bytes()))
    if job.file not in modules:
        with suppress(Exception):  # it is raised again in the ranks, whose logs pytest prints
            modules[job.file] = _import_file(job.file)
        gc.freeze()  # the collector would copy the memory that ranks share with this process
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, (
        f"{job.file} starts {threads - 1} threads when it is imported: forked ranks would not have them"
    )
    ranks = {}
    for rank in range(job.num_ranks):
        if (pid := os.fork()) == 0:
            _be_rank(folder, rank, job, modules, control)
        ranks[os.pidfd_open(pid)] = pid, rank
    return ranks


def _import_file(file: str) -> ModuleType:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _be_rank(folder: Path, rank: int, job: Job, modules: dict[str, ModuleType], control: socket.socket) -> NoReturn:
    try:
        control.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(job.cwd)
        os.environ.clear()
        os.environ.update(job.env)
        _run_function(folder, rank, job, modules.get(job.file) or _import_file(job.file))
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # destroying a group with dead members would hang


def _run_function(folder: Path, rank: int, job: Job, module: ModuleType) -> None:
    import torch.distributed as dist

    arguments = pickle.loads(job.arguments)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=job.num_ranks)
    dist.barrier()  # a function may close its connections, while another rank still waits for its own
    here = sys.modules["spawn"].Rank(rank, job.num_ranks, folder / "shared")
    result = getattr(module, job.function)(here, **arguments)
    (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    if job.all_live:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.modules["spawn"] = sys.modules["__main__"]
    _serve(socket.socket(fileno=int(sys.argv[1])))
