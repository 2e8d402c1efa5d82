"""Which rank plays which role: agent, observer, parameter server, trainer. Pure functions of the counts.

Ranks get their roles in the order in which the roles are written: `{agent: 1, observer: 4}` makes rank 0 the agent
and ranks 1 to 4 the observers. A run without roles has one, `trainer`, which all ranks share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcdist.errors import ConfigError

DEFAULT_ROLE = "trainer"


@dataclass(frozen=True)
class Roles:
    """Roles with their counts, in rank order. Make it with `Roles.of`."""

    counts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, counts: Mapping[str, int], world_size: int) -> Roles:
        """The roles of a world; without counts all ranks are trainers. Raises ConfigError when they do not add up."""
        if not counts:
            return cls(((DEFAULT_ROLE, world_size),))
        roles = cls(tuple(counts.items()))
        if roles.world_size != world_size:
            raise ConfigError([f"roles add up to {roles.world_size} ranks ({roles}), but {world_size} were started"])
        return roles

    def __str__(self) -> str:
        return ", ".join(f"{role} {count}" for role, count in self.counts)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(role for role, _ in self.counts)

    @property
    def world_size(self) -> int:
        return sum(count for _, count in self.counts)

    def count(self, role: str) -> int:
        """How many ranks play a role; 0 for one that nobody plays."""
        return dict(self.counts).get(role, 0)

    def ranks_of(self, role: str) -> range:
        """The ranks that play a role, in the order of their index. Raises ConfigError where nobody plays it."""
        first = 0
        for name, count in self.counts:
            if name == role:
                return range(first, first + count)
            first += count
        raise ConfigError([f"no rank plays the role {role!r}: roles are {self}"])

    def rank_of(self, role: str, index: int = 0) -> int:
        """The rank of `role:index`. Raises ConfigError where there is none."""
        ranks = self.ranks_of(role)
        if not 0 <= index < len(ranks):
            raise ConfigError([f"no rank is {role}:{index}: roles are {self}"])
        return ranks[index]

    def of_rank(self, rank: int) -> tuple[str, int]:
        """Role and index within the role of a rank."""
        first = 0
        for name, count in self.counts:
            if first <= rank < first + count:
                return name, rank - first
            first += count
        raise IndexError(f"rank {rank} of {self.world_size}")

    def name_of(self, rank: int) -> str:
        """`role:index`, which is also the rank's name in RPC."""
        role, index = self.of_rank(rank)
        return f"{role}:{index}"

    def require(self, **counts: int | None) -> None:
        """Raise ConfigError unless the roles are these and no others; None stands for one rank or more.

        `ctx.roles.require(agent=1, observer=None)`
        """
        wrong = set(self.names) != set(counts) or any(
            self.count(role) != count for role, count in counts.items() if count is not None
        )
        if wrong:
            wanted = ", ".join(f"{role} {'1 or more' if count is None else count}" for role, count in counts.items())
            example = ", ".join(f"{role}: {count or 1}" for role, count in counts.items())
            raise ConfigError([f"this trainer needs the roles {wanted}, got {self}: set roles='{{{example}}}'"])


def rank_table(roles: Roles, groups: Iterable[tuple[range, str]], devices: Mapping[str, str]) -> list[str]:
    """Who is who and where, a line for each stretch of ranks of one role in one place, and a head.

    Args:
        groups: ranks and the place that they share (a host, or what is asked of Slurm for them), in rank order.
        devices: device by role, where it is known.
    """
    places = list(groups)
    rows = [("rank", "role", "device", "where" if any(where for _, where in places) else "")]
    for role, _ in roles.counts:
        mine = roles.ranks_of(role)
        for ranks, where in places:
            both = range(max(mine.start, ranks.start), min(mine.stop, ranks.stop))
            if both:
                index = range(both.start - mine.start, both.stop - mine.start)
                rows.append((span(both), f"{role}:{span(index)}", devices.get(role, ""), where))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def span(numbers: range) -> str:
    """`3` or `3-7`."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
