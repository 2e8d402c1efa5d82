"""Who holds a run: at most one supervisor at a time.

The lease names host, process and time of its last renewal. On the holder's own host the process table decides
whether it is alive; from elsewhere the renewals do (no network file system's locks can be trusted everywhere).
Another container is elsewhere too, whatever its host name: its process table is another one.
"""

from __future__ import annotations

import fcntl
import getpass
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hpcdist.errors import RunFolderError
from hpcdist.formats import LARGEST
from hpcdist.rundir import RunDir, read_json, write_json

log = logging.getLogger(__name__)
RENEW_S = 10.0
#: A holder on another host that has not renewed for this long is taken for dead.
STALE_S = 60.0


def holder(run: RunDir) -> dict[str, Any] | None:
    """The live holder of a run's lease, or None when it is free."""
    found = _read(run)
    return found if found is not None and _is_alive(found) else None


def last_renewal(run: RunDir) -> float | None:
    """When the lease, whoever holds or held it, was last renewed; None without one."""
    found = _read(run)
    return None if found is None else float(found["renewed"])


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
        return time.time() - float(lease["renewed"]) < STALE_S
    try:
        process = psutil.Process(int(lease["pid"]))
        return process.create_time() == lease["started"] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Serialise those who look at the lease and then write it."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def hold(run: RunDir, *, job_id: str | None = None) -> Iterator[None]:
    """Hold the run's lease for as long as the block lasts, renewing it from a thread.

    A lease that an earlier life of the same Slurm job has left is taken over: Slurm runs a job once at a time.

    Raises RunFolderError, naming the holder, when another process has it.
    """
    mine: dict[str, Any] = {
        "host": socket.gethostname(),
        "processes": _processes(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "user": user_name(),
        "job_id": job_id,
        "acquired": time.time(),
        "renewed": time.time(),
    }
    with _exclusive(run.path / ".lease.lock"):
        other = holder(run)
        if other is not None and (job_id is None or other.get("job_id") != job_id):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(other["acquired"]))
            raise RunFolderError(
                f"run {run.name} is held by process {other['pid']} of {other['user']} on {other['host']} since {since}:"
                f" wait for it, or end it with `hpcdist stop {run.name}`"
            )
        write_json(run.lease, mine)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            try:
                write_json(run.lease, mine | {"renewed": time.time()})
            except OSError as error:
                # A disk that is full now may have room in ten seconds; a thread that has ended renews nothing.
                log.warning("the lease of run %s could not be renewed: %s", run.name, error)

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        run.lease.unlink(missing_ok=True)
