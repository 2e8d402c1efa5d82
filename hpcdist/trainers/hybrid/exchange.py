"""The exchange of rows between trainers and parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.config.schema import Config
from hpcdist.rank.context import Context
from hpcdist.rank.rpc import rpc_group
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.tables import (
    Coalesced,
    Layout,
    LookupPlan,
    TableShard,
    Units,
    put_rows,
    rows_as_units,
    sums_as_units,
    unit_of_row,
)

# The server's side of the exchange; the trainer's is `Lookups`. It transfers *units* (see tables.py), per step and
# trainer:
#
#     header and rows of the units           trainer → server     ahead, while the trainer computes the previous batch
#     values                                 server → trainer     once the previous update is applied; or ahead, then
#                                                                 again for the units that the update has changed
#     gradients                              trainer → server
#
# The exchange uses gloo's send and receive instead of RPC: without threads that wait for the interpreter lock.

# Kind of a request, the first number of its header: a lookup with gradients to follow, a lookup without gradients, an
# answer after all gradients are applied, the end of the exchange.
TRAIN, LOOK, FLUSH, LEAVE = range(4)
#: Kind, number of rows, number of offsets (0: each row is a unit), values ahead, gradients of the last TRAIN follow.
HEADER_LENGTH = 5
#: Numbers in the first message of a request. A small request fits into it; each gloo message costs three transfers.
FIRST_LENGTH = 256
TAG_HEADER, TAG_ROWS, TAG_VALUES, TAG_LATE, TAG_LATE_UNITS, TAG_LATE_VALUES, TAG_GRADIENTS = range(7)


@dataclass(frozen=True)
class _Request:
    kind: int
    rows: Tensor
    offsets: Tensor | None
    ahead: bool
    gradients_follow: bool

    @property
    def num_units(self) -> int:
        return len(self.rows) if self.offsets is None else len(self.offsets)

    def of_units(self, units: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor | None]:
        """Return rows and offsets of the given units."""
        if self.offsets is None:
            return self.rows[torch.from_numpy(units)], None
        begins = self.offsets.numpy()
        lengths = np.diff(begins, append=len(self.rows))[units]
        offsets = lengths.cumsum() - lengths
        places = np.repeat(begins[units] - offsets, lengths) + np.arange(lengths.sum())
        return self.rows[torch.from_numpy(places)], torch.from_numpy(offsets)


class _Pending:
    """A batch with gradients that have not arrived."""

    def __init__(self, requests: Sequence[_Request]) -> None:
        self.counts = [request.num_units for request in requests]
        before = [0, *accumulate(self.counts)]  # units are numbered across the trainers
        units = [unit_of_row(len(one.rows), one.offsets) + first for one, first in zip(requests, before, strict=False)]
        self.coalesced = Coalesced.of(torch.cat([request.rows for request in requests]), torch.cat(units))


class TableServer:
    """Answers trainers until they leave.

    Args:
        group: a gloo group of all ranks that has no other use.
        num_trainers: number of all trainers; gradients are divided by it, as in DDP.
    """

    def __init__(self, shard: TableShard, group: dist.ProcessGroup, num_trainers: int) -> None:
        self._shard = shard
        self._group = group
        self._num_trainers = num_trainers
        self._touched = np.zeros(len(shard.weight), dtype=bool)
        self._lock = threading.Lock()

    def serve(self, trainers: Sequence[int], *, sync: bool) -> None:
        """Serve these trainers (ranks) together: each step is one update with their gradients, in order.

        With `sync` no value is sent that a pending update would change. Without, call it in a thread per trainer.
        """
        pending: _Pending | None = None
        while True:
            requests = dict(zip(trainers, map(self._receive_request, trainers), strict=True))
            assert len({request.kind for request in requests.values()}) == 1, "trainers are not at the same step"
            first = requests[trainers[0]]
            late: dict[int, np.ndarray[Any, Any]] = {}
            for trainer, request in requests.items():
                if request.ahead:
                    self._send(self._values(request), trainer, TAG_VALUES)
                    late[trainer] = self._changed(request, pending if sync and first.gradients_follow else None)
            if first.gradients_follow:
                assert pending is not None
                self._apply(pending, trainers)
                pending = None
            if first.kind == LEAVE:
                return
            for trainer, request in requests.items():
                if first.kind == FLUSH:
                    self._send(torch.zeros(1, dtype=torch.int64), trainer, TAG_LATE)
                else:
                    self._answer(trainer, request, late.get(trainer))
            if first.kind == TRAIN:
                # Overlaps with the computation of the trainers.
                pending = _Pending(list(requests.values()))

    def _answer(self, trainer: int, request: _Request, late: np.ndarray[Any, Any] | None) -> None:
        if late is None:
            self._send(self._values(request), trainer, TAG_VALUES)
            return
        self._send(torch.tensor([len(late)]), trainer, TAG_LATE)
        if len(late):
            self._send(torch.from_numpy(late), trainer, TAG_LATE_UNITS)
            self._send(self._shard.values(*request.of_units(late)), trainer, TAG_LATE_VALUES)

    def _values(self, request: _Request) -> Tensor:
        return self._shard.values(request.rows, request.offsets)

    def _changed(self, request: _Request, pending: _Pending | None) -> np.ndarray[Any, Any]:
        """Return the indices of the units with a row of the pending update, int64."""
        if pending is None or len(request.rows) == 0:
            return np.zeros(0, dtype=np.int64)
        touched = pending.coalesced.rows.numpy()
        self._touched[touched] = True
        changed = self._touched[request.rows.numpy()]
        self._touched[touched] = False
        if request.offsets is not None:
            changed = np.logical_or.reduceat(changed, request.offsets.numpy())
        return np.flatnonzero(changed)

    def _apply(self, pending: _Pending, trainers: Sequence[int]) -> None:
        grads = torch.empty(sum(pending.counts), self._shard.weight.shape[1])
        received = [
            self._group.recv([part], trainer, TAG_GRADIENTS)
            for part, trainer in zip(grads.split(pending.counts), trainers, strict=True)
            if len(part)
        ]
        for work in received:
            work.wait()
        with self._lock:  # in async mode other threads apply updates, too
            self._shard.update(pending.coalesced, grads.div_(self._num_trainers))

    def _receive_request(self, trainer: int) -> _Request:
        first = torch.empty(FIRST_LENGTH, dtype=torch.int64)
        self._group.recv([first], trainer, TAG_HEADER).wait()
        kind, num_rows, num_offsets, ahead, follow = first[:HEADER_LENGTH].tolist()
        body = first[HEADER_LENGTH:][: num_rows + num_offsets]
        if len(body) < num_rows + num_offsets:
            body = torch.empty(num_rows + num_offsets, dtype=torch.int64)
            self._group.recv([body], trainer, TAG_ROWS).wait()
        offsets = body[num_rows:] if num_offsets else None
        return _Request(kind, body[:num_rows], offsets, bool(ahead), bool(follow))

    def _send(self, tensor: Tensor, trainer: int, tag: int) -> None:
        if tensor.numel():
            self._group.send([tensor], trainer, tag).wait()


def serve_tables(ctx: Context, cfg: Config, layout: Layout, exchange: dist.ProcessGroup) -> None:
    """Hold this server's rows of the tables until rank 0 leaves."""
    hybrid = cfg.section(HybridConfig)
    shard = TableShard(
        layout,
        ctx.role_index,
        optimizer=hybrid.table_optimizer,
        lr=hybrid.table_lr,
        scale=hybrid.init_scale,
        seed=cfg.seed,
        device=ctx.device,
    )
    trainers = list(ctx.ranks_of("trainer"))
    server = TableServer(shard, exchange, len(trainers))
    together = [trainers] if hybrid.mode == "sync" else [[trainer] for trainer in trainers]
    # Not a context manager: after an error its exit would wait for threads that wait for a lost peer.
    pool = ThreadPoolExecutor(len(together), thread_name_prefix="tables")

    def save(step: int) -> None:
        ctx.save(step, model=None, trainer={}, shard=shard.checkpoint())

    with rpc_group(ctx, {"table_rows": lambda table: shard.table_rows(table).cpu()}) as group:
        if (saved := ctx.restore()) is not None:
            own_first = sorted(range(saved.world_size), key=lambda rank: rank != ctx.rank)
            shard.load(saved.shard(rank) for rank in own_first)
        work = [pool.submit(server.serve, ranks, sync=hybrid.mode == "sync") for ranks in together]
        group.serve({"save": save}, work)
    pool.shutdown()


