"""Shards: parts of a model that several ranks own. Each owner writes its own file, rank 0 collects them.

    {"model": {name: tensor}, "rows": {name: [first row, total rows]}, "trainer": further state of the owner}

Names are those of the whole model. A tensor with `rows` is a slice of a table, so that no rank has to hold the whole
table. Owners report to rank 0 through the store: both sides write in background threads, which must not call
collectives.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them at run time

from hpcdist.checkpoint import checkpoint_folder
from hpcdist.checkpoint.checkpoint_folder import FileRecord
from hpcdist.errors import CheckpointError
from hpcdist.files import retry
from hpcdist.files.atomic import fsync_folder
from hpcdist.files.bounded_json import parse_json

POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that one rank owns, for `Context.save`.

    Attributes:
        model: tensors by their name in the whole model.
        rows: for each tensor that is a slice of a table: its first row and the total number of rows of the table.
        trainer: further state that this rank needs to resume, such as optimizer state.
    """

    model: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    trainer: Any = None

    @property
    def is_empty(self) -> bool:
        """Whether the rank contributes nothing to the checkpoint."""
        return not self.model and self.trainer is None

    def content(self) -> dict[str, Any]:
        """Return the content of the shard's file."""
        rows = {name: list(span) for name, span in self.rows.items()}
        return {"model": self.model, "rows": rows, "trainer": self.trainer}


class ShardExchange:
    """Reports from the owners to rank 0 that their shards of a step are on disk.

    Args:
        store: store of all ranks.
        rank: this rank.
        attempt: number of the attempt.
        timeout_s: how long rank 0 waits for the last owner, in seconds; the death of an owner ends the attempt earlier.
    """

    def __init__(self, store: Store, *, rank: int, attempt: int, timeout_s: float = 3600.0) -> None:
        self._store = PrefixStore(f"shards/{attempt}", store)
        self._rank = rank
        self._timeout_s = timeout_s

    def write(self, content: Mapping[str, Any], step: int, staging: Path) -> None:
        """Write the shard of this rank, and report the success or the error to rank 0.

        Raises CheckpointError if the file cannot be written.
        """
        try:
            retry.retry(lambda: staging.mkdir(parents=True, exist_ok=True), staging)
            record = checkpoint_folder.save_file(dict(content), staging / checkpoint_folder.shard_name(self._rank))
            report: dict[str, Any] = {"bytes": record.size_bytes, "sha256": record.sha256}
        except OSError as error:
            text = f"rank {self._rank} could not write its shard of step {step}: {error.strerror or error}"
            may_pass = retry.is_away(error)
            self._store.set(f"{step}/{self._rank}", json.dumps({"error": text, "may_pass": may_pass}))
            raise CheckpointError(text, may_pass=may_pass) from error
        self._store.set(f"{step}/{self._rank}", json.dumps(report))

    def collect(self, step: int, owners: Sequence[int], staging: Path, into: Path) -> dict[str, FileRecord]:
        """Wait on rank 0 for every owner, and move the shards into the checkpoint folder.

        Raises CheckpointError if an owner has failed or exceeds the time limit.
        """
        try:
            reports = {rank: self._report(step, rank) for rank in owners}
            for rank in owners:
                retry.rename(staging / checkpoint_folder.shard_name(rank), into / checkpoint_folder.shard_name(rank))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        retry.retry(lambda: fsync_folder(into), into)
        return {checkpoint_folder.shard_name(rank): record for rank, record in reports.items()}

    def _report(self, step: int, rank: int) -> FileRecord:
        key = f"{step}/{rank}"
        end = time.monotonic() + self._timeout_s
        # Not `Store.wait`, which blocks the store for all other threads of this process.
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise CheckpointError(f"rank {rank} has not written its shard of step {step} in {self._timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)
        text = self._store.get(key)
        self._store.delete_key(key)
        try:
            report = parse_json(text)
            failure = str(report["error"])[:1000] if "error" in report else ""
            if not failure:
                return FileRecord(size_bytes=int(report["bytes"]), sha256=str(report["sha256"]))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise CheckpointError(f"rank {rank} reported its shard of step {step} as {text[:100]!r}") from error
        raise CheckpointError(failure, may_pass=report.get("may_pass") is True)


def merge(shards: Sequence[Mapping[str, Any]], source: str) -> dict[str, Tensor]:
    """Return the tensors of the whole model from the contents of its shards.

    Raises CheckpointError if rows are missing or a content is not that of a `Shard`.
    """
    try:
        return _merged(shards, source)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{source}: a shard is damaged ({type(error).__name__}: {str(error)[:200]})") from error


def _merged(shards: Sequence[Mapping[str, Any]], source: str) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    pieces: dict[str, list[tuple[int, int, Tensor]]] = {}
    for shard in shards:
        for name, tensor in shard["model"].items():
            if name in shard["rows"]:
                first, total = shard["rows"][name]
                pieces.setdefault(name, []).append((first, total, tensor))
            else:
                whole[name] = tensor
    for name, found in pieces.items():
        found.sort(key=lambda piece: piece[0])
        next_row = 0
        for first, _, tensor in found:
            if first != next_row:
                break
            next_row += len(tensor)
        if next_row != found[0][1]:
            raise CheckpointError(f"{source}: rows of {name} are missing after row {next_row} of {found[0][1]}")
        whole[name] = torch.cat([tensor for _, _, tensor in found])
    return whole
