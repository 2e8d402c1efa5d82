"""The parent process of ranks, which outlives the attempts: it imports torch once and forks each rank.

    python -m hpcdist.rank.parent RUN_FOLDER all|task fork|execute LIMIT_S COMMAND…

On one machine a single parent starts all ranks. In a job it is a task of srun and starts the rank of this task, inside
the task's container and with its processors and GPUs. With `execute` each rank executes COMMAND, as for scripts, which
import torch themselves; so do ranks of a parent that cannot be forked safely after its imports. Imports that take more
than LIMIT_S seconds print their stack.

Requests are lines of JSON on standard input, reports are lines with `MARK` and JSON on standard output, which srun
passes on in both directions (`supervisor/parents.py` is the other side):

    {"start": 2, "rank": 0, "env": {…}}      start a rank of attempt 2; in a job without `rank`: each parent has one
    {"signal": 15}                           send a signal to the ranks that run
    {"end": 2}                               kill the ranks of attempt 2 and all their children

    {"parent": 0, "ready": "n1", "problem": ""}             waits for requests on this host; why it does not fork
    {"parent": 0, "rank": 0, "attempt": 2, "pid": 9}        has started a rank
    {"parent": 0, "rank": 0, "attempt": 2, "error": "…"}    cannot start a rank
    {"parent": 0, "rank": 0, "attempt": 2, "code": -9, "memory_kill": null}
                                                            a rank has ended; a negative code is a signal
    {"parent": 0, "over": 2}                                no process of attempt 2 is left

`parent` is the rank of a task, and null on one machine. `memory_kill` has the fields of `MemoryKill` if the kernel has
killed the rank, or another process of its control group, since the rank was started; else it is null.

The parent imports the modules of the run's trainer, so a restart costs no import. User code is imported by the ranks
alone: it may start threads, use a GPU or read the rank's variables. The parent has no threads and no CUDA context, and
never runs code of a rank. It ends after the end of its requests, in a job not before its rank; when it dies, the kernel
kills the ranks.
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
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpcdist.errors import HpcdistError
from hpcdist.host import retry
from hpcdist.host.cgroups import MemoryCounts, memory_counts, memory_kill
from hpcdist.rank.processes import (
    FILE_TIMEOUT_S,
    IGNORED,
    KILL_S,
    MARK,
    PARENT_MODULE,
    PR_SET_NAME,
    RANK_MODULE,
    STOP_SIGNALS,
    fork_rank,
)
from hpcdist.run.folder import RunDir, require_same

if TYPE_CHECKING:
    from hpcdist.config.schema import Config

#: Modules that every rank with a trainer imports; `context` imports the others.
TRAINER_MODULES = ("hpcdist.rank.system_metrics", "hpcdist.rank.collective_check", "hpcdist.rank.context")
#: Interval of the checks whether the processes of an attempt have ended.
_END_POLL_S = 0.01
#: At a lack of memory the kernel kills processes with a higher score first: a rank, not its parent.
_OOM_SCORE_FILE = Path("/proc/self/oom_score_adj")
_RANK_OOM_SCORE = 300  #: in addition to that of the parent
_MAX_OOM_SCORE = 1000  #: of Linux
#: Characters of an error in a report: srun splits lines after 1,024 bytes, and JSON makes a text longer.
_MAX_TEXT = 500
#: prctl(2): orphaned descendants become children of this process.
_PR_SET_CHILD_SUBREAPER = 36
_WITHOUT_HANDLER = {signal.SIGKILL, signal.SIGSTOP}
#: Slurm sends them to all processes of a job, so also to the ranks.
_JOB_CONTROL = {signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
#: They are about faults of the process that gets them.
_FAULTS = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGABRT,
    signal.SIGTRAP,
    signal.SIGSYS,
}
#: They are about pipes and children of the process that gets them.
_PIPES_AND_CHILDREN = {signal.SIGPIPE, signal.SIGCHLD}
#: Signals that a task of srun does not pass on to its rank. SIGTERM, which Slurm sends to tasks, is passed on.
_NOT_PASSED_ON = _WITHOUT_HANDLER | _JOB_CONTROL | _FAULTS | _PIPES_AND_CHILDREN


def main() -> None:
    """Serve requests; in a forked rank, run the worker. The arguments are in the docstring of this module."""
    folder, scope, how, limit_s, *command = sys.argv[1:]
    own_rank = None
    if scope == "task":
        own_rank = int(os.environ["SLURM_PROCID"])
    parent = Parent(RunDir(Path(folder)), own_rank)
    problem = ""
    if how == "fork":
        problem = prepare_to_fork(parent.run, float(limit_s), is_local=own_rank is None)
        parent.forks = not problem
    rank_env = parent.serve(problem)
    # Only a rank gets here.
    if not parent.forks:
        os.execvpe(command[0], command, {**parent.env, **rank_env})
    os.environ.update(rank_env)
    worker = importlib.import_module(RANK_MODULE)
    # As if the interpreter had been started with the rank's command, `python … -m MODULE FOLDER`: user code may read
    # both.
    sys.argv = [str(worker.__file__), folder]
    python_words = sys.orig_argv[: sys.orig_argv.index(PARENT_MODULE)]
    sys.orig_argv[:] = [*python_words, RANK_MODULE, folder]
    worker.main()


def prepare_to_fork(run: RunDir, limit_s: float, *, is_local: bool) -> str:
    """Import the modules that the ranks need.

    Returns why this process must not be forked into ranks, and an empty string if it may.
    """
    # Not above: the parent of a script stays small.
    from hpcdist.rank import private_network

    faulthandler.dump_traceback_later(limit_s)
    try:
        with retry.patient(FILE_TIMEOUT_S):
            config = _import_modules(run)
    except BaseException as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
    finally:
        faulthandler.cancel_dump_traceback_later()
    # CUDA fails in a forked process if its parent has initialised it. torch knows that in a fork only, so a trial fork
    # reports it by its exit code.
    pid = os.fork()
    if pid == 0:
        os._exit(int(sys.modules["torch"].cuda._is_in_bad_fork()))
    _, status = os.waitpid(pid, 0)
    if status != 0:
        return "the imports have initialised CUDA"
    # Threads do not exist in a forked process. NumPy starts threads of OpenBLAS at its import if OMP_NUM_THREADS > 1,
    # but OpenBLAS has ended them before the fork above.
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        return f"the imports have started {num_threads - 1} threads"
    if is_local and private_network.is_wanted(config):
        private_network.enter()
    return ""


def _import_modules(run: RunDir) -> "Config":
    from hpcdist.config.loading import load_run_config

    gc.disable()  # a collection during the imports takes time and frees nothing: imported objects stay
    for name in ("torch", RANK_MODULE):
        importlib.import_module(name)
    require_same(run.path, os.environ)
    # An address with a password is not kept in the config, nor passed to ranks in a container, which do not need it.
    config = load_run_config(run.config, [], {"HPCDIST_TRACKING_URI": "", **os.environ})
    for name in TRAINER_MODULES:
        importlib.import_module(name)
    if ":" not in config.trainer.target:
        importlib.import_module(f"hpcdist.trainers.{config.trainer.target}.train")
    # The collector would write to all objects, and thereby copy the memory that ranks share with the parent.
    gc.freeze()
    gc.enable()
    return config


@dataclass(eq=False)
class _Rank:
    """A rank that this process has started."""

    number: int
    attempt: int
    pid: int
    descriptor: int  #: of the process
    counts_before: Mapping[Path, MemoryCounts]  #: before the start of the rank; see `memory_counts`
    has_ended: bool = False


class Parent:
    """Starts ranks on request, and reports how they end.

    Args:
        own_rank: in a job, the rank that this process starts; None if it starts all ranks of a run.
    """

    def __init__(self, run: RunDir, own_rank: int | None) -> None:
        self.run = run
        self.own_rank = own_rank
        self.forks = False  #: whether a rank is a fork of this process, or else a new interpreter
        self.env = dict(os.environ)  #: before the imports, which may set variables; of ranks that are not forked
        self._ranks: dict[int, _Rank] = {}
        self._rest = b""  #: beginning of a request that has not arrived completely
        self._requests_have_ended = False  #: whether no request follows
        self._waiting_signals: list[int] = []
        self._affinity = os.sched_getaffinity(0)  #: before the imports, which may change it
        #: Children of the shell that has become this process, such as the FUSE daemons of its container's image.
        self._children_before = frozenset(_children())
        self._requests = os.dup(0)
        self._reports = os.dup(1)
        # From now on, output of the imports goes to standard error, and standard input is empty, as it is for ranks.
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if own_rank is None:
            # A terminal and a job send these to all processes; the supervisor stops the ranks.
            for number in IGNORED:
                signal.signal(number, signal.SIG_IGN)
        else:
            # For Slurm this process is the rank.
            for number in signal.valid_signals() - _NOT_PASSED_ON:
                signal.signal(number, self._pass_on)

    def serve(self, problem: str) -> dict[str, str]:
        """Obey requests until their end, which ends the process.

        The call returns only in a process that has become a rank: the environment variables that the rank has in
        addition to this process.
        """
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._report(ready=host, problem=problem)
        while True:
            running = [rank for rank in self._ranks.values() if not rank.has_ended]
            if self._requests_have_ended and not running:
                os._exit(0)
            poll = select.poll()
            if not self._requests_have_ended:
                poll.register(self._requests, select.POLLIN)
            for rank in running:
                poll.register(rank.descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            for rank in running:
                if rank.descriptor in ready:
                    self._note_end(rank)
            if self._requests not in ready:
                continue
            for request in self._read_requests():
                if "start" in request:
                    env = self._start(request)
                    if env is not None:
                        return env
                elif "signal" in request:
                    self._signal(request["signal"])
                elif "end" in request:
                    self._end(request["end"])

    def _report(self, **report: Any) -> None:
        line = f"{MARK}{json.dumps({'parent': self.own_rank, **report})}\n"
        # Without a supervisor the end of the requests follows.
        with suppress(OSError):
            os.write(self._reports, line.encode())

    def _read_requests(self) -> Iterator[dict[str, Any]]:
        received = os.read(self._requests, 1 << 16)
        if not received:
            self._requests_have_ended = True
            # On one machine the supervisor has ended. In a job, slurmstepd may have been killed: the rank continues,
            # and the supervisor finds out from its files that it has ended.
            if self.own_rank is None:
                os._exit(0)
            return
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            yield json.loads(line)

    def _start(self, request: Mapping[str, Any]) -> dict[str, str] | None:
        """Start a rank. Returns None, and in the rank its environment variables; see `serve`."""
        number = request.get("rank", self.own_rank)
        attempt = self.run.attempt(request["start"])
        place = {"rank": number, "attempt": attempt.number}
        for rank in self._ranks.values():
            if rank.attempt != attempt.number:  # `_end` forgets the ranks that it could kill
                error = f"process {rank.pid} of attempt {rank.attempt} survives SIGKILL on this node"
                self._report(**place, error=error)
                return None
        # Slurm sends SIGUSR2 ahead of the time limit: a rank without a handler must not die of it.
        ignored = []
        if self.own_rank is not None:
            ignored = [signal.SIGUSR2]
        # A rank with a trainer unblocks these once it has handlers.
        blocked = STOP_SIGNALS if self.forks else ()
        counts_before = memory_counts()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            # If another folder were in the place of the run's, a new interpreter would import code from it.
            require_same(self.run.path, self.env)
            with retry.patient(FILE_TIMEOUT_S):
                output = retry.retry(lambda: os.open(attempt.log(number), flags, 0o666), attempt.path)
            pid = fork_rank(lambda: self._become_rank(number, attempt.number, output), ignored, blocked)
        except (OSError, HpcdistError) as error:
            self._report(**place, error=f"its parent process cannot start it: {error}"[:_MAX_TEXT])
            return None
        if pid == 0:
            env = dict(request["env"])
            if self.own_rank is not None:  # Slurm has set it to the process id of the parent
                env["SLURM_TASK_PID"] = str(os.getpid())
            return env
        _close(output)
        rank = _Rank(number, attempt.number, pid, os.pidfd_open(pid), counts_before)
        self._ranks[number] = rank
        self._report(**place, pid=pid)
        waiting = self._waiting_signals
        self._waiting_signals = []
        for signal_number in waiting:
            self._signal(signal_number)
        return None

    def _become_rank(self, number: int, attempt: int, output: int) -> None:
        """Give this forked process the output, name and signals of a rank, and nothing else of its parent.

        Args:
            output: descriptor of the rank's log.
        """
        os.close(self._requests)
        os.close(self._reports)
        for rank in self._ranks.values():
            os.close(rank.descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        _close(output)
        if self.own_rank is not None:
            for signal_number in signal.valid_signals() - _NOT_PASSED_ON:
                signal.signal(signal_number, signal.SIG_DFL)
        os.sched_setaffinity(0, self._affinity)
        with suppress(OSError):
            score = int(_OOM_SCORE_FILE.read_text()) + _RANK_OOM_SCORE
            _OOM_SCORE_FILE.write_text(str(min(_MAX_OOM_SCORE, score)))
        # As `ps` and `pkill` show it, and `shown_place` reads it: the kernel allows 15 characters.
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{number}/{attempt}".encode())
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed()  # Python's `random` does this itself

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal to this task: send it to its rank, or keep it for the next one."""
        if any(not rank.has_ended for rank in self._ranks.values()):
            self._signal(number)
        else:
            # Such as the signal of a preemption between two attempts.
            self._waiting_signals.append(number)

    def _signal(self, number: int) -> None:
        for rank in self._ranks.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank.descriptor, number)

    def _note_end(self, rank: _Rank) -> None:
        """Report how a rank has ended."""
        # WNOWAIT leaves it a zombie: its number, which is that of its process group, is not given to another process.
        ended = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "the process has ended"
        code = ended.si_status
        if ended.si_code != os.CLD_EXITED:
            code = -ended.si_status  # the number of a signal
        rank.has_ended = True
        kill = memory_kill(rank.counts_before)
        fields = asdict(kill) if kill is not None else None
        self._report(rank=rank.number, attempt=rank.attempt, code=code, memory_kill=fields)

    def _end(self, attempt: int) -> None:
        """Kill the ranks and their descendants, and report that none is left; no report if one survives."""
        until = time.monotonic() + KILL_S
        while time.monotonic() < until:
            for rank in self._ranks.values():
                # The group holds its children too, which may outlive it. A rank that has just been forked has no group.
                for kill in (os.killpg, os.kill):
                    with suppress(ProcessLookupError):
                        kill(rank.pid, signal.SIGKILL)
            for child in self._descendants():
                os.kill(child, signal.SIGKILL)  # never fails: a child that has ended is a zombie until it is reaped
            self._reap()
            if not self._ranks and not self._descendants():
                self._report(over=attempt)
                return
            time.sleep(_END_POLL_S)

    def _reap(self) -> None:
        """Forget the ranks that have ended, and orphans of ranks, which are children of this process."""
        for rank in list(self._ranks.values()):
            if not rank.has_ended and _is_readable(rank.descriptor):
                self._note_end(rank)
            if rank.has_ended:
                os.waitpid(rank.pid, 0)
                os.close(rank.descriptor)
                del self._ranks[rank.number]
        pids = {rank.pid for rank in self._ranks.values()}
        for orphan in self._descendants():
            if orphan not in pids:
                os.waitpid(orphan, os.WNOHANG)

    def _descendants(self) -> list[int]:
        """Return the ranks, and the processes that ended ranks have left behind: all are children of this process."""
        return [pid for pid in _children() if pid not in self._children_before]


def _close(descriptor: int) -> None:
    """Close a file to which this process has written nothing, so that an error of the file system does not matter."""
    with suppress(OSError):
        os.close(descriptor)


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _children() -> list[int]:
    """Return the child processes of this process, which has a single thread; zombies included."""
    try:
        pids = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        return []
    return [int(pid) for pid in pids]


if __name__ == "__main__":
    main()
