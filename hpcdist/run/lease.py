"""The lease of a run: at most one supervisor holds a run at a time.

The lease file contains host, process id, a random owner id and the time of the last renewal. On the holder's host the
process table shows whether the holder is alive; on other hosts, and in other containers with their own process
tables, the renewals do.

Clocks of hosts differ. Therefore a lease of another host and Slurm job is taken over only after it has not changed for
one minute of the observer's clock, unless it is very old. A stalled holder finds another owner id at its next renewal,
or before it writes the run's state, and stops (`Held.check`). Its ranks publish no checkpoint once a newer attempt
exists (`Context._before_publish`).
"""

import getpass
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hpcdist.errors import LeaseLostError, RunFolderError, error_text
from hpcdist.host import retry
from hpcdist.host.json_files import LARGEST, read_json, write_json
from hpcdist.host.locks import exclusive
from hpcdist.host.machine import boot_id, process_start
from hpcdist.run.folder import RunDir, State

log = logging.getLogger(__name__)
LOCK = ".lease.lock"
RENEW_S = 10.0
#: A holder on another host counts as dead if it has not renewed its lease for this time.
STALE_S = 60.0
#: A lease this old is stale whatever the clock of its host: clocks of hosts differ by less than ten minutes.
SURELY_STALE_S = 600.0
POLL_S = 0.5


def holder(run: RunDir) -> dict[str, Any] | None:
    """Return the lease of a run if its holder is alive; None if nobody holds the run."""
    lease = _read(run)
    if lease is None or not _is_alive(lease):
        return None
    return lease


def _read(run: RunDir) -> dict[str, Any] | None:
    """Return the lease of a run; None if it is missing or damaged."""
    lease = read_json(run.lease)
    if lease is None:
        return None
    for key in ("host", "user"):
        if not isinstance(lease.get(key), str):
            return None
    for key in ("pid", "started", "acquired", "renewed"):
        if type(lease.get(key)) not in (int, float) or not 0 <= lease[key] <= LARGEST:
            return None
    return lease


def user_name() -> str:
    """Return the name of the user, or the user id if it has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _processes() -> str:
    """Return the PID namespace of this process, which differs between containers with the same host name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_held(run: RunDir) -> bool:
    """Return whether a live process holds a run. Waits until a holder on another host renews its lease or is stale."""
    first = holder(run)
    if first is None:
        return False
    lease: dict[str, Any] | None = first
    while lease is not None and not _is_here(lease):
        if lease["renewed"] != first["renewed"]:
            return True
        time.sleep(POLL_S)
        lease = holder(run)
    return lease is not None


def _is_here(lease: dict[str, Any]) -> bool:
    """Return whether the holder is in this process table, so that its process id is valid here."""
    processes = _processes()
    place = (lease["host"], lease.get("processes", processes))
    return place == (socket.gethostname(), processes)


def _is_alive(lease: dict[str, Any]) -> bool:
    # A lease without its boot is one of hpcdist before 2026-11-29, which has the start of the process in another unit.
    if not _is_here(lease) or "boot" not in lease:
        return abs(time.time() - float(lease["renewed"])) < STALE_S
    is_of_this_boot = bool(lease["boot"] == boot_id())
    return is_of_this_boot and process_start(int(lease["pid"])) == lease["started"]


