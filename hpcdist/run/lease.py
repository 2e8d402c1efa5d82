"""Who holds a run: at most one supervisor at a time.

The lease names host, process, an owner id made at random, and the time of its last renewal. On the holder's own host
the process table decides whether it is alive; from elsewhere the renewals do. Another container is elsewhere too,
whatever its host name: its process table is another one.

Clocks of hosts differ, so a lease from elsewhere is taken over only after it has not changed for a minute of the
observer's own time, unless it is very old. A holder that was stalled meanwhile finds another owner id at its next
renewal, or when it is about to write the run's state, and stops (`Held.check`); its ranks publish no checkpoint once
there is a newer attempt (`Context.save`).
"""

from __future__ import annotations

import getpass
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from hpcdist.errors import LeaseLostError, RunFolderError
from hpcdist.files import retry
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import LARGEST
from hpcdist.files.lock import exclusive
from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)
LOCK = ".lease.lock"
RENEW_S = 10.0
#: A holder on another host that has not renewed for this long is taken for dead.
STALE_S = 60.0
#: No two hosts' clocks differ so much: a lease that old is stale without a wait.
SURELY_STALE_S = 600.0
LOOK_EVERY_S = 0.5


def holder(run: RunDir) -> dict[str, Any] | None:
    """The live holder of a run's lease, or None when it is free."""
    found = _read(run)
    return found if found is not None and _is_alive(found) else None


def last_renewal(run: RunDir) -> float | None:
    """When the lease, whoever holds or held it, was last renewed; None without one."""
    found: Any = (read_json(run.lease) or {}).get("renewed")
    return float(found) if type(found) in (int, float) and 0 <= found <= LARGEST else None


def _read(run: RunDir) -> dict[str, Any] | None:
    """The lease; None where there is none, or one that a crash has left half written.

    Raises RunFolderError when a newer hpcdist has written it.
    """
    found = read_json(run.lease)
    if found is None:
        return None
    texts = all(isinstance(found.get(key), str) for key in ("host", "user"))
    numbers = all(
        type(found.get(key)) in (int, float) and 0 <= found[key] <= LARGEST
        for key in ("pid", "started", "acquired", "renewed")
    )
    return found if texts and numbers else None


def user_name() -> str:
    """Who this is; in a container perhaps somebody whom no list of users knows, and then the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _processes() -> str:
    """Names the process table that this process sees; containers on one host may share its name, but not this."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_held(run: RunDir, *, look_every_s: float = 0.5) -> bool:
    """Whether a live process holds a run, for certain: one elsewhere is waited for until it renews or is stale."""
    first = holder(run)
    found = first
    while found is not None and first is not None and not _is_here(found):
        if found["renewed"] != first["renewed"]:
            return True
        time.sleep(look_every_s)
        found = holder(run)
    return found is not None


def _is_here(lease: dict[str, Any]) -> bool:
    return (lease["host"], lease.get("processes", _processes())) == (socket.gethostname(), _processes())


