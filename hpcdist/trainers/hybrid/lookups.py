"""Lookups of embedding rows on parameter servers, as the trainer sees them; `table_server.py` has the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor

from hpcdist.trainers.hybrid import table_server
from hpcdist.trainers.hybrid.tables import Coalesced, Layout, put_rows, unit_of_row


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


@dataclass
class Lookup:
    """A lookup of one batch in progress."""

    units: Units
    values: Tensor
    received: list[dist.Work] = field(default_factory=list)
    num_late: list[Tensor] = field(
        default_factory=list
    )  #: number of changed units by server, if values were requested ahead
    is_pushed: bool = False


class Lookups:
    """Looks up bags in tables on servers, one batch ahead, and returns their gradients.

        this = lookups.request(lookups.prepare(rows, offsets), train=True)
        pooled = lookups.collect(this)         # [bags, dim]
        following = lookups.request(…)         # is transferred meanwhile
        …
        lookups.push(this, gradient_of_pooled)

    Args:
        group: a gloo group of all ranks, used for nothing else.
        servers: ranks of the servers, in the order of the layout.
    """

    def __init__(self, group: dist.ProcessGroup, servers: Sequence[int], layout: Layout, plan: LookupPlan) -> None:
        self._group = group
        self._servers = servers
        self._starts = layout.starts
        self._dim = layout.dim
        self._plan = plan
        #: The last training lookup, until a header announces its gradients.
        self._open: Lookup | None = None
        #: Tensors are kept until they are sent.
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def prepare(self, rows: Tensor, offsets: Tensor) -> Units:
        """Return the units of a batch's bags for global rows [n] and offsets [bags + 1]."""
        as_units = sums_as_units if self._plan.pool_at_server else rows_as_units
        return as_units(rows, offsets, self._starts)

    def request(self, units: Units, *, train: bool) -> Lookup:
        """Request the values of a batch without waiting. With `train`, `push` follows after the next request.

        At most one requested batch may be uncollected.
        """
        lookup = Lookup(units, torch.empty(sum(units.counts), self._dim))
        follow = self._gradients_follow() if not train else self._open is not None
        if train or follow:
            self._open = lookup if train else None
        for number, (server, values) in enumerate(zip(self._servers, lookup.values.split(units.counts), strict=True)):
            rows, offsets = units.rows[number], None if units.offsets is None else units.offsets[number]
            kind = table_server.TRAIN if train else table_server.LOOK
            header = [kind, len(rows), 0 if offsets is None else len(offsets), int(self._plan.ahead), int(follow)]
            self._send_request(server, header, [rows] if offsets is None else [rows, offsets])
            # The receive starts now: gloo transfers data only once both sides have called.
            if len(values):
                lookup.received.append(self._group.recv([values], server, table_server.TAG_VALUES))
            if self._plan.ahead:
                lookup.num_late.append(torch.zeros(1, dtype=torch.int64))
                lookup.received.append(self._group.recv([lookup.num_late[-1]], server, table_server.TAG_LATE))
        return lookup

    def collect(self, lookup: Lookup) -> Tensor:
        """Wait for the values of a batch; return the sums of its bags, [bags, dim], on the host."""
        for work in lookup.received:
            work.wait()
        begin = 0
        for number, (num_late, count) in enumerate(zip(lookup.num_late, lookup.units.counts, strict=False)):
            if int(num_late):
                units = torch.empty(int(num_late), dtype=torch.int64)
                values = torch.empty(int(num_late), self._dim)
                for tensor, tag in ((units, table_server.TAG_LATE_UNITS), (values, table_server.TAG_LATE_VALUES)):
                    self._group.recv([tensor], self._servers[number], tag).wait()
                put_rows(lookup.values, units + begin, values)
            begin += count
        self._settle()
        return lookup.units.pooled(lookup.values)

    def push(self, lookup: Lookup, gradient: Tensor) -> None:
        """Send the gradient of the sums of `collect`, [bags, dim], once for each training request."""
        lookup.is_pushed = True
        for part, server in zip(lookup.units.gradients(gradient.cpu()), self._servers, strict=True):
            self._send(part, server, table_server.TAG_GRADIENTS)

    def flush(self) -> None:
        """Wait until the servers have applied all gradients of this trainer."""
        answers = [torch.zeros(1, dtype=torch.int64) for _ in self._servers]
        self._order(table_server.FLUSH)
        for answer, server in zip(answers, self._servers, strict=True):
            self._group.recv([answer], server, table_server.TAG_LATE).wait()
        self._settle()

    def leave(self) -> None:
        """End the exchange of this trainer with the servers, which drop a requested batch without gradients."""
        self._order(table_server.LEAVE)
        self._settle()

    def _order(self, kind: int) -> None:
        follow = self._gradients_follow()
        if follow:
            self._open = None
        for server in self._servers:
            self._send_request(server, [kind, 0, 0, 0, int(follow)], [])

    def _gradients_follow(self) -> bool:
        """Return whether gradients have been sent that no header has announced."""
        return self._open is not None and self._open.is_pushed

    def _send_request(self, server: int, header: list[int], body: list[Tensor]) -> None:
        first = torch.empty(table_server.FIRST_LENGTH, dtype=torch.int64)
        first[: table_server.HEADER_LENGTH] = torch.tensor(header)
        num_numbers = sum(map(len, body))
        room = first[table_server.HEADER_LENGTH :]
        if 0 < num_numbers <= len(room):
            torch.cat(body, out=room[:num_numbers])
        self._send(first, server, table_server.TAG_HEADER)
        if num_numbers > len(room):
            self._send(torch.cat(body), server, table_server.TAG_ROWS)

    def _send(self, tensor: Tensor, server: int, tag: int) -> None:
        if tensor.numel():
            self._sending.append((self._group.send([tensor], server, tag), tensor))

    def _settle(self) -> None:
        """Wait until all messages so far are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
