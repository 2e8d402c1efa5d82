"""Check whether the nodes can see the runs folder, by the type of its file system."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpcdist.machine.storage import IN_MEMORY, LOCAL, PRIVATE


def runs_dir_problems(
    runs_dir: Path, file_system: str, nodes: Iterable[str], hostname: str
) -> tuple[list[str], list[str]]:
    """Return errors and warnings about a runs folder that the nodes must see.

    Args:
        file_system: type of its file system, empty if unknown.
        nodes: the nodes that the job may run on.
        hostname: name of this machine, which may be one of the nodes.
    """
    if file_system not in LOCAL or set(nodes) == {hostname}:
        return [], []
    private = next((place for place in PRIVATE if runs_dir.resolve().is_relative_to(place)), None)
    if private is not None or file_system in IN_MEMORY:
        reason = f"each machine has its own {private}" if private else f"{file_system} is in this machine's memory"
        return [
            f"runs_dir={runs_dir}: {reason}, and the nodes would not see the run folder:"
            " set runs_dir (or HPCDIST_RUNS_DIR) to a folder on a shared file system"
        ], []
    return [], [
        f"runs_dir={runs_dir} is on {file_system}, a file system of this machine: the nodes must see it under the same"
        " path; if they do, set cluster.shared_runs=true"
    ]