# Lookups of embedding rows on parameter servers, as the trainer sees them.


@dataclass
class Lookup:
    """A lookup of one batch in progress."""

    units: Units
    values: Tensor
    receiving: list[dist.Work] = field(default_factory=list)
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
        self._uncollected: Lookup | None = None
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
        lookup = self._uncollected = Lookup(units, torch.empty(sum(units.counts), self._dim))
        follow = self._gradients_follow() if not train else self._open is not None
        if train or follow:
            self._open = lookup if train else None
        for number, (server, values) in enumerate(zip(self._servers, lookup.values.split(units.counts), strict=True)):
            rows, offsets = units.rows[number], None if units.offsets is None else units.offsets[number]
            kind = TRAIN if train else LOOK
            header = [kind, len(rows), 0 if offsets is None else len(offsets), int(self._plan.ahead), int(follow)]
            self._send_request(server, header, [rows] if offsets is None else [rows, offsets])
            # The receive starts now: gloo transfers data only once both sides have called.
            if len(values):
                lookup.receiving.append(self._group.recv([values], server, TAG_VALUES))
            if self._plan.ahead:
                lookup.num_late.append(torch.zeros(1, dtype=torch.int64))
                lookup.receiving.append(self._group.recv([lookup.num_late[-1]], server, TAG_LATE))
        return lookup

    def collect(self, lookup: Lookup) -> Tensor:
        """Wait for the values of a batch; return the sums of its bags, [bags, dim], on the host."""
        self._receive(lookup)
        self._uncollected = None
        self._settle()
        return lookup.units.pooled(lookup.values)

    def _receive(self, lookup: Lookup) -> None:
        for work in lookup.receiving:
            work.wait()
        begin = 0
        for number, (num_late, count) in enumerate(zip(lookup.num_late, lookup.units.counts, strict=False)):
            if int(num_late):
                units = torch.empty(int(num_late), dtype=torch.int64)
                values = torch.empty(int(num_late), self._dim)
                for tensor, tag in ((units, TAG_LATE_UNITS), (values, TAG_LATE_VALUES)):
                    self._group.recv([tensor], self._servers[number], tag).wait()
                put_rows(lookup.values, units + begin, values)
            begin += count
        lookup.receiving, lookup.num_late = [], []

    def push(self, lookup: Lookup, gradient: Tensor) -> None:
        """Send the gradient of the sums of `collect`, [bags, dim]; call it once for each training request."""
        lookup.is_pushed = True
        for part, server in zip(lookup.units.gradients(gradient.cpu()), self._servers, strict=True):
            self._send(part, server, TAG_GRADIENTS)

    def flush(self) -> None:
        """Wait until the servers have applied all gradients of this trainer."""
        if self._uncollected is not None:  # a server answers it before it reads on, and waits until values are received
            self._receive(self._uncollected)
        answers = [torch.zeros(1, dtype=torch.int64) for _ in self._servers]
        self._order(FLUSH)
        for answer, server in zip(answers, self._servers, strict=True):
            self._group.recv([answer], server, TAG_LATE).wait()
        self._settle()

    def leave(self) -> None:
        """End the exchange of this trainer with the servers, which drop a requested batch without gradients."""
        self._order(LEAVE)
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
        first = torch.empty(FIRST_LENGTH, dtype=torch.int64)
        first[:HEADER_LENGTH] = torch.tensor(header)
        num_numbers = sum(map(len, body))
        room = first[HEADER_LENGTH:]
        if 0 < num_numbers <= len(room):
            torch.cat(body, out=room[:num_numbers])
        self._send(first, server, TAG_HEADER)
        if num_numbers > len(room):
            self._send(torch.cat(body), server, TAG_ROWS)

    def _send(self, tensor: Tensor, server: int, tag: int) -> None:
        if tensor.numel():
            self._sending.append((self._group.send([tensor], server, tag), tensor))

    def _settle(self) -> None:
        """Wait until all messages so far are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()
