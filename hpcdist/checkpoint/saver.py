"""Asynchronous saving: the training thread copies the state to reused host memory, and a second thread writes it."""

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from hpcdist.checkpoint.store import CheckpointStore, Snapshot
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.host import retry

# `torch.distributed.checkpoint.async_save` (torch 2.15) is not used: it reports an error only to a caller that asks the
# returned future, and reuses its host copy only if the caller keeps a stager (see `HostBuffers`).

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Copies a state to reused host memory, and passes the copy to a function that runs in a second thread.

    The next `check()`, `submit()`, `wait()` or `close()` raises an error of that thread. If the file system was
    unreachable, only `wait()` and `close()` raise it; the other two log it.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._buffers = HostBuffers()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")  # begins at its first task
        self._pending: Future[None] | None = None
        self._copies: list[torch.cuda.Event] = []

    def submit(self, state: Mapping[str, Any], consume: Callable[[dict[str, Any]], None]) -> None:
        """Copy the state (on CUDA, queue the copy), and call `consume` with the copy in the second thread.

        Later changes of the state are not in the copy. The call first waits for the write in progress.
        """
        self.copied(state, consume)()

    def copied(self, state: Mapping[str, Any], consume: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Copy the state as `submit` does, and return a function that starts the second thread.

        Call that function once all other work of the save is done: it would compete with the thread.
        """
        self.settle()  # there is only one set of buffers
        host, self._copies = self._buffers.copy(state)

        def work() -> None:
            self.wait_for_copy()
            consume(host)

        def start() -> None:
            self._pending = self._thread.submit(work)

        return start

    def wait_for_copy(self) -> None:
        """Wait until the state is copied. Until then, only the stream that was current in `submit` may change it."""
        for event in self._copies:
            event.synchronize()

    def wait(self) -> None:
        """Wait for the write in progress. Raises CheckpointError if it fails."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if isinstance(error, CheckpointError):
            raise error
        if error is None:
            return
        may_pass = False
        if isinstance(error, HpcdistError) and isinstance(error.__cause__, OSError):
            may_pass = retry.is_away(error.__cause__)
        text = f"saving to {self._target} failed: {type(error).__name__}: {error}"
        raise CheckpointError(text, may_pass=may_pass) from error

    def settle(self) -> None:
        """Wait for the write in progress; only log an unreachable file system, since the next save is complete."""
        try:
            self.wait()
        except CheckpointError as error:
            _require_passing(error)

    def check(self) -> None:
        """Raise CheckpointError if the write in progress has already failed permanently; does not wait."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def close(self) -> None:
        """Wait for the write in progress, then stop the thread and free the buffers."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._buffers = HostBuffers()


def _require_passing(error: CheckpointError) -> None:
    """Raise an error of a save, or log it if the file system was unreachable: the training can go on."""
    if not error.may_pass:
        raise error
    log.warning("%s; the training continues, and the next save tries again", error)


class AsyncSaver(BackgroundWriter):
    """Saves checkpoints in the background, and prunes the store after each of them.

    The caller must restore before the first save. `before_publish` is called in the background before a checkpoint is
    renamed to its final name.
    """

    def __init__(self, store: CheckpointStore, *, before_publish: Callable[[], None] | None = None) -> None:
        super().__init__(str(store.folder))
        self._store = store
        self._before_publish = before_publish

    def needs_write(self, step: int) -> bool:
        """Wait for the write in progress; return whether a step must be written: not if it is on disk already.

        Raises CheckpointError if the step is negative or older than the newest checkpoint, or if an earlier save has
        failed.
        """
        if step < 0:
            raise CheckpointError(f"a checkpoint's step must be >= 0, got {step}")
        self.settle()
        newest = self._store.newest_step()
        if newest is not None and step < newest:
            raise CheckpointError(
                f"step {step} is older than the newest checkpoint in {self._store.folder}, step {newest}: "
                "restore before saving, or start a new run"
            )
        return step != newest

    def save(self, snapshot: Snapshot, *, on_written: Callable[[], None] = lambda: None) -> None:
        """Save a checkpoint in the background. If the step is saved already, only add its metrics and samples.

        Args:
            on_written: called once the checkpoint is on disk, in the second thread or, for a saved step, in this one.

        Raises CheckpointError as `needs_write` does.
        """
        step = snapshot.step
        if not self.needs_write(step):
            # For example a save at the last step of an epoch, followed by the epoch's evaluation.
            try:
                self._store.annotate(step, snapshot.metrics, snapshot.samples)
            except CheckpointError as error:
                _require_passing(error)
            on_written()
            return
        state = {"model": snapshot.model, "trainer": snapshot.trainer, "rank_states": snapshot.rank_states}
        rest = replace(snapshot, model={}, trainer=None, rank_states=[])  # so that `add_and_prune` keeps no originals

        def add_and_prune(host: dict[str, Any]) -> None:
            self._store.add(replace(rest, **host), before_publish=self._before_publish)
            on_written()
            self._store.prune()

        self.submit(state, add_and_prune)


# Copy a nested state into host memory that is allocated once and reused for every save.
#
# The training thread waits for this copy at each save: for 200 MB on a CPU it takes 18 ms, a memcpy 13 ms and
# `torch.save` 157 ms (`benchmarks/checkpoint_stall.py`). `DefaultStager` of `torch.distributed.checkpoint` (torch 2.15)
# is not used: it copies the whole storage of a view, and on CUDA the training thread must wait for the copies before it
# changes the weights; here they are queued on the stream of the training.

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

    @torch.no_grad()
    def copy(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[torch.cuda.Event]]:
        """Return `state` with every tensor copied to the host, and the CUDA events to wait for before reading it.

        Tied weights share one buffer; a view of a larger storage copies only its own bytes. Memory formats are kept. A
        buffer is reused if the tensor at the same position in the state has the same shape, strides and dtype, and is
        again on a GPU or not; a call therefore overwrites the result of the previous call. CUDA copies are queued on
        the current stream, before later kernels such as the next optimizer step.
        """
        walk = _Walk(self._buffers)
        host = walk.visit(state, ())
        if walk.missing:
            missing = walk.missing
            self._buffers = walk.reused
            del walk, host  # free unused buffers before the allocation of new ones
            self._buffers |= _allocate(missing)
            walk = _Walk(self._buffers)
            host = walk.visit(state, ())
        self._buffers = walk.reused
        for buffer, tensor in walk.pairs:
            buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        events = []
        for device in {tensor.device for _, tensor in walk.pairs if tensor.is_cuda}:
            event = torch.cuda.Event(blocking=True)  # the waiting thread sleeps instead of polling
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return host, events


def plain_state(state: Any, name: str) -> Any:
    """Return a state as a checkpoint can contain it, with the same tensors.

    Raises CheckpointError for a value that a checkpoint cannot contain; its message begins with `name`.
    """
    return _Walk({}).visit(state, (name,))


def _without_numpy(value: Any) -> Any:
    """Return a number or text of NumPy as that of Python, and any other value as it is."""
    if isinstance(value, np.generic):
        return value.item()
    return value


class _Walk:
    """One pass over a state: assigns a buffer to each tensor, and copies the containers.

    Attributes:
        reused: buffers that fit a tensor, by its path in the state.
        missing: tensors without a fitting buffer, by path, with the required specification.
        pairs: each buffer with the tensor to copy into it.
    """

    def __init__(self, buffers: dict[_Path, tuple[_Spec, Tensor]]) -> None:
        self._buffers = buffers
        self._seen: dict[tuple[Any, ...], Tensor] = {}  #: results by address, device and specification of a tensor
        self.reused: dict[_Path, tuple[_Spec, Tensor]] = {}
        self.missing: dict[_Path, tuple[_Spec, Tensor]] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def visit(self, value: Any, path: _Path) -> Any:
        """Return a copy of `value`, which is at `path` in the state, with buffers in place of its tensors.

        A tensor without a buffer is returned itself, and noted as missing.
        """
        value = _without_numpy(value)
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return self._buffer_for(value, path)
        if isinstance(value, Mapping):
            items = {self._key(key, path): self.visit(item, (*path, key)) for key, item in value.items()}
            if kind in (OrderedDict, Counter):
                return kind(items)
            return items
        if isinstance(value, list | tuple):
            visited = [self.visit(item, (*path, index)) for index, item in enumerate(value)]
            if isinstance(value, tuple):
                return tuple(visited)
            return visited
        if isinstance(value, set):
            items_of_set = set(map(_without_numpy, value))
            if all(type(item) in _PLAIN for item in items_of_set):
                return items_of_set
        for plain in (int, float, str):  # IntEnum and the like
            if isinstance(value, plain):
                return plain(value)
        raise CheckpointError(
            f"{_name(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot contain: "
            "use a tensor, a number, a string, or a dict, list or tuple of these"
        )

    def _key(self, key: Any, path: _Path) -> Any:
        if type(key) is tuple:
            key = tuple(map(_without_numpy, key))
            is_plain = all(type(part) in _PLAIN for part in key)
        else:
            key = _without_numpy(key)
            is_plain = type(key) in _PLAIN
        if is_plain:
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
        _, buffer = kept
        self.reused[path] = kept
        self._seen[view] = buffer
        self.pairs.append((buffer, tensor))
        return buffer


def _allocate(missing: Mapping[_Path, tuple[_Spec, Tensor]]) -> dict[_Path, tuple[_Spec, Tensor]]:
    """Return one buffer for each missing tensor, cut out of a few large allocations."""
    specs = {path: spec for path, (spec, _) in missing.items()}
    buffers: dict[_Path, tuple[_Spec, Tensor]] = {}
    for slab in _slabs(specs):
        total = sum(_aligned_bytes(specs[path]) for path in slab)
        is_pinned = specs[slab[0]].pinned
        memory = torch.empty(total, dtype=torch.uint8, pin_memory=is_pinned).numpy()
        offset = 0
        for path in slab:
            spec, tensor = missing[path]
            if tensor.numel() == 0:
                buffer = torch.empty(spec.shape, dtype=spec.dtype)
            else:
                # Not a view of the slab: `torch.save` writes whole storages, so each buffer needs a storage of its own.
                flat = torch.frombuffer(memory, dtype=spec.dtype, count=tensor.numel(), offset=offset)
                # The strides of `clone()`: equal for a dense tensor, packed for a view with gaps.
                like = torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format)
                buffer = flat.as_strided(spec.shape, like.stride())
            buffers[path] = (spec, buffer)
            offset += _aligned_bytes(spec)
    return buffers


def _slabs(specs: Mapping[_Path, _Spec]) -> list[list[_Path]]:
    """Divide buffers among allocations: each is either pinned or not, and at most _SLAB_BYTES or a single buffer."""
    slabs: list[list[_Path]] = []
    num_bytes = 0  # of the last slab
    is_pinned = False  # the last slab
    for path in sorted(specs, key=lambda path: specs[path].pinned):
        spec = specs[path]
        size = _aligned_bytes(spec)
        if not slabs or spec.pinned is not is_pinned or num_bytes + size > _SLAB_BYTES:
            slabs.append([])
            num_bytes = 0
            is_pinned = spec.pinned
        slabs[-1].append(path)
        num_bytes += size
    return slabs


def _aligned_bytes(spec: _Spec) -> int:
    size = math.prod(spec.shape) * spec.dtype.itemsize
    num_units = -(-size // _ALIGNMENT_BYTES)  # rounded up
    return num_units * _ALIGNMENT_BYTES


def _name(path: _Path) -> str:
    """Return the place in a state for a message, such as `trainer['groups'][0]`."""
    if not path:
        return "the state"
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])
