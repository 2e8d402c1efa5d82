"""The shipper's process: started before the ranks, waited for after them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from hpcdist.config.schema import Config
from hpcdist.errors import TrackingError
from hpcdist.run.folder import RunDir
from hpcdist.tracking.uri import is_server, resolve_uri

log = logging.getLogger(__name__)


class ShipperProcess:
    """`hpcdist.tracking.shipper` on one run, as a child of low priority.

    Args:
        uri: where MLflow is, password included; it travels in the environment.
        env: the environment to start from.
        through_queue: stay until `drain`, through all lives of the run's job; else the run's own end is the shipper's.
    """

    def __init__(self, run: RunDir, uri: str, env: Mapping[str, str], *, through_queue: bool = False) -> None:
        flags = ["--through-queue"] if through_queue else []
        with open(run.path / "shipper.log", "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdist.tracking.shipper", str(run.path), *flags],
                env={**env, "HPCDIST_TRACKING_URI": uri, "HPCDIST_SUPERVISOR_PID": str(os.getpid())},
                stdin=subprocess.PIPE if through_queue else subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The ranks come first, also while they are being started; where someone follows a job there are none.
                preexec_fn=None if through_queue else _be_nice,
            )

    def drain(self, timeout_s: float) -> bool:
        """Wait until MLflow has everything of a run that has ended, but not for ever; whether it has."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError), self._process.stdin as pipe:
                pipe.write(b".")
        try:
            return self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


def ship_once(run: RunDir, uri: str, env: Mapping[str, str]) -> str:
    """Let MLflow have what there is of a run; a sentence. A server that is away is no reason to fail.

    In a process of low priority: MLflow's import takes seconds of a processor that the run may just be starting on.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcdist", "sync", str(run.path)],
        env={**env, "HPCDIST_TRACKING_URI": uri},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        preexec_fn=_be_nice,
    )
    text = (done.stdout or done.stderr).strip().removeprefix(f"{run.name}: ").removeprefix("hpcdist: ")
    return f"MLflow: {text}" if done.returncode == 0 else f"not in MLflow yet: {text}"


def ship_now(run: RunDir, config: Config, env: Mapping[str, str]) -> str:
    """Let MLflow show a run that waits in the queue; a sentence."""
    try:
        return ship_once(run, resolve_uri(config, env), env)
    except TrackingError as error:
        return f"not in MLflow yet: {error}"


@contextmanager
def shipping_from_here(run: RunDir, config: Config, env: Mapping[str, str]) -> Iterator[None]:
    """Ship a Slurm run from this host while the block lasts, unless its job does so itself (to a server).

    A block that is left by Ctrl-C leaves the run, which goes on, as it is.
    """
    try:
        uri = resolve_uri(config, env)
    except TrackingError as error:
        log.warning("%s; the run is followed, not shipped from here", error)
        yield
        return
    if is_server(uri):
        ship_now(run, config, env)
        yield
        # The job has shipped its end, unless it died without a word: then there is something left to say.
        ship_now(run, config, env)
        return
    shipper = ShipperProcess(run, uri, env, through_queue=True)
    yield
    shipper.drain(config.tracking.drain_timeout_s)


def _be_nice() -> None:
    os.nice(10)
    # Where the kernel weighs sessions against each other (sched(7), autogroups), a nice value counts inside its own
    # session only: that of the session is another number. Elsewhere there is no such file.
    with suppress(OSError), open("/proc/self/autogroup", "w") as file:
        file.write("10")
