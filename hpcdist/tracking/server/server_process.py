"""The process of a tracking server: its start, its end, and whether it is alive.

A process is identified by machine, process id and start time, so that an old record never points to another process.
The server is the leader of a session; its workers belong to that session as long as one of them lives.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version

import psutil

from hpcdist.config.redaction import redact_text
from hpcdist.errors import UserMistake
from hpcdist.tracking.server.server_folder import (
    ServerFolder,
    ServerRecord,
    environment_without_mlflow,
    server_variables,
)

POLL_S = 0.2
#: Time after SIGTERM until SIGKILL.
END_S = 20.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def start(
    folder: ServerFolder,
    store: str,
    env: Mapping[str, str],
    *,
    host: str,
    port: int,
    workers: int,
    allowed_hosts: Sequence[str] = (),
) -> tuple[ServerRecord, subprocess.Popen[bytes]]:
    """Start the server in the background and record its process.

    Args:
        store: URI of a database with tables.
        host: address to listen on.
        allowed_hosts: names of the machine in addition to its own, for the Host header of requests.
    """
    options = ["--host", host, "--port", str(port), "--workers", str(workers), "--app-name", "basic-auth"]
    options += ["--serve-artifacts", "--artifacts-destination", str(folder.artifacts)]
    hosts = ",".join([*own_names(port), *allowed_hosts])
    with open(os.open(folder.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options],
            env=environment_without_mlflow(env) | server_variables(folder, store, hosts),
            cwd=folder.path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=0o077,
        )
    record = ServerRecord(
        machine=socket.gethostname(),
        pid=process.pid,
        started=psutil.Process(process.pid).create_time(),
        address=f"http://{_in_uri(_reachable(host))}:{port}",
        store=redact_text(store),
        version=version("mlflow"),
    )
    folder.write_record(record)
    return record, process


def own_names(port: int) -> list[str]:
    """Return the names and addresses of this machine with a port, which requests may have as their host."""
    names = {*LOOPBACK, socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names |= {one.address.partition("%")[0] for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6)}
    return sorted(f"{_in_uri(name)}:{port}" for name in names)


def _reachable(host: str) -> str:
    """Return a name or address of this machine at which a server on `host` answers."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104 (compared)
        return host
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:  # the machine cannot resolve its own name
        return "127.0.0.1" if host != "::" else "::1"
    return name


def _in_uri(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def members(record: ServerRecord) -> list[psutil.Process]:
    """Return the live processes of a server, none if it has ended.

    Raises UserMistake when it was started on another machine.
    """
    if record.machine != socket.gethostname():
        raise UserMistake(f"the server was started on {record.machine}: run the command there")
    try:
        leader = psutil.Process(record.pid)
        if leader.create_time() != record.started:
            return []  # another process with the same id, which the kernel gives when the session is empty
    except psutil.NoSuchProcess:
        pass  # workers may outlive their leader, and the id of a session is not given again before they end
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == record.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def listens(record: ServerRecord, port: int) -> bool:
    """Return whether a process of the server listens on a port, rather than one of another program."""
    for process in members(record):
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
    return False


def end(record: ServerRecord, report: Callable[[str], None]) -> bool:
    """End all processes of a server and wait until they have ended. Returns False if there were none."""
    if not (found := members(record)):
        return False
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
    until, killed = time.monotonic() + END_S, False
    while found := members(record):
        if time.monotonic() > until and not killed:
            killed = True
            report(f"the server did not end within {END_S:g} s of SIGTERM: killing it")
        for process in found if killed else ():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)
    return True


def require_free(host: str, port: int, options: str) -> None:
    """Raise UserMistake when the port of an address cannot be bound; `options` are those that choose others."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserMistake(
            f"port {port} of {host} cannot be used ({error.strerror}): choose others with {options}"
        ) from error
