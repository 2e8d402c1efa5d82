"""Embedding tables on parameter servers: layout, rows of a server, and the exchange of rows with the trainers.

A server holds its rows of all tables in one matrix, so that several tables need one lookup and one update. Global rows
(`Layout.place`) are numbered across the servers: server 0's rows of every table, then server 1's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcdist.checkpoint.initial_weights import initial_weights
from hpcdist.checkpoint.sharded import Box, Key, Target, copy_overlap
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.errors import CheckpointError
from hpcdist.rank.context import Context
from hpcdist.rank.rpc import rpc_group
from hpcdist.rank.training_loop import fill_rows
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.click_logs import Bags, Clicks

#: Initial rows are uniform in plus and minus this value.
INIT_SCALE = 0.01
#: Number of rows that are updated together, so that their gradients and state fit into a core's cache.
UPDATE_ROWS = 2048


@dataclass(frozen=True)
class Layout:
    """Shards of the tables. Server s of n has rows `R × s // n` to `R × (s + 1) // n` of a table of R rows."""

    tables: Mapping[str, int]  #: number of rows by name
    dim: int
    num_servers: int

    def span(self, table: str, server: int) -> range:
        """Return the rows of a table that a server has."""
        return share_of(server, self.num_servers, self.tables[table])

    def num_rows(self, server: int) -> int:
        """Return the number of rows of all tables on a server."""
        return sum(len(self.span(table, server)) for table in self.tables)

    @property
    def starts(self) -> list[int]:
        """First global row of each server, then the number of all rows."""
        return [0, *accumulate(self.num_rows(server) for server in range(self.num_servers))]

    def place(self, ids: Tensor, table_of_id: Tensor) -> Tensor:
        """Return the global rows, int64 [n], of ids in tables (given by number)."""
        global_rows = torch.empty_like(ids)
        firsts = self.starts[:-1]  # global row of the table's first row on each server
        for number, table in enumerate(self.tables):
            in_table = table_of_id == number
            table_ids = ids[in_table]
            spans = [self.span(table, server) for server in range(self.num_servers)]
            stops = torch.tensor([span.stop for span in spans])
            server_of_id = torch.searchsorted(stops, table_ids, right=True)
            shifts = torch.tensor([first - span.start for first, span in zip(firsts, spans, strict=True)])
            global_rows[in_table] = table_ids + shifts[server_of_id]
            firsts = [first + len(span) for first, span in zip(firsts, spans, strict=True)]
        return global_rows


class SparseOptimizer:
    """SGD, Adagrad or SparseAdam with the formulas of torch.optim, for the rows of a batch.

    It is not torch.optim, because sparse tensors cost two to four times as much: writing 40,000 of a million rows of
    64 numbers takes 12 ms as a sparse `add_`, 1.1 ms as one copy per row.
    """

    BETAS, ADAM_EPS, ADAGRAD_EPS = (0.9, 0.999), 1e-8, 1e-10

    def __init__(self, name: Literal["sgd", "adagrad", "sparse_adam"], lr: float, weight: Tensor) -> None:
        self.name = name
        self.lr = lr
        self.step = 0
        names = {"sgd": [], "adagrad": ["sum"], "sparse_adam": ["exp_avg", "exp_avg_sq"]}[name]
        self.state = {key: torch.zeros_like(weight) for key in names}

    def change(self, rows: Tensor, grad: Tensor) -> Tensor:
        """Return the change of these different rows for their gradient, both [n, dim]; `grad` is overwritten."""
        if self.name == "sgd":
            return grad.mul_(-self.lr)
        if self.name == "adagrad":
            total = self.state["sum"].index_select(0, rows).addcmul_(grad, grad)
            put_rows(self.state["sum"], rows, total)
            return grad.div_(total.sqrt_().add_(self.ADAGRAD_EPS)).mul_(-self.lr)
        beta1, beta2 = self.BETAS
        mean = self.state["exp_avg"].index_select(0, rows).lerp_(grad, 1 - beta1)
        square = self.state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        put_rows(self.state["exp_avg"], rows, mean)
        put_rows(self.state["exp_avg_sq"], rows, square)
        step_size = self.lr * (1 - beta2**self.step) ** 0.5 / (1 - beta1**self.step)
        return mean.div_(square.sqrt_().add_(self.ADAM_EPS)).mul_(-step_size)


def put_rows(matrix: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set different rows. NumPy copies each row as one element, 3 to 10 times faster than torch."""
    if not matrix.is_cpu:
        matrix.index_copy_(0, rows, values)
        return
    row_type = np.dtype((np.void, matrix.shape[1] * matrix.element_size()))
    matrix_rows = matrix.numpy().view(row_type).reshape(-1)
    matrix_rows[rows.numpy()] = values.contiguous().numpy().view(row_type).reshape(-1)


