"""Embedding tables on parameter servers: layout, rows of a server, and the exchange of rows with the trainers.

A server holds its rows of all tables in one matrix, so that several tables need one lookup and one update. Global rows
(`TableLayout.place`) are numbered across the servers: server 0's rows of every table, then server 1's.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
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
from hpcdist.rank.rpc import RpcGroup, rpc_group
from hpcdist.rank.training_loop import fill_rows
from hpcdist.trainers.hybrid import HybridConfig
from hpcdist.trainers.hybrid.click_logs import Bags, Clicks

#: Initial rows are uniform in plus and minus this value.
INIT_SCALE = 0.01
#: Number of rows that are updated together, so that their gradients and state fit into a core's cache.
UPDATE_ROWS = 2048


@dataclass(frozen=True)
class TableLayout:
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


def units_of(rows: Tensor, offsets: Tensor | None) -> Bags:
    """Return the units of a message; without offsets, each row is one."""
    if offsets is None:
        return single_rows(rows)
    return Bags(rows, offsets)


def parts_of(units: Bags) -> tuple[Tensor, Tensor | None]:
    """Return the arguments of `units_of` that give these units."""
    if len(units) == len(units.ids):
        return units.ids, None
    return units.ids, units.offsets


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

    def __init__(self, layout: TableLayout, server: int, cfg: HybridConfig, *, seed: int, device: torch.device) -> None:
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


# The exchange: two calls of RPC per batch, trainer and server.
#
#     look_up    values of the batch's units    while the trainer computes the previous batch, if values are sent ahead
#     push       gradients of the previous batch → values of the batch once the server has applied the gradients of all
#                trainers; if values were sent ahead, only those that this update has changed

#: Values are sent before the previous batch's gradients are applied if these change less than this share of the units:
#: changed values are sent twice.
MAX_LATE_SHARE = 0.25
#: Threads in which a server answers. Its lock lets one compute at a time; each may start as many threads of OpenMP as
#: the server has cores.
NUM_SERVER_THREADS = 2


class _Batch(NamedTuple):
    """A trainer's batch without the gradients, which have not arrived."""

    units: Bags
    is_sent: bool  #: whether the trainer has their values as they are before the last update


class _Push(NamedTuple):
    """The gradients of a trainer's batch, until those of all trainers have arrived."""

    gradients: Tensor
    answer: Future[Any]


class _Update(NamedTuple):
    """Which rows an update changes, and the units that contain each, numbered across the trainers."""

    rows: Tensor
    units: Bags

    @classmethod
    def of(cls, batches: Sequence[Bags]) -> "_Update":
        """Return the update with the gradients of a batch of each trainer."""
        first_units = accumulate((len(units) for units in batches), initial=0)
        unit_of_row = [units.of_id + first for units, first in zip(batches, first_units, strict=False)]
        return cls(*grouped(torch.cat([units.ids for units in batches]), torch.cat(unit_of_row)))


