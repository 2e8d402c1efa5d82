"""Requests of srun's tasks to the parent process on their node, which forks a rank for each (`rank/forked_task.py`).

Each connection is one rank: the parent reports the end of the rank, and kills the rank's process group when the task
closes the connection. Ranks belong to the step of the parent, whose processors include those of all ranks on the node.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpcdist.machine.process_record import SPACE
from hpcdist.rank.forked_task import MESSAGE_BYTES, peer_uid
from hpcdist.rank.forking import fork_rank, set_place
from hpcdist.rank.node_parent import END
from hpcdist.rank.stop_signals import STOP_SIGNALS

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
_NUM_DESCRIPTORS = 3


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
            data, descriptors, _, _ = socket.recv_fds(task.connection, MESSAGE_BYTES, _NUM_DESCRIPTORS)
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
        if len(descriptors) < _NUM_DESCRIPTORS:
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
