"""The writing of shards: each owner of a part writes a file, and rank 0 collects them for the checkpoint.

Owners report to rank 0 through the store: both sides write in background threads, which must not call collectives. The
files are in a folder beside the checkpoint's temporary one, from which rank 0 moves them before it writes the manifest
(see `CheckpointStore.add`). A kill before the rename of the checkpoint leaves both folders, which the next restore
removes.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them at run time
from torch.serialization import get_crc32_options, set_crc32_options

from hpcdist.checkpoint.sharded import Box, Key
from hpcdist.checkpoint.state import shard_content
from hpcdist.checkpoint.store import FileRecord, save_file, shard_name
from hpcdist.errors import CheckpointError
from hpcdist.host import retry

#: How long rank 0 waits for the last owner; the death of an owner ends the attempt earlier.
OWNER_TIMEOUT_S = 3600.0


@contextmanager
def _without_crc() -> Iterator[None]:
    """Let `torch.save` leave out the CRC-32 of each tensor, a fifth of the processor time of a save.

    The manifest has the SHA-256 of a shard. Other files keep their CRC-32, which tools for zip files compare. The
    setting is one of this thread, in older versions of torch one of the process.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class ShardExchange:
    """Reports from the owners to rank 0 that their shards of a step are on disk."""

    def __init__(self, store: Store, *, rank: int, attempt: int) -> None:
        self._store = PrefixStore(f"shards/{attempt}", store)
        self._rank = rank

    def write(self, state: Mapping[str, Any], *, boxes: Mapping[Key, Box], step: int, staging: Path) -> None:
        """Write the shard of this rank, and report the success or the error to rank 0.

        Args:
            state: a copy of `Shard.state`.

        Raises CheckpointError if it cannot be written.
        """
        key = f"{step}/{self._rank}"
        try:
            retry.retry(lambda: staging.mkdir(parents=True, exist_ok=True), staging)
            with _without_crc():
                record = save_file(shard_content(state, boxes), staging / shard_name(self._rank))
            report: dict[str, Any] = {"bytes": record.size_bytes, "sha256": record.sha256}
        except OSError as error:
            text = f"rank {self._rank} could not write its shard of step {step}: {error.strerror or error}"
            may_pass = retry.is_away(error)
            self._store.set(key, json.dumps({"error": text, "may_pass": may_pass}))
            raise CheckpointError(text, may_pass=may_pass) from error
        self._store.set(key, json.dumps(report))

    def pending(self, step: int, owners: Sequence[int], staging: Path) -> "PendingShards":
        """Return on rank 0 the shards of a step, which their owners are writing."""
        return PendingShards(self._store, step, owners, staging)


class PendingShards:
    """The shards of a step until rank 0 has collected or dropped them."""

    def __init__(self, store: Store, step: int, owners: Sequence[int], staging: Path) -> None:
        self._store = store
        self._step = step
        self._owners = owners
        self._staging = staging
        self._is_awaited = True

    def collect(self, into: Path) -> dict[str, FileRecord]:
        """Wait for every owner, and move the shards into the checkpoint folder.

        Returns the record of each file by its name. Raises CheckpointError if an owner could not write its shard.
        """
        records = {}
        reports = self._reports()
        try:
            for rank, report in reports.items():
                if "error" in report:
                    raise CheckpointError(report["error"], may_pass=report["may_pass"])
                records[shard_name(rank)] = FileRecord(size_bytes=report["bytes"], sha256=report["sha256"])
            for name in records:
                retry.rename(self._staging / name, into / name)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
        # The folder itself is synced with the manifest, which is written later.
        return records

    def drop(self) -> None:
        """Wait for every owner, and remove the shards, unless they have been collected.

        Raises CheckpointError if an owner has not reported in time.
        """
        if self._is_awaited:
            self._reports()
            shutil.rmtree(self._staging, ignore_errors=True)

    def _reports(self) -> dict[int, dict[str, Any]]:
        """Wait for the reports of all owners, also after an error of one: the others still write to the folder."""
        self._is_awaited = False
        keys = {rank: f"{self._step}/{rank}" for rank in self._owners}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=OWNER_TIMEOUT_S))
        except DistStoreError as error:
            late = ", ".join(str(rank) for rank, key in keys.items() if not self._store.check([key]))
            text = f"rank {late} has not written its shard of step {self._step} in {OWNER_TIMEOUT_S:g} s"
            raise CheckpointError(text) from error
        reports = {}
        for rank, key in keys.items():
            reports[rank] = json.loads(self._store.get(key))
            self._store.delete_key(key)
        return reports
