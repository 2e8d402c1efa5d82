"""Requests to the parent process of the ranks (`rank/parent.py`), and the task of srun whose rank that process forks.

    python -m hpcdist.rank.parent_client NAME CONNECT_S LIMIT_S RUN_FOLDER

Protocol: each connection is one rank. The parent sends `{}` once it serves the connection. The request is a file with
`env`, `cwd`, `affinity`, and signals that are `ignored` and `blocked`; with it come the files for standard output and
error, and in a local run the pipe of the process guard. The answer has the `pid`, the `error` for
which the parent cannot fork this rank, or the `failure` for which no rank may start. When the connection is closed, the
parent kills the rank and its process group; until then it does not reap the rank, so the other side can wait for the
process and read its exit code.

The task passes signals on to the rank, and ends with its exit code or signal: for Slurm it is the rank. If no parent
listens within CONNECT_S seconds, or it has not forked the rank after LIMIT_S seconds, the task itself becomes the rank.

The parent may import torch for a long time. A stop signal in the meantime does not end the task: the rank gets it once
it has a handler, as does a rank that imports torch itself.
"""

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from hpcdist.rank.processes import RANK_MODULE, STOP_SIGNALS, exit_code_of, wait_for_end

MESSAGE_BYTES = 4096
#: Signals that are not passed on: those of the task's own faults and child processes, and those that stop a process,
#: which Slurm sends to all processes of a job.
_NOT_PASSED_ON = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
    signal.SIGPIPE,
}


class NoParentError(Exception):
    """The parent cannot fork the rank. The text is the reason."""


class RankRefusedError(Exception):
    """No rank may start. The text is the reason."""


def request_rank(
    parent: socket.socket,
    env: Mapping[str, str],
    cwd: str,
    descriptors: Sequence[int],
    limit_s: float,
    *,
    ignored: Sequence[int] = (),
    blocked: Sequence[int] = (),
) -> int:
    """Ask for a rank, and return its process id. The time limit includes the imports of the parent."""
    affinity = sorted(os.sched_getaffinity(0))
    request = {"env": dict(env), "cwd": cwd, "affinity": affinity, "ignored": [*ignored], "blocked": [*blocked]}
    # The environment may be larger than a message.
    with os.fdopen(os.memfd_create("request"), "wb") as file:
        file.write(json.dumps(request).encode())
        file.flush()
        try:
            socket.send_fds(parent, [b"{}"], [file.fileno(), *descriptors])
        except OSError as error:
            raise NoParentError("its parent process has ended") from error
    until = time.monotonic() + limit_s
    try:
        while not (answer := receive(parent, until - time.monotonic())):  # `{}`: it serves the connection
            pass
    except TimeoutError as error:
        raise NoParentError(f"its parent process has not forked it within {limit_s:g} s") from error
    if "failure" in answer:
        raise RankRefusedError(answer["failure"])
    if "pid" not in answer:
        raise NoParentError(str(answer["error"]))
    return int(answer["pid"])


def receive(parent: socket.socket, limit_s: float) -> dict[str, Any]:
    """Return the next message. Raises NoParentError, or TimeoutError after `limit_s` seconds."""
    if not select.select([parent], [], [], max(0.0, limit_s))[0]:
        raise TimeoutError
    with suppress(OSError):
        if data := parent.recv(MESSAGE_BYTES):
            return dict(json.loads(data))
    raise NoParentError("its parent process has ended")


@contextmanager
def address(folder: str, name: str) -> Iterator[str]:
    """Yield the address of a parent on this node: a file in the run folder, which other users cannot reach or create.

    All nodes share that folder. A path through an open descriptor has less than the kernel's limit of 108 bytes.
    """
    descriptor = os.open(Path(folder, "attempts"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}.{os.environ.get('SLURMD_NODENAME', '')}"
    finally:
        os.close(descriptor)


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def main() -> NoReturn:
    passed_on = signal.valid_signals() - _NOT_PASSED_ON
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    name, connect_s, limit_s, folder = sys.argv[1:]
    ignored = [one for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN]
    try:
        parent, limit = _connect(folder, name, float(connect_s)), float(limit_s)
        rank = request_rank(parent, os.environ, os.getcwd(), [1, 2], limit, ignored=ignored, blocked=STOP_SIGNALS)
    except RankRefusedError as error:
        sys.exit(f"hpcdist: {error}")
    except (OSError, NoParentError) as error:
        print(f"hpcdist: this rank imports torch itself: {error}", file=sys.stderr, flush=True)
        # `StopFlag.install` unblocks the others.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on - {*STOP_SIGNALS})
        os.execv(sys.executable, [sys.executable, "-P", "-m", RANK_MODULE, folder])

    def pass_on(number: int, _frame: object) -> None:
        with suppress(OSError):
            os.kill(rank, number)  # the parent keeps the process id until this task ends

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    wait_for_end(rank)
    if (status := exit_code_of(rank)) >= 0:
        os._exit(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(128 - status)


def _connect(folder: str, name: str, limit_s: float) -> socket.socket:
    until = time.monotonic() + limit_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)  # a full backlog does not hold up the rank
        try:
            with address(folder, name) as place:
                connection.connect(place)
            break
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError) as error:
            connection.close()
            if isinstance(error, ConnectionRefusedError):
                # The parent has ended, or listens within a second of the creation of its socket file.
                until = min(until, time.monotonic() + 1.0)
            if time.monotonic() >= until:
                raise NoParentError("no parent process of ranks listens on this node") from error
        time.sleep(0.02)
    connection.setblocking(True)
    if peer_uid(connection) != os.getuid():
        raise NoParentError("a process of another user listens in place of the parent process of ranks")
    return connection


if __name__ == "__main__":
    main()
