"""Tensors that several ranks hold in parts, such as the DTensors of FSDP2 and tensor parallelism.

A part is a box of the whole tensor: it begins at an offset in every dimension and has the shape of the part. Each rank
writes boxes to its own file, and each box is in one file only:

    shard-00002.pt  {"model": {name: part}, "boxes": {name: [offset, shape of the whole tensor]}, "trainer": {…}}

`boxes` also has the parts in `trainer` that are DTensors, by their path in the trainer's state:
`("optimizer", "state", 0, "exp_avg")`. A tensor without a box is whole. Any mesh restores from these files, since the
reader copies the common part of a box of the file and a box of the new mesh. Files are mapped into memory, so that
only the copied pages are read.
"""

import hashlib
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpcdist.checkpoint.store import load_file
from hpcdist.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: Length of a digest of names, so that it fits into a signed number of 64 bits.
DIGEST_BYTES = 7

#: A name of the model, or a path in the trainer's state.
Key = str | tuple[Any, ...]


class Box(NamedTuple):
    """Where a part of a tensor is."""

    offset: tuple[int, ...]  #: of the part, in every dimension
    shape: tuple[int, ...]  #: of the whole tensor

    @classmethod
    def of_rows(cls, part: Tensor, first: int, total: int) -> "Box":
        """Return the box of a part that begins at row `first` of a table with `total` rows."""
        return cls((first, *(0 for _ in part.shape[1:])), (total, *part.shape[1:]))


class Whole(NamedTuple):
    """The description, in a checkpoint, of a tensor that is in shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Target(NamedTuple):
    """Memory for one box of a whole tensor."""

    tensor: Tensor
    offset: tuple[int, ...]


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, without importing DTensor, which takes long."""
    # A process with a sharded model has imported it already.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_sharded(state: Any) -> bool:
    """Return whether a nested state contains DTensors."""
    return any(is_dtensor(value) for value in tree_leaves(state))


def targets_of(value: Tensor) -> list[Target]:
    """Return the memory of this process that a tensor consists of: for a DTensor, its part of the whole tensor.

    Raises CheckpointError if it consists of sums that are still to be added.
    """
    if not is_dtensor(value):
        return [Target(value, (0,) * value.dim())]
    dtensor: DTensor = value  # type: ignore[assignment]
    if any(placement.is_partial() for placement in dtensor.placements):
        raise CheckpointError(
            f"a DTensor of shape {list(value.shape)} has the placements {dtensor.placements}, so each rank has only a"
            " part of a sum: call redistribute before the save"
        )
    local = dtensor.to_local()
    if local.numel() == 0:
        return []
    # The method by which `torch.distributed.checkpoint` asks; it knows strided shards, as of FSDP2 over tensor
    # parallelism.
    (chunk,) = dtensor.__create_chunk_list__()
    assert tuple(chunk.sizes) == tuple(local.shape)
    return [Target(local.detach(), tuple(chunk.offsets))]


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state dict is that of a module's `get_extra_state`, with a value of any type."""
    return name.rpartition(".")[2] == "_extra_state"  # documented by torch.nn.Module.state_dict


# --- saving


class Division(NamedTuple):
    """A state without its DTensors, and these."""

    model: dict[str, Any]  #: None in place of DTensors
    trainer: Any  #: likewise
    tensors: dict[Key, "DTensor"]

    @property
    def wholes(self) -> dict[Key, Whole]:
        """Shape and type of each DTensor."""
        return {key: Whole(tuple(value.shape), value.dtype) for key, value in self.tensors.items()}


def divide(model: Mapping[str, Any], trainer: Mapping[str, Any]) -> Division:
    """Return the state of a model and a trainer, with the DTensors apart."""
    tensors: dict[Key, Any] = {}
    for name, value in model.items():
        if is_dtensor(value):
            tensors[name] = value
    plain_model = {name: None if name in tensors else value for name, value in model.items()}

    def take(path: tuple[Any, ...], value: Any) -> Any:
        if not is_dtensor(value):
            return value
        tensors[path] = value
        return None

    return Division(plain_model, map_leaves(take, trainer), tensors)


