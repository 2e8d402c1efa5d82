"""The parent process of the ranks on one machine: it imports torch once and forks the ranks of all attempts.

    python -m hpcdist.rank.parent RUN_FOLDER                                started by the supervisor of a local run
    python -m hpcdist.rank.parent RUN_FOLDER LIMIT_S NAME [EARLIER_NAME…]   on a node of a job, as a task of srun

It also imports the modules of the run's trainer, so a restart costs no import. User code is imported by the ranks
alone: it may start threads, use a GPU or read the rank's variables. The parent has no threads and no CUDA context, and
never runs code of a rank. When it dies, the kernel kills the ranks.

`rank/parent_client.py` has the protocol. The supervisor of a local run (`supervisor/children.py`) passes connections on
through the parent's standard output, a socket; the parent ends when the supervisor closes it. On a node, the tasks of
ranks connect to a socket in the run folder, also during the imports. There, SIGALRM ends a parent whose
imports take more than LIMIT_S seconds, and parents with earlier names are ended first, since Slurm cannot end a step
with a lost node.
"""

import ctypes
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
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.loading import load_run_config
from hpcdist.config.schema import Config
from hpcdist.host import retry
from hpcdist.rank import private_network
from hpcdist.rank.parent_client import MESSAGE_BYTES, address, peer_uid
from hpcdist.rank.processes import (
    CANNOT_FORK,
    FILE_TIMEOUT_S,
    IGNORED,
    PARENT_MODULE,
    PR_SET_NAME,
    RANK_MODULE,
    fork_rank,
    leave,
    wait_for_end,
)
from hpcdist.run.folder import RunDir, require_same

#: Modules that every rank with a trainer imports; `context` imports the others.
TRAINER_MODULES = ("hpcdist.rank.system_metrics", "hpcdist.rank.collective_check", "hpcdist.rank.context")
#: Beginnings of the names of variables that may differ between steps, or between tasks of a step: none of the parent's.
STEP_VARIABLES = ("SLURM", "SRUN_", "PMI", "HPCDIST_ATTEMPT", "HPCDIST_MASTER_")


def main() -> None:
    folder, *node = sys.argv[1:]
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    starter = os.getppid()
    if node:
        # Shows where an import hangs, and ends the process.
        faulthandler.register(signal.SIGALRM, chain=True)
        limit_s, name, *earlier = node
        signal.setitimer(signal.ITIMER_REAL, float(limit_s))
        source = _listen(folder, name, earlier)
        for variable in [name for name in os.environ if name.startswith(STEP_VARIABLES)]:
            del os.environ[variable]
    else:
        source = socket.socket(fileno=os.dup(1))
        os.dup2(2, 1)  # the imports may print
    env = dict(os.environ)
    try:
        with retry.patient(FILE_TIMEOUT_S):
            config = _import_modules(RunDir(Path(folder)))
    except BaseException:
        leave(traceback.format_exc(), CANNOT_FORK)
    # Threads do not exist in a forked process, and CUDA fails. Fork handlers end the threads of OpenBLAS, which NumPy
    # starts at its import if OMP_NUM_THREADS > 1.
    if (pid := os.fork()) == 0:
        os._exit(sys.modules["torch"].cuda._is_in_bad_fork())
    if os.waitpid(pid, 0)[1]:
        leave("the imports have initialised CUDA", CANNOT_FORK)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        leave(f"the imports have started {num_threads - 1} threads", CANNOT_FORK)
    if not node and private_network.is_wanted(config):
        private_network.enter()
    if node:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.unregister(signal.SIGALRM)
    ForkServer(source, env, starter, listens=bool(node)).serve()
    # `serve` returns in a forked rank only.
    worker = importlib.import_module(RANK_MODULE)
    sys.argv = [str(worker.__file__), folder]
    sys.orig_argv[:] = [*sys.orig_argv[: sys.orig_argv.index(PARENT_MODULE)], RANK_MODULE, folder]
    worker.main()


