"""Whether other machines see a folder as well, as far as its file system tells."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpcdist.machine.storage import IN_MEMORY, LOCAL, PRIVATE


def folder_problems(runs_dir: Path, kind: str, hosts: Iterable[str], here: str) -> tuple[list[str], list[str]]:
    """Mistakes and doubts about a runs folder that the nodes must see.

    Args:
        kind: its file system's type, empty where unknown.
        hosts: the nodes that the run may stand on.
        here: this machine's name among them, if it is one of them.
    """
    if kind not in LOCAL or set(hosts) == {here}:
        return [], []
    private = next((place for place in PRIVATE if runs_dir.resolve().is_relative_to(place)), None)
    if private is not None or kind in IN_MEMORY:
        why = f"each machine has a {private} of its own" if private else f"{kind} is in this machine's memory"
        return [
            f"runs_dir={runs_dir}: {why}, so the nodes would not see the run:"
            " point runs_dir (or HPCDIST_RUNS_DIR) at a shared file system"
        ], []
    return [], [
        f"runs_dir={runs_dir} is on {kind}, a file system of this machine: the nodes must see it under the same path;"
        " if they do, say cluster.shared_runs=true"
    ]
