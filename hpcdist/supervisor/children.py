"""Child processes of the supervisor: the guard, which kills the ranks if the supervisor dies, and the shipper."""

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.errors import TrackingError
from hpcdist.host.files import short_path
from hpcdist.host.log_files import last_lines, say
from hpcdist.run.folder import IDENTITY_VARIABLE, RunDir, identity
from hpcdist.tracking.uri import is_server, resolve_uri

log = logging.getLogger(__name__)

#: Program of the guard. It reads `+pgid` and `-pgid` from a pipe. The supervisor holds the other end of this pipe, and
#: each child holds it until it has registered. When the supervisor dies, the pipe ends, and the guard kills all
#: registered process groups, grandchildren included.
_GUARD = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)  # Slurm sends SIGTERM to everything that a job has started
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
#: A child registers its own group with the guard, through its standard input, before it executes the command. If the
#: supervisor did this after the start, a supervisor killed in between would leave an orphan. The child then closes the
#: pipe. The write is in a subshell, because SIGPIPE kills the writer if the guard is dead.
_REGISTER_AND_EXEC = '(echo "+$$" >&0); exec "$@" </dev/null'
#: For a child with a socket in both directions as standard output.
_REGISTER_AND_CONNECT = '(echo "+$$" >&0); exec "$@" <&1'


