"""The operations of the benchmark, and the checks of their results."""

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from hpcdist.rank.collective_check import largest_exact, synchronize
from hpcdist.rank.process_group import Groups
from hpcdist.trainers.comm.results import CheckResult

# Test data for exact checks of transport and reduction: whole numbers that depend on rank and index.
#
# All values, and all partial sums and products in any order, are exact in all dtypes, so that results can be compared
# without a tolerance.

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}
#: A prime, so that data shifted by a power of two, such as a wrong chunk, differs.
_PERIOD = 113
#: A value that no message contains.
NEVER = 119


def message(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the message of a rank: values from 0 to 112, different at each index for up to 113 ranks."""
    place = torch.arange(count)
    values = (37 * rank + 7 * place + place // _PERIOD) % _PERIOD
    return values.to(dtype)


@functools.lru_cache(maxsize=128)
def reduced(num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the sum over all ranks; cached, because it is slow for a thousand ranks and used by many operations."""
    total = torch.zeros(count, dtype=torch.int64)
    for rank in range(num_ranks):
        total += contribution(rank, num_ranks, count, dtype)
    return total.to(dtype)


def contribution(rank: int, num_ranks: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the contribution of a rank to a sum, int64 numbers that `dtype` can represent."""
    place = torch.arange(count)
    # Multiplicative hashing: without it the sums over all ranks would be equal at every index.
    mixed = (2_654_435_761 * (place + 1) ^ 40_503 * (rank + 1)) * 2_246_822_519 % (1 << 32) >> 13
    turn = (rank + place) % num_ranks  # which ranks contribute more than zero varies by index
    limit = min(largest_exact(dtype), 1 << 20)  # of the sum; some dtypes represent larger numbers exactly
    values = min(_PERIOD, max(2, limit // num_ranks + 1))  # each contributes 0 to values - 1
    return (mixed % values) * (turn < limit // (values - 1))


@dataclass(frozen=True)
class OperationKind:
    """An operation that is checked and measured.

    The two buffers have `all` data, the equal `part` of one rank, all data at the `root` only, or `none`.
    """

    name: str
    source: str
    result: str
    in_place: bool = False  #: both are the same buffer
    has_parts: bool = False  #: the data consist of one equal part for each rank
    is_one_way: bool = False  #: a rank may finish before others have begun, so that ranks could run ahead
    reduces: bool = False  #: values are summed, so that the dtype matters
    least_ranks: int = 1

    @property
    def has_root(self) -> bool:
        """Whether one rank has all data."""
        return "root" in (self.source, self.result)

    def hops(self, num_ranks: int) -> int:
        """Return the number of consecutive operations in one call."""
        if self.name == "send_recv":  # around the ring of all ranks
            return num_ranks
        return 1


class Operation:
    """One operation on this rank: buffers, call and expected result.

    `count` is the number of elements of all data, the parts of all ranks together.
    """

    def __init__(
        self, kind: OperationKind, count: int, dtype: torch.dtype, device: torch.device, *, root: int = 0
    ) -> None:
        self.kind = kind
        self.count = count
        self.dtype = dtype
        self.device = device
        self.root = root
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.part = count // self.size
        self.is_root = self.rank == root
        lengths = {"all": count, "part": self.part, "root": 0, "none": 0}
        if self.is_root:
            lengths["root"] = count
        num_sent = lengths[kind.source]
        num_received = lengths[kind.result]
        if kind.in_place:
            data = torch.empty(count, dtype=dtype, device=device)
            self.source = data[:num_sent]
            self.result = data[:num_received]
        else:
            self.source = torch.empty(num_sent, dtype=dtype, device=device)
            self.result = torch.empty(num_received, dtype=dtype, device=device)
        self.source.zero_()  # zeros do not overflow in repeated sums; writing also allocates the pages

    def run(self) -> None:
        """Call the operation once, with the buffers as they are."""
        CALLS[self.kind.name](self)

    def fill(self) -> None:
        """Overwrite the result with values that no correct result contains, and write the input pattern."""
        self.result.fill_(NEVER)
        if len(self.source):
            self.source.copy_(self._input())

    def _input(self) -> Tensor:  # on the CPU, like the expected result
        rank, size = self.rank, self.size
        if self.kind.reduces:
            return contribution(rank, size, self.count, self.dtype)
        match self.kind.name:
            case "scatter":
                return self._parts(range(size))
            case "gather" | "all_gather":
                return self._parts([rank])
            case "all_to_all":  # a different part for each pair of ranks
                return self._parts(range(rank * size, (rank + 1) * size))
        return message(rank, self.count, self.dtype)

    def expected(self) -> Tensor:
        """Return the correct result on this rank, on the CPU, for the input of `fill`."""
        rank, size = self.rank, self.size
        if self.kind.reduces:
            total = reduced(size, self.count, self.dtype)
            if self.kind.has_parts:
                return total[rank * self.part :][: self.part]
            return total
        match self.kind.name:
            case "scatter":
                return self._parts([rank])
            case "gather" | "all_gather":
                return self._parts(range(size))
            case "all_to_all":
                return self._parts(range(rank, size * size, size))
            case "isend_irecv":
                return message((rank - 1) % size, self.count, self.dtype)
        return message(self.root, self.count, self.dtype)

    def _parts(self, numbers: Iterable[int]) -> Tensor:
        return torch.cat([message(number, self.part, self.dtype) for number in numbers])

    def chunks(self, data: Tensor) -> list[Tensor] | None:
        """Return the parts of all ranks at the root, None elsewhere."""
        if not self.is_root:
            return None
        return list(data.chunk(self.size))


def _send_recv(op: Operation) -> None:
    """Pass a message around the ring of all ranks with blocking calls; the time is that of one hop."""
    right = (op.rank + 1) % op.size
    left = (op.rank - 1) % op.size
    if op.is_root:
        dist.send(op.result, right)
    dist.recv(op.result, left)
    if not op.is_root:
        dist.send(op.result, right)


def _isend_irecv(op: Operation) -> None:
    """Send to the right neighbour and receive from the left one at the same time, as in nccl-tests."""
    right = (op.rank + 1) % op.size
    left = (op.rank - 1) % op.size
    both = [dist.P2POp(dist.isend, op.source, right), dist.P2POp(dist.irecv, op.result, left)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


CALLS: dict[str, Callable[[Operation], object]] = {
    "send_recv": _send_recv,
    "isend_irecv": _isend_irecv,
    "all_reduce": lambda op: dist.all_reduce(op.source),
    "reduce": lambda op: dist.reduce(op.source, op.root),
    "broadcast": lambda op: dist.broadcast(op.result, op.root),
    "scatter": lambda op: dist.scatter(op.result, op.chunks(op.source), op.root),
    "gather": lambda op: dist.gather(op.source, op.chunks(op.result), op.root),
    "all_gather": lambda op: dist.all_gather_into_tensor(op.result, op.source),
    "reduce_scatter": lambda op: dist.reduce_scatter_tensor(op.result, op.source),
    "all_to_all": lambda op: dist.all_to_all_single(op.result, op.source),
    "barrier": lambda op: dist.barrier(),
}
#: All operations by their names in a config.
OPERATIONS = {
    kind.name: kind
    for kind in (
        OperationKind("send_recv", "root", "all", in_place=True, least_ranks=2),
        OperationKind("isend_irecv", "all", "all", least_ranks=2),
        OperationKind("all_reduce", "all", "all", in_place=True, reduces=True),
        OperationKind("reduce", "all", "root", in_place=True, reduces=True, is_one_way=True),
        OperationKind("broadcast", "root", "all", in_place=True, is_one_way=True),
        OperationKind("scatter", "root", "part", has_parts=True, is_one_way=True),
        OperationKind("gather", "part", "root", has_parts=True, is_one_way=True),
        OperationKind("all_gather", "part", "all", has_parts=True),
        OperationKind("reduce_scatter", "all", "part", has_parts=True, reduces=True),
        OperationKind("all_to_all", "all", "all", has_parts=True),
        OperationKind("barrier", "none", "none"),
    )
}


# Correctness of an operation's result on every rank, at sizes that do not divide evenly.

#: Error messages of torch and its backends for an unsupported operation, equal on every rank.
_UNSUPPORTED = re.compile(
    r"not support|unsupported|not implemented|invalid scalar type|no backend type associated|unhandled scalar",
    re.IGNORECASE,
)
#: Numbers of elements (of each rank's part, if there are parts): one, a few, and enough for several messages.
_COUNTS = (1, 7, 20_011)
#: Seconds by which one rank enters a barrier late: long enough for a rank that does not wait to leave before.
_BARRIER_DELAY_S = 0.02
#: Limit of the characters of a backend's message in the report.
_MAX_REASON_LENGTH = 200
#: Number of the check, equal on all ranks.
_serial = itertools.count()


def check(kind: OperationKind, dtype: str, device: torch.device, groups: Groups, *, node: str) -> CheckResult:
    """Compare the result of an operation with the exact expected result. Call it on every rank; `node` is its node."""
    world_size = dist.get_world_size()
    has_ranks = world_size >= kind.least_ranks
    serial = next(_serial)
    wrong = ""
    unsupported = ""
    if has_ranks:
        try:
            # All cases, also after a wrong result, because the other ranks continue with the next case.
            differences = [_compare(operation, groups, serial) for operation in _cases(kind, DTYPES[dtype], device)]
            wrong = next(filter(None, differences), "")
        except (RuntimeError, ValueError) as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
            unsupported = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
    own_error = ""
    if wrong:
        own_error = f"rank {dist.get_rank()} on {node}: {wrong}"
    errors = list(filter(None, groups.all_gather(own_error)))
    reasons = list(filter(None, groups.all_gather(unsupported)))
    ok: bool | None = True
    text = ""
    if errors:
        ok = False
        text = errors[0]
        if len(errors) > 1:
            text += f"; {len(errors) - 1} more of {world_size} ranks have wrong results"
    elif reasons:
        ok = None
        text = f"{dist.get_backend()} does not support {kind.name} of {dtype}: {reasons[0]}"
    elif not has_ranks:
        ok = None
        text = f"{kind.name} needs {kind.least_ranks} ranks"
    return CheckResult(operation=kind.name, dtype=dtype, ok=ok, error=text)


def _cases(kind: OperationKind, dtype: torch.dtype, device: torch.device) -> Iterator[Operation]:
    """Yield an operation for each size and root that are checked, in the same order on all ranks."""
    size = dist.get_world_size()
    counts: Sequence[int] = _COUNTS
    if kind.name == "barrier":
        counts = _COUNTS[:1]
    roots = {0}
    if kind.has_root:
        roots = {0, size - 1}
    for count in counts:
        whole = count
        if kind.has_parts:
            # The total does not grow with the world size: checks of a thousand ranks would take minutes.
            whole = max(1, count // size) * size
        for root in roots:
            yield Operation(kind, whole, dtype, device, root=root)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return the error of the call, empty if its result is correct."""
    if operation.kind.name != "barrier":
        operation.fill()
        operation.run()
        return _difference(operation)
    # One rank arrives late; no rank may leave the barrier before it.
    errors = []
    for late_rank in (0, operation.size - 1):
        key = f"comm/barrier/{serial}/{late_rank}"
        if operation.rank == late_rank:
            time.sleep(_BARRIER_DELAY_S)
        groups.store.add(key, 1)
        operation.run()
        synchronize(operation.device)
        num_arrived = groups.store.add(key, 0)
        if num_arrived < operation.size:
            errors.append(f"a rank left the barrier of {operation.size} ranks when {num_arrived} had arrived")
    return next(iter(errors), "")


def _difference(operation: Operation) -> str:
    """Return the first wrong value of the result as text, empty if there is none."""
    if not len(operation.result):
        return ""
    got, expected = operation.result.cpu(), operation.expected()
    if got.dtype == expected.dtype and torch.equal(got, expected):
        return ""
    places = torch.nonzero(got != expected).flatten()
    index = int(places[0])
    root = ""
    if operation.kind.has_root:
        root = f" (root is rank {operation.root})"
    dtype = str(got.dtype).removeprefix("torch.")
    return (
        f"{operation.kind.name} of {len(got)} x {dtype}{root} is wrong: at index {index} expected"
        f" {expected[index].item():g}, got {got[index].item():g} ({len(places)} of {len(got)} differ)"
    )
