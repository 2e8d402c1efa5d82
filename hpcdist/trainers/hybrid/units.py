"""The bags of a batch as units of the parameter servers: what a trainer asks them for, and how bags follow from it.

A unit is one or more rows of one server; its value is their sum. With rows 0 to 4 on server A, rows 5 to 9 on server B
and the bags [1, 7] and [1, 2, 7]:

    rows as units    A: 1, 2               B: 7            each row once; the trainer sums bags from these three values
    sums as units    A: [1], [1, 2]        B: [7], [7]     one sum per bag and server, which the trainer adds

`choose` takes the form with fewer units. The gradient of a unit is the sum of those of the bags that contain it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor

from hpcdist.trainers.hybrid.tables import Coalesced, unit_of_row


@dataclass(frozen=True)
class LookupPlan:
    """How lookups are exchanged, chosen once per attempt. The results are equal up to rounding."""

    pool_at_server: bool
    ahead: bool  #: whether values of the next batch are sent before this batch's update


@dataclass(frozen=True)
class Units:
    """The bags of a batch as units of the servers, in the order of the servers.

    Attributes:
        rows: rows of each server, int64, relative to its first row.
        offsets: start of each unit in a server's `rows`; None if each row is a unit.
        counts: number of units by server.
        places: indices of the units of each bag, bag after bag; None if bag b is unit b of every server.
        offsets_of_bag: start of each bag in `places`.
        bags: indices of the bags that each unit is part of, unit after unit; None if unit u of every server is bag u.
        firsts: start of each unit in `bags`; None if each unit is part of one bag.
    """

    rows: list[Tensor]
    offsets: list[Tensor] | None
    counts: list[int]
    places: Tensor | None
    offsets_of_bag: Tensor | None
    bags: Tensor | None
    firsts: Tensor | None

    def pooled(self, values: Tensor) -> Tensor:
        """Return the sums of the bags [bags, dim] for the values of all units [units, dim]."""
        if self.places is None:
            parts = values.split(self.counts)
            return values if len(parts) == 1 else torch.stack(parts).sum(0)
        return F.embedding_bag(self.places, values, self.offsets_of_bag, mode="sum")

    def gradients(self, grad: Tensor) -> Sequence[Tensor]:
        """Return the gradients of each server's units [units, dim] for those of the sums of the bags [bags, dim]."""
        if self.bags is None:
            return [grad] * len(self.counts)
        if self.firsts is None:
            units = grad.index_select(0, self.bags)
        else:
            units = F.embedding_bag(self.bags, grad, self.firsts, mode="sum")
        return list(units.split(self.counts))


def rows_as_units(rows: Tensor, offsets: Tensor, starts: Sequence[int]) -> Units:
    """Return units for sums at the trainer: each different row of the bags is a unit.

    Args:
        rows: global rows of the bags, int64 [n].
        offsets: start of each bag in `rows`, then the number of rows, int64 [bags + 1].
        starts: first global row of each server, then the number of all rows.
    """
    found = Coalesced.of(rows, unit_of_row(len(rows), offsets[:-1]))
    cuts = torch.searchsorted(found.rows, torch.tensor(starts)).tolist()
    counts = [end - begin for begin, end in pairwise(cuts)]
    # Sorted rows are ordered by server. Sorted by bag again, they are the units of each bag.
    unit = torch.arange(len(found.rows)).repeat_interleave(found.firsts.diff())
    return Units(
        rows=[part - start for part, start in zip(found.rows.split(counts), starts, strict=False)],
        offsets=None,
        counts=counts,
        places=Coalesced.of(found.units, unit).units,
        offsets_of_bag=offsets[:-1],
        bags=found.units,
        firsts=found.firsts[:-1],
    )


def sums_as_units(rows: Tensor, offsets: Tensor, starts: Sequence[int]) -> Units:
    """Return units for sums at the servers: each server's rows of a bag are a unit. Arguments as in `rows_as_units`."""
    num_bags = len(offsets) - 1
    bag_of_row = unit_of_row(len(rows), offsets[:-1])
    own_rows, own_offsets, bags = [], [], []
    for start, end in pairwise(starts):
        if len(starts) > 2:
            mine = ((rows >= start) & (rows < end)).nonzero().squeeze(1)
            here, bag = rows[mine], bag_of_row[mine]
        else:
            here, bag = rows, bag_of_row
        firsts = torch.from_numpy(np.flatnonzero(np.diff(bag.numpy(), prepend=-1)))
        own_rows.append(here - start)
        own_offsets.append(firsts)
        bags.append(bag[firsts])
    counts = [len(part) for part in bags]
    is_whole = all(count == num_bags for count in counts)
    of_unit = torch.cat(bags)
    found = None if is_whole else Coalesced.of(of_unit, torch.arange(len(of_unit)))
    return Units(
        rows=own_rows,
        offsets=own_offsets,
        counts=counts,
        places=None if found is None else found.units,
        offsets_of_bag=None if found is None else torch.searchsorted(of_unit.sort().values, torch.arange(num_bags)),
        bags=None if is_whole else of_unit,
        firsts=None,
    )


def choose(batches: Sequence[tuple[Tensor, Tensor]], starts: Sequence[int], num_trainers: int) -> LookupPlan:
    """Return the plan with less traffic for the first two batches (or one), given as rows and offsets.

    Values are requested ahead if less than a quarter of the units change meanwhile and have to be sent again. The
    estimate assumes that batches of other trainers are similar.
    """
    pool_at_server = sum(sums_as_units(*batches[0], starts).counts) < sum(rows_as_units(*batches[0], starts).counts)
    as_units = sums_as_units if pool_at_server else rows_as_units
    units = as_units(*batches[-1], starts)
    touched = batches[0][0].unique()
    changed = 0
    for server, rows in enumerate(units.rows):
        hit = torch.isin(rows + starts[server], touched).numpy()
        if units.offsets is not None and len(hit):
            hit = np.logical_or.reduceat(hit, units.offsets[server].numpy())
        changed += int(hit.sum())
    same = changed / max(1, sum(units.counts))
    return LookupPlan(pool_at_server=pool_at_server, ahead=1 - (1 - same) ** num_trainers < 0.25)
