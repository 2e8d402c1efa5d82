"""The parent process of the ranks on one machine, `python -m hpcdist.rank.parent RUN_FOLDER`.

It imports torch and the modules of the run's trainer once, and then forks a process for each rank, in every attempt of
the run: a restart costs no import. User code is imported by the ranks alone, because it may start threads, use a GPU or
read the rank's variables at its import.

The supervisor (`supervisor/rank_parent.py`) is at the other end of standard output, which is a socket. The parent has
no threads and no CUDA context, and never runs code of a rank. A rank that is killed does not affect it. When the
supervisor closes the socket or dies, the parent ends. When the parent dies, the kernel kills the ranks.
"""

from __future__ import annotations

import ctypes
import errno
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
from typing import Any, NoReturn

from hpcdist.config.loading import load_run_config
from hpcdist.files import retry
from hpcdist.machine import process_record
from hpcdist.run.folder import RunDir
from hpcdist.supervisor.plan import PARENT_MODULE, RANK_MODULE

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
#: Signals that end a process or a job; the socket alone ends the parent. Slurm sends SIGTERM to all processes of a job.
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1
#: How long the parent retries to read the config, as a rank does.
FILE_TIMEOUT_S = 120.0
#: Maximum size of a request; a larger one would be cut off.
MESSAGE_BYTES = 64 * 1024
#: Descriptors of a request to fork: the guard's pipe and the log.
_NUM_DESCRIPTORS = 2


def main() -> None:
    """Serve the supervisor; in a forked process, run the rank."""
    (folder,) = sys.argv[1:]
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)  # the imports may print
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED}
    try:
        with retry.patient(FILE_TIMEOUT_S):
            restarts = _import_modules(RunDir(Path(folder)))
    except BaseException:
        _leave(traceback.format_exc())
    if problem := _why_not_forkable():
        _leave(problem)
    control.send(b"{}")
    _serve(control, handlers, _IDLE_S if restarts else None)
    # In a rank.
    worker = importlib.import_module(RANK_MODULE)
    sys.argv = [str(worker.__file__), folder]
    sys.orig_argv[:] = [RANK_MODULE if word == PARENT_MODULE else word for word in sys.orig_argv]
    worker.main()


def _leave(problem: str) -> NoReturn:
    # Not `sys.exit`, which waits for threads that an import has started.
    print(problem.strip(), file=sys.stderr, flush=True)
    os._exit(1)


def _import_modules(run: RunDir) -> bool:
    """Import what ranks need. Returns whether there may be restarts."""
    gc.disable()  # as in the worker: imported objects are never freed
    for name in ("torch", RANK_MODULE):
        importlib.import_module(name)
    config = load_run_config(run.effective_config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    if not config.trainer.script:
        for name in _OF_TRAINERS:
            importlib.import_module(name)
        if ":" not in config.trainer.target:
            importlib.import_module(f"hpcdist.trainers.{config.trainer.target}.train")
            importlib.import_module(_OF_STEPS)
    _share_memory()
    return config.launch.max_restarts > 0


def _share_memory() -> None:
    # The collector would write to all objects, and thereby copy the memory that ranks share with the parent.
    gc.freeze()
    gc.enable()


def _import_for_restarts() -> None:
    """Import what the first attempt has imported itself. An error is one of the ranks, too, and not of this process."""
    try:
        gc.disable()
        importlib.import_module(_OF_STEPS)
    except Exception:
        traceback.print_exc()
    _share_memory()


def _why_not_forkable() -> str:
    """Return why a forked process would not work, or nothing. Threads do not exist in it, and CUDA fails."""
    # Fork handlers end the threads of OpenBLAS, which NumPy starts at its import if OMP_NUM_THREADS > 1.
    if (pid := os.fork()) == 0:
        os._exit(sys.modules["torch"].cuda._is_in_bad_fork())
    if os.waitpid(pid, 0)[1]:
        return "the imports have initialised CUDA"
    threads = len(os.listdir("/proc/self/task"))
    return f"the imports have started {threads - 1} threads" if threads > 1 else ""


def _serve(control: socket.socket, handlers: Mapping[signal.Signals, Any], timeout: float | None) -> None:
    """Serve the supervisor's requests. Returns in each forked rank; the parent exits when the supervisor does.

    Args:
        timeout: idle time in seconds before the imports for restarts; None without restarts.
    """
    problem = ""
    while True:
        if not select.select([control], [], [], timeout)[0]:
            timeout = None
            _import_for_restarts()
            problem = _why_not_forkable()
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
            continue
        if problem:
            _leave(problem)
        pid, answer = _fork(request, descriptors, control, handlers)
        if pid == 0:
            return
        for descriptor in descriptors:
            os.close(descriptor)
        with suppress(OSError):
            control.send(json.dumps(answer).encode())


def _fork(
    request: Mapping[str, Any], descriptors: list[int], control: socket.socket, handlers: Mapping[signal.Signals, Any]
) -> tuple[int, dict[str, Any]]:
    """Fork a rank. Returns its process id, 0 in the rank itself and -1 after an error, and the answer."""
    if len(descriptors) < _NUM_DESCRIPTORS:
        return -1, {"error": errno.EMFILE}
    parent = os.getpid()
    # A signal to the rank waits until it has its own handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return -1, {"error": error.errno}
    if pid == 0:
        try:
            control.close()
            _become_rank(request, *descriptors, parent=parent)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:  # the process must not go on as a second parent
            traceback.print_exc()
            os._exit(1)
        return 0, {}
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid, {"pid": pid}


def _become_rank(request: Mapping[str, Any], guard: int, log: int, *, parent: int) -> None:
    """Give this forked process what a rank has that was started by a command.

    Args:
        request: `env`: the variables that differ from the parent's; `cwd`: the working directory.
        guard: pipe of the process guard.
        log: file for standard output and error.
        parent: process id of the parent.
    """
    os.setsid()
    # First of all: the guard ends this process if the supervisor has died.
    with suppress(BrokenPipeError), os.fdopen(guard, "wb", buffering=0) as pipe:
        pipe.write(f"+{os.getpid()}\n".encode())
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(-signal.SIGKILL & 0xFF)  # the parent has died before the call
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    os.chdir(request["cwd"])
    os.environ.pop(process_record.SPACE, None)
    os.environ.update(request["env"])
    process_record.replace_word(PARENT_MODULE, RANK_MODULE)
    process_record.show_variables(request["env"])
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()  # Python's `random` does this itself


if __name__ == "__main__":
    main()
