"""Checkpoints that survive a kill at any moment, and a saver that costs the training thread one memcpy.

    from hpcdist.checkpoint.weights import load_weights
    model.load_state_dict(load_weights("runs/digits/first/checkpoints/step-00001200"))

One process writes (rank 0). A checkpoint is written into a folder of its own, synced, and renamed into
place, so that a reader sees it whole or not at all; `checkpoint_files` says what is in it. The caller sees to
it that state is loaded before anything is saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from hpcdist.checkpoint.host_copy import HostBuffers
from hpcdist.checkpoint.store import CheckpointStore, CollectShards, Snapshot
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.files import retry

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Copies a state to host memory kept for it, and hands the copy to a function that a second thread calls.

    An error of that thread is raised by the next `submit()`, `wait()` or `close()`, which does nothing else. Starts
    no thread before the first `submit()`.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._buffers = HostBuffers()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def submit(self, state: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Return after the copy (on CUDA after queueing it, see `HostBuffers.copy`); what changes later is not in it.

        Waits for the write before this one: there is one set of buffers. Raises CheckpointError when that one has
        failed for good, and for a value that a checkpoint cannot hold.
        """
        self.settle()
        host, events = self._buffers.copy(state)

        def work() -> None:
            for event in events:
                event.synchronize()
            write(host)

        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending = self._thread.submit(work)

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises CheckpointError when the last write failed."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            cause = error.__cause__ if isinstance(error, HpcdistError) else None
            raise CheckpointError(
                f"saving to {self._what} failed: {type(error).__name__}: {error}",
                may_pass=isinstance(cause, OSError) and retry.is_away(cause),
            ) from error

    def settle(self) -> None:
        """Wait as `wait` does, but only report a write that failed because its file system was away.

        The next save writes everything that this one would have written.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if not error.may_pass:
                raise
            log.error("%s; training goes on, and the next save tries again", error)

    def check(self) -> None:
        """Raise CheckpointError when the write under way has failed for good already; waits for nothing."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def close(self) -> None:
        """Wait for what is being written, then stop the thread and free the buffers. May be called again."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._buffers = HostBuffers()


class AsyncSaver:
    """Saves in the background: the calling thread copies to host memory kept for it, a second thread writes.

    An error of the background is raised by the next `save()`, `wait()` or `close()`, which does nothing else; one of
    a file system that was away only by `wait()` and `close()`. Starts no thread and looks at no disk before the first
    `save()`. As a context manager it closes itself.

    Args:
        store: where to write; it is pruned after each checkpoint that is complete.
        before_publish: called in the background before each checkpoint gets its name, such as to make durable
            what must not be older than the checkpoint.
    """

    def __init__(self, store: CheckpointStore, *, before_publish: Callable[[], None] | None = None) -> None:
        self._store = store
        self._before_publish = before_publish
        self._writer = BackgroundWriter(str(store.folder))
        self._closed = False

    def save(
        self,
        step: int,
        *,
        model: Mapping[str, Tensor],
        trainer: Any,
        rank_states: list[Any],
        metrics: Mapping[str, float] | None = None,
        collect_shards: CollectShards | None = None,
        block: bool = False,
    ) -> None:
        """Save the state as it is at this moment; what is changed after the return is not in the checkpoint.

        Returns after the copy to the host. If the save before this one is still being written, waits for it first.
        `block=True` returns when it is on disk. A step that is saved already is not saved again, but gets new
        metrics. `collect_shards` adds what other ranks have written, see `shards.py`.

        Raises CheckpointError when the save before has failed, for a step older than the newest checkpoint,
        for a value that a checkpoint cannot hold, and with `block` for any failure of this save.
        """
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved: the saver is closed")
        if step < 0:
            raise CheckpointError(f"a checkpoint's step must be >= 0, got {step}")
        self._writer.settle()
        newest = self._store.newest_step()
        if newest is not None and step < newest:
            raise CheckpointError(
                f"step {step} is older than the newest checkpoint in {self._store.folder}, step {newest}: "
                "restore before saving, or start a new run"
            )
        if step == newest:
            # Such as a save at the last step of an epoch, then its evaluation.
            self._store.annotate(step, metrics or {})
            return
        numbers = {k: float(v) for k, v in (metrics or {}).items()}

        def write(host: dict[str, Any]) -> None:
            snapshot = Snapshot(step=step, metrics=numbers, collect_shards=collect_shards, **host)
            self._store.write(snapshot, before_publish=self._before_publish)
            self._store.prune()

        self._writer.submit({"model": model, "trainer": trainer, "rank_states": rank_states}, write)
        if block:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written any more. Raises CheckpointError when the last save failed."""
        self._writer.wait()

    def check(self) -> None:
        """Raise CheckpointError when the save under way has failed already; waits for nothing."""
        self._writer.check()

    def close(self) -> None:
        """Wait for what is being written, then stop the thread and free the buffers. May be called again."""
        self._closed = True
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
