"""The nodes of an allocation: those of the next attempt, spare ones, and those that are left out. No side effects."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

#: A node that is lost this often is not used again in this allocation.
MAX_LOSSES = 2


class NodePool:
    """Chooses the nodes of each attempt of a run with interchangeable nodes.

    Args:
        allocated: names of the nodes, in Slurm's order.
        most: number of nodes that the run requests.
        least: number of nodes with which it may continue.
        spare: number of nodes that stay idle as long as no node has failed.
    """

    def __init__(self, allocated: Sequence[str], *, most: int, least: int, spare: int = 0) -> None:
        self._allocated = tuple(allocated)
        self._least = least
        self._target = max(least, min(most, len(allocated) - spare))
        self._losses: dict[str, int] = {}
        self._unfit: set[str] = set()
        self._lost: set[str] = set()
        #: The nodes of the next attempt, in Slurm's order.
        self.used: tuple[str, ...] = self._allocated[: self._target]

    @property
    def present(self) -> tuple[str, ...]:
        """The nodes on which steps can run: all that are not lost."""
        return tuple(node for node in self._allocated if node not in self._lost)

    @property
    def idle(self) -> tuple[str, ...]:
        """The nodes on which steps can run and that the next attempt does not use."""
        return tuple(node for node in self.present if node not in self.used)

    @property
    def fit(self) -> tuple[str, ...]:
        """The nodes on which ranks can run."""
        return tuple(node for node in self.present if node not in self._unfit)

    @property
    def missing(self) -> tuple[str, ...]:
        """The lost nodes with which the run would become larger if they answered again."""
        if len(self.used) >= self._target:
            return ()
        return tuple(node for node in self._allocated if node in self._lost and self._losses[node] < MAX_LOSSES)

    def can_lose(self, nodes: Collection[str]) -> bool:
        """Return whether enough nodes remain after the loss of `nodes`."""
        return len(self._allocated) - len(self._lost | self._unfit | set(nodes)) >= self._least

    def drop_silent(self, nodes: Collection[str]) -> bool:
        """Continue without nodes that do not answer; see `_replace`."""
        lost = self._lost | set(nodes)
        if not self._replace(lost | self._unfit):
            return False
        for node in set(nodes) - self._lost:
            self._losses[node] = self._losses.get(node, 0) + 1
        self._lost = lost
        return True

    def drop_unfit(self, nodes: Collection[str]) -> bool:
        """Continue without nodes that answer but are not fit for ranks; see `_replace`."""
        if not self._replace(self._lost | self._unfit | set(nodes)):
            return False
        self._unfit |= set(nodes)
        return True

    def restore(self, nodes: Iterable[str]) -> None:
        """Use lost nodes again, which answer."""
        self._lost -= set(nodes)
        self._replace(self._lost | self._unfit)

    def keep_idle(self, nodes: Collection[str]) -> None:
        """Count lost nodes that answer as idle again, unless they were lost too often or the run could grow."""
        if len(self.used) >= self._target:
            self._lost -= {node for node in nodes if self._losses[node] < MAX_LOSSES}

    def forget(self, nodes: Iterable[str]) -> None:
        """Stop waiting for lost nodes that do not belong to the allocation any more."""
        self._losses |= dict.fromkeys(nodes, MAX_LOSSES)

    def _replace(self, out: Collection[str]) -> bool:
        """Choose nodes without those in `out`; return whether enough are left. If not, nothing changes.

        Nodes of the last attempt are preferred, so that ranks stay where their files are cached.
        """
        fit = [node for node in self._allocated if node not in out]
        chosen = sorted(fit, key=lambda node: node not in self.used)[: self._target]
        if len(chosen) < self._least:
            return False
        self.used = tuple(node for node in self._allocated if node in chosen)
        return True
