"""The groups of ranks that operations work in: all of them, and the world cut into groups that work side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

WORLD = "world"


@dataclass(frozen=True, kw_only=True)
class Team:
    """One rank's group in one way of cutting the world.

    Attributes:
        name: of the cut: `world`, `halves`, …; its groups work at the same time.
        ranks: of this rank's group, by their number in the world.
        largest: ranks of the cut's largest group.
        group: None where this rank is alone in its group, and has nobody to talk to.
    """

    name: str
    ranks: tuple[int, ...]
    largest: int
    group: dist.ProcessGroup | None
    device: torch.device
    backend: str

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        """This rank's number in its group."""
        return self.ranks.index(dist.get_rank())

    def neighbour(self, steps: int) -> int:
        """The world's rank that stands so many places to the right in the group's circle."""
        return self.ranks[(self.index + steps) % self.size]


def cuts(nodes: Sequence[str]) -> dict[str, list[list[int]]]:
    """Ways of cutting the world into groups, none of them trivial; each rank is in one group of each.

    Args:
        nodes: each rank's.
    """
    ranks = list(range(len(nodes)))
    by_node = {name: [rank for rank in ranks if nodes[rank] == name] for name in dict.fromkeys(nodes)}
    found = {}
    if len(by_node) > 1:
        found["within nodes"] = list(by_node.values())
        most = max(map(len, by_node.values()))
        # One rank of each node: what data parallelism over nodes and a hybrid shard use.
        found["across nodes"] = [[part[i] for part in by_node.values() if i < len(part)] for i in range(most)]
    found["halves"] = [ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]]
    found["even and odd"] = [ranks[::2], ranks[1::2]]
    kept: dict[str, list[list[int]]] = {}
    for name, groups in found.items():
        groups = [group for group in groups if group]
        if 1 < len(groups) < len(ranks) and not any(sorted(groups) == sorted(other) for other in kept.values()):
            kept[name] = groups
    return kept


class Words:
    """Small words among all ranks, on the host, beside what is measured. Make it on every rank."""

    def __init__(self, timeout: timedelta) -> None:
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group

    def barrier(self) -> None:
        dist.barrier(self._group)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's maximum over all ranks, on every rank."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group)
        found: list[float] = tensor.tolist()
        return found

    def everyones(self, word: str) -> list[str]:
        """Each rank's, by rank, on every rank."""
        found: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(found, word, self._group)
        return found


def make_teams(nodes: Sequence[str], device: torch.device, timeout: timedelta, *, with_groups: bool) -> dict[str, Team]:
    """This rank's team of each cut, the world first. Makes process groups: call it on every rank."""
    rank, backend = dist.get_rank(), dist.get_backend()
    world = dist.group.WORLD
    assert world is not None
    ways = {WORLD: [list(range(len(nodes)))]} | (cuts(nodes) if with_groups else {})
    teams = {}
    for name, groups in ways.items():
        mine = None
        for ranks in groups:
            # Every rank takes part in making every group, also those that it is not in.
            made = world if name == WORLD else (dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None)
            if rank in ranks:
                assert made is None or isinstance(made, dist.ProcessGroup)
                mine = Team(
                    name=name,
                    ranks=tuple(ranks),
                    largest=max(map(len, groups)),
                    group=made,
                    device=device,
                    backend=backend,
                )
        assert mine is not None
        teams[name] = mine
    return teams
