"""Process 1 of a rank's container under podman and docker, which start containers outside of the Slurm step.

    python -m hpcdist.containers.pid1 ATTEMPT COMMAND …

`node_wrapper.sh` on the node holds a named pipe open, `rank-RRRRR.line` in the attempt's folder, and writes the names
of signals for the rank into it. End of file means that the step is gone, for whatever reason: this process ends, and
the kernel ends all other processes of the container. The rank writes its own log, and its exit code is written to
`rank-RRRRR.exit`, so neither depends on helper processes of podman or docker, which Slurm may kill at any time.
"""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcdist.host.files import write_atomic

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: Sequence[str], env: dict[str, str]) -> int:
    """Run a rank and return its exit code, or 128 + the signal that killed it."""
    folder, *command = argv
    base = Path(folder) / f"rank-{int(env['SLURM_PROCID']):05d}"
    log = os.open(f"{base}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    # Non-blocking: there is a writer, unless the step is already gone.
    line = os.open(f"{base}.line", os.O_RDONLY | os.O_NONBLOCK)
    os.unlink(f"{base}.line")  # copying a folder with a pipe would block for ever
    code = _follow(command, line)
    if code is None:
        print("hpcdist: the Slurm step around this container is gone: ending it", file=sys.stderr, flush=True)
        return 128 + signal.SIGTERM
    write_atomic(Path(f"{base}.exit"), f"{code}\n")
    return code


def _follow(command: Sequence[str], line: int) -> int | None:
    """Start the command, forward signals and reap orphans; return its exit code, or None when the pipe is closed."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    for number in (*_FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # Slurm sends SIGUSR2 ahead of the time limit; a rank that has no handler yet must not die of it.
    ignore = lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # noqa: E731
    rank = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=ignore)
    poll = select.poll()
    for descriptor in (wake, line):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == line:
                names = os.read(line, 4096)
                if not names:
                    return None
                numbers = [signal.Signals[f"SIG{name}"] for name in names.decode().split()]
            else:
                numbers = [signal.Signals(number) for number in os.read(wake, 4096) if number in _FORWARDED]
            for number in numbers:
                os.kill(rank.pid, number)  # `send_signal` would reap the rank
        if (code := _collect(rank.pid)) is not None:
            return code


def _collect(rank: int) -> int | None:
    """Reap all ended processes; return the rank's exit code if it is among them."""
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
