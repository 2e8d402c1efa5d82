"""List or kill the ranks of a run on the nodes of its job, without Slurm, which cannot signal ranks after the end of
their slurmstepd.

    python -m hpcdist.slurm.job.node_ranks RUN list|kill

This command, of which each node executes one, searches the process table. It answers with the ranks that run, after
`kill` those that have survived SIGKILL; a task that waits for its forked rank counts as well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hpcdist.run.folder import RunDir
from hpcdist.slurm.on_nodes import JobNodes, announced, ask, nodes_command, print_answer
from hpcdist.supervisor.hang import family, find_ranks

#: Time limit of the search for ranks, which starts Python on each node, perhaps from a slow file system.
RANKS_ON_NODES_S = 60.0
#: A killed process ends within this time, unless it waits for a device or a file system.
KILL_S = 5.0
_POLL_EVERY_S = 0.05


def ranks_on_nodes(
    run: RunDir, action: Literal["list", "kill"], nodes: JobNodes, env: Mapping[str, str], *, patient: bool = True
) -> dict[str, list[int]]:
    """Return the running ranks of a run by node, for the nodes that answer; after `kill` those that have survived."""
    if not nodes.names:
        return {}
    command = [sys.executable, "-P", "-m", "hpcdist.slurm.job.node_ranks", str(run.path), action]
    step = nodes_command(nodes, command if patient else announced(command))
    found = ask(step, nodes.names, RANKS_ON_NODES_S, env=env, patient=patient)
    return {node: list(answer["ranks"]) for node, answer in found.by_node.items()}


def main(argv: Sequence[str]) -> None:
    folder, action = argv
    node = os.environ.get("SLURMD_NODENAME", "")
    run = Path(folder)
    ranks = (
        kill_ranks(run, node)
        if action == "kill"
        else [process.rank for process in find_ranks(run, None, node, with_tasks=True)]
    )
    print_answer({"ranks": sorted(ranks)})


def kill_ranks(run: Path, node: str) -> list[int]:
    """Kill the ranks of a run on this node and their child processes; returns the ranks that survive."""
    until = time.monotonic() + KILL_S
    while (found := find_ranks(run, None, node, with_tasks=True)) and time.monotonic() < until:
        for process in found:
            for pid in family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_EVERY_S)
    return [process.rank for process in found]


if __name__ == "__main__":
    main(sys.argv[1:])