def _is_alive(lease: dict[str, Any]) -> bool:
    if not _is_here(lease):
        return abs(time.time() - float(lease["renewed"])) < STALE_S
    try:
        process = psutil.Process(int(lease["pid"]))
        return process.create_time() == lease["started"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Held:
    """A lease that this process holds."""

    def __init__(self, run: RunDir, mine: dict[str, Any]) -> None:
        self._run = run
        self._mine = mine
        self._renewed = self._tried = _now_s()
        self._lost = ""
        self._failed = False

    def check(self) -> None:
        """Raise LeaseLostError when another process has the lease.

        Costs nothing as long as renewals are tried in time. Where the last try is old, such as after this process was
        stopped, the lease is read before anything else is done.
        """
        if not self._lost and _now_s() - self._tried > 2 * RENEW_S:
            self.renew()
        if self._lost:
            raise LeaseLostError(self._lost)

    def renew(self) -> None:
        """Renew the lease unless it is another's. Errors of the file system are logged; the next renewal is soon."""
        self._tried = _now_s()
        try:
            with exclusive(self._run.path / LOCK, within_s=RENEW_S):
                found = read_json(self._run.lease, within_s=0)
                # A successor that has come and gone leaves none.
                gone = found is None and _now_s() - self._renewed > STALE_S
                if gone or (found is not None and found.get("owner") != self._mine["owner"]):
                    self._note_loss(found or {})
                    return
                write_json(self._run.lease, self._mine | {"renewed": time.time()}, within_s=0)
        except (OSError, RunFolderError) as error:
            # A disk that is full now may have room in ten seconds; a thread that has ended renews nothing.
            if not self._failed:
                log.warning("the lease of run %s could not be renewed: %s", self._run.name, error)
            self._failed = True
            return
        if self._failed:
            log.warning("the lease of run %s is renewed again", self._run.name)
        self._failed = False
        self._renewed = _now_s()

    def release(self) -> None:
        """Remove the lease if it is still this process's. One that cannot be removed names a process that has ended."""
        try:
            with exclusive(self._run.path / LOCK):
                found = read_json(self._run.lease)
                if found is not None and found.get("owner") == self._mine["owner"]:
                    retry.remove(self._run.lease)
        except (OSError, RunFolderError) as error:
            log.warning("the lease of run %s could not be removed: %s", self._run.name, error)

    def _note_loss(self, found: dict[str, Any]) -> None:
        by = "process {pid} of {user} on {host}".format(**found) if found else "another process, which has ended"
        mine = f"process {self._mine['pid']} on {self._mine['host']}"
        self._lost = f"run {self._run.name} was taken over by {by}, while {mine} could not renew its lease"
        log.error("%s", self._lost)


def _now_s() -> float:
    """Time that goes on while this process, or the machine, sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def hold(run: RunDir, *, job_id: str | None = None) -> Iterator[Held]:
    """Hold the run's lease for as long as the block lasts, renewing it from a thread.

    A lease that an earlier life of the same Slurm job has left is taken over: Slurm runs a job once at a time. One
    from another host that looks stale is watched for a minute first, since clocks differ.

    Raises RunFolderError, naming the holder, when another process has it.
    """
    mine: dict[str, Any] = {
        "host": socket.gethostname(),
        "processes": _processes(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "user": user_name(),
        "job_id": job_id,
        "owner": secrets.token_hex(8),
        "acquired": time.time(),
    }
    unchanged: dict[str, Any] | None = None
    while True:
        with exclusive(run.path / LOCK):
            other = read_json(run.lease)
            if other is None or other == unchanged or _is_free(run, other, job_id):
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


def _is_free(run: RunDir, other: dict[str, Any], job_id: str | None) -> bool:
    """Whether a lease binds nobody; False where that has to be watched. Raises RunFolderError for a live holder's."""
    if job_id is not None and other.get("job_id") == job_id:
        return True
    if _is_alive(other):
        raise _held_by(run, other)
    return _is_here(other) or time.time() - float(other["renewed"]) > SURELY_STALE_S


def _watch(run: RunDir, other: dict[str, Any]) -> dict[str, Any] | None:
    """Watch a lease that looks stale by this host's clock; return it when it has not changed for STALE_S.

    Raises RunFolderError when its holder renews it.
    """
    log.warning(
        "run %s was held by process %s on %s; waiting up to %.0f s to see that it is not renewed",
        *(run.name, other["pid"], other["host"], STALE_S),
    )
    until = time.monotonic() + STALE_S
    while time.monotonic() < until:
        time.sleep(min(LOOK_EVERY_S, STALE_S))
        found = read_json(run.lease)
        if found is None:
            return None
        if found != other:
            raise _held_by(run, found)
    return other


def _held_by(run: RunDir, other: dict[str, Any]) -> RunFolderError:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["acquired"]))
    return RunFolderError(
        f"run {run.name} is held by process {other['pid']} of {other['user']} on {other['host']} since {since}:"
        f" wait for it, or end it with `hpcdist stop {run.name}`"
    )
