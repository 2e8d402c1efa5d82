"""List or kill the ranks of a run on this node.

    python -m hpcdist.slurm.job.node_ranks RUN list|kill

Prints the node's name and the ranks that run, after `kill` those that have survived SIGKILL; a task that waits for its
forked rank counts as well. It searches the process table, because Slurm cannot signal ranks after the end of their
slurmstepd.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.supervisor.hang_node import find_ranks

#: A killed process ends within this time, unless it waits for a device or a file system.
KILL_S = 5.0
_POLL_EVERY_S = 0.05


def main(argv: Sequence[str]) -> None:
    """Print the node and the ranks of a run on it; with `kill`, end them."""
    folder, action = argv
    node = os.environ.get("SLURMD_NODENAME", "")
    run = Path(folder)
    ranks = (
        kill_ranks(run, node)
        if action == "kill"
        else [process.rank for process in find_ranks(run, None, node, with_tasks=True)]
    )
    print(node or socket.gethostname(), *sorted(ranks), flush=True)


def kill_ranks(run: Path, node: str) -> list[int]:
    """Kill the ranks of a run on this node and their child processes; returns the ranks that survive."""
    until = time.monotonic() + KILL_S
    while (found := find_ranks(run, None, node, with_tasks=True)) and time.monotonic() < until:
        for process in found:
            for pid in (process.pid, *process.children):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_EVERY_S)
    return [process.rank for process in found]


def parse_rank_answers(text: str, nodes: Iterable[str]) -> Mapping[str, list[int]]:
    """Return the ranks by node, for those of `nodes` that have answered."""
    wanted = set(nodes)
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: [int(rank) for rank in row[1:]] for row in rows if row and row[0] in wanted}


if __name__ == "__main__":
    main(sys.argv[1:])
