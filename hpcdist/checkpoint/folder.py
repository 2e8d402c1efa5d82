"""The files of one checkpoint folder: write them with a hash and fsync, and verify them before loading.

    step-00001200/
        model.pt        the model's state dict
        trainer.pt      {"trainer": the trainer's state, "rank_states": one state for each rank}
        shard-00002.pt  the part of the model that rank 2 owns, if any: see state.py
        manifest.json   written last: {format, format_version, step, created (unix s), write_s, world_size, metrics,
                        files: {name: {bytes, sha256}}}

The `.pt` files are read with `torch.load(weights_only=True)`, which refuses a crafted file instead of executing it.

`torch.distributed.checkpoint` (torch 2.15) is not used, because it stores no hashes, so that a changed byte of a tensor
is loaded without an error, and because it reads its metadata with `pickle.load`, which executes a crafted file.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch

from hpcdist.errors import CheckpointError, RunFolderError
from hpcdist.host.files import open_regular, read_json_value, stamped, unstamped, write_atomic
from hpcdist.host.retry import retry
from hpcdist.run.records import MANIFEST_FILE, step_of

MODEL_FILE = "model.pt"
TRAINER_FILE = "trainer.pt"
#: How long a read is retried, in seconds. A broken disk block causes the same error as an unreachable file server, so
#: after this time an older checkpoint is used.
READ_TIMEOUT_S = 30.0

_REFUSED = re.compile(r"GLOBAL \S+|WeightsUnpickler error: (?!Unsupported global)[^\n]+")
_FILE_NAME = re.compile(r"model\.pt|trainer\.pt|shard-\d{5,}\.pt")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and SHA-256 of one file, as written."""

    size_bytes: int
    sha256: str


CollectShards = Callable[[Path], Mapping[str, FileRecord]]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state to write as one checkpoint, in host memory.

    Attributes:
        step: number of steps done.
        model: state dict of the bare model.
        trainer: the trainer's state.
        rank_states: one state for each rank, by rank.
        metrics: metrics of this checkpoint.
        collect_shards: moves the shards of other ranks into a folder, and returns their records by file name.
    """

    step: int
    model: Mapping[str, Any]
    trainer: Any
    rank_states: list[Any]
    metrics: Mapping[str, float]
    collect_shards: CollectShards | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of `manifest.json`. `created` is a Unix time; writing the files took `write_s` seconds."""

    step: int
    created: float
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileRecord]
    write_s: float = 0.0

    @property
    def shards(self) -> list[str]:
        """Names of the files written by ranks other than 0."""
        return [name for name in self.files if name not in (MODEL_FILE, TRAINER_FILE)]


def shard_name(rank: int) -> str:
    """Return the file name of a rank's shard."""
    return f"shard-{rank:05d}.pt"


class _HashingFile:
    """A file for `torch.save` that hashes the data while it is written, and keeps the first error."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self.size_bytes = 0
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._hash.update(view)
        done = 0
        try:
            while done < len(view):  # one write stores at most 2 GiB, or less if the disk is nearly full
                done += self._raw.write(view[done:])
        except OSError as error:
            self.error = error
            raise
        self.size_bytes += done
        return done

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def record(self) -> FileRecord:
        return FileRecord(size_bytes=self.size_bytes, sha256=self._hash.hexdigest())


def save_file(content: Any, path: Path) -> FileRecord:
    """Write a file with `torch.save` and fsync; return its size and hash. Raises OSError if that fails."""
    return retry(lambda: _save_once(content, path), path)


def _save_once(content: Any, path: Path) -> FileRecord:
    with open(path, "wb", buffering=0) as raw:
        file = _HashingFile(raw)
        try:
            torch.save(content, cast(IO[bytes], file))
        except RuntimeError:
            if file.error is not None:  # torch reports only an `enforce fail` without the cause
                raise file.error from None
            raise
        os.fsync(raw.fileno())
    return file.record()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write or replace the manifest with fsync. Metrics that are not finite become null."""
    text = json.dumps(
        {
            **stamped({"format_version": 1}),  # hpcdist 0.1 reads only `format_version`
            "step": manifest.step,
            "created": manifest.created,
            "write_s": manifest.write_s,
            "world_size": manifest.world_size,
            "metrics": {k: v if math.isfinite(v) else None for k, v in manifest.metrics.items()},
            "files": {k: {"bytes": v.size_bytes, "sha256": v.sha256} for k, v in manifest.files.items()},
        },
        indent=2,
    )
    write_atomic(folder / MANIFEST_FILE, text + "\n", durable=True)


