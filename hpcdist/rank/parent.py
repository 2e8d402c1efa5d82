"""The parent process of the ranks on one machine, `python -m hpcdist.rank.parent RUN_FOLDER`.

It imports torch and the modules of the run's trainer once, and then forks a process for each rank, in every attempt of
the run: a restart costs no import. User code is imported by the ranks alone, because it may start threads, use a GPU or
read the rank's variables at its import.

On one machine the supervisor (`supervisor/rank_parent.py`) is at the other end of standard output, which is a socket.
When the supervisor closes it or dies, the parent ends. On Slurm there is a parent on each node, and tasks of srun ask
it for their ranks (`rank/task_server.py`). The parent has no threads and no CUDA context, and never runs code of a
rank. A rank that is killed does not affect it. When the parent dies, the kernel kills the ranks.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config
from hpcdist.files import retry
from hpcdist.machine import process_record
from hpcdist.machine.process_record import CANNOT_FORK, PARENT_MODULE, RANK_MODULE
from hpcdist.rank.forking import IGNORED, fork_rank, leave, set_place
from hpcdist.rank.network import private_network
from hpcdist.rank.task_server import TaskServer, listening_socket
from hpcdist.run.folder import RunDir
from hpcdist.run.folder_identity import require_same

#: Modules that every rank with a trainer imports.
_OF_TRAINERS = (
    "hpcdist.machine.energy",
    "hpcdist.rank.collective_check",
    "hpcdist.rank.context",
    "hpcdist.rank.device",
    "hpcdist.rank.live_commands",
    "hpcdist.rank.network.process_group",
    "hpcdist.rank.seeding",
    "hpcdist.rank.stop_agreement",
    "hpcdist.rank.telemetry.heartbeat",
    "hpcdist.rank.telemetry.system_metrics",
)
#: Imports torch._dynamo, as long an import as that of torch. Ranks need it for DistributedDataParallel and optimizers.
_OF_STEPS = "hpcdist.rank.telemetry.timed_ddp"
#: Idle time in seconds after which the parent imports `_OF_STEPS` in advance, for the next attempt.
_IDLE_S = 10.0
#: How long the parent retries to read the config, as a rank does.
FILE_TIMEOUT_S = 120.0
#: Maximum size of a request; a larger one would be cut off.
MESSAGE_BYTES = 64 * 1024
#: Descriptors of a request to fork: the guard's pipe and the log.
_NUM_DESCRIPTORS = 2


def main() -> None:
    """Serve the supervisor, or tasks of srun; in a forked process, run the rank."""
    (folder,) = sys.argv[1:]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The time limit of `node_parent`: shows where an import hangs, and ends the process.
    faulthandler.register(signal.SIGALRM, chain=True)
    env, slurmstepd = dict(os.environ), os.getppid()
    listener = listening_socket()
    control = None
    if listener is None:
        control = socket.socket(fileno=os.dup(1))
        os.dup2(2, 1)  # the imports may print
    try:
        with retry.patient(FILE_TIMEOUT_S):
            config = _import_modules(RunDir(Path(folder)), late=listener is None)
    except BaseException:
        leave(traceback.format_exc(), CANNOT_FORK)
    if problem := _why_not_forkable():
        leave(problem, CANNOT_FORK)
    if control is not None and private_network.is_wanted(config):
        private_network.enter()
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.unregister(signal.SIGALRM)
    if control is None:
        assert listener is not None, "one of them is open"
        TaskServer(listener, env, slurmstepd).serve()
    else:
        control.send(b"{}")
        _serve(control, _IDLE_S if config.launch.max_restarts > 0 else None)
    # In a rank.
    worker = importlib.import_module(RANK_MODULE)
    sys.argv = [str(worker.__file__), folder]
    sys.orig_argv[:] = [RANK_MODULE if word == PARENT_MODULE else word for word in sys.orig_argv]
    worker.main()


def _import_modules(run: RunDir, *, late: bool) -> Config:
    """Import what ranks need. Returns the config of the run.

    Args:
        late: whether `_OF_STEPS` may be imported after the first fork.
    """
    gc.disable()  # as in the worker: imported objects are never freed
    for name in ("torch", RANK_MODULE):
        importlib.import_module(name)
    require_same(run.path, os.environ)
    config = load_run_config(run.effective_config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    if not config.trainer.script:
        for name in _OF_TRAINERS:
            importlib.import_module(name)
        if ":" not in config.trainer.target:
            importlib.import_module(f"hpcdist.trainers.{config.trainer.target}.train")
        if ":" not in config.trainer.target or not late:
            importlib.import_module(_OF_STEPS)
    _share_memory()
    return config


def _share_memory() -> None:
    # The collector would write to all objects, and thereby copy the memory that ranks share with the parent.
    gc.freeze()
    gc.enable()


def _import_for_restarts() -> str:
    """Import what the first attempt has imported itself; return why ranks cannot be forked any more, or nothing.

    An error of the import is one of the ranks, too, and not of this process.
    """
    try:
        gc.disable()
        importlib.import_module(_OF_STEPS)
    except Exception:
        traceback.print_exc()
    _share_memory()
    return _why_not_forkable()


def _why_not_forkable() -> str:
    """Return why a forked process would not work, or nothing. Threads do not exist in it, and CUDA fails."""
    # Fork handlers end the threads of OpenBLAS, which NumPy starts at its import if OMP_NUM_THREADS > 1.
    if (pid := os.fork()) == 0:
        os._exit(sys.modules["torch"].cuda._is_in_bad_fork())
    if os.waitpid(pid, 0)[1]:
        return "the imports have initialised CUDA"
    threads = len(os.listdir("/proc/self/task"))
    return f"the imports have started {threads - 1} threads" if threads > 1 else ""


def _serve(control: socket.socket, timeout: float | None) -> None:
    """Serve the supervisor's requests. Returns in each forked rank; the parent exits when the supervisor does.

    Args:
        timeout: idle time in seconds before the imports for restarts; None without restarts.
    """
    problem = ""
    rank_has_ended = False
    while True:
        if not select.select([control], [], [], timeout)[0]:
            timeout = None
            problem = _import_for_restarts()
            continue
        try:
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, _NUM_DESCRIPTORS)
        except OSError:
            data = b""
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "reap" in request:  # has no answer
            os.waitpid(request["reap"], os.WNOHANG)
            rank_has_ended = True
            continue
        if rank_has_ended and timeout is not None and len(descriptors) == _NUM_DESCRIPTORS:
            # A restart within the idle time: one import here instead of one in each rank.
            timeout = None
            problem = _import_for_restarts()
        if problem:
            leave(problem, CANNOT_FORK)
        pid, answer = _fork(request, descriptors, control)
        if pid == 0:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            control.send(json.dumps(answer).encode())


def _fork(request: Mapping[str, Any], descriptors: list[int], control: socket.socket) -> tuple[int, dict[str, Any]]:
    """Fork a rank. Returns its process id, 0 in the rank itself and -1 after an error, and the answer."""
    if len(descriptors) < _NUM_DESCRIPTORS:
        return -1, {"error": errno.EMFILE}

    def become() -> None:
        control.close()
        _become_rank(request, *descriptors)

    try:
        pid = fork_rank(become)
    except OSError as error:
        return -1, {"error": error.errno}
    return pid, {"pid": pid}


def _become_rank(request: Mapping[str, Any], guard: int, log: int) -> None:
    """Give this forked process what a rank has that was started by a command.

    Args:
        request: `env`: the variables that differ from the parent's; `cwd`: the working directory.
        guard: pipe of the process guard.
        log: file for standard output and error.
    """
    # First of all: the guard ends this process if the supervisor has died.
    with suppress(BrokenPipeError), os.fdopen(guard, "wb", buffering=0) as pipe:
        pipe.write(f"+{os.getpid()}\n".encode())
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    set_place(request["cwd"], request["env"], process_record.SPACE_BYTES)


if __name__ == "__main__":
    main()