def _import_modules(run: RunDir) -> Config:
    gc.disable()  # as in the worker: imported objects are never freed
    for name in ("torch", RANK_MODULE):
        importlib.import_module(name)
    require_same(run.path, os.environ)
    config = load_run_config(run.config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    for name in TRAINER_MODULES:
        importlib.import_module(name)
    if ":" not in config.trainer.target:
        importlib.import_module(f"hpcdist.trainers.{config.trainer.target}.train")
    # The collector would write to all objects, and thereby copy the memory that ranks share with the parent.
    gc.freeze()
    gc.enable()
    return config


#: The message that ends a parent.
_END = b"end"


def _listen(folder: str, name: str, earlier: Collection[str]) -> socket.socket:
    """End earlier parents on this node, and return the socket of this one."""
    for other in earlier:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
            connection.settimeout(10.0)  # for its end: it may be importing torch; a full backlog is an error at once
            with address(folder, other) as place:
                connection.connect(place)
                os.unlink(place)
            connection.send(_END)
            while connection.recv(MESSAGE_BYTES):  # until the other process has ended
                pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with address(folder, name) as place:
            listener.bind(place)
    except OSError as error:  # a file system without sockets
        leave(f"hpcdist: no socket can be created in {folder}/attempts: {error}", CANNOT_FORK)
    listener.listen(1024)  # more connections at once than tasks on a node
    return listener


#: Interval of checks whether the process that started this one is alive: otherwise no process would end this one.
_CHECK_EVERY_S = 5.0
#: Time for the ranks of an earlier attempt to end after SIGKILL.
KILL_S = 10.0
#: Beginnings of the names of variables that a rank cannot have of its own: those that libraries read while they are
#: imported, and those by which Slurm gives a task GPUs of its own. The parent's step has all GPUs of the job there.
_SHARED_VARIABLES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON", "TORCH", "PYTORCH_", "TMPDIR"),
    *("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
#: Descriptors of a request: the request itself, standard output, standard error; perhaps the pipe of a process guard.
_NUM_DESCRIPTORS = 3


@dataclass(eq=False)
class _Rank:
    connection: socket.socket
    pid: int = 0  #: 0 before the rank is forked

    @property
    def is_open(self) -> bool:
        return self.connection.fileno() >= 0

    def end(self) -> None:
        self.connection.close()
        # The process group may outlive the rank, which need not lead it yet.
        for kill in (os.killpg, os.kill) if self.pid else ():
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


@dataclass(eq=False)
class ForkServer:
    """Forks a rank for each request until the process that started this one ends."""

    source: socket.socket  #: passes connections on, or accepts them if `listens`
    env: Mapping[str, str]  #: environment before the imports, which may set variables
    starter: int
    listens: bool

    def __post_init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._affinity = os.sched_getaffinity(0)

    def serve(self) -> None:
        while os.getppid() == self.starter:
            poll = select.poll()
            poll.register(self.source, select.POLLIN)
            for rank in self._ranks:
                if rank.is_open:
                    poll.register(rank.connection, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll(_CHECK_EVERY_S * 1000)}
            for rank in [rank for rank in self._ranks if rank.connection.fileno() in ready]:
                if self._receive(rank):
                    return
            # Until they are reaped here, the process ids of ranks stay valid.
            for rank in [rank for rank in self._ranks if not rank.is_open]:
                if not rank.pid or os.waitpid(rank.pid, os.WNOHANG)[0]:
                    self._ranks.remove(rank)
            if self.source.fileno() in ready:
                self._accept()
        os._exit(0)

    def _accept(self) -> None:
        if self.listens:
            try:
                connection, _ = self.source.accept()
            except OSError as error:
                leave(f"the parent process of the ranks cannot accept a connection: {error.strerror}", CANNOT_FORK)
            if peer_uid(connection) != os.getuid():
                connection.close()
                return
        else:
            data, descriptors, _, _ = socket.recv_fds(self.source, 1, 1)
            if not data:
                os._exit(0)
            if not descriptors:
                if any(rank.pid for rank in self._ranks):
                    return  # this connection is for the next rank, which may never be requested
                leave("the parent process of the ranks has too many open files", CANNOT_FORK)
            connection = socket.socket(fileno=descriptors[0])
        self._ranks.append(_Rank(connection))
        with suppress(OSError):  # closed by the other side
            connection.send(b"{}")

    def _receive(self, rank: _Rank) -> bool:
        """Fork a rank, or end that of a connection that was closed. Returns whether this process is the rank."""
        try:
            data, descriptors, _, _ = socket.recv_fds(rank.connection, MESSAGE_BYTES, _NUM_DESCRIPTORS + 1)
        except OSError:
            data, descriptors = b"", []
        if data == _END:
            os._exit(0)
        if not data or rank.pid:
            rank.end()
        elif not _is_closed(rank.connection):
            if (answer := self._fork(rank, descriptors)) is None:
                return True
            with suppress(OSError):
                rank.connection.send(json.dumps(answer).encode())
        for descriptor in descriptors:
            os.close(descriptor)
        return False

    def _fork(self, rank: _Rank, descriptors: list[int]) -> dict[str, Any] | None:
        """Fork a rank. Returns the answer, None in the rank."""
        if len(descriptors) < _NUM_DESCRIPTORS:
            return {"error": "its parent process has too many open files"}
        request = json.loads(os.pread(descriptors[0], os.fstat(descriptors[0]).st_size, 0))
        for other in self._ranks:
            if other.is_open and other.pid and _is_closed(other.connection):  # which has not been noticed yet
                other.end()
            if not other.is_open and other.pid and not wait_for_end(other.pid, KILL_S):
                return {"failure": f"process {other.pid} of an earlier attempt survives SIGKILL on this node"}
        env, own = request["env"], self.env
        if differing := [
            name
            for name in sorted(env.keys() | own.keys())
            if name.startswith(_SHARED_VARIABLES) and env.get(name) != own.get(name)
        ]:
            return {"error": f"{differing[0]} differs from that of its parent process"}
        wanted = set(request["affinity"])
        in_rank = False
        try:
            os.sched_setaffinity(0, wanted)
            if os.sched_getaffinity(0) != wanted:
                return {"error": "the step of its parent process has other processors"}
            rank.pid = fork_rank(
                lambda: self._become_rank(request, descriptors), request["ignored"], request["blocked"]
            )
            if in_rank := rank.pid == 0:
                return None
        except OSError as error:
            return {"error": f"its parent process cannot fork it: {error.strerror}"}
        finally:
            if not in_rank:
                os.sched_setaffinity(0, self._affinity)
        if self.listens:
            place = f"task {env.get('SLURM_PROCID')} of attempt {env.get('HPCDIST_ATTEMPT')}"
            with suppress(OSError):  # a full disk is no reason to end
                os.write(1, f"process {os.getpid()} has forked process {rank.pid} for {place}\n".encode())
        return {"pid": rank.pid}

    def _become_rank(self, request: dict[str, Any], descriptors: list[int]) -> None:
        """Give this forked process the environment, folder and outputs of a rank that is started by a command."""
        _, output, errors, *guard = descriptors
        for pipe in guard:  # first of all: the guard ends this process if the supervisor has died
            with suppress(BrokenPipeError):
                os.write(pipe, f"+{os.getpid()}\n".encode())
        self.source.close()
        for rank in self._ranks:
            rank.connection.close()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for descriptor in descriptors:
            os.close(descriptor)
        # The environment of a task is complete. That of a local rank lacks what the start of an interpreter adds, as
        # LC_CTYPE. Both lack the changes that the imports would make.
        env = {**request["env"], "SLURM_TASK_PID": str(os.getpid())} if self.listens else {**self.env, **request["env"]}
        for name in self.env.keys() | os.environ.keys():
            before, after = self.env.get(name), os.environ.get(name)
            if before != after and env.get(name) == before:
                env.pop(name, None)
                env |= {} if after is None else {name: after}
        for name in os.environ.keys() - env.keys():
            del os.environ[name]
        os.environ.update(env)
        os.chdir(request["cwd"])
        rank_number = env["SLURM_PROCID" if self.listens else "HPCDIST_RANK"]
        # As `ps` and `pkill` show it, and `shown_place` reads it: the kernel allows 15 characters.
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{rank_number}/{env['HPCDIST_ATTEMPT']}".encode())
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed()  # Python's `random` does this itself


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main()
