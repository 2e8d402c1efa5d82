"""Asynchronous saving: the training thread only copies the state to host memory, a second thread writes the files.

`torch.distributed.checkpoint.async_save` (torch 2.15) is not used: it reports an error only to a caller that asks the
returned future, and reuses its host copy only if the caller keeps a stager (see `host_copy.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from hpcdist.checkpoint.checkpoint_folder import CollectShards, Snapshot
from hpcdist.checkpoint.host_copy import HostBuffers
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.files import retry

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Copies a state to reused host memory, and passes the copy to a function that runs in a second thread.

    The next `submit()`, `wait()` or `close()` raises an error of that thread and does nothing else. The thread starts
    at the first `submit()`.

    Args:
        target: name of the destination in error messages.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._buffers = HostBuffers()
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def submit(self, state: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Copy the state and start to write it; later changes of the state are not written.

        Returns after the copy (on CUDA after queueing it, see `HostBuffers.copy`). Waits for the previous write first,
        because there is only one set of buffers.

        Raises CheckpointError if the previous write has failed permanently, and for a value that a checkpoint cannot
        contain.
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
        """Wait for the write in progress. Raises CheckpointError if it fails."""
        if self._pending is None:
            return
        error = self._pending.exception()
        self._pending = None
        if isinstance(error, CheckpointError):
            raise error
        if error is not None:
            cause = error.__cause__ if isinstance(error, HpcdistError) else None
            raise CheckpointError(
                f"saving to {self._target} failed: {type(error).__name__}: {error}",
                may_pass=isinstance(cause, OSError) and retry.is_away(cause),
            ) from error

    def settle(self) -> None:
        """Wait for the write in progress, but only log an error caused by an unreachable file system.

        The next save writes the complete state anyway.
        """
        try:
            self.wait()
        except CheckpointError as error:
            if not error.may_pass:
                raise
            log.error("%s; the training continues, and the next save tries again", error)

    def check(self) -> None:
        """Raise CheckpointError if the write in progress has already failed permanently; does not wait."""
        if self._pending is not None and self._pending.done():
            self.settle()

    def close(self) -> None:
        """Wait for the write in progress, then stop the thread and free the buffers. May be called again."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
                self._thread = None
            self._buffers = HostBuffers()


class AsyncSaver(BackgroundWriter):
    """Saves checkpoints in the background. As a context manager it closes itself.

    If the file system was unreachable, only `wait()` and `close()` raise an error. The caller must restore before the
    first save.

    Args:
        store: destination of the checkpoints; it is pruned after each of them.
        before_publish: called in the background before a checkpoint is renamed to its final name, for example to make
            other files durable that must not be older than the checkpoint.
    """

    def __init__(self, store: CheckpointStore, *, before_publish: Callable[[], None] | None = None) -> None:
        super().__init__(str(store.folder))
        self._store = store
        self._before_publish = before_publish
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
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        """Copy the state to host memory and write it in the background; later changes of the state are not saved.

        Waits for the previous save first. If the step is saved already, the call only adds the metrics. With `block`
        it returns only after the checkpoint is on disk. `on_written` is called once it is on disk. The other arguments
        are the fields of `Snapshot`; `step` must not be less than the step of the newest checkpoint.

        Raises CheckpointError if the previous save has failed, for a step older than the newest checkpoint, for a value
        that a checkpoint cannot contain, and with `block` if this save fails.
        """
        if self._closed:
            raise CheckpointError(f"step {step} cannot be saved: the saver is closed")
        if step < 0:
            raise CheckpointError(f"a checkpoint's step must be >= 0, got {step}")
        self.settle()
        newest = self._store.newest_step()
        if newest is not None and step < newest:
            raise CheckpointError(
                f"step {step} is older than the newest checkpoint in {self._store.folder}, step {newest}: "
                "restore before saving, or start a new run"
            )
        if step == newest:
            # For example a save at the last step of an epoch, followed by the epoch's evaluation.
            self._store.annotate(step, metrics or {})
            on_written()
            return
        numbers = {k: float(v) for k, v in (metrics or {}).items()}

        def write(host: dict[str, Any]) -> None:
            snapshot = Snapshot(step=step, metrics=numbers, collect_shards=collect_shards, **host)
            self._store.write(snapshot, before_publish=self._before_publish)
            on_written()
            self._store.prune()

        self.submit({"model": model, "trainer": trainer, "rank_states": rank_states}, write)
        if block:
            self.wait()

    def close(self) -> None:
        """Write what is pending, and end the writer's thread; later saves are refused."""
        self._closed = True
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
