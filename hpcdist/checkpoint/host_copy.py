"""Copy a nested state into host memory that is allocated once and reused for every save.

The training thread waits for this copy at each save: for 200 MB on a CPU it takes 18 ms, a memcpy 13 ms and
`torch.save` 157 ms (`benchmarks/checkpoint_stall.py`). `DefaultStager` of `torch.distributed.checkpoint` (torch 2.15)
is not used: it copies the whole storage of a view, and on CUDA the training thread must wait for the copies before it
changes the weights; here they are queued on the stream of the training.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from hpcdist.errors import CheckpointError

# Immutable types that `torch.load(weights_only=True)` returns unchanged.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_ALIGNMENT_BYTES = 64
# Pinned allocations are rounded up to a power of two; slabs of this size limit the waste.
_SLAB_BYTES = 1 << 30

_Path = tuple[Any, ...]


class _Spec(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    pinned: bool


class HostBuffers:
    """Reused host memory for one state: pinned for CUDA tensors, ordinary for other tensors."""

    def __init__(self) -> None:
        self._buffers: dict[_Path, tuple[_Spec, Tensor]] = {}

    def copy(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.cuda.Event]]:
        """Return `state` with every tensor copied to the host, and the CUDA events to wait for before reading it.

        Tensors that are the same view of the same memory (tied weights) share one buffer; a view of a larger storage
        copies only its own bytes. Memory formats (`channels_last`) are kept. Containers are returned as plain dict,
        OrderedDict, Counter, list, tuple and set. A buffer is reused if the tensor at the same position in the state
        has the same shape, strides and dtype; a call therefore overwrites the result of the previous call.

        CUDA copies are queued on the current stream. Kernels that are queued later, such as the next optimizer step,
        run after the copies. After `event.synchronize()` on every returned event the host copy can be read.

        Raises CheckpointError for a value that `torch.load(weights_only=True)` would refuse.
        """
        walk = _Walk(self._buffers)
        host = walk.visit(state, ())
        if walk.missing:
            missing, self._buffers = walk.missing, walk.reused
            del walk, host  # free unused buffers before the allocation of new ones
            self._buffers |= _allocate(missing)
            walk = _Walk(self._buffers)
            host = walk.visit(state, ())
        self._buffers = walk.reused
        return host, _queue_copies(walk.pairs)


class _Walk:
    """One pass over a state: assigns a buffer to each tensor, and copies the containers."""

    def __init__(self, buffers: dict[_Path, tuple[_Spec, Tensor]]) -> None:
        self._buffers = buffers
        self._seen: dict[tuple[Any, ...], Tensor] = {}
        self.reused: dict[_Path, tuple[_Spec, Tensor]] = {}
        self.missing: dict[_Path, tuple[_Spec, Tensor]] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def visit(self, value: Any, path: _Path) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._buffer_for(value, path)
        if isinstance(value, Mapping):
            items = {self._key(key, path): self.visit(item, (*path, key)) for key, item in value.items()}
            return kind(items) if kind in (OrderedDict, Counter) else items
        if isinstance(value, list | tuple):
            visited = [self.visit(item, (*path, index)) for index, item in enumerate(value)]
            return visited if isinstance(value, list) else tuple(visited)
        if isinstance(value, set) and all(type(item) in _PLAIN for item in value):
            return set(value)
        for plain in (int, float, str):  # numpy.float64, IntEnum and the like
            if isinstance(value, plain):
                return plain(value)
        raise CheckpointError(
            f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot contain: "
            "use a tensor, a number, a string, or a dict, list or tuple of these"
        )

    def _key(self, key: Any, path: _Path) -> Any:
        if type(key) in _PLAIN:
            return key
        if type(key) is tuple and all(type(part) in _PLAIN for part in key):
            return key
        raise CheckpointError(f"{_name(path)} has the key {key!r}, but keys in a checkpoint are strings or numbers")

    def _buffer_for(self, tensor: Tensor, path: _Path) -> Tensor:
        if type(tensor) not in (Tensor, Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{_name(path)} is a {type(tensor).__name__} of layout {tensor.layout} on {tensor.device}; "
                "a checkpoint contains only plain dense tensors with data: convert it (`full_tensor()`, `to_dense()`)"
            )
        spec = _Spec(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cuda)
        view = (tensor.data_ptr(), tensor.device, spec)
        if tensor.numel() and view in self._seen:
            return self._seen[view]
        kept = self._buffers.get(path)
        if kept is None or kept[0] != spec:
            self._seen[view] = tensor
            self.missing[path] = (spec, tensor)
            return tensor
        self.reused[path] = kept
        self._seen[view] = kept[1]
        self.pairs.append((kept[1], tensor))
        return kept[1]


def _allocate(missing: Mapping[_Path, tuple[_Spec, Tensor]]) -> dict[_Path, tuple[_Spec, Tensor]]:
    """Return one buffer for each missing tensor, cut out of a few large allocations."""
    buffers: dict[_Path, tuple[_Spec, Tensor]] = {}
    for pinned in {spec.pinned for spec, _ in missing.values()}:
        slab: list[tuple[_Path, _Spec, Tensor]] = []
        num_bytes = 0
        for path, (spec, tensor) in missing.items():
            if spec.pinned is not pinned:
                continue
            size = _aligned_bytes(spec)
            if slab and num_bytes + size > _SLAB_BYTES:
                buffers |= _carve(slab, num_bytes, pinned)
                slab, num_bytes = [], 0
            slab.append((path, spec, tensor))
            num_bytes += size
        buffers |= _carve(slab, num_bytes, pinned)
    return buffers


def _carve(slab: list[tuple[_Path, _Spec, Tensor]], num_bytes: int, pinned: bool) -> dict[_Path, tuple[_Spec, Tensor]]:
    memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()
    buffers: dict[_Path, tuple[_Spec, Tensor]] = {}
    offset = 0
    for path, spec, tensor in slab:
        # The strides of `clone()`: equal for a dense tensor, packed for a view with gaps.
        stride = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
        count = math.prod(spec.shape)
        if count == 0:
            buffer = torch.empty(spec.shape, dtype=spec.dtype)
        else:
            # Not a view of the slab: `torch.save` writes whole storages, so each buffer needs a storage of its own.
            flat = torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset)
            buffer = flat.as_strided(spec.shape, stride)
        buffers[path] = (spec, buffer)
        offset += _aligned_bytes(spec)
    return buffers


def _aligned_bytes(spec: _Spec) -> int:
    size = math.prod(spec.shape) * spec.dtype.itemsize
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@torch.no_grad()
def _queue_copies(pairs: list[tuple[Tensor, Tensor]]) -> list[torch.cuda.Event]:
    devices: dict[torch.device, None] = {}
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        if tensor.is_cuda:
            devices[tensor.device] = None
    events = []
    for device in devices:
        # `blocking`: the waiting thread sleeps instead of polling.
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return events


def _name(path: _Path) -> str:
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:]) if path else "the state"