def write_checkpoint(folder: Path, snapshot: Snapshot) -> None:
    """Write all files of a checkpoint into an empty folder, with fsync."""
    began = time.monotonic()
    files = {
        MODEL_FILE: save_file(snapshot.model, folder / MODEL_FILE),
        TRAINER_FILE: save_file(
            {"trainer": snapshot.trainer, "rank_states": snapshot.rank_states}, folder / TRAINER_FILE
        ),
    }
    if snapshot.collect_shards is not None:
        files |= snapshot.collect_shards(folder)
    manifest = Manifest(
        step=snapshot.step,
        created=time.time(),
        world_size=len(snapshot.rank_states),
        metrics=snapshot.metrics,
        files=files,
        # The next submission checks by this time whether the last save fits into the remaining time limit.
        write_s=round(time.monotonic() - began, 3),
    )
    write_manifest(folder, manifest)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest and compare the sizes of the files with it; hashes are not checked.

    Raises CheckpointError with a message of one line.
    """
    try:
        path = folder / MANIFEST_FILE
        manifest = parse_manifest(retry(lambda: read_json_value(path), path, within_s=READ_TIMEOUT_S), path)
        files = {name: folder / name for name in manifest.files}
        sizes = {name: retry(file.stat, file, within_s=READ_TIMEOUT_S).st_size for name, file in files.items()}
    except OSError as error:
        name = Path(error.filename or MANIFEST_FILE).name
        raise CheckpointError(f"{folder}: {name} cannot be read ({error.strerror})") from error
    except RunFolderError as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{folder}: {MANIFEST_FILE} is broken ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    if step_of(folder) not in (None, manifest.step):  # a copy may have another name, such as `best` in MLflow
        raise CheckpointError(f"{folder}: {MANIFEST_FILE} is that of step {manifest.step}")
    for name, record in manifest.files.items():
        if sizes[name] != record.size_bytes:
            raise CheckpointError(
                f"{folder}: {name} has {sizes[name]} bytes, but {record.size_bytes} according to its manifest"
            )
    return manifest


def parse_manifest(raw: Any, path: Path = Path(MANIFEST_FILE)) -> Manifest:
    """Return the manifest in a JSON value.

    Raises ValueError, TypeError, KeyError, AttributeError or OverflowError for an invalid manifest, and RunFolderError
    for one of a newer format.
    """
    if not isinstance(raw, dict):
        raise TypeError(f"it contains a {type(raw).__name__}")
    unstamped(raw, path)
    if raw["format_version"] != 1:  # older manifests have no `format`
        raise ValueError(f"format_version is {raw['format_version']!r:.50}, but this hpcdist reads only 1")
    names = {MODEL_FILE: None, TRAINER_FILE: None} | dict.fromkeys(raw["files"])
    if strange := [name for name in names if not _FILE_NAME.fullmatch(name)]:
        raise ValueError(f"{strange[0]!r} is not a file name of a checkpoint")
    files = {
        name: FileRecord(size_bytes=int(raw["files"][name]["bytes"]), sha256=str(raw["files"][name]["sha256"]))
        for name in names
    }
    return Manifest(
        step=int(raw["step"]),
        created=float(raw["created"]),
        world_size=int(raw["world_size"]),
        metrics={str(k): math.nan if v is None else float(v) for k, v in raw["metrics"].items()},
        files=files,
        write_s=float(raw.get("write_s", 0.0)),
    )


def verify_hashes(folder: Path, manifest: Manifest) -> None:
    """Raise CheckpointError unless the SHA-256 of every file equals the one in the manifest."""
    for name, record in manifest.files.items():
        path = folder / name
        try:
            digest = retry(lambda path=path: _digest(path), path, within_s=READ_TIMEOUT_S)  # type: ignore[misc]
        except OSError as error:
            raise CheckpointError(f"{folder}: {name} cannot be read ({error.strerror})") from error
        if digest != record.sha256:
            raise CheckpointError(f"{folder}: {name} has changed since it was written (its SHA-256 differs)")


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_file(path: Path) -> dict[str, Any]:
    """Load a file to host memory with `torch.load(weights_only=True)`.

    Raises CheckpointError if the file cannot be read or contains anything other than plain data.
    """
    try:
        content = retry(lambda: torch.load(path, map_location="cpu", weights_only=True), path, within_s=READ_TIMEOUT_S)
    except Exception as error:
        # The first line of torch's error advises to load the file without this protection, so it is not shown.
        refused = _REFUSED.search(str(error))
        reason = refused[0] if refused else f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise CheckpointError(
            f"{path} was not loaded, because it does not contain plain data only: {reason}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} contains a {type(content).__name__}, not a dict")
    return content
