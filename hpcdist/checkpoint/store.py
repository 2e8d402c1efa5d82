"""The `checkpoints/` folder of a run: find, load, write and prune checkpoints. One process writes, all may read.

A checkpoint is written to a temporary folder, synced, and renamed, so that a reader finds a complete checkpoint or none
even if the writer is killed at any moment.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from hpcdist.checkpoint import folder as checkpoint_folder
from hpcdist.checkpoint.folder import Snapshot
from hpcdist.errors import CheckpointError
from hpcdist.host import retry as file_retry
from hpcdist.host.files import fsync_folder
from hpcdist.host.retry import retry
from hpcdist.run.records import folder_name, step_of

log = logging.getLogger(__name__)

_TEMP_PREFIX = ".tmp-"


@dataclass(frozen=True, kw_only=True)
class Found:
    """A complete checkpoint on disk. A metric that was not finite when it was saved is NaN."""

    path: Path
    step: int
    world_size: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A loaded checkpoint, all tensors in host memory. `world_size` is that of the run when it saved the checkpoint."""

    step: int
    model: dict[str, Tensor]
    trainer: Any
    rank_states: list[Any]
    metrics: Mapping[str, float]
    world_size: int


class CheckpointStore:
    """The `checkpoints/` folder of one run.

    Args:
        folder: created at the first write.
        keep_last: number of newest checkpoints to keep, at least 2.
        best_metric: metric by which the best checkpoint is kept in addition.
        monitor_mode: whether the largest or the smallest value is the best.

    Attributes:
        skipped: one line for each invalid checkpoint that the last `latest()` skipped.

    Raises CheckpointError for a `keep_last` below 2: with a single checkpoint, one broken disk block would end the run.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        best_metric: str | None = None,
        monitor_mode: Literal["max", "min"] = "max",
    ) -> None:
        if keep_last < 2:
            raise CheckpointError(f"checkpoint.keep_last must be >= 2, got {keep_last}")
        self.folder = Path(folder)
        self.skipped: list[str] = []
        self._keep_last = keep_last
        self._best_metric = best_metric
        self._monitor_mode = monitor_mode
        self._looked = False
        self._newest: Found | None = None  # verified or written by this process
        self._broken: set[Path] = set()

    # --- reading

    def latest(self) -> Found | None:
        """Return the newest checkpoint whose manifest, sizes and hashes are valid; None if there is none."""
        self.skipped, self._broken = [], set()
        self._newest, self._looked = None, True
        for folder in self._folders():
            try:
                self._newest = _verified(folder)
                break
            except CheckpointError as error:
                self._broken.add(folder)
                self.skipped.append(str(error))
                log.warning("skipping checkpoint %s", error)
        return self._newest

    def all(self) -> list[Found]:
        """Return the checkpoints with valid manifest and sizes, newest first; hashes are not checked."""
        return list(self._whole())

    def best(self) -> Found | None:
        """Return the checkpoint with the best metric, the newest of equal ones; None if no checkpoint has the metric.

        Hashes are not checked.
        """
        return next(iter(self._by_metric(self.all())), None)

    def newest_step(self) -> int | None:
        """Return the step of the newest valid checkpoint; reads the disk only if `latest()` has not been called."""
        if not self._looked:
            self.latest()
        return None if self._newest is None else self._newest.step

    def load(self, path: Path | str, *, verify: bool = True) -> Checkpoint:
        """Load one checkpoint folder into host memory. `verify` checks the hashes, unless `latest()` has just done so.

        Raises CheckpointError if it is incomplete, has changed, or contains anything other than plain data.
        """
        folder = Path(path)
        manifest = checkpoint_folder.read_manifest(folder)
        if verify:
            checkpoint_folder.verify_hashes(folder, manifest)
        trainer_file = folder / checkpoint_folder.TRAINER_FILE
        rest = checkpoint_folder.load_file(trainer_file)
        if rest.keys() != {"trainer", "rank_states"} or not isinstance(rest["rank_states"], list):
            raise CheckpointError(f"{trainer_file} does not contain `trainer` and `rank_states`")
        return Checkpoint(
            step=manifest.step,
            model=checkpoint_folder.load_file(folder / checkpoint_folder.MODEL_FILE),
            metrics=manifest.metrics,
            world_size=manifest.world_size,
            **rest,
        )

    def _folders(self) -> list[Path]:
        """Return the folders named like a checkpoint, newest first."""
        steps = {entry: step_of(entry) for entry in _entries(self.folder)}
        named = [(step, entry) for entry, step in steps.items() if step is not None]
        return [entry for _, entry in sorted(named, reverse=True)]

    def _whole(self) -> Iterator[Found]:
        """Yield the checkpoints with valid manifest and sizes, newest first; hashes are not checked."""
        for folder in self._folders():
            if folder not in self._broken:
                try:
                    yield _found(folder, checkpoint_folder.read_manifest(folder))
                except CheckpointError as error:
                    self._broken.add(folder)
                    log.warning("keeping invalid checkpoint %s", error)

    def _by_metric(self, candidates: list[Found]) -> list[Found]:
        """Return the candidates that have the metric, the best first. `candidates` are newest first."""
        metric = self._best_metric
        if not metric:
            return []
        sign = -1.0 if self._monitor_mode == "max" else 1.0
        scored = [(sign * found.metrics.get(metric, math.nan), found) for found in candidates]
        return [found for _, found in sorted((s for s in scored if not math.isnan(s[0])), key=lambda s: s[0])]

    # --- writing, by one process

    def write(self, snapshot: Snapshot, *, before_publish: Callable[[], None] | None = None) -> Path:
        """Write a checkpoint with fsync and return its folder.

        A valid checkpoint of the same step is kept and the new one is dropped, because both contain the same state.
        `before_publish` is called directly before the rename to the final name.

        Raises CheckpointError if the files cannot be written, for example on a full disk. Then the temporary folder is
        removed and older checkpoints are unchanged.
        """
        final = self.folder / folder_name(snapshot.step)
        try:
            retry(lambda: self.folder.mkdir(parents=True, exist_ok=True), self.folder)
            if file_retry.exists(final) and self._is_valid(final):
                log.info("%s exists already and is valid: it is kept", final)
            else:
                self._write_new(snapshot, final, before_publish)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {snapshot.step} could not be written to {self.folder}: "
                f"{error.strerror or error} ({_free_space(self.folder)}); older checkpoints are unchanged",
                may_pass=file_retry.is_away(error),
            ) from error
        self._broken.discard(final)
        if snapshot.step >= (self.newest_step() or 0):
            self._newest = _found(final, checkpoint_folder.read_manifest(final))
        return final

    def _write_new(self, snapshot: Snapshot, final: Path, before_publish: Callable[[], None] | None) -> None:
        temp = self._temp_name(final)
        try:
            retry(lambda: temp.mkdir(exist_ok=True), temp)
            checkpoint_folder.write_checkpoint(temp, snapshot)
            if before_publish is not None:
                before_publish()
            if file_retry.exists(final):  # an invalid checkpoint
                self._remove(final)
            file_retry.rename(temp, final)
            retry(lambda: fsync_folder(self.folder), self.folder)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)  # the next restore removes the remaining files
            raise

    def annotate(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the checkpoint of `step`.

        Raises CheckpointError if the checkpoint does not exist or its manifest cannot be written.
        """
        folder = self.folder / folder_name(step)
        manifest = checkpoint_folder.read_manifest(folder)
        try:
            checkpoint_folder.write_manifest(folder, replace(manifest, metrics={**manifest.metrics, **metrics}))
        except OSError as error:
            raise CheckpointError(f"{folder}: its metrics could not be written: {error.strerror or error}") from error

    def prune(self) -> list[Path]:
        """Remove all valid checkpoints except the newest `keep_last` and the best; return the removed folders.

        Invalid checkpoints neither count nor are removed, so that they can be examined.

        Raises CheckpointError if a checkpoint cannot be removed.
        """
        whole = list(self._whole())
        if len(whole) <= self._keep_last:
            return []
        if whole[0].step != self.newest_step():  # its hashes have not been checked
            self.latest()
            whole = list(self._whole())
        best = self._by_metric(whole)[:1]
        doomed = [found.path for found in whole[self._keep_last :] if found not in best]
        for path in doomed:
            try:
                self._remove(path)
            except OSError as error:
                raise CheckpointError(
                    f"old checkpoint {path} cannot be removed: {error.strerror}", may_pass=file_retry.is_away(error)
                ) from error
        return doomed

    def remove_leftovers(self) -> list[Path]:
        """Remove incomplete checkpoints of killed attempts, and return their paths. Only for the writing process."""
        leftovers = [entry for entry in _entries(self.folder) if entry.name.startswith(f"{_TEMP_PREFIX}step-")]
        for entry in leftovers:
            try:
                retry(lambda entry=entry: shutil.rmtree(entry), entry)  # type: ignore[misc]
            except OSError as error:
                raise CheckpointError(f"incomplete checkpoint {entry} cannot be removed: {error.strerror}") from error
            log.info("removed %s, the incomplete checkpoint of an attempt that died while saving", entry)
        return leftovers

    def _is_valid(self, folder: Path) -> bool:
        try:
            _verified(folder)
        except CheckpointError as error:
            log.warning("replacing checkpoint %s", error)
            return False
        return True

    def _remove(self, folder: Path) -> None:
        # Renamed first: a kill during the removal must not leave a checkpoint with missing files.
        temp = self._temp_name(folder)
        file_retry.rename(folder, temp)
        retry(lambda: shutil.rmtree(temp), temp)

    def staging(self, step: int, attempt: int) -> Path:
        """Return the folder to which the ranks of an attempt write their shards, until rank 0 collects them."""
        return self.folder / f"{_TEMP_PREFIX}{folder_name(step)}-shards-{attempt:03d}"

    def _temp_name(self, final: Path) -> Path:
        return self.folder / f"{_TEMP_PREFIX}{final.name}-{secrets.token_hex(4)}"


def _verified(folder: Path) -> Found:
    manifest = checkpoint_folder.read_manifest(folder)
    checkpoint_folder.verify_hashes(folder, manifest)
    return _found(folder, manifest)


def _found(folder: Path, manifest: checkpoint_folder.Manifest) -> Found:
    return Found(path=folder, step=manifest.step, world_size=manifest.world_size, metrics=manifest.metrics)


def _entries(folder: Path) -> list[Path]:
    try:
        return retry(lambda: list(folder.iterdir()), folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint folder {folder} cannot be read: {error.strerror}") from error


def _free_space(folder: Path) -> str:
    while not os.path.exists(folder):
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.0f} MB free"
    except OSError as error:
        return f"free space unknown: {error.strerror}"
