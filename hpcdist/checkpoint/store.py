"""The `checkpoints/` folder of a run: find, load, write and prune checkpoints. One process publishes, all may read.

    step-00001200/
        model.pt        the model's state dict
        trainer.pt      {"trainer": the trainer's state, "rank_states": one state for each rank,
                        "sharded": shape and type of each DTensor, if any: see sharded.py}
        shard-00002.pt  the parts of model and trainer's state that rank 2 owns, if any: see sharded.py
        samples.npy     per-sample results of its evaluation: see `ReportData.log_samples`
        manifest.json   written last: {format, format_version, step, created (unix s), write_s, world_size, metrics,
                        files: {name: {bytes, sha256}}}

A checkpoint is written to a temporary folder, synced, and renamed, so that a reader finds a complete checkpoint or none
even if the writer is killed at any moment. The `.pt` files are read with `torch.load(weights_only=True)`, which refuses
a crafted file instead of executing it.

`torch.distributed.checkpoint` (torch 2.15) is not used, because it stores no hashes, so that a changed byte of a tensor
is loaded without an error, and because it reads its metadata with `pickle.load`, which executes a crafted file.
"""

import hashlib
import io
import json
import logging
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import torch

from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.errors import CheckpointError, RunFolderError
from hpcdist.host import retry as file_retry
from hpcdist.host.files import fsync_folder, open_regular, write_atomic
from hpcdist.host.json_files import read_json_value, stamped, unstamped
from hpcdist.host.retry import retry
from hpcdist.run.checkpoint_files import (
    MANIFEST_FILE,
    MODEL_FILE,
    SAMPLES_FILE,
    TRAINER_FILE,
    folder_name,
    step_of,
)

log = logging.getLogger(__name__)

#: How long a read is retried, in seconds. A broken disk block causes the same error as an unreachable file server, so
#: after this time an older checkpoint is used.
READ_TIMEOUT_S = 30.0

#: Number of bytes of a file after which the kernel begins to write them to the disk.
WRITEBACK_BYTES = 8 << 20