class TableServer:
    """Answers trainers, in threads of RPC. It divides gradients by the number of all trainers, as DDP does."""

    def __init__(self, shard: TableShard, num_trainers: int) -> None:
        self._shard = shard
        self._lock = threading.Lock()
        self._batches: list[deque[_Batch]] = [deque() for _ in range(num_trainers)]  #: by trainer
        self._pushes: dict[int, _Push] = {}  #: by trainer, until all have sent theirs
        self._prepared: _Update | None = None  #: the next update, once it is known and prepared
        self._preparation = ThreadPoolExecutor(1, thread_name_prefix="tables")
        self._touched = np.zeros(len(shard.weight), dtype=bool)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that trainers call, by name."""
        return {"look_up": self.look_up, "push": self.push, "table_rows": self.table_rows}

    def look_up(self, trainer: int, rows: Tensor, offsets: Tensor | None, train: bool) -> Tensor:
        """Return the values of a batch, [units, dim]. With `train`, the trainer will push its gradients."""
        units = units_of(rows, offsets)
        with self._lock:
            if train:
                self._batches[trainer].append(_Batch(units, is_sent=True))
            return self._shard.values(units)

    def push(
        self, trainer: int, gradients: Tensor, next_rows: Tensor | None, next_offsets: Tensor | None
    ) -> Future[tuple[Tensor | None, Tensor] | None]:
        """Take the gradients of a trainer's oldest batch, [units, dim], and its next batch if that is not known yet.

        The result is there once the gradients of all trainers are applied. Without a next batch it is None, otherwise
        units and values: all values, and None for the units, or those that have changed since `look_up`.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if next_rows is not None:
                self._batches[trainer].append(_Batch(units_of(next_rows, next_offsets), is_sent=False))
            self._pushes[trainer] = _Push(gradients, answer)
            if len(self._pushes) == len(self._batches):
                pushes = [self._pushes.pop(number) for number in range(len(self._batches))]
                try:
                    self._apply(pushes)
                except Exception as error:  # of every trainer's call
                    for push in pushes:
                        if not push.answer.done():
                            push.answer.set_exception(error)
        return answer

    def _apply(self, pushes: Sequence[_Push]) -> None:
        """Do one update with the gradients of all trainers, in order, and answer."""
        update = self._prepared
        if update is None:
            update = self._next_update()
        for batches in self._batches:
            batches.popleft()
        gradients = torch.cat([push.gradients for push in pushes])
        self._shard.update(update.rows, update.units, gradients.div_(len(pushes)))
        for push, batches in zip(pushes, self._batches, strict=True):
            push.answer.set_result(self._values_after(update, batches))
        self._prepared = None
        # In another thread: the last trainer gets its answer when this call ends.
        self._preparation.submit(self._prepare)

    def _prepare(self) -> None:
        """Prepare the next update while the trainers compute. An error of it comes again with the update itself."""
        with self._lock:
            if self._prepared is None and all(self._batches):
                self._prepared = self._next_update()

    def _next_update(self) -> _Update:
        return _Update.of([batches[0].units for batches in self._batches])

    def _values_after(self, update: _Update, batches: Sequence[_Batch]) -> tuple[Tensor | None, Tensor] | None:
        """Return the result of `push`."""
        if not batches:
            return None
        units = batches[0].units
        if not batches[0].is_sent:
            return None, self._shard.values(units)
        changed = self._changed(units, update)
        return changed, self._shard.values(units.take(changed))

    def _changed(self, units: Bags, update: _Update) -> Tensor:
        """Return the indices of the units with a row of the update, int64."""
        touched = update.rows.numpy()
        self._touched[touched] = True
        changed = with_any(units, self._touched[units.ids.numpy()])
        self._touched[touched] = False
        return torch.from_numpy(changed)

    def table_rows(self, table: str) -> Tensor:
        """Return this server's rows of a table on the host."""
        return self._shard.table_rows(table).cpu()


def serve_tables(ctx: Context, cfg: Config, layout: TableLayout, whole: nn.Module) -> None:
    """Hold this server's rows of the tables until rank 0 leaves.

    Args:
        whole: the whole model, on the device `meta`.
    """
    shard = TableShard(layout, ctx.roles.own_index, cfg.section(HybridConfig), seed=cfg.seed, device=ctx.device)
    saved = ctx.restore()
    if saved is None:
        shard.start_from(initial_weights(ctx.run, whole, cfg.model))
    else:
        own_first = sorted(range(saved.world_size), key=lambda rank: rank != ctx.rank)
        shard.load(saved.shard(rank) for rank in own_first)
    server = TableServer(shard, ctx.roles.count("trainer"))
    with rpc_group(ctx, server.functions, num_threads=NUM_SERVER_THREADS) as group:
        group.serve({"save": lambda step: ctx.save(step, model=None, trainer={}, shard=shard.checkpoint())})


@dataclass
class Lookup:
    """The bags of a batch as units of the servers. Units are numbered across the servers."""

    units: list[Bags]  #: by server
    units_of_bag: Bags
    bags_of_unit: Bags
    values: Tensor = field(init=False)  #: of the units, [units, dim], on the host
    #: Answers of the servers to `look_up`; none if their values come with the answers to `push`.
    calls: list[Future[Tensor]] = field(default_factory=list)

    @property
    def counts(self) -> list[int]:
        """Number of units by server."""
        return [len(units) for units in self.units]

    def pooled(self) -> Tensor:
        """Return the sums of the bags, [bags, dim], on the host."""
        return sums_of(self.units_of_bag, self.values)


