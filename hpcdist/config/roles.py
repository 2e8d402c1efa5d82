"""Roles of ranks: `{agent: 1, observer: 4}` makes rank 0 the agent and ranks 1 to 4 the observers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from hpcdist.errors import ConfigError

DEFAULT_ROLE = "trainer"


def share_of(index: int, num_owners: int, num_items: int) -> range:
    """Return the share of one owner: consecutive items, in number at most one more than those of others.

    Args:
        index: number of the owner, from 0.
    """
    return range(num_items * index // num_owners, num_items * (index + 1) // num_owners)


def needed_ranks(counts: Mapping[str, int]) -> str:
    """Return the beginning of a message about a number of ranks that does not fit the roles of a config."""
    roles = Roles(tuple(counts.items()))
    text = f"roles add up to {roles.world_size} ranks ({roles})"
    if len(counts) == 1:
        text += " or a multiple of them"
    return text


@dataclass(frozen=True)
class Roles:
    """The roles and their numbers of ranks, in rank order. Create it with `Roles.of`."""

    counts: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, counts: Mapping[str, int], world_size: int) -> Self:
        """Return the roles of a run, see `fit`. Raises ConfigError for a number of ranks that does not fit."""
        roles = cls.fit(counts, world_size)
        if roles is None:
            raise ConfigError(f"{needed_ranks(counts)}, but {world_size} were started")
        return roles

    @classmethod
    def fit(cls, counts: Mapping[str, int], world_size: int) -> Self | None:
        """Return the roles of this number of ranks; None if it does not fit. Without counts all ranks are trainers.

        A single role may have a multiple of its ranks, for replicas: `{stage: 2}` with 6 ranks gives the role six
        ranks, which the trainer divides into three replicas.
        """
        if not counts:
            return cls(((DEFAULT_ROLE, world_size),))
        roles = cls(tuple(counts.items()))
        if roles.world_size == world_size:
            return roles
        if len(counts) == 1 and world_size % roles.world_size == 0:
            return cls(((roles.names[0], world_size),))
        return None

    def __str__(self) -> str:
        return ", ".join(f"{role} {count}" for role, count in self.counts)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the roles, in rank order."""
        return tuple(role for role, _ in self.counts)

    @property
    def world_size(self) -> int:
        return sum(count for _, count in self.counts)

    def count(self, role: str) -> int:
        """Return the number of ranks with a role; 0 for an unknown role."""
        return dict(self.counts).get(role, 0)

    def _ranges(self) -> Iterator[tuple[str, range]]:
        first = 0
        for role, count in self.counts:
            yield role, range(first, first + count)
            first += count

    def ranks_of(self, role: str) -> range:
        """Return the ranks of a role, ordered by index. Raises ConfigError if no rank has this role."""
        if role in self.names:
            return dict(self._ranges())[role]
        raise ConfigError(f"no rank has the role {role!r}: the roles are {self}")

    def of_rank(self, rank: int) -> tuple[str, int]:
        """Return the role of a rank and its index within the role."""
        for role, ranks in self._ranges():
            if rank in ranks:
                return role, rank - ranks.start
        raise IndexError(f"rank {rank} of {self.world_size}")

    def name_of(self, rank: int) -> str:
        """Return `role:index`, which is also the rank's name in RPC."""
        role, index = self.of_rank(rank)
        return f"{role}:{index}"

    def require(self, **counts: int | None) -> None:
        """Raise ConfigError unless the run has exactly these roles: `ctx.roles.require(agent=1, observer=None)`.

        Args:
            **counts: number of ranks by role; None stands for one or more.
        """
        fits = all(self.count(role) == count for role, count in counts.items() if count is not None)
        if fits and set(self.names) == set(counts):
            return
        needed = []
        example = []
        for role, count in counts.items():
            if count is None:
                needed.append(f"{role} 1 or more")
                example.append(f"{role}: 1")
            else:
                needed.append(f"{role} {count}")
                example.append(f"{role}: {count or 1}")
        raise ConfigError(
            f"this trainer needs the roles {', '.join(needed)}, got {self}: set roles='{{{', '.join(example)}}}'"
        )


def rank_table(roles: Roles, groups: Iterable[tuple[range, str]], devices: Mapping[str, str]) -> list[str]:
    """Return a table of ranks, roles, devices and places: a header, and a line for each role in each place.

    Args:
        groups: ranks and their common place (a host or a Slurm request), in rank order.
        devices: device by role, if known.
    """
    places = list(groups)
    place_title = ""
    if any(place for _, place in places):
        place_title = "place"
    rows = [("rank", "role", "device", place_title)]
    for role, role_ranks in roles._ranges():
        for place_ranks, place in places:
            ranks = range(max(role_ranks.start, place_ranks.start), min(role_ranks.stop, place_ranks.stop))
            if ranks:
                indexes = range(ranks.start - role_ranks.start, ranks.stop - role_ranks.start)
                rows.append((span(ranks), f"{role}:{span(indexes)}", devices.get(role, ""), place))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def span(numbers: range) -> str:
    """Return consecutive numbers, at least one, as `3` or `3-7`."""
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{numbers[0]}-{numbers[-1]}"