class Held:
    """The lease that this process holds, see `hold`."""

    def __init__(self, run: RunDir, mine: dict[str, Any]) -> None:
        self._run = run
        self._mine = mine
        self._renewed = self._tried = _now_s()
        self._lost = ""  # the message of LeaseLostError, once another process has the lease
        self._failed = False

    def check(self) -> None:
        """Raise LeaseLostError if another process has the lease, which is read only if the last renewal is late."""
        if not self._lost and _now_s() - self._tried > 2 * RENEW_S:
            self.renew()
        if self._lost:
            raise LeaseLostError(self._lost)

    def fail_start(self, error: Exception, *, rejected: bool = False) -> State:
        """Record the error that prevented the first attempt; returns the state. Raises LeaseLostError."""
        state = self._run.read_state()
        state = replace(state, status="failed", reason=error_text(error), ended=time.time(), rejected=rejected)
        self.check()  # the state belongs to a supervisor that has taken over meanwhile
        self._run.write_state(state)
        return state

    def renew(self) -> None:
        """Renew the lease unless another process holds it. Errors of the file system are logged."""
        self._tried = _now_s()
        try:
            with exclusive(self._run.path / LOCK, within_s=RENEW_S):
                lease = read_json(self._run.lease, within_s=0)
                # A successor that has already ended leaves no lease.
                is_gone = lease is None and _now_s() - self._renewed > STALE_S
                is_taken = lease is not None and lease.get("owner") != self._mine["owner"]
                if is_gone or is_taken:
                    successor = "another process, which has ended"
                    if lease:
                        known = {"pid": "?", "user": "an unknown user", "host": "an unknown host", **lease}
                        successor = "process {pid} of {user} on {host}".format(**known)
                    this_process = f"process {self._mine['pid']} on {self._mine['host']}"
                    self._lost = (
                        f"{self._run.kind} {self._run.name} was taken over by {successor}, while {this_process} could"
                        " not renew its lease"
                    )
                    log.error("%s", self._lost)
                    return
                write_json(self._run.lease, self._mine | {"renewed": time.time()}, within_s=0)
        except (OSError, RunFolderError) as error:
            # The next renewal may succeed; an exception would end the thread.
            if not self._failed:
                log.warning("the lease of %s %s cannot be renewed: %s", self._run.kind, self._run.name, error)
            self._failed = True
            return
        if self._failed:
            log.warning("the lease of %s %s is renewed again", self._run.kind, self._run.name)
        self._failed = False
        self._renewed = _now_s()

    def release(self) -> None:
        """Remove the lease unless another process holds it. Errors of the file system are logged."""
        try:
            with exclusive(self._run.path / LOCK):
                lease = read_json(self._run.lease)
                if lease is not None and lease.get("owner") == self._mine["owner"]:
                    retry.remove(self._run.lease)
        except (OSError, RunFolderError) as error:
            log.warning("the lease of %s %s cannot be removed: %s", self._run.kind, self._run.name, error)


def _now_s() -> float:
    """Return a clock that also advances while the process or the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def hold(run: RunDir, *, job_id: str | None = None) -> Iterator[Held]:
    """Hold the run's lease inside the block; a thread renews it.

    A lease of an earlier start of the same Slurm job is taken over at once, because Slurm runs a job once at a time. A
    stale lease of another host is first watched for one minute. Raises RunFolderError if another process holds it.
    """
    mine: dict[str, Any] = {
        "host": socket.gethostname(),
        "processes": _processes(),
        "pid": os.getpid(),
        "started": process_start(os.getpid()),
        "boot": boot_id(),
        "user": user_name(),
        "job_id": job_id,
        "owner": secrets.token_hex(8),
        "acquired": time.time(),
    }
    unchanged: dict[str, Any] | None = None
    while True:
        with exclusive(run.path / LOCK):
            other = _read(run)
            if other is None or _is_free(run, other, unchanged=unchanged, job_id=job_id):
                write_json(run.lease, mine | {"renewed": time.time()})
                break
        unchanged = _watch(run, other)
    held = Held(run, mine)
    ended = threading.Event()

    def keep_renewing() -> None:
        while not ended.wait(RENEW_S):
            held.renew()

    thread = threading.Thread(target=keep_renewing, name="lease", daemon=True)
    thread.start()
    try:
        yield held
    finally:
        ended.set()
        thread.join()
        held.release()


def _is_free(run: RunDir, other: dict[str, Any], *, unchanged: dict[str, Any] | None, job_id: str | None) -> bool:
    """Return whether the lease of another process can be taken over at once; False if it must be watched first.

    Raises RunFolderError if the other process is alive.

    Args:
        unchanged: the lease that `_watch` has found stale.
        job_id: Slurm job of this process.
    """
    if other == unchanged:
        return True
    if job_id is not None and other.get("job_id") == job_id:
        return True
    if _is_alive(other):
        raise _held_by(run, other)
    return _is_here(other) or time.time() - float(other["renewed"]) > SURELY_STALE_S


def _watch(run: RunDir, other: dict[str, Any]) -> dict[str, Any] | None:
    """Return a lease that has not changed for STALE_S; None if it is gone."""
    log.warning(
        "%s %s was held by process %s on %s; waiting up to %.0f s to make sure that it is not renewed",
        *(run.kind, run.name, other["pid"], other["host"], STALE_S),
    )
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        time.sleep(POLL_S)
        lease = _read(run)
        if lease is None:
            return None
        if lease != other:
            raise _held_by(run, lease)
    return other


def _held_by(run: RunDir, other: dict[str, Any]) -> RunFolderError:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["acquired"]))
    return RunFolderError(
        f"{run.kind} {run.name} is held by process {other['pid']} of {other['user']} on {other['host']} since {since}:"
        f" wait for it, or end it with `hpcdist stop {run.name}`"
    )