def rows_as_units(bags: Bags, starts: Sequence[int]) -> Lookup:
    """Return a lookup for sums at the trainer: each different row of the bags is a unit.

    Args:
        starts: see `TableLayout.starts`.
    """
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
    """Looks up bags in the tables, and sends gradients to the servers.

    It exchanges values in the form that is best for the first batches.
    """

    def __init__(self, ctx: Context, group: RpcGroup, layout: TableLayout, first_batches: Iterable[Clicks]) -> None:
        bags = [clicks.bags for clicks in first_batches]
        pool_at_server, self._ahead = choose(bags, layout.starts, ctx.roles.count("trainer"))
        self._group = group
        self._trainer = ctx.roles.own_index
        self._servers = group.of_role("parameter_server")
        self._timer = ctx.timer
        self._timeout_s = ctx.groups.timeout.total_seconds()  # of a trainer's wait for the others
        self._starts = layout.starts
        self._as_units = sums_as_units if pool_at_server else rows_as_units
        #: The batch after the one that is being computed.
        self._following: Lookup | None = None
        #: Answers to the last gradients, by server.
        self._pushes: list[Future[Any]] = []

    def look_up(self, batches: Iterable[Clicks], *, train: bool) -> Iterator[tuple[Clicks, Lookup]]:
        """Yield each batch with its values. With `train`, `push` its gradient before the next one is taken.

        Values of the next batch arrive while a batch is computed, or with the answer to its gradient.
        """
        self.wait_until_applied()
        self._pushes.clear()
        lookups = ((clicks, self._as_units(clicks.bags, self._starts)) for clicks in batches)
        current = next(lookups, None)
        if current is None:
            return
        self._request(current[1], train=train)
        for following in lookups:  # made while the servers apply the gradients of the batch before
            self._receive(current[1])
            self._following = following[1]
            if self._ahead or not train:
                self._request(following[1], train=train)
            yield current
            current = following
        self._receive(current[1])
        self._following = None
        yield current

    def push(self, lookup: Lookup, gradient: Tensor) -> None:
        """Send the gradient of the sums of a batch's bags, [bags, dim]."""
        gradients = sums_of(lookup.bags_of_unit, gradient.cpu()).split(lookup.counts)
        following = self._following
        new_units: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(self._servers)
        if following is not None and following.calls:
            wait(following.calls)  # a server must know the next batch before it takes these gradients
        elif following is not None:
            new_units = [parts_of(units) for units in following.units]
        for server, part, (rows, offsets) in zip(self._servers, gradients, new_units, strict=True):
            self._pushes.append(self._call(server, "push", part, rows, offsets))

    def wait_until_applied(self) -> None:
        """Wait until the servers have applied all gradients that the trainers have pushed."""
        with self._timer.waiting():
            for push in self._pushes:
                push.result()

    def _request(self, lookup: Lookup, *, train: bool) -> None:
        for server, units in zip(self._servers, lookup.units, strict=True):
            rows, offsets = parts_of(units)
            lookup.calls.append(self._call(server, "look_up", rows, offsets, train))

    def _receive(self, lookup: Lookup) -> None:
        """Wait for the values of a batch as they are after the gradients before it."""
        with self._timer.waiting():
            answers = [push.result() for push in self._pushes]
            values = [call.result() for call in lookup.calls]
        self._pushes.clear()
        if not values:
            values = [answer[1] for answer in answers]
        elif answers:
            for part, (changed, late) in zip(values, answers, strict=True):
                put_rows(part, changed, late)
        lookup.values = torch.cat(values)

    def _call(self, server: str, function: str, *arguments: Any) -> Future[Any]:
        return self._group.call(server, function, self._trainer, *arguments, timeout_s=self._timeout_s)
