"""Process 1 of a rank's container under podman and docker, whose containers are no children of the Slurm step.

    python -m hpcdist.containers.pid1 ATTEMPT COMMAND …

What ties it to the step is a named pipe that `containers/contained.sh` made and holds open, `rank-RRRRR.line`
in the attempt's folder. The names of signals come through it, for the rank. Its end means that the step is gone,
however that came about; then this process ends, and the kernel ends all others in the container. The rank writes its
log by itself, and its exit code is left in `rank-RRRRR.exit`: neither depends on podman's or docker's helpers, which
Slurm may kill at any time.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcdist.files.atomic import write_atomic

#: The step is gone: exit code of a container that ends for that.
ABANDONED = 143
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str], env: dict[str, str]) -> int:
    """Run a rank and return the exit code it ended with, 128 more than the signal that killed it."""
    folder, *command = argv
    base = Path(folder) / f"rank-{int(env['SLURM_PROCID']):05d}"
    log = os.open(f"{base}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # Not waiting for a writer: there is one, or the step has gone already.
    line = os.open(f"{base}.line", os.O_RDONLY | os.O_NONBLOCK)
    os.unlink(f"{base}.line")  # whoever copies the folder would wait at a pipe for ever
    code = _follow(command, line)
    if code is None:
        print("hpcdist: the Slurm step around this container is gone: ending it", file=sys.stderr, flush=True)
        return ABANDONED
    write_atomic(Path(f"{base}.exit"), f"{code}\n")
    return code


def _follow(command: Sequence[str], line: int) -> int | None:
    """Start the command, hand signals on, collect orphans; its exit code, or None once nobody holds the line."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    for number in (*_FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # Until the rank can hear SIGUSR2, which Slurm sends ahead of the time limit, it must not die of it.
    rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_ignore_usr2)
    poll = select.poll()
    for descriptor in (wake, line):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == line:
                words = os.read(line, 4096)
                if not words:
                    return None
                numbers = [signal.Signals[f"SIG{word}"] for word in words.decode().split()]
            else:
                numbers = [signal.Signals(number) for number in os.read(wake, 4096) if number in _FORWARDED]
            for number in numbers:
                os.kill(rank.pid, number)  # not `send_signal`: it would collect the rank by itself
        if (code := _collect(rank.pid)) is not None:
            return code


def _ignore_usr2() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _collect(rank: int) -> int | None:
    """Reap all that has ended; the rank's exit code when it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == rank:
            code = os.waitstatus_to_exitcode(status)
            found = 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], dict(os.environ)))
