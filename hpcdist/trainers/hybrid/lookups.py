"""Lookups of embedding rows on parameter servers, as the trainer sees them; `table_server.py` has the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.trainers.hybrid import table_server
from hpcdist.trainers.hybrid.tables import Layout, put_rows
from hpcdist.trainers.hybrid.units import LookupPlan, Units, rows_as_units, sums_as_units


@dataclass
class Lookup:
    """A lookup of one batch in progress."""

    units: Units
    values: Tensor
    received: list[dist.Work] = field(default_factory=list)
    #: Number of changed units by server, if values were requested ahead.
    num_late: list[Tensor] = field(default_factory=list)
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
