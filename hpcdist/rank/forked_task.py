"""A task of srun whose rank is forked by the parent process on its node.

    python -m hpcdist.rank.forked_task NAME CONNECT_S LIMIT_S RUN_FOLDER

The task gives the parent (`rank/parent.py`) its environment, CPU affinity, folder, output and ignored signals, passes
signals on to the rank, and ends as the rank ends, with the same exit code or signal: for Slurm it is the rank. When the
task ends, the parent kills the rank. If no parent listens within CONNECT_S seconds, or if it has not forked the rank
after LIMIT_S seconds, the task itself becomes the rank and imports torch.

The parent may import torch for a long time. A stop signal in the meantime does not end the task: the rank gets it once
it has a handler, as does a rank that imports torch itself.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from hpcdist.rank.node_parent import address
from hpcdist.rank.processes import RANK_MODULE, STOP_SIGNALS

MESSAGE_BYTES = 4096
_CONNECT_EVERY_S = 0.02
#: Signals that are not passed on: those of the task's own faults and child processes, and those that stop a process,
#: which Slurm sends to all processes of a job.
_OWN = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
    signal.SIGPIPE,
}


class NoParentError(Exception):
    """The parent cannot fork the rank. The text is the reason."""


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def main() -> NoReturn:
    """Let the rank be forked and wait for its end, or become the rank."""
    passed_on = signal.valid_signals() - _OWN
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    name, connect_s, limit_s, folder = sys.argv[1:]
    try:
        parent = _connect(folder, name, float(connect_s))
        rank = _ask(parent, float(limit_s))
    except (OSError, NoParentError) as error:
        print(f"hpcdist: this rank imports torch itself: {error}", file=sys.stderr, flush=True)
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, passed_on - {*STOP_SIGNALS}
        )  # `StopFlag.install` unblocks the others
        os.execv(sys.executable, [sys.executable, "-P", "-m", RANK_MODULE, folder])
    for number in passed_on:
        signal.signal(number, lambda number, _frame: _pass_on(rank, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    end_like(_answer(parent).get("status", -signal.SIGKILL))


def _connect(folder: str, name: str, limit_s: float) -> socket.socket:
    until = time.monotonic() + limit_s
    place = address(folder, name)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.setblocking(False)  # a full backlog does not hold up the rank
        try:
            connection.connect(place)
            break
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError) as error:
            connection.close()
            if time.monotonic() >= until:
                raise NoParentError("no parent process of ranks listens on this node") from error
        time.sleep(_CONNECT_EVERY_S)
    connection.setblocking(True)
    if peer_uid(connection) != os.getuid():
        raise NoParentError("a process of another user listens in place of the parent process of ranks")
    return connection


def _ask(parent: socket.socket, limit_s: float) -> int:
    """Ask for the rank; returns its process id."""
    request = {
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "ignored": [int(one) for one in signal.valid_signals() if signal.getsignal(one) == signal.SIG_IGN],
    }
    # The environment may be larger than a message.
    with os.fdopen(os.memfd_create("request"), "wb") as file:
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(parent, [b"{}"], [file.fileno(), 1, 2])
    if not select.select([parent], [], [], limit_s)[0]:
        parent.close()
        raise NoParentError(f"its parent process has not forked it within {limit_s:g} s")
    answer = _answer(parent)
    if "failure" in answer:
        sys.exit(f"hpcdist: {answer['failure']}")
    if "pid" not in answer:
        raise NoParentError(str(answer.get("error", "its parent process has ended")))
    return int(answer["pid"])


def _answer(parent: socket.socket) -> dict[str, Any]:
    """Wait for a message; returns an empty one if the parent has ended."""
    try:
        data = parent.recv(MESSAGE_BYTES)
    except OSError:
        data = b""
    return dict(json.loads(data or b"{}"))


def _pass_on(rank: int, number: int) -> None:
    with suppress(OSError):
        os.kill(rank, number)  # the parent keeps the process id until this task ends


def end_like(status: int) -> NoReturn:
    """End with an exit code, or by a signal if `status` is negative."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if status != -signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
