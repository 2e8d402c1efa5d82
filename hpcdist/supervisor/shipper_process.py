"""The shipper process, which starts before the ranks and ends after them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.logs import say
from hpcdist.run.folder import RunDir
from hpcdist.run.folder_identity import VARIABLE, identity
from hpcdist.tracking.client.uri import is_server, resolve_uri
from hpcdist.tracking.journal.shipping_state import upload_progress

log = logging.getLogger(__name__)
#: Time after which an upload is noted, and interval of further notes.
FIRST_NOTE_S = 1.0
NOTE_EVERY_S = 5.0


class ShipperProcess:
    """`hpcdist.tracking.shipping.shipper` for one run, as a child process with low priority.

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
                [sys.executable, "-P", "-m", "hpcdist.tracking.shipping.shipper", str(run.path), *flags],
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
