"""Processes that the supervisor starts besides ranks: the one that forks ranks, and the shipper, which commands that
follow a Slurm run start as well.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.host.log_files import last_lines, say
from hpcdist.rank.processes import SPACE, SPACE_BYTES
from hpcdist.run.folder import VARIABLE, RunDir, identity
from hpcdist.supervisor.launcher import Guard
from hpcdist.supervisor.plan import parent_command
from hpcdist.tracking.points import upload_progress
from hpcdist.tracking.uri import is_server, resolve_uri

# The supervisor's side of the process that forks ranks (`rank/parent.py`).

log = logging.getLogger(__name__)

_MESSAGE_BYTES = 64 * 1024
#: Maximum size of quoted output.
_SHOWN_BYTES = 200
#: Time for the parent to end after its socket is closed.
_LEAVE_S = 5.0


class ParentEnded(Exception):
    """The parent process has ended or does not answer. The text is the reason, if it is known."""


class RankParent:
    """A parent process of ranks, which is started at once and imports torch.

    Args:
        env: environment of the parent, and of ranks except for the variables given to `fork`.
        cwd: working directory.
        output: file for the output of the parent.
        init_timeout_s: time limit in seconds for the imports, and for the answer to a request, which may import, too.
    """

    def __init__(
        self, run: Path, guard: Guard, *, env: Mapping[str, str], cwd: Path, output: Path, init_timeout_s: float
    ) -> None:
        self._guard = guard
        self._env = dict(env)
        self._cwd = cwd
        #: File with the output of the parent.
        self.output = output
        #: Whether the imports have succeeded.
        self.was_ready = False
        #: Whether later attempts may use it, or a successor.
        self.is_usable = True
        self._init_timeout_s = init_timeout_s
        self._ready_by = time.monotonic() + init_timeout_s
        self._output_begin = output.stat().st_size if output.exists() else 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                space = {SPACE: " " * SPACE_BYTES}
                command = parent_command(run)
                self._process = guard.start(command, env={**env, **space}, cwd=cwd, output=output, control=theirs)
        except BaseException:
            self._control.close()
            raise

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Wait until the parent has imported everything, and return whether it has.

        Raises ParentEnded if it cannot fork, or has not imported everything in time.
        """
        if self.was_ready:
            return True
        if self._readable(min(timeout_s, max(0.0, self._ready_by - time.monotonic()))):
            self._receive()
            self.was_ready = True
        elif time.monotonic() >= self._ready_by:
            self._kill(f"it was not ready within launch.init_timeout_s={self._init_timeout_s:g} s")
        return self.was_ready

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        return self._process.poll() is None

    def fork(self, env: Mapping[str, str], log: int) -> ForkedRank:
        """Fork a rank.

        Args:
            env: complete environment, which may differ from the parent's in a few variables.
            log: descriptor of the file for standard output and error.

        Raises:
            OSError: the process cannot be created.
            ParentEnded: the parent does not answer.
        """
        own = {name: value for name, value in env.items() if self._env.get(name) != value}
        answer = self._request({"env": own, "cwd": str(self._cwd)}, [self._guard.fileno(), log])
        if "error" in answer:
            raise OSError(answer["error"], os.strerror(answer["error"]))
        return ForkedRank(self, answer["pid"])

    def reap(self, pid: int) -> None:
        """Let the parent reap a rank that has ended. There is no answer to wait for, since the parent may import."""
        with suppress(OSError):
            self._control.send(json.dumps({"reap": pid}).encode(), socket.MSG_DONTWAIT)

    def last_words(self) -> str:
        """Return the last line that this parent has printed, if any."""
        with suppress(OSError):
            if self.output.stat().st_size > self._output_begin:  # the file has the output of earlier ones, too
                return "".join(text for _, text in last_lines(self.output, 1)).strip()
        return ""

    def close(self) -> None:
        """End the parent, and with it the ranks."""
        self._control.close()
        try:
            self._process.wait(_LEAVE_S if self.was_ready else 0)
        except subprocess.TimeoutExpired:  # it still imports, or is stopped
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._guard.forget(self._process.pid)

    def _request(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Mapping[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except OSError as error:
            raise ParentEnded from error
        if not self._readable(self._init_timeout_s):
            self._kill(f"it did not fork a rank within launch.init_timeout_s={self._init_timeout_s:g} s")
        return self._receive()

    def _kill(self, reason: str) -> NoReturn:
        """Kill the parent, and with it its ranks: they must not run unobserved."""
        log.warning("the parent process of the ranks is killed: %s", reason)
        self._process.kill()
        raise ParentEnded(reason)

    def _readable(self, timeout_s: float) -> bool:
        return wait_readable(self._control.fileno(), timeout_s)

    def _receive(self) -> Mapping[str, Any]:
        try:
            data = self._control.recv(_MESSAGE_BYTES)
        except OSError as error:
            raise ParentEnded from error
        if not data:
            raise ParentEnded
        try:
            answer = json.loads(data)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            self._kill(f"the start of its interpreter prints {data[:_SHOWN_BYTES].decode(errors='replace')!r}")
        return answer


class ForkedRank:
    """A rank that the parent has forked, with the interface of `subprocess.Popen`.

    The parent reaps a rank only when asked to, so that its process id stays valid until then.
    """

    def __init__(self, parent: RankParent, pid: int) -> None:
        self._parent = parent
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._wait(0.0)

    def kill(self) -> None:
        """Send SIGKILL to the process, which need not lead its process group yet."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit code."""
        code = self._wait(None)
        assert code is not None, "there was no time limit"
        return code

    def _wait(self, timeout_s: float | None) -> int | None:
        if self._code is None and _wait_for_end(self.pid, timeout_s):
            self._code = _code_of_zombie(self.pid)
            self._parent.reap(self.pid)
        return self._code


def _wait_for_end(pid: int, timeout_s: float | None) -> bool:
    """Wait for the end of a process that need not be a child; return whether it has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return wait_readable(descriptor, timeout_s)
    finally:
        os.close(descriptor)


def _code_of_zombie(pid: int) -> int:
    """Return the exit code of a process that has ended, negative for a signal."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -signal.SIGKILL  # by the kernel, at the death of the parent; another process has reaped it
    # Field 52. The second one, the name in parentheses, may contain spaces.
    return os.waitstatus_to_exitcode(int(stat.rpartition(")")[2].split()[49]))


def wait_readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable, without a time limit if `timeout_s` is None; return whether it is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


# The shipper process, which starts before the ranks and ends after them.

#: Time after which an upload is noted, and interval of further notes.
FIRST_NOTE_S = 1.0
NOTE_EVERY_S = 5.0


class ShipperProcess:
    """`hpcdist.tracking.shipper` for one run, as a child process with low priority.

    Args:
        uri: tracking URI, password included; passed in the environment.
        env: environment of the process.
        through_queue: run until `drain`, through all restarts of the run's job; otherwise until the run ends.
    """

    def __init__(self, run: RunDir, uri: str, env: Mapping[str, str], *, through_queue: bool = False) -> None:
        self._run = run
        flags = ["--through-queue"] if through_queue else []
        with open(run.path / "shipper.log", "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdist.tracking.shipper", str(run.path), *flags],
                env={**env, "HPCDIST_TRACKING_URI": uri, "HPCDIST_SUPERVISOR_PID": str(os.getpid())},
                stdin=subprocess.PIPE if through_queue else subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Low priority on machines with ranks; `follow` runs on a machine without any.
                preexec_fn=None if through_queue else _be_nice,
            )

    def drain(self, timeout_s: float, note: Callable[[str], None] = lambda text: None) -> bool:
        """Wait until MLflow has all records of an ended run, at most `timeout_s`. Returns whether it has.

        Args:
            note: called with the progress of a longer upload.
        """
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(b".")
        else:
            _be_normal(self._process.pid)  # the ranks have ended; on a busy machine low priority takes minutes
        until, pause_s, shown = time.monotonic() + timeout_s, FIRST_NOTE_S, ""
        while True:
            left_s = max(0.0, until - time.monotonic())
            try:
                return self._process.wait(min(pause_s, left_s)) == 0
            except subprocess.TimeoutExpired:
                if left_s <= pause_s:
                    self._process.kill()
                    self._process.wait()
                    return False
            with suppress(RunFolderError, OSError):
                if (text := upload_progress(self._run)) != shown:
                    note(shown := text)
            pause_s = NOTE_EVERY_S


def ship_now(run: RunDir, config: Config, env: Mapping[str, str]) -> str:
    """Ship the current records of a run in a child process, and return a sentence on the result.

    The process has normal priority, because the caller waits for it. An unavailable server is not an error.
    """
    try:
        uri = resolve_uri(config, env)
    except TrackingError as error:
        return f"not in MLflow yet: {error}"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcdist", "sync", str(run.path)],
        env={**env, "HPCDIST_TRACKING_URI": uri},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    text = (done.stdout or done.stderr).strip().removeprefix(f"{run.name}: ").removeprefix("hpcdist: ")
    return f"MLflow: {text}" if done.returncode == 0 else f"not in MLflow yet: {text}"


@contextmanager
def shipping_from_here(run: RunDir, config: Config, env: Mapping[str, str]) -> Iterator[None]:
    """Ship a Slurm run from this host inside the block, unless its job ships to a server itself.

    Ctrl-C in the block does not affect the run.
    """
    try:
        uri = resolve_uri(config, env)
    except TrackingError as error:
        log.warning("%s; the run is followed, but not shipped from here", error)
        yield
        return
    if is_server(uri):
        ship_now(run, config, env)
        yield
        # The job has shipped its end, unless its supervisor died.
        ship_now(run, config, env)
        return
    shipper = ShipperProcess(run, uri, {**env, VARIABLE: identity(run.path)}, through_queue=True)
    yield
    shipper.drain(config.tracking.drain_timeout_s, say)


def _be_nice() -> None:
    os.nice(10)
    _set_nice_of_session("self", 10)


def _be_normal(pid: int) -> None:
    """End the low priority of the session of process `pid`, and of the process itself where the user may do that."""
    with suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, 0)
    _set_nice_of_session(pid, 0)


def _set_nice_of_session(pid: int | str, value: int) -> None:
    # With autogroups, see sched(7), a nice value counts inside its session only, and the session has its own value,
    # which its user may also lower. Without autogroups there is no such file.
    with suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as file:
        file.write(str(value))