# Units: what a trainer requests from one server, as `Bags` of rows, numbered from the server's first row. A unit is the
# sum of several rows, or one row. With rows 0 to 4 on server A, 5 to 9 on server B and the bags [1, 7] and [1, 2, 7]:
#
#     rows as units    A: [1], [2]         B: [2]         each row once; the trainer sums bags from these three values
#     sums as units    A: [1], [1, 2]      B: [2], [2]    one sum per bag and server, which the trainer adds
#
# The gradient of a unit is the sum of those of the bags that contain it.


def single_rows(rows: Tensor) -> Bags:
    """Return each row as a unit."""
    return Bags(rows, torch.arange(len(rows) + 1))


def with_any(units: Bags, is_marked: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the units with a marked row; `is_marked` has a value for each row of the units."""
    if len(units):
        is_marked = np.logical_or.reduceat(is_marked, units.offsets[:-1].numpy())
    return np.flatnonzero(is_marked)


def grouped(keys: Tensor, members: Tensor) -> tuple[Tensor, Bags]:
    """Return the different keys, sorted, and the members of each, in their given order: sums are deterministic."""
    # One sort of integers takes 0.1 ms for 20,000 of them; torch.unique takes 2 ms. Each integer is a key and, in the
    # low bits, its place.
    num_bits = max(1, (len(keys) - 1).bit_length())
    packed = (keys.numpy() << num_bits) | np.arange(len(keys))
    packed.sort()
    sorted_keys = packed >> num_bits
    places = packed & ((1 << num_bits) - 1)
    firsts = np.flatnonzero(np.diff(sorted_keys, prepend=-1))  # of each key
    different_keys = torch.from_numpy(sorted_keys[firsts])
    sorted_members = members[torch.from_numpy(places)]
    offsets = torch.from_numpy(np.append(firsts, len(keys)))
    return different_keys, Bags(sorted_members, offsets)


def sums_of(bags: Bags, values: Tensor) -> Tensor:
    """Return the sum of the values [n, dim] of each bag of indices."""
    return F.embedding_bag(bags.ids, values, bags.offsets, mode="sum", include_last_offset=True)


class TableShard:
    """One server's rows of all tables, [rows, dim], with their optimizer."""

    def __init__(self, layout: Layout, server: int, cfg: HybridConfig, *, seed: int, device: torch.device) -> None:
        self._spans = {table: layout.span(table, server) for table in layout.tables}
        self._slices: dict[str, slice] = {}  # rows of the matrix by table
        first = 0
        for table, span in self._spans.items():
            self._slices[table] = slice(first, first + len(span))
            first += len(span)
        self._layout = layout
        self.weight = torch.empty(layout.num_rows(server), layout.dim, device=device)
        for table, span in self._spans.items():
            fill_rows(self.table_rows(table), span, table=table, scale=INIT_SCALE, seed=seed)
        self.optimizer = SparseOptimizer(cfg.table_optimizer, cfg.table_lr, self.weight)

    def values(self, units: Bags) -> Tensor:
        """Return the values, [units, dim], on the host."""
        device = self.weight.device
        rows = units.ids.to(device)
        if len(units) == len(rows):  # each unit is one row
            return self.weight.index_select(0, rows).cpu()
        return sums_of(Bags(rows, units.offsets.to(device)), self.weight).cpu()

    def update(self, rows: Tensor, units: Bags, grads: Tensor) -> None:
        """Do one optimizer step for different rows with the gradients of the units that contain each, [units, dim]."""
        device, optimizer = self.weight.device, self.optimizer
        optimizer.step += 1
        grads = grads.to(device)
        for begin in range(0, len(rows), UPDATE_ROWS):
            part = rows[begin : begin + UPDATE_ROWS].to(device)
            offsets = units.offsets[begin : begin + UPDATE_ROWS + 1]
            ids = units.ids[offsets[0] : offsets[-1]].to(device)
            grad = sums_of(Bags(ids, (offsets - offsets[0]).to(device)), grads)
            change = optimizer.change(part, grad)
            put_rows(self.weight, part, change.add_(self.weight.index_select(0, part)))

    # --- checkpoints

    def table_rows(self, table: str, matrix: Tensor | None = None) -> Tensor:
        """Return a view of a table's rows of the weights, or of another matrix with the same rows."""
        if matrix is None:
            matrix = self.weight
        return matrix[self._slices[table]]

    def checkpoint(self) -> Shard:
        """Return views of all rows and of the optimizer's state, which has the same rows."""
        weights = {}
        boxes: dict[Key, Box] = {}
        states = {}
        for table, span in self._spans.items():
            name = weight_name(table)
            weights[name] = self.table_rows(table)
            boxes[name] = Box.of_rows(weights[name], span.start, self._layout.tables[table])
            states[name] = {key: self.table_rows(table, matrix) for key, matrix in self.optimizer.state.items()}
        return Shard(model=weights, boxes=boxes, trainer={"step": self.optimizer.step, "state": states})

    def start_from(self, weights: StoredWeights) -> None:
        """Copy this server's rows of the whole tables in `weights`, by the names of `ClickModel`."""
        for table, span in self._spans.items():
            if weight_name(table) in weights:
                weights.fill(weight_name(table), [Target(self.table_rows(table), (span.start, 0))])

    def load(self, shards: Iterable[Mapping[str, Any] | None]) -> None:
        """Load this server's rows from shards of any number of servers, one at a time, until it has all rows."""
        num_missing = {table: len(span) for table, span in self._spans.items()}
        for shard in filter(None, shards):
            for table in self._spans:
                num_missing[table] -= self._load_table(table, shard)
            self.optimizer.step = shard["trainer"]["step"]
            if not any(num_missing.values()):
                return
        for table, count in num_missing.items():
            if count:
                raise CheckpointError(f"the checkpoint lacks {count} rows of table {table!r}")

    def _load_table(self, table: str, shard: Mapping[str, Any]) -> int:
        """Load the rows of a table that this server and the shard have in common; return their number."""
        name = weight_name(table)
        rows = shard["model"][name]
        offset, shape = shard["boxes"][name]
        if tuple(shape) != (self._layout.tables[table], self._layout.dim):
            size = " × ".join(map(str, shape))
            raise CheckpointError(f"the checkpoint's table {table!r} has another size: {size}")
        own_offset = (self._spans[table].start, 0)
        for key, matrix in self.optimizer.state.items():
            own_state = Target(self.table_rows(table, matrix), own_offset)
            copy_overlap(shard["trainer"]["state"][name][key], offset, own_state)
        return copy_overlap(rows, offset, Target(self.table_rows(table), own_offset)) // self._layout.dim


def weight_name(table: str) -> str:
    """Return the name of a table's rows in the state dict of `ClickModel`."""
    return f"tables.{table}.weight"


# The exchange. It uses gloo's send and receive instead of RPC: without threads that wait for the interpreter lock. Per
# batch and trainer:
#
#     header, rows of the units    trainer → server    while the trainer computes the previous batch
#     values, if sent ahead        server → trainer    at once
#     gradients                    trainer → server    of the previous batch, if it was one of the training
#     values, or late values       server → trainer    once the server has applied these gradients; if values were sent
#                                                      ahead, only those that this update has changed
#
# So a server has applied all gradients before a batch when it has answered the request of that batch.

#: Kind of a request: a batch whose gradients follow, a batch without gradients, the end of the exchange.
TRAIN, LOOK, LEAVE = range(3)
#: Kind, number of rows, number of offsets (0: each row is a unit), whether values are sent ahead.
HEADER_LENGTH = 4
#: Numbers in the first message of a request. A small request fits into it; each gloo message costs three transfers.
FIRST_LENGTH = 256
#: Values are sent before the previous batch's gradients are applied if these change less than this share of the units:
#: changed values are sent twice.
MAX_LATE_SHARE = 0.25
TAG_HEADER, TAG_ROWS, TAG_VALUES, TAG_LATE, TAG_LATE_UNITS, TAG_LATE_VALUES, TAG_GRADIENTS = range(7)


class _Request(NamedTuple):
    """A request of a trainer."""

    kind: int
    is_ahead: bool  #: whether values are sent before the gradients of the previous batch are applied
    units: Bags


class _Update(NamedTuple):
    """An update whose gradients have not arrived."""

    counts: list[int]  #: number of units by trainer
    rows: Tensor
    units: Bags  #: units that contain each row, numbered across the trainers


def _joint_update(requests: Sequence[Bags]) -> _Update:
    """Return the update for the units that each trainer has requested."""
    counts = [len(units) for units in requests]
    first_units = accumulate(counts, initial=0)
    unit_of_row = [units.of_id + first for units, first in zip(requests, first_units, strict=False)]
    rows, units_of_row = grouped(torch.cat([units.ids for units in requests]), torch.cat(unit_of_row))
    return _Update(counts, rows, units_of_row)


class TableServer:
    """Answers trainers until they leave. It divides gradients by the number of all trainers, as DDP does."""

    def __init__(self, shard: TableShard, group: dist.ProcessGroup, trainers: Sequence[int]) -> None:
        self._shard = shard
        self._group = group
        self._trainers = trainers  #: ranks
        self._touched = np.zeros(len(shard.weight), dtype=bool)

    def serve(self) -> None:
        """Serve the trainers: a step is one update with the gradients of all, in order.

        No value is sent that a pending update would change.
        """
        update: _Update | None = None
        while True:
            requests = [self._receive_request(trainer) for trainer in self._trainers]
            kind = requests[0].kind
            assert all(request.kind == kind for request in requests), "trainers are not at the same step"
            if kind == LEAVE:
                return
            changed: dict[int, Tensor] = {}  # units whose values were sent and then change, by trainer
            for trainer, request in zip(self._trainers, requests, strict=True):
                if request.is_ahead:
                    self._send(self._shard.values(request.units), trainer, TAG_VALUES)
                    changed[trainer] = self._changed(request.units, update)
            if update is not None:
                self._apply(update)
                update = None
            for trainer, request in zip(self._trainers, requests, strict=True):
                if trainer in changed:
                    self._send_late(request.units, changed[trainer], trainer)
                else:
                    self._send(self._shard.values(request.units), trainer, TAG_VALUES)
            if kind == TRAIN:  # prepared while the trainers compute
                update = _joint_update([request.units for request in requests])

    def _changed(self, units: Bags, update: _Update | None) -> Tensor:
        """Return the indices of the units with a row of the update, int64."""
        if update is None:
            return torch.zeros(0, dtype=torch.int64)
        touched = update.rows.numpy()
        self._touched[touched] = True
        changed = with_any(units, self._touched[units.ids.numpy()])
        self._touched[touched] = False
        return torch.from_numpy(changed)

    def _apply(self, update: _Update) -> None:
        """Receive the gradients of an update, and do it."""
        grads = torch.empty(sum(update.counts), self._shard.weight.shape[1])
        receiving = []
        for part, trainer in zip(grads.split(update.counts), self._trainers, strict=True):
            if len(part):
                receiving.append(self._group.recv([part], trainer, TAG_GRADIENTS))
        for work in receiving:
            work.wait()
        self._shard.update(update.rows, update.units, grads.div_(len(self._trainers)))

    def _receive_request(self, trainer: int) -> _Request:
        first = torch.empty(FIRST_LENGTH, dtype=torch.int64)
        self._group.recv([first], trainer, TAG_HEADER).wait()
        kind, num_rows, num_offsets, is_ahead = first[:HEADER_LENGTH].tolist()
        body_length = num_rows + num_offsets
        body = first[HEADER_LENGTH:][:body_length]
        if len(body) < body_length:
            body = torch.empty(body_length, dtype=torch.int64)
            self._group.recv([body], trainer, TAG_ROWS).wait()
        rows = body[:num_rows]
        # Without offsets, each row is a unit.
        units = single_rows(rows) if num_offsets == 0 else Bags(rows, body[num_rows:])
        return _Request(kind, bool(is_ahead), units)

    def _send_late(self, units: Bags, changed: Tensor, trainer: int) -> None:
        """Send the values again that have changed since they were sent: their number, the units, the values."""
        self._send(torch.tensor([len(changed)]), trainer, TAG_LATE)
        self._send(changed, trainer, TAG_LATE_UNITS)
        self._send(self._shard.values(units.take(changed)), trainer, TAG_LATE_VALUES)

    def _send(self, tensor: Tensor, trainer: int, tag: int) -> None:
        if tensor.numel():
            self._group.send([tensor], trainer, tag).wait()


def serve_tables(ctx: Context, cfg: Config, layout: Layout, exchange: dist.ProcessGroup, whole: nn.Module) -> None:
    """Hold this server's rows of the tables until rank 0 leaves.

    Args:
        whole: the whole model, on the device `meta`.
    """
    shard = TableShard(layout, ctx.roles.own_index, cfg.section(HybridConfig), seed=cfg.seed, device=ctx.device)
    server = TableServer(shard, exchange, ctx.roles.ranks_of("trainer"))
    # Not a context manager: after an error its exit would wait for a thread that waits for a lost peer.
    pool = ThreadPoolExecutor(1, thread_name_prefix="tables")

    def save(step: int) -> None:
        ctx.save(step, model=None, trainer={}, shard=shard.checkpoint())

    with rpc_group(ctx, {"table_rows": lambda table: shard.table_rows(table).cpu()}) as group:
        saved = ctx.restore()
        if saved is None:
            shard.start_from(initial_weights(ctx.run, whole, cfg.model))
        else:
            own_first = sorted(range(saved.world_size), key=lambda rank: rank != ctx.rank)
            shard.load(saved.shard(rank) for rank in own_first)
        group.serve({"save": save}, [pool.submit(server.serve)])
    pool.shutdown()


@dataclass
class Lookup:
    """The bags of a batch as units of the servers. Units are numbered across the servers."""

    units: list[Bags]  #: by server
    units_of_bag: Bags
    bags_of_unit: Bags
    values: Tensor = field(init=False)  #: of the units, [units, dim], on the host
    receiving: list[dist.Work] = field(default_factory=list)
    num_late: dict[int, Tensor] = field(default_factory=dict)  #: by number of a server that sends values ahead

    @property
    def counts(self) -> list[int]:
        """Number of units by server."""
        return [len(units) for units in self.units]

    def pooled(self) -> Tensor:
        """Return the sums of the bags, [bags, dim], on the host."""
        return sums_of(self.units_of_bag, self.values)


def rows_as_units(bags: Bags, starts: Sequence[int]) -> Lookup:
    """Return a lookup for sums at the trainer: each different row of the bags is a unit. `starts`: `Layout.starts`."""
    rows, bags_of_unit = grouped(bags.ids, bags.of_id)
    cuts = torch.searchsorted(rows, torch.tensor(starts)).tolist()  # sorted rows are ordered by server
    units = []
    for (begin, end), start in zip(pairwise(cuts), starts, strict=False):
        units.append(single_rows(rows[begin:end] - start))
    unit_of_id = torch.arange(len(rows)).repeat_interleave(bags_of_unit.offsets.diff())
    _, units_by_bag = grouped(bags_of_unit.ids, unit_of_id)  # its offsets lack empty bags
    units_of_bag = Bags(units_by_bag.ids, bags.offsets)
    return Lookup(units, units_of_bag, bags_of_unit)


def sums_as_units(bags: Bags, starts: Sequence[int]) -> Lookup:
    """Return a lookup for sums at the servers: each server's rows of a bag are a unit. Arguments as `rows_as_units`."""
    units = []
    bag_of_unit_by_server = []
    bag_of_id = bags.of_id
    for start, end in pairwise(starts):
        on_server = (bags.ids >= start) & (bags.ids < end)
        server_bags, server_units = grouped(bag_of_id[on_server], bags.ids[on_server] - start)
        units.append(server_units)
        bag_of_unit_by_server.append(server_bags)
    bag_of_unit = torch.cat(bag_of_unit_by_server)
    by_bag = bag_of_unit.sort(stable=True)
    offsets = torch.searchsorted(by_bag.values, torch.arange(len(bags) + 1))
    units_of_bag = Bags(by_bag.indices, offsets)
    bags_of_unit = Bags(bag_of_unit, torch.arange(len(bag_of_unit) + 1))  # one of each
    return Lookup(units, units_of_bag, bags_of_unit)


def choose(batches: Sequence[Bags], starts: Sequence[int], num_trainers: int) -> tuple[bool, bool]:
    """Return what causes less traffic for the first two batches (or one): sums as units, and values ahead.

    Values are sent before the previous batch's gradients are applied if few of the units change meanwhile and have to
    be sent again. The estimate assumes that batches of other trainers are similar.
    """
    num_sums = sum(sums_as_units(batches[0], starts).counts)
    num_rows = sum(rows_as_units(batches[0], starts).counts)
    pool_at_server = num_sums < num_rows
    as_units = sums_as_units if pool_at_server else rows_as_units
    lookup = as_units(batches[-1], starts)
    updated_rows = batches[0].ids.unique()
    num_changed = 0
    for units, start in zip(lookup.units, starts, strict=False):
        is_updated = torch.isin(units.ids + start, updated_rows)
        num_changed += len(with_any(units, is_updated.numpy()))
    share_by_one = num_changed / max(1, sum(lookup.counts))
    share_by_all = 1 - (1 - share_by_one) ** num_trainers
    return pool_at_server, share_by_all < MAX_LATE_SHARE


class TableClient:
    """Looks up bags in the tables, and sends gradients to the servers. Create it with `table_client`."""

    def __init__(self, ctx: Context, group: dist.ProcessGroup, layout: Layout, first_batches: Iterable[Clicks]) -> None:
        bags = [clicks.bags for clicks in first_batches]
        pool_at_server, self._ahead = choose(bags, layout.starts, ctx.roles.count("trainer"))
        self._group = group
        self._servers = ctx.roles.ranks_of("parameter_server")
        self._timer = ctx.timer
        self._starts = layout.starts
        self._dim = layout.dim
        self._as_units = sums_as_units if pool_at_server else rows_as_units
        #: The batch whose values have not all arrived.
        self._requested: Lookup | None = None
        #: Tensors are kept until they are sent.
        self._sending: list[tuple[dist.Work, Tensor]] = []

    def look_up(self, batches: Iterable[Clicks], *, train: bool) -> Iterator[tuple[Clicks, Lookup]]:
        """Yield each batch with its values. With `train`, `push` its gradient before the next one is taken.

        The next batch is requested before a batch is yielded, so that its values arrive meanwhile.
        """
        kind = TRAIN if train else LOOK
        lookups = ((clicks, self._as_units(clicks.bags, self._starts)) for clicks in batches)
        current = next(lookups, None)
        if current is None:
            return
        self._request(current[1], kind)
        for following in lookups:  # made while the servers apply the gradients of the batch before
            self._receive()
            self._request(following[1], kind)
            yield current
            current = following
        self._receive()
        yield current

    def push(self, lookup: Lookup, gradient: Tensor) -> None:
        """Send the gradient of the sums of a batch's bags, [bags, dim]."""
        gradients = sums_of(lookup.bags_of_unit, gradient.cpu())
        for part, server in zip(gradients.split(lookup.counts), self._servers, strict=True):
            self._send(part, server, TAG_GRADIENTS)

    def wait_until_applied(self) -> None:
        """Wait until the servers have applied all gradients that this trainer has pushed."""
        if self._requested is None:
            no_bags = single_rows(torch.zeros(0, dtype=torch.int64))
            self._request(rows_as_units(no_bags, self._starts), LOOK)
        self._receive()  # a server answers when it has applied the gradients before

    def leave(self) -> None:
        """End the exchange; servers drop a batch that was requested and not pushed. All gradients must be applied."""
        for server in self._servers:
            self._send_request(server, LEAVE, single_rows(torch.zeros(0, dtype=torch.int64)), ahead=False)
        self._settle()

    def _request(self, lookup: Lookup, kind: int) -> None:
        self._requested = lookup
        lookup.values = torch.empty(sum(lookup.counts), self._dim)
        parts = zip(self._servers, lookup.units, lookup.values.split(lookup.counts), strict=True)
        for number, (server, units, values) in enumerate(parts):
            # A server without values answers with the number of late values.
            ahead = self._ahead or len(units) == 0
            self._send_request(server, kind, units, ahead=ahead)
            # The receive starts now: gloo transfers data only once both sides have called.
            if len(units):
                lookup.receiving.append(self._group.recv([values], server, TAG_VALUES))
            if ahead:
                lookup.num_late[number] = torch.zeros(1, dtype=torch.int64)
                lookup.receiving.append(self._group.recv([lookup.num_late[number]], server, TAG_LATE))

    def _receive(self) -> None:
        """Wait for the values of the requested batch, if they have not arrived yet."""
        lookup = self._requested
        self._requested = None
        if lookup is None:
            return
        with self._timer.waiting():
            for work in lookup.receiving:
                work.wait()
            first_units = [0, *accumulate(lookup.counts)]
            for number, num_late in lookup.num_late.items():
                self._receive_late(lookup, self._servers[number], int(num_late), first_units[number])
            self._settle()

    def _receive_late(self, lookup: Lookup, server: int, num_late: int, first_unit: int) -> None:
        """Replace the values that have changed since a server sent them."""
        if num_late == 0:
            return
        units = torch.empty(num_late, dtype=torch.int64)
        values = torch.empty(num_late, self._dim)
        self._group.recv([units], server, TAG_LATE_UNITS).wait()
        self._group.recv([values], server, TAG_LATE_VALUES).wait()
        put_rows(lookup.values, first_unit + units, values)

    def _send_request(self, server: int, kind: int, units: Bags, *, ahead: bool) -> None:
        body = units.ids
        if len(units) != len(units.ids):  # not each row is a unit
            body = torch.cat([units.ids, units.offsets])
        num_rows = len(units.ids)
        num_offsets = len(body) - num_rows
        first = torch.empty(FIRST_LENGTH, dtype=torch.int64)
        first[:HEADER_LENGTH] = torch.tensor([kind, num_rows, num_offsets, int(ahead)])
        room = first[HEADER_LENGTH:]
        if len(body) <= len(room):
            room[: len(body)] = body
        self._send(first, server, TAG_HEADER)
        if len(body) > len(room):
            self._send(body, server, TAG_ROWS)

    def _send(self, tensor: Tensor, server: int, tag: int) -> None:
        if tensor.numel():
            self._sending.append((self._group.send([tensor], server, tag), tensor))

    def _settle(self) -> None:
        """Wait until all messages so far are sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


@contextmanager
def table_client(
    ctx: Context, group: dist.ProcessGroup, layout: Layout, first_batches: Iterable[Clicks]
) -> Iterator[TableClient]:
    """Yield a client that exchanges values in the form that is best for the first batches, and end the exchange."""
    client = TableClient(ctx, group, layout, first_batches)
    yield client
    client.leave()  # not after an error: servers may have died