@contextmanager
def _output(path: Path) -> Iterator[int]:
    """Open a file for the output of a child. An error at its close must not lose the child: nothing is written here."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        yield file
    finally:
        with suppress(OSError):
            os.close(file)


class Guard:
    """Starts children as leaders of process groups, which it kills when this process dies."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        output: Path,
        channel: socket.socket | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a child in a new session.

        Args:
            output: file for its standard output and errors.
            channel: is its standard input and output instead, if given.
        """
        with _output(output) as file:
            if channel is None:
                script, stdout = _REGISTER_AND_EXEC, file
            else:
                script, stdout = _REGISTER_AND_CONNECT, channel.fileno()
            return subprocess.Popen(
                ["/bin/sh", "-c", script, "sh", *command],
                env=env,
                cwd=cwd,
                stdin=self._pipe,
                stdout=stdout,
                stderr=file,
                start_new_session=True,
            )

    def register(self, group: int) -> None:
        """Let the guard kill a process group that a child of this process has created."""
        self._write(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Unregister the process group of an ended child, because the kernel may reuse its id."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        # A run continues without its guard.
        with suppress(BrokenPipeError):
            self._pipe.write(line)
            self._pipe.flush()

    def close(self) -> None:
        """End the guard, which first kills the groups that are still registered."""
        with suppress(BrokenPipeError):
            self._pipe.close()
        self._process.wait()


# The shipper process, which starts before the ranks and ends after them.

#: Time after which an upload is noted.
NOTE_AFTER_S = 1.0
#: Time that a script's reader of metrics has for the rest at the end of a run.
READ_WITHIN_S = 30.0
#: Limit of its warnings that are reported.
MAX_WARNINGS = 5
#: The beginning of a warning in its log, see `log_files.configure`.
_WARNING = re.compile(r"\d\d:\d\d:\d\d (WARNING|ERROR) ")
#: Difference between the nice values of the shipper and of the ranks: with it, the shipper takes little processor time.
_NICER_BY = 10
#: Highest nice value, that of the lowest priority.
_MAX_NICE = 19


class ShipperProcess:
    """`hpcdist.tracking.shipper` for one run, as a child process with low priority; it gets the URI in its environment.

    With `through_queue` it runs until `drain`, through all restarts of the run's job; otherwise until the run ends.
    """

    def __init__(self, run: RunDir, uri: str, env: Mapping[str, str], *, through_queue: bool = False) -> None:
        flags = ["--through-queue"] if through_queue else []
        with _output(run.path / "shipper.log") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdist.tracking.shipper", str(run.path), *flags],
                env={**env, "HPCDIST_TRACKING_URI": uri, "HPCDIST_SUPERVISOR_PID": str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._has_low_priority = not through_queue  # `follow` runs on a machine without ranks
        if self._has_low_priority:
            _set_nice(self._process.pid, _low_priority())

    def drain(self, timeout_s: float, note: Callable[[str], None] = lambda text: None) -> bool:
        """Wait until MLflow has all records of an ended run, and return whether it has them; then end the shipper.

        Args:
            timeout_s: longest time to wait.
            note: is called with a text if the upload takes longer than NOTE_AFTER_S.
        """
        if self._has_low_priority:
            _set_nice(self._process.pid, 0)  # the ranks have ended; on a busy machine low priority takes minutes
        if self._process.stdin is not None:
            # The shipper stops waiting for new records when it reads a byte.
            with suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(b".")
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(min(NOTE_AFTER_S, timeout_s)) == 0
        if timeout_s > NOTE_AFTER_S:
            note("uploading to MLflow")
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout_s - NOTE_AFTER_S) == 0
        self._process.kill()
        self._process.wait()
        return False


class MetricsReader:
    """`hpcdist.tracking.script_metrics` for one run, as a child process with low priority."""

    def __init__(self, run: RunDir, env: Mapping[str, str]) -> None:
        self._run = run
        self._env = env
        self._log = run.path / "script-metrics.log"
        self._process = self._start()
        _set_nice(self._process.pid, _low_priority())

    def _start(self) -> subprocess.Popen[bytes]:
        with _output(self._log) as file:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdist.tracking.script_metrics", str(self._run.path)],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self) -> list[str]:
        """Let the process read the rest, after all ranks have ended; another one if it was killed.

        Returns its warnings, of at most MAX_WARNINGS lines. Raises OSError.
        """
        _set_nice(self._process.pid, 0)
        try:
            code = self._end()
            if code < 0:
                self._process = self._start()
                code = self._end()
        except subprocess.TimeoutExpired:
            self.kill()
            return [f"not all metrics of the script were read within {READ_WITHIN_S:g} s (see {self._log})"]
        warnings = []
        for _, line in last_lines(self._log, MAX_WARNINGS):
            warning = _WARNING.match(line)
            if warning is not None:
                warnings.append(line[warning.end() :])
        if code and not warnings:
            warnings.append(f"the process that reads the metrics of the script has failed (see {self._log})")
        return warnings

    def _end(self) -> int:
        """Send the byte after which the process reads the rest and ends. Returns its exit code."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b".")
        return self._process.wait(READ_WITHIN_S)

    def kill(self) -> None:
        """End the process at once, such as when another supervisor holds the run."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()


def ship_now(run: RunDir, config: Config, env: Mapping[str, str]) -> str:
    """Ship the records of a run in a child process with normal priority.

    Returns a sentence about the result, such as `not in MLflow yet: …`. Does not raise if the server is unavailable.
    """
    try:
        env = {**env, "HPCDIST_TRACKING_URI": resolve_uri(config, env)}
    except TrackingError as error:
        return f"not in MLflow yet: {error}"
    command = [sys.executable, "-P", "-m", "hpcdist", "sync", str(run.path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, start_new_session=True)
    text = (done.stdout or done.stderr).strip().removeprefix(f"{run.name}: ").removeprefix("hpcdist: ")
    if done.returncode != 0:
        return f"not in MLflow yet: {text}"
    return f"MLflow: {text}"


def ship_in_background(runs: Sequence[RunDir], config: Config, env: Mapping[str, str]) -> str:
    """Ship the records of new runs in a process that outlives this one.

    Returns a sentence about it. A failure is visible only in `sync.log` of the first run; the job or a later
    `hpcdist sync` then ships the rest.
    """
    try:
        env = {**env, "HPCDIST_TRACKING_URI": resolve_uri(config, env)}
    except TrackingError as error:
        return f"not in MLflow yet: {error}"
    log_file = runs[0].path / "sync.log"
    with _output(log_file) as file:
        subprocess.Popen(
            [sys.executable, "-P", "-m", "hpcdist", "sync", *(str(run.path) for run in runs)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return f"uploading to MLflow in the background (see {short_path(log_file)})"


@contextmanager
def shipping_from_here(run: RunDir, config: Config, env: Mapping[str, str]) -> Iterator[None]:
    """Ship a Slurm run from this host inside the block, unless its job ships to a server itself."""
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
    shipper = ShipperProcess(run, uri, {**env, IDENTITY_VARIABLE: identity(run.path)}, through_queue=True)
    drain_s = 0.0
    try:
        yield
        drain_s = config.tracking.drain_timeout_s
    finally:
        shipper.drain(drain_s, say)


def _low_priority() -> int:
    return min(os.nice(0) + _NICER_BY, _MAX_NICE)


def _set_nice(pid: int, value: int) -> None:
    """Set the nice value of a process that leads a session, and of the session, if the user may do that."""
    with suppress(PermissionError, ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, value)
    # With autogroups, see sched(7), a nice value counts inside its session only, and the session has its own value,
    # which its user may also lower. Without autogroups there is no such file.
    with suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as file:
        file.write(str(value))