def map_leaves(change: Callable[[tuple[Any, ...], Any], Any], state: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return a nested state of dicts, lists and tuples, in which a function of path and value changes the values."""
    if isinstance(state, Mapping):
        items = {key: map_leaves(change, value, (*path, key)) for key, value in state.items()}
        if isinstance(state, OrderedDict):
            return OrderedDict(items)
        if isinstance(state, Counter):
            return Counter(items)
        return items
    if type(state) in (list, tuple):
        values = [map_leaves(change, value, (*path, index)) for index, value in enumerate(state)]
        if type(state) is tuple:
            return tuple(values)
        return values
    return change(path, state)


#: The ranks of a mesh as nested lists.
Ranks = list[Any]


class Owners:
    """Decides which rank writes each box, so that all ranks write about as many bytes.

    Several ranks have the same box with replicas (HSDP), and if a tensor's mesh is a part of a larger one.

    Args:
        all_gather: returns the values of all ranks, by rank.
    """

    def __init__(self, rank: int, world_size: int, all_gather: Callable[[list[Ranks]], list[list[Ranks]]]) -> None:
        self._rank = rank
        self._world_size = world_size
        self._all_gather = all_gather
        self._signature: list[Any] = []
        self._boxes: dict[Key, Box] = {}
        self._owners: list[int] = []

    def choose(self, tensors: Mapping[Key, "DTensor"]) -> tuple[dict[Key, Box], list[int]]:
        """Return the boxes that this rank writes, and the ranks that write any. Call it on all ranks.

        All ranks pass the same tensors; only their parts differ. The choice is made once for equal tensors.
        """
        signature = [
            (key, value.shape, value.dtype, value.placements, value.device_mesh) for key, value in tensors.items()
        ]
        if signature != self._signature:
            owner_of = self._assign(tensors)
            self._boxes = {}
            for key, value in tensors.items():
                for target in targets_of(value):
                    if owner_of[key]:
                        self._boxes[key] = Box(target.offset, tuple(value.shape))
                # One without values has no parts, but readers need its shape and type.
                if not value.numel() and self._owners[:1] == [self._rank]:
                    self._boxes[key] = Box((0,) * value.dim(), tuple(value.shape))
            self._signature = signature
        return self._boxes, self._owners

    def _assign(self, tensors: Mapping[Key, "DTensor"]) -> dict[Key, bool]:
        """Return for each tensor whether this rank writes its part."""
        meshes = list(dict.fromkeys(value.device_mesh for value in tensors.values()))
        by_rank = self._all_gather([mesh.mesh.tolist() for mesh in meshes])
        # Each mesh with those of the other ranks beside it: [number of meshes, shape of a mesh]. Each holds a copy.
        beside = {}
        for number, mesh in enumerate(meshes):
            beside[mesh] = np.unique(np.array([ranks[number] for ranks in by_rank]), axis=0)
        num_bytes = np.zeros(self._world_size)  # that each rank writes
        is_own = {}
        # The largest first, which balances best.
        for key, value in sorted(tensors.items(), key=lambda item: -item[1].numel() * item[1].element_size()):
            replicated = [0, *(dim + 1 for dim, place in enumerate(value.placements) if place.is_replicate())]
            ranks = np.moveaxis(beside[value.device_mesh], replicated, range(len(replicated)))
            num_copies = math.prod(ranks.shape[: len(replicated)])
            ranks = ranks.reshape(num_copies, -1)  # by copy, by part
            owners = ranks[num_bytes[ranks].argmin(axis=0), np.arange(ranks.shape[1])]
            num_bytes[owners] += value.numel() * value.element_size() / ranks.shape[1]
            is_own[key] = self._rank in owners
        self._owners = np.flatnonzero(num_bytes).tolist()
        return is_own


def digest_of(tensors: Mapping[Key, "DTensor"]) -> int:
    """Return a digest of names, shapes and types, which must be equal on all ranks; 0 without tensors."""
    if not tensors:
        return 0
    content = [(key, tuple(value.shape), str(value.dtype)) for key, value in tensors.items()]
    digest = hashlib.blake2b(repr(content).encode(), digest_size=DIGEST_BYTES).digest()
    return int.from_bytes(digest, "big")


# --- reading


def read_shard(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Return the content of the file of one rank, in host memory. Raises CheckpointError if it is damaged."""
    content = load_file(path, mmap=mmap)
    if "rows" not in content:
        return content
    try:  # written before 2026-11-29: first row and number of rows of a table
        boxes = {}
        for name, (first, total) in content["rows"].items():
            boxes[name] = Box.of_rows(content["model"][name], first, total)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damaged(path, error) from error
    return {"model": content["model"], "boxes": boxes, "trainer": content.get("trainer")}


def nearest_first(num_saved: int, rank: int, world_size: int) -> list[int]:
    """Return the ranks that saved a checkpoint, in the order in which a rank most likely finds its parts.

    First the rank itself: on the same mesh without replicas it wrote them all, and on any mesh those of tensors with
    fewer rows than ranks. Then those around the same place among all ranks, since a mesh divides rows in the order of
    its ranks. With replicas, some parts are found last, in the files of the same place in another replica. Each file
    that is opened takes 0.1 s and 1.1 MB for 1,000 tensors.
    """
    place = (rank + 0.5) / world_size * num_saved - 0.5
    return sorted(range(num_saved), key=lambda saved: (saved != rank, abs(saved - place)))


def damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{path}: a shard is damaged ({type(error).__name__}: {str(error)[:200]})")


def parts_of(path: Path) -> Iterator[tuple[Key, Box, Tensor]]:
    """Yield the parts of tensors in the file of one rank, mapped into memory.

    Raises CheckpointError if the file is damaged.
    """
    content = read_shard(path, mmap=True)
    try:
        boxes = content["boxes"]
        for name, part in content["model"].items():
            if name not in boxes:
                yield name, Box((0,) * part.dim(), tuple(part.shape)), part
        for key, (offset, shape) in boxes.items():
            part = content["trainer" if isinstance(key, tuple) else "model"][key]
            if not len(offset) == len(shape) == part.dim():
                raise ValueError(f"the box of {key} has {len(offset)} dimensions, the part {part.dim()}")
            yield key, Box(tuple(offset), tuple(shape)), part
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise damaged(path, error) from error


class ShardReader:
    """The shards of a checkpoint, which stay mapped into memory as long as this object exists.

    Args:
        files: the shards. They are opened in this order, and only until everything is found.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._num_opened = 0
        self._parts: dict[Key, list[tuple[Box, Tensor]]] = {}  #: in the files that are open

    def wholes(self) -> dict[Key, Whole]:
        """Return shape and type of each tensor in the shards, of which all are opened."""
        while self._num_opened < len(self._files):
            self._open_next()
        wholes: dict[Key, Whole] = {}
        for key, parts in self._parts.items():
            box, part = parts[0]
            wholes[key] = Whole(box.shape, part.dtype)
        return wholes

    def fill(self, key: Key, targets: Sequence[Target]) -> None:
        """Copy boxes of a whole tensor into memory. Of the shards, only their parts of these boxes are read.

        Raises CheckpointError if values of a box are in no shard.
        """
        num_missing = sum(self._copy(key, target) for target in targets)
        if num_missing:
            raise CheckpointError(f"{self._folder}: {num_missing} values of {key_text(key)} are in no shard")

    def _copy(self, key: Key, target: Target) -> int:
        """Copy a box of a whole tensor; return the number of values that are in no shard."""
        num_missing = target.tensor.numel()
        parts = self._parts_of(key)
        while num_missing:
            found = next(parts, None)
            if found is None:
                break
            box, part = found
            num_missing -= copy_overlap(part, box.offset, target)
        return num_missing

    def _parts_of(self, key: Key) -> Iterator[tuple[Box, Tensor]]:
        """Yield the parts of a tensor. The next file is opened when the files before have no more of them."""
        number = 0
        while True:
            parts = self._parts.get(key, [])
            if number < len(parts):
                yield parts[number]
                number += 1
            elif self._num_opened < len(self._files):
                self._open_next()
            else:
                return

    def _open_next(self) -> None:
        for key, box, part in parts_of(self._files[self._num_opened]):
            self._parts.setdefault(key, []).append((box, part))
        self._num_opened += 1

    def read(self, key: Key, whole: Whole) -> Tensor:
        """Return a whole tensor in host memory."""
        tensor = torch.empty(whole.shape, dtype=whole.dtype)
        self.fill(key, targets_of(tensor))
        return tensor

    @property
    def _folder(self) -> str:
        if not self._files:
            return "a checkpoint without shards"
        return str(self._files[0].parent)


@torch.no_grad()
def copy_overlap(source: Tensor, offset: Sequence[int], target: Target) -> int:
    """Copy the common box of a target and a part of a tensor, which begins at `offset`.

    Returns the number of values.
    """
    here = []
    there = []
    for begin, size, own_begin, own_size in zip(offset, source.shape, target.offset, target.tensor.shape, strict=True):
        low = max(begin, own_begin)
        high = min(begin + size, own_begin + own_size)
        if low >= high:
            return 0
        here.append(slice(low - own_begin, high - own_begin))
        there.append(slice(low - begin, high - begin))
    part = source[tuple(there)]
    target.tensor[tuple(here)].copy_(part)
    return part.numel()


def key_text(key: Key) -> str:
    """Return a name or path for a message: `optimizer.state.0.exp_avg`."""
    if isinstance(key, str):
        return key
    return ".".join(map(str, key))
