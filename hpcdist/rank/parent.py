"""The parent process of the ranks on one machine, `python -m hpcdist.rank.parent RUN_FOLDER`, and its service for the
tasks of srun.
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
import stat
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config
from hpcdist.host import retry
from hpcdist.rank import private_network, processes
from hpcdist.rank.forked_task import MESSAGE_BYTES, peer_uid
from hpcdist.rank.node_parent import END
from hpcdist.rank.processes import (
    CANNOT_FORK,
    IGNORED,
    PARENT_MODULE,
    RANK_MODULE,
    SPACE,
    STOP_SIGNALS,
    fork_rank,
    leave,
    set_place,
)
from hpcdist.run.folder import RunDir, require_same

# Requests of srun's tasks to the parent process on their node, which forks a rank for each (`rank/forked_task.py`).
#
# Each connection is one rank: the parent reports the end of the rank, and kills the rank's process group when the task
# closes the connection. Ranks belong to the step of the parent, whose processors include those of all ranks on the
# node.

#: Interval of checks whether slurmstepd is alive: without it Slurm could not end this process.
_CHECK_EVERY_S = 5.0
#: Time for the ranks of an earlier attempt to end after SIGKILL.
KILL_S = 10.0
#: Beginnings of the names of variables that a rank cannot have of its own: those that libraries read while they are
#: imported, and those by which Slurm gives a task GPUs of its own. The parent's step has all GPUs of the job there.
_OF_ALL_RANKS = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH", "PYTORCH_", "TMPDIR"),
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
#: Descriptors of a request: the request itself, standard output, standard error.
_TASK_DESCRIPTORS = 3


def listening_socket() -> socket.socket | None:
    """Return the socket that `node_parent` has left as standard input, and replace that by /dev/null; None if none."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        return None
    listener = socket.socket(fileno=os.dup(0))
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    return listener


@dataclass(eq=False)
class _Task:
    """A task and its rank."""

    connection: socket.socket
    pid: int = 0  #: 0 before the rank is forked
    end: int = -1  #: descriptor of the rank's process, -1 if it has ended
    is_open: bool = True

    def close(self) -> None:
        if self.is_open:
            self.connection.close()
            self.is_open = False