_TEMP_PREFIX = ".tmp-"
_REFUSED = re.compile(r"GLOBAL \S+|WeightsUnpickler error: (?!Unsupported global)[^\n]+")
_FILE_NAME = re.compile(r"model\.pt|trainer\.pt|shard-\d{5,}\.pt")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and SHA-256 of one file, as written."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of one checkpoint, to be written, or loaded into host memory."""

    step: int  #: number of steps done
    model: dict[str, Any]  #: state dict of the bare model
    trainer: Any
    rank_states: list[Any]  #: by rank
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: Moves the shards of other ranks into a folder, and returns their records by file name.
    collect_shards: Callable[[Path], Mapping[str, FileRecord]] | None = None
    #: Returns the states of the ranks, which are then not in `rank_states`.
    collect_rank_states: Callable[[], list[Any]] | None = None
    #: Waits for the shards of other ranks, and removes them, unless they have been collected.
    drop_shards: Callable[[], None] = lambda: None
    samples: bytes = b""  #: content of SAMPLES_FILE; empty without one
    #: Shape and type of each tensor in shards, by name or path; `model` and `trainer` have None in its place.
    sharded: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint on disk: its folder, and the contents of `manifest.json`. Metrics that were not finite are NaN."""

    path: Path
    step: int
    created: float  #: Unix time
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    write_s: float = 0.0

    @property
    def shards(self) -> list[str]:
        """Names of the files with parts of the model."""
        return sorted(self.files.keys() - {MODEL_FILE, TRAINER_FILE})


class CheckpointStore:
    """The `checkpoints/` folder of one run.

    At least the two newest checkpoints are kept, because one broken disk block would end a run with a single one.

    Args:
        cfg: how many checkpoints are kept, and the metric of the best one; without it there is no best one.
    """

    def __init__(self, folder: Path, cfg: CheckpointConfig | None = None) -> None:
        self.folder = folder
        self._cfg = cfg or CheckpointConfig(monitor="")
        self._has_searched = False  #: whether `latest` has been called
        self._newest: Manifest | None = None  #: verified or written by this process
        self._broken: set[Path] = set()

    # --- reading

    def latest(self, verify: "Callable[[Path], Manifest] | None" = None) -> Manifest | None:
        """Return the newest checkpoint with valid manifest, sizes and hashes; None if there is none.

        Args:
            verify: returns the manifest of a checkpoint, or raises CheckpointError; by default `verified`.
        """
        verify = verify or verified
        self._broken = set()
        self._newest = None
        self._has_searched = True
        for folder in self._folders():
            try:
                self._newest = verify(folder)
                break
            except CheckpointError as error:
                self._broken.add(folder)
                log.warning("skipping checkpoint %s", error)
        return self._newest

    def all(self) -> list[Manifest]:
        """Return the checkpoints with valid manifest and sizes, newest first; hashes are not checked."""
        checkpoints = []
        for folder in self._folders():
            if folder in self._broken:
                continue
            try:
                checkpoints.append(read_manifest(folder))
            except CheckpointError as error:
                self._broken.add(folder)
                log.warning("keeping invalid checkpoint %s", error)
        return checkpoints

    def best(self) -> Manifest | None:
        """Return the checkpoint with the best metric, the newest of equal ones; hashes are not checked."""
        return self._best_of(self.all())

    def newest_step(self) -> int | None:
        """Return the step of the newest valid checkpoint; reads the disk only if `latest()` has not been called."""
        if not self._has_searched:
            self.latest()
        if self._newest is None:
            return None
        return self._newest.step

    def load(self, path: Path) -> Snapshot:
        """Load a checkpoint that `latest()` has returned, with verified hashes, into host memory."""
        manifest = read_manifest(path)
        rest = load_file(path / TRAINER_FILE)
        if rest.keys() - {"sharded"} != {"trainer", "rank_states"} or not isinstance(rest["rank_states"], list):
            raise CheckpointError(f"{path / TRAINER_FILE} does not contain `trainer` and `rank_states`")
        return Snapshot(step=manifest.step, model=load_file(path / MODEL_FILE), metrics=manifest.metrics, **rest)

    def _folders(self) -> list[Path]:
        """Return the folders with the name of a checkpoint, newest first."""
        steps = {entry: step_of(entry) for entry in _entries(self.folder)}
        named = [(step, entry) for entry, step in steps.items() if step is not None]
        return [entry for _, entry in sorted(named, reverse=True)]

    def _best_of(self, checkpoints: list[Manifest]) -> Manifest | None:
        values = {each.step: each.metrics.get(self._cfg.monitor, math.nan) for each in checkpoints}
        measured = [each for each in checkpoints if not math.isnan(values[each.step])]
        choose = max if self._cfg.monitor_mode == "max" else min
        return choose(measured, key=lambda each: values[each.step], default=None)

    # --- writing, by one process

    def add(self, snapshot: Snapshot, *, before_publish: Callable[[], None] | None = None) -> Path:
        """Add a checkpoint, written with fsync, and return its folder.

        A valid checkpoint of the same step is kept and the new one is dropped, because both contain the same state.
        `before_publish` is called directly before the rename to the final name.
        """
        final = self.folder / folder_name(snapshot.step)
        try:
            retry(lambda: self.folder.mkdir(parents=True, exist_ok=True), self.folder)
            if not self._is_valid(final):
                self._write_and_publish(snapshot, final, before_publish)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint of step {snapshot.step} could not be written to {self.folder}: "
                f"{error.strerror or error} ({free_space(self.folder)}); older checkpoints are unchanged",
                may_pass=file_retry.is_away(error),
            ) from error
        finally:
            snapshot.drop_shards()
        self._broken.discard(final)
        if snapshot.step >= (self.newest_step() or 0):
            self._newest = read_manifest(final)
        return final

    def _is_valid(self, final: Path) -> bool:
        """Return whether a checkpoint exists and is valid."""
        if not file_retry.exists(final):
            return False
        try:
            verified(final)
        except CheckpointError as error:
            log.warning("replacing checkpoint %s", error)
            return False
        log.info("%s exists already and is valid: it is kept", final)
        return True

    def _write_and_publish(self, snapshot: Snapshot, final: Path, before_publish: Callable[[], None] | None) -> None:
        temp = self._temp_name(final)
        try:
            retry(lambda: temp.mkdir(exist_ok=True), temp)
            write_files(temp, snapshot)
            if before_publish is not None:
                before_publish()
            if file_retry.exists(final):  # an invalid checkpoint
                self._remove(final)
            file_retry.rename(temp, final)
            retry(lambda: fsync_folder(self.folder), self.folder)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)  # the next restore removes the remaining files
            raise

    def annotate(self, step: int, metrics: Mapping[str, float], samples: bytes = b"") -> None:
        """Add metrics, and the content of SAMPLES_FILE unless it is empty, to the checkpoint of `step`."""
        folder = self.folder / folder_name(step)
        manifest = read_manifest(folder)
        try:
            if samples:
                write_atomic(folder / SAMPLES_FILE, samples, durable=True)
            write_manifest(replace(manifest, metrics={**manifest.metrics, **metrics}))
        except OSError as error:
            text = f"{folder}: its metrics could not be written: {error.strerror or error}"
            raise CheckpointError(text, may_pass=file_retry.is_away(error)) from error

    def prune(self) -> None:
        """Remove all valid checkpoints except the newest `checkpoint.keep_last` and the best.

        Invalid checkpoints neither count nor are removed, so that they can be examined.
        """
        checkpoints = self.all()
        if len(checkpoints) <= self._cfg.keep_last:
            return
        if checkpoints[0].step != self.newest_step():  # its hashes have not been checked
            self.latest()
            checkpoints = self.all()
        best = self._best_of(checkpoints)
        for old in checkpoints[self._cfg.keep_last :]:
            if old is best:
                continue
            try:
                self._remove(old.path)
            except OSError as error:
                text = f"old checkpoint {old.path} cannot be removed: {error.strerror}"
                raise CheckpointError(text, may_pass=file_retry.is_away(error)) from error

    def remove_leftovers(self) -> None:
        """Remove incomplete checkpoints of killed attempts. Only for the writing process."""
        for entry in _entries(self.folder):
            if not entry.name.startswith(f"{_TEMP_PREFIX}step-"):
                continue
            try:
                retry(lambda entry=entry: shutil.rmtree(entry), entry)  # type: ignore[misc]
            except OSError as error:
                raise CheckpointError(f"incomplete checkpoint {entry} cannot be removed: {error.strerror}") from error
            log.info("removed %s, the incomplete checkpoint of an attempt that died while saving", entry)

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


def _entries(folder: Path) -> list[Path]:
    try:
        return retry(lambda: list(folder.iterdir()), folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint folder {folder} cannot be read: {error.strerror}") from error


def free_space(folder: Path) -> str:
    """Return the free space of a folder, which may not exist yet, for a message."""
    while not os.path.exists(folder):
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.0f} MB free"
    except OSError as error:
        return f"free space unknown: {error.strerror}"


# The files of one checkpoint folder: write them with a hash and fsync, and verify them before loading.


def shard_name(rank: int) -> str:
    """Return the name of the file for the part of the model that a rank owns."""
    return f"shard-{rank:05d}.pt"


class _HashingFile:
    """An unbuffered file for `torch.save` that hashes the data while it is written, and keeps the first error."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self._num_begun = 0  #: bytes that the kernel has begun to write to the disk
        self.digest = hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`, and return its number of bytes."""
        view = memoryview(data).cast("B")
        try:
            for begin in range(0, len(view), WRITEBACK_BYTES):
                self._write_piece(view[begin : begin + WRITEBACK_BYTES])
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def _write_piece(self, piece: memoryview) -> None:
        self.digest.update(piece)
        done = 0
        while done < len(piece):  # a write stores less if the disk is nearly full
            done += self._raw.write(piece[done:])
        self.size_bytes += done
        num_waiting = self.size_bytes - self._num_begun
        if num_waiting >= WRITEBACK_BYTES:
            # The disk then works beside the hashing of the next piece, so that fsync has little left to wait for.
            # The kernel keeps the pages in memory, because they are not on the disk yet. A file system may refuse.
            with suppress(OSError):
                os.posix_fadvise(self._raw.fileno(), self._num_begun, num_waiting, os.POSIX_FADV_DONTNEED)
            self._num_begun = self.size_bytes

    def flush(self) -> None:
        pass


def save_file(content: Any, path: Path) -> FileRecord:
    """Write a file with `torch.save` and fsync; return its size and hash. Raises OSError if that fails."""

    def save_once() -> FileRecord:
        with open(path, "wb", buffering=0) as raw:
            file = _HashingFile(raw)
            try:
                torch.save(content, cast(IO[bytes], file))
            except RuntimeError:
                if file.error is not None:  # torch reports only an `enforce fail` without the cause
                    raise file.error from None
                raise
            os.fsync(raw.fileno())
        return FileRecord(size_bytes=file.size_bytes, sha256=file.digest.hexdigest())

    return retry(save_once, path)


def write_manifest(manifest: Manifest) -> None:
    """Write or replace the manifest with fsync. Metrics that are not finite become null."""
    metrics: dict[str, float | None] = {}
    for name, value in manifest.metrics.items():
        metrics[name] = value if math.isfinite(value) else None
    content = {
        **stamped({"format_version": 1}),  # hpcdist 0.1 reads only `format_version`
        "step": manifest.step,
        "created": manifest.created,
        "write_s": manifest.write_s,
        "world_size": manifest.world_size,
        "metrics": metrics,
        "files": {
            name: {"bytes": record.size_bytes, "sha256": record.sha256} for name, record in manifest.files.items()
        },
    }
    write_atomic(manifest.path / MANIFEST_FILE, json.dumps(content, indent=2) + "\n", durable=True)


def write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write all files of a checkpoint into an empty folder, with fsync."""
    began = time.monotonic()
    rank_states = snapshot.rank_states
    if snapshot.collect_rank_states is not None:
        rank_states = snapshot.collect_rank_states()
    rest = {"trainer": snapshot.trainer, "rank_states": rank_states}
    if snapshot.sharded:
        rest["sharded"] = dict(snapshot.sharded)
    files = {
        MODEL_FILE: save_file(snapshot.model, folder / MODEL_FILE),
        TRAINER_FILE: save_file(rest, folder / TRAINER_FILE),
    }
    if snapshot.collect_shards is not None:
        files |= snapshot.collect_shards(folder)
    if snapshot.samples:  # not a file of the manifest: a resume does not need it
        write_atomic(folder / SAMPLES_FILE, snapshot.samples, durable=True)
    manifest = Manifest(
        path=folder,
        step=snapshot.step,
        created=time.time(),
        world_size=len(rank_states),
        metrics=snapshot.metrics,
        files=files,
        # The next submission compares `cluster.signal_lead_s` with the longest of these times.
        write_s=round(time.monotonic() - began, 3),
    )
    write_manifest(manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint and compare the sizes of the files with it; hashes are not checked.

    Raises CheckpointError with a message of one line if a file cannot be read or does not fit.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = _parsed(retry(lambda: read_json_value(path), path, within_s=READ_TIMEOUT_S), path)
        files = {name: folder / name for name in manifest.files}
        sizes = {name: retry(file.stat, file, within_s=READ_TIMEOUT_S).st_size for name, file in files.items()}
    except OSError as error:
        name = Path(error.filename or MANIFEST_FILE).name
        raise CheckpointError(f"{folder}: {name} cannot be read ({error.strerror})") from error
    except RunFolderError as error:  # of a newer format
        raise CheckpointError(str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise CheckpointError(f"{folder}: {MANIFEST_FILE} is broken ({reason})") from error
    if step_of(folder) not in (None, manifest.step):  # a copy may have another name, such as `best` in MLflow
        raise CheckpointError(f"{folder}: {MANIFEST_FILE} is that of step {manifest.step}")
    for name, record in manifest.files.items():
        if sizes[name] != record.size_bytes:
            raise CheckpointError(
                f"{folder}: {name} has {sizes[name]} bytes, but {record.size_bytes} according to its manifest"
            )
    return manifest


def _parsed(raw: Any, path: Path) -> Manifest:
    if not isinstance(raw, dict):
        raise TypeError(f"it contains a {type(raw).__name__}")
    unstamped(raw, path)
    if raw["format_version"] != 1:  # older manifests have no `format`
        raise ValueError(f"format_version is {raw['format_version']!r:.50}, but this hpcdist reads only 1")
    names = {MODEL_FILE: None, TRAINER_FILE: None} | dict.fromkeys(raw["files"])
    for name in names:
        if not _FILE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a file name of a checkpoint")
    files = {}
    for name in names:
        record = raw["files"][name]
        files[name] = FileRecord(size_bytes=int(record["bytes"]), sha256=str(record["sha256"]))
    return Manifest(
        path=path.parent,
        step=int(raw["step"]),
        created=float(raw["created"]),
        world_size=int(raw["world_size"]),
        metrics={str(name): _metric(value) for name, value in raw["metrics"].items()},
        files=files,
        write_s=float(raw.get("write_s", 0.0)),
    )


def _metric(value: Any) -> float:
    """Return a metric of a manifest, in which null is a value that was not finite."""
    if value is None:
        return math.nan
    return float(value)


def verified(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, after a check of the sizes and SHA-256 hashes of its files.

    Raises CheckpointError if a file is missing, cannot be read, or has changed.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        verify_file(folder / name, record.sha256)
    return manifest


def verify_file(path: Path, sha256: str) -> None:
    """Raise CheckpointError if a file of a checkpoint cannot be read, or does not have this hash."""

    def digest() -> str:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    try:
        found = retry(digest, path, within_s=READ_TIMEOUT_S)
    except OSError as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read ({error.strerror})") from error
    if found != sha256:
        raise CheckpointError(f"{path.parent}: {path.name} has changed since it was written (its SHA-256 differs)")


def load_file(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Load a file of a checkpoint to host memory.

    Args:
        mmap: map the file instead of reading it, so that processes of a machine share its memory.

    Raises CheckpointError if the file cannot be read, or contains anything other than a dict of plain data.
    """
    try:
        content = retry(
            lambda: torch.load(path, map_location="cpu", weights_only=True, mmap=mmap), path, within_s=READ_TIMEOUT_S
        )
    except Exception as error:
        # The first line of torch's refusal advises to load the file without this protection, so it is not shown.
        refusal = _REFUSED.search(str(error))
        if refusal:
            reason = refusal[0]
        else:
            first_line, _, _ = str(error).partition("\n")
            reason = f"{type(error).__name__}: {first_line}"
        text = f"{path} was not loaded, because it does not contain plain data only: {reason}"
        raise CheckpointError(text) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not a dict")
    return content
