"""Sums over micro-batches in a fixed order: a binary tree whose shape depends on the number of micro-batches alone.

Floating-point addition is not associative, so the order determines the rounding. A rank adds the nodes of the tree that
lie in its own share. The ranks then exchange these partial sums: each rank adds one part of the vector, and all ranks
gather the parts. With one micro-batch per rank, this transfers as much as a ring all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

#: A node of the tree: its leaves, from the first one to before the second number.
Node = tuple[int, int]


def middle(low: int, high: int) -> int:
    """Return where a node is cut: its left child is the largest complete tree with fewer leaves."""
    return low + (1 << ((high - low - 1).bit_length() - 1))


def nodes_within(share: range, node: Node) -> Iterator[Node]:
    """Yield the largest nodes below `node` whose leaves all lie in `share`, from left to right."""
    low, high = node
    if share.start <= low and high <= share.stop:
        yield node
    elif max(low, share.start) < min(high, share.stop):
        cut = middle(low, high)
        yield from nodes_within(share, (low, cut))
        yield from nodes_within(share, (cut, high))


def total(node: Node, known: Mapping[Node, Tensor]) -> Tensor:
    """Return the sum of a node from the sums of nodes below it."""
    if node in known:
        return known[node]
    cut = middle(*node)
    return total((node[0], cut), known) + total((cut, node[1]), known)


class PartialSums:
    """The sums of the nodes in one rank's share. Holds at most a logarithm of the number of leaves as vectors."""

    def __init__(self, num_leaves: int, share: range) -> None:
        self._owned = list(nodes_within(share, (0, num_leaves))) if share else []
        self._sums: dict[Node, Tensor] = {}

    def add(self, leaf: int, vector: Tensor) -> None:
        """Add the vector of a leaf; call it from the first leaf of the share to the last one."""
        node = (leaf, leaf + 1)
        self._sums[node] = vector
        for owned in self._owned:
            if owned[0] <= leaf < owned[1]:
                self._reduce(owned, leaf)

    def _reduce(self, node: Node, leaf: int) -> Tensor | None:
        """Add the sums of complete nodes on the way from `node` to `leaf`. Returns that of `node` if it is complete."""
        if node in self._sums:
            return self._sums[node]
        low, high = node
        cut = middle(low, high)
        if leaf < cut:
            self._reduce((low, cut), leaf)
            return None
        right = self._reduce((cut, high), leaf)
        if right is None:
            return None
        left = self._sums.pop((low, cut))
        self._sums.pop((cut, high))
        self._sums[node] = left.add_(right)
        return left

    def vectors(self) -> list[Tensor]:
        """Return the sums of the share's largest nodes, from left to right."""
        return [self._sums[node] for node in self._owned]


@dataclass(frozen=True)
class Exchange:
    """The shares of all ranks in one sum, and the exchange of their partial sums.

    Attributes:
        num_leaves: number of micro-batches with samples.
        shares: their numbers by rank.
    """

    num_leaves: int
    shares: list[range]

    def sum(self, vectors: list[Tensor], like: Tensor) -> Tensor:
        """Return the sum of all leaves on every rank; call it on every rank.

        Args:
            vectors: `PartialSums.vectors` of this rank, [n] each.
            like: a tensor with the length n, dtype and device of the vectors, for a rank without any.
        """
        nodes = [list(nodes_within(share, (0, self.num_leaves))) if share else [] for share in self.shares]
        flat_nodes = [node for own in nodes for node in own]
        world_size = len(self.shares)
        if world_size == 1:
            return total((0, self.num_leaves), dict(zip(flat_nodes, vectors, strict=True)))
        part = -(-len(like) // world_size)
        sent = like.new_zeros(world_size, len(vectors), part)
        for number, vector in enumerate(vectors):
            whole = len(vector) // part
            sent[:whole, number] = vector[: whole * part].view(whole, part)
            if whole < world_size:
                sent[whole, number, : len(vector) - whole * part] = vector[whole * part :]
        received = like.new_empty(len(flat_nodes), part)
        dist.all_to_all_single(
            received,
            sent.view(-1, part),
            output_split_sizes=[len(own) for own in nodes],
            input_split_sizes=[len(vectors)] * world_size,
        )
        own_part = total((0, self.num_leaves), dict(zip(flat_nodes, received, strict=True)))
        gathered = like.new_empty(world_size * part)
        dist.all_gather_into_tensor(gathered, own_part.contiguous())
        return gathered[: len(like)]

    def sent_bytes(self, num_values: int, rank: int, *, size_bytes: int = 4) -> int:
        """Return the bytes that a rank sends to others in one sum of vectors of `num_values`."""
        world_size = len(self.shares)
        part = -(-num_values // world_size)
        share = self.shares[rank]
        num_nodes = len(list(nodes_within(share, (0, self.num_leaves)))) if share else 0
        return (num_nodes + 1) * (world_size - 1) * part * size_bytes
