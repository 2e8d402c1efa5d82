"""The operations of the benchmark, and the checks of their results."""

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
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
    return ((37 * rank + 7 * place + place // _PERIOD) % _PERIOD).to(dtype)


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
        return "root" in (self.source, self.result)

    def hops(self, n: int) -> int:
        """Return the number of consecutive operations in one call."""
        return n if self.name == "send_recv" else 1


class Operation:
    """One operation on this rank: buffers, call and expected result.

    `count` is the number of elements of all data, the parts of all ranks together.
    """

    def __init__(
        self, kind: OperationKind, count: int, dtype: torch.dtype, device: torch.device, *, root: int = 0
    ) -> None:
        self.kind, self.count, self.dtype, self.device, self.root = kind, count, dtype, device, root
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.part, self.is_root = count // self.size, self.rank == root
        lengths = {"all": count, "part": self.part, "root": count if self.is_root else 0, "none": 0}
        sent, received = lengths[kind.source], lengths[kind.result]
        data = torch.empty(count if kind.in_place else sent, dtype=dtype, device=device)
        self.source = data[:sent]
        self.result = data[:received] if kind.in_place else data.new_empty(received)
        self.source.zero_()  # zeros do not overflow in repeated sums; writing also allocates the pages

    def run(self) -> None:
        CALLS[self.kind.name](self)

    def fill(self) -> None:
        """Overwrite the result with values that no correct result contains, and write the input pattern."""
        self.result.fill_(NEVER)
        if len(self.source):
            self.source.copy_(self._input())

    def _input(self) -> Tensor:  # on the CPU, like the expected result
        here, size = self.rank, self.size
        if self.kind.reduces:
            return contribution(here, size, self.count, self.dtype)
        match self.kind.name:
            case "scatter":
                return self._parts(range(size))
            case "gather" | "all_gather":
                return self._parts([here])
            case "all_to_all":  # a different part for each pair of ranks
                return self._parts(range(here * size, (here + 1) * size))
        return message(here, self.count, self.dtype)

    def expected(self) -> Tensor:
        here, size = self.rank, self.size
        if self.kind.reduces:
            total = reduced(size, self.count, self.dtype)
            return total[here * self.part :][: self.part] if self.kind.has_parts else total
        match self.kind.name:
            case "scatter":
                return self._parts([here])
            case "gather" | "all_gather":
                return self._parts(range(size))
            case "all_to_all":
                return self._parts(range(here, size * size, size))
            case "isend_irecv":
                return message((here - 1) % size, self.count, self.dtype)
        return message(self.root, self.count, self.dtype)

    def _parts(self, numbers: Iterable[int]) -> Tensor:
        return torch.cat([message(number, self.part, self.dtype) for number in numbers])

    def chunks(self, data: Tensor) -> list[Tensor] | None:
        """Return the parts of all ranks at the root, None elsewhere."""
        return list(data.chunk(self.size)) if self.is_root else None


def _send_recv(op: Operation) -> None:
    """Pass a message around the ring of all ranks with blocking calls; the time is that of one hop."""
    right, left = (op.rank + 1) % op.size, (op.rank - 1) % op.size
    if op.is_root:
        dist.send(op.result, right)
    dist.recv(op.result, left)
    if not op.is_root:
        dist.send(op.result, right)


def _isend_irecv(op: Operation) -> None:
    """Send to the right neighbour and receive from the left one at the same time, as in nccl-tests."""
    right, left = (op.rank + 1) % op.size, (op.rank - 1) % op.size
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
#: Number of the check, equal on all ranks.
_serial = itertools.count()


def check(kind: OperationKind, dtype: str, device: torch.device, groups: Groups, *, node: str) -> CheckResult:
    """Compare the result of an operation with the exact expected result. Call it on every rank; `node` is its node."""
    wrong, unsupported, serial = "", "", next(_serial)
    if dist.get_world_size() >= kind.least_ranks:
        try:
            # All cases, also after a wrong result, because the other ranks continue with the next case.
            found = [_compare(operation, groups, serial) for operation in _cases(kind, DTYPES[dtype], device)]
            wrong = next(filter(None, found), "")
        except (RuntimeError, ValueError) as error:
            if not _UNSUPPORTED.search(str(error)):
                raise
            unsupported = " ".join(str(error).split())[:200]
    errors = list(filter(None, groups.all_gather(f"rank {dist.get_rank()} on {node}: {wrong}" if wrong else "")))
    reasons = list(filter(None, groups.all_gather(unsupported)))
    ok: bool | None = True
    text = ""
    if errors:
        more = f"; {len(errors) - 1} more of {dist.get_world_size()} ranks have wrong results"
        ok, text = False, errors[0] + (more if len(errors) > 1 else "")
    elif reasons:
        ok, text = None, f"{dist.get_backend()} does not support {kind.name} of {dtype}: {reasons[0]}"
    elif dist.get_world_size() < kind.least_ranks:
        ok, text = None, f"{kind.name} needs {kind.least_ranks} ranks"
    return CheckResult(operation=kind.name, dtype=dtype, ok=ok, error=text)


def _cases(kind: OperationKind, dtype: torch.dtype, device: torch.device) -> Iterator[Operation]:
    size = dist.get_world_size()
    for count in _COUNTS[:1] if kind.name == "barrier" else _COUNTS:
        # The total does not grow with the world size: checks of a thousand ranks would take minutes.
        whole = max(1, count // size) * size if kind.has_parts else count
        for root in {0, size - 1} if kind.has_root else {0}:
            yield Operation(kind, whole, dtype, device, root=root)


def _compare(operation: Operation, groups: Groups, serial: int) -> str:
    """Return the error of the call, empty if its result is correct."""
    if operation.kind.name != "barrier":
        operation.fill()
        operation.run()
        return _difference(operation)
    # One rank arrives late; no rank may leave the barrier before it.
    found = []
    for late in (0, operation.size - 1):
        key = f"comm/barrier/{serial}/{late}"
        if operation.rank == late:
            time.sleep(0.02)
        groups.store.add(key, 1)
        operation.run()
        synchronize(operation.device)
        if (num_arrived := groups.store.add(key, 0)) < operation.size:
            found.append(f"a rank left the barrier of {operation.size} ranks when {num_arrived} had arrived")
    return next(iter(found), "")


def _difference(operation: Operation) -> str:
    if not len(operation.result):
        return ""
    got, expected = operation.result.cpu(), operation.expected()
    if got.dtype == expected.dtype and torch.equal(got, expected):
        return ""
    places = torch.nonzero(got != expected).flatten()
    index = int(places[0])
    root = f" (root is rank {operation.root})" if operation.kind.has_root else ""
    dtype = str(got.dtype).removeprefix("torch.")
    return (
        f"{operation.kind.name} of {len(got)} x {dtype}{root} is wrong: at index {index} expected"
        f" {expected[index].item():g}, got {got[index].item():g} ({len(places)} of {len(got)} differ)"
    )
