"""Start of the parent process of the ranks on a node, as a task of srun.

    python -m hpcdist.rank.node_parent RUN_FOLDER LIMIT_S NAME [EARLIER_NAME…]

It creates the socket at which the tasks of ranks (`rank/forked_task.py`) ask for their rank, removes the variables of
its own step from the environment, and becomes the parent process (`rank/parent.py`), with the socket as standard input.
Tasks may connect while the parent imports torch. SIGALRM ends the parent if its imports take more than LIMIT_S seconds.
Parents with earlier names are ended first, since Slurm cannot end a step with a lost node.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcdist.rank.processes import CANNOT_FORK, PARENT_MODULE, SPACE, SPACE_BYTES

#: Beginnings of the names of variables that may differ between steps, or between tasks of a step. The kernel shows the
#: parent's variables as those of its ranks, so it has none of these.
OF_STEPS = ("SLURM", "SRUN_", "PMI", "HPCDIST_ATTEMPT", "HPCDIST_MASTER_")
#: More connections at once than tasks on a node.
_BACKLOG = 1024
#: The message that ends a parent.
END = b"end"
#: Time for an earlier parent to end. It may be importing torch.
_END_S = 10.0
#: The kernel allows 128 KiB for one variable.
_MAX_SPACE_BYTES = 120 * 1024


def address(folder: str, name: str) -> str:
    """Return the address of the socket: a file in the run folder, which other users can neither reach nor create.

    All nodes share that folder. A path through an open descriptor has less than the kernel's limit of 108 bytes.
    """
    descriptor = os.open(Path(folder, "attempts"), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{descriptor}/{name}.{os.environ.get('SLURMD_NODENAME', '')}"


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the parent, with space for the variables that it lacks."""
    own = {name: value for name, value in env.items() if not name.startswith(OF_STEPS)}
    removed = sum(len(os.fsencode(f"{name}={env[name]}")) + 1 for name in env.keys() - own.keys())
    return own | {SPACE: " " * min(2 * removed + SPACE_BYTES, _MAX_SPACE_BYTES)}


def _end(folder: str, name: str) -> None:
    """End the parent process of that name on this node, if there is one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, suppress(OSError):
        connection.settimeout(_END_S)  # a full backlog is an error at once
        connection.connect(place := address(folder, name))
        os.unlink(place)
        connection.send(END)
        connection.recv(1)  # until the other process has ended


def main() -> None:
    """End earlier parents, listen, and become the parent process."""
    folder, limit_s, name, *earlier = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, float(limit_s))  # continues in the parent
    for other in earlier:
        _end(folder, other)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(address(folder, name))
    except OSError as error:  # a file system without sockets
        print(f"hpcdist: no socket can be created in {folder}/attempts: {error}", file=sys.stderr)
        sys.exit(CANNOT_FORK)
    listener.listen(_BACKLOG)
    os.dup2(listener.fileno(), 0)
    os.execve(sys.executable, [sys.executable, "-P", "-m", PARENT_MODULE, folder], environment(os.environ))


if __name__ == "__main__":
    main()