class TaskServer:
    """Forks ranks for tasks on this node until slurmstepd ends.

    Args:
        env: environment before the imports, which may set variables.
        slurmstepd: process that started this one.
    """

    def __init__(self, listener: socket.socket, env: Mapping[str, str], slurmstepd: int) -> None:
        self._listener = listener
        self._env = env
        self._slurmstepd = slurmstepd
        self._space_bytes = len(env.get(SPACE, ""))
        self._tasks: list[_Task] = []
        self._affinity = os.sched_getaffinity(0)

    def serve(self) -> None:
        """Serve tasks. Returns in each forked rank; this process exits with slurmstepd."""
        while os.getppid() == self._slurmstepd:
            poll = select.poll()
            poll.register(self._listener, select.POLLIN)
            for task in self._tasks:
                if task.is_open:
                    poll.register(task.connection, select.POLLIN)
                if task.end >= 0:
                    poll.register(task.end, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(_CHECK_EVERY_S * 1000)}
            for task in list(self._tasks):
                if task.end in ready:
                    self._report_end(task)
                if task.is_open and task.connection.fileno() in ready and self._receive(task):
                    return
            self._reap()
            if self._listener.fileno() in ready:
                self._accept()
        os._exit(0)

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if peer_uid(connection) != os.getuid():
                connection.close()
                return
            self._tasks.append(_Task(connection))

    def _receive(self, task: _Task) -> bool:
        """Fork the rank of a task, or kill that of a task that has ended. Returns whether this process is the rank."""
        try:
            data, descriptors, _, _ = socket.recv_fds(task.connection, MESSAGE_BYTES, _TASK_DESCRIPTORS)
        except OSError:
            data, descriptors = b"", []
        if data == END:
            os._exit(0)
        if not data or task.pid:
            task.close()
            _kill(task)
        elif not _is_closed(task.connection):
            answer = self._fork(task, descriptors)
            if answer is None:
                return True
            with suppress(OSError):
                task.connection.send(json.dumps(answer).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _fork(self, task: _Task, descriptors: list[int]) -> dict[str, Any] | None:
        """Fork a rank. Returns the answer to the task, None in the rank."""
        if len(descriptors) < _TASK_DESCRIPTORS:
            return {"error": "its parent process has too many open files"}
        request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        if left := self._left():
            return {"failure": f"process {left} of an earlier attempt survives SIGKILL on this node"}
        env, own = request["env"], self._env
        if differing := [
            name
            for name in sorted(env.keys() | own.keys())
            if name.startswith(_OF_ALL_RANKS) and env.get(name) != own.get(name)
        ]:
            return {"error": f"{differing[0]} differs from that of its parent process"}
        wanted = set(request["affinity"])
        in_rank = False
        try:
            os.sched_setaffinity(0, wanted)
            if os.sched_getaffinity(0) != wanted:
                return {"error": "the step of its parent process has other processors"}
            task.pid = fork_rank(lambda: self._become_rank(request, descriptors), request["ignored"], STOP_SIGNALS)
            if in_rank := task.pid == 0:
                return None
            task.end = os.pidfd_open(task.pid)
        except OSError as error:
            if task.pid:  # the task becomes the rank instead
                _kill(task)
                os.waitpid(task.pid, 0)
                task.pid = 0
            return {"error": f"its parent process cannot fork it: {error.strerror}"}
        finally:
            if not in_rank:
                os.sched_setaffinity(0, self._affinity)
        place = f"task {env.get('SLURM_PROCID')} of attempt {env.get('HPCDIST_ATTEMPT')}"
        with suppress(OSError):  # a full disk is no reason to end
            os.write(1, f"process {os.getpid()} has forked process {task.pid} for {place}\n".encode())
        return {"pid": task.pid}

    def _become_rank(self, request: dict[str, Any], descriptors: list[int]) -> None:
        self._listener.close()
        for task in self._tasks:
            task.close()
            if task.end >= 0:
                os.close(task.end)
        for stream in (1, 2):
            os.dup2(descriptors[stream], stream)
        for descriptor in descriptors:
            os.close(descriptor)
        env = self._environment(request["env"])
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
        set_place(request["cwd"], changed, self._space_bytes)

    def _environment(self, of_task: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a rank: that of its task, with the changes that the imports would make there."""
        env = {**of_task, "SLURM_TASK_PID": str(os.getpid())}
        for name in self._env.keys() | os.environ.keys():
            before, after = self._env.get(name), os.environ.get(name)
            if before != after and of_task.get(name) == before:
                env.pop(name, None)
                env |= {} if after is None else {name: after}
        return env

    def _report_end(self, task: _Task) -> None:
        """Report the end of a rank, whose process id stays valid until its task has ended."""
        found = os.waitid(os.P_PID, task.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return
        os.close(task.end)
        task.end = -1
        status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        if task.is_open:
            with suppress(OSError):
                task.connection.send(json.dumps({"status": status}).encode())

    def _reap(self) -> None:
        """Forget the ranks that have ended and whose tasks have ended as well."""
        for task in [task for task in self._tasks if not task.is_open and task.end < 0]:
            if task.pid:
                os.waitpid(task.pid, 0)
            self._tasks.remove(task)

    def _left(self) -> int:
        """Wait for the end of ranks whose tasks have ended; returns one that survives SIGKILL, or 0."""
        for task in self._tasks:
            # A task that has ended may not have been noticed.
            if task.is_open and task.pid and _is_closed(task.connection):
                task.close()
                _kill(task)
            if not task.is_open and task.end >= 0:
                poll = select.poll()
                poll.register(task.end, select.POLLIN)
                if not poll.poll(KILL_S * 1000):
                    return task.pid
        return 0


def _kill(task: _Task) -> None:
    """Kill a rank and its process group, which may outlive it. The rank need not lead the group yet."""
    for kill in (os.killpg, os.kill) if task.pid else ():
        with suppress(ProcessLookupError):
            kill(task.pid, signal.SIGKILL)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


# The parent process itself.
#
# It imports torch and the modules of the run's trainer once, and then forks a process for each rank, in every attempt
# of the run: a restart costs no import. User code is imported by the ranks alone, because it may start threads, use a
# GPU or read the rank's variables at its import.
#
# On one machine the supervisor (`supervisor/children.py`) is at the other end of standard output, which is a socket.
# When the supervisor closes it or dies, the parent ends. On Slurm there is a parent on each node, and tasks of srun ask
# it for their ranks (`TaskServer`). The parent has no threads and no CUDA context, and never runs code of a
# rank. A rank that is killed does not affect it. When the parent dies, the kernel kills the ranks.

#: Modules that every rank with a trainer imports.
_OF_TRAINERS = (
    "hpcdist.rank.system_metrics",
    "hpcdist.rank.collective_check",
    "hpcdist.rank.context",
    "hpcdist.rank.device",
    "hpcdist.rank.stopping",
    "hpcdist.rank.process_group",
    "hpcdist.rank.telemetry",
)
#: Imports torch._dynamo, as long an import as that of torch. Ranks need it for DistributedDataParallel and optimizers.
_OF_STEPS = "hpcdist.rank.step_timing"
#: Idle time in seconds after which the parent imports `_OF_STEPS` in advance, for the next attempt.
_IDLE_S = 10.0
#: How long the parent retries to read the config, as a rank does.
FILE_TIMEOUT_S = 120.0
#: Maximum size of a request; a larger one would be cut off.
REQUEST_BYTES = 64 * 1024
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
    config = load_run_config(run.config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
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
            data, descriptors, _, _ = socket.recv_fds(control, REQUEST_BYTES, _NUM_DESCRIPTORS)
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
    set_place(request["cwd"], request["env"], processes.SPACE_BYTES)


if __name__ == "__main__":
    main()
