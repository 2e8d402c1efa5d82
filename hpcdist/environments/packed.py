"""The packed environments of a `runs_dir`, each made once and used by all runs with the same environment."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcdist.config.schema.environment import EnvironmentConfig
from hpcdist.environments.listing import fingerprint
from hpcdist.environments.uv_project import build, uv_fingerprint
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import fill
from hpcdist.files.lock import long_lock
from hpcdist.files.ownership import make_private
from hpcdist.run.runs_dir import own_place

log = logging.getLogger(__name__)
DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Packed:
    """An environment that is ready for the nodes."""

    key: str = ""  #: name of its copy on the nodes
    kind: str = ""
    path: str = ""  #: the archive or image; for an environment that is used in place, its folder
    sha256: str = ""  #: of the archive or image
    size_bytes: int = 0
    prefix: str = ""  #: folder of the environment that was packed, which its scripts name


def store_of(runs_dir: Path) -> Path:
    """Return the folder of packed environments, which all nodes share."""
    return own_place(runs_dir) / ".environments"


def pack(environment: EnvironmentConfig, runs_dir: Path, env: Mapping[str, str]) -> Packed:
    """Return the packed form of an environment; create it if there is none of the same content.

    Environments that have not been used for `max_age_days` are removed.

    Raises:
        UserMistake: uv fails, or the environment's Python does not start.
        OSError: the archive cannot be written.
    """
    make_private(store := store_of(runs_dir))
    source = Path(environment.path)
    digest = uv_fingerprint(source, environment.uv_args) if environment.kind == "uv" else fingerprint(source)
    form = "" if environment.stage else "-in-place"
    record = store / f"{environment.kind}-{digest[:16]}{form}.json"
    with long_lock(store / "lock"):
        if (found := _read(record)) is None:
            began = time.monotonic()
            log.info("packing %s, once for all runs", source)
            found = _make(environment, store, record.stem, env)
            write_json(record, asdict(found))
            size = f", {found.size_bytes / 1e6:.0f} MB" if found.size_bytes else ""
            log.info("packed %s in %.0f s%s: %s", source, time.monotonic() - began, size, found.path)
        os.utime(record)
        _remove_unused(store, environment.max_age_days, keep=record.stem)
    return found


def touch(packed: Packed, runs_dir: Path) -> bool:
    """Mark an environment as used now; returns whether its file or folder still exists."""
    for record in store_of(runs_dir).glob(f"{packed.key}*.json"):
        with suppress(OSError):
            os.utime(record)
    return Path(packed.path).exists()


def _read(record: Path) -> Packed | None:
    raw = read_json(record)
    if raw is None:
        return None
    found = fill(Packed, raw, record)
    return found if Path(found.path).exists() else None


def _make(environment: EnvironmentConfig, store: Path, name: str, env: Mapping[str, str]) -> Packed:
    source = Path(environment.path)
    if environment.kind == "squashfs":
        return _packed(environment.kind, name, source)
    if not environment.stage:
        target = store / name
        shutil.rmtree(target, ignore_errors=True)
        build(source, environment.uv_args, target, env)
        return Packed(key=name, kind=environment.kind, path=str(target))
    from hpcdist.environments.archive import interpreter, write_archive  # slow to import, and seldom needed

    archive = store / f"{name}.tar.zst"
    if environment.kind == "venv":
        write_archive(source, interpreter(source, environment.python), archive)
        return _packed(environment.kind, name, archive, prefix=source)
    built = store / f".{name}.{os.getpid()}"
    try:
        build(source, environment.uv_args, built, env)
        write_archive(built, interpreter(built, environment.python), archive)
    finally:
        shutil.rmtree(built, ignore_errors=True)
    return _packed(environment.kind, name, archive, prefix=built)


def _packed(kind: str, name: str, path: Path, *, prefix: Path | str = "") -> Packed:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Packed(
        key=name, kind=kind, path=str(path), sha256=digest, size_bytes=path.stat().st_size, prefix=str(prefix)
    )


def _remove_unused(store: Path, max_age_days: float, *, keep: str) -> None:
    """Remove environments, copies of hpcdist and unfinished files that have not been used for a time."""
    before = time.time() - max_age_days * DAY_S
    for path in sorted(store.iterdir(), key=lambda path: path.suffix == ".json"):  # records after their files
        name = path.name.removesuffix(".json").removesuffix(".tar.zst")
        if name in (keep, "lock"):
            continue
        record = store / f"{name}.json"
        with suppress(FileNotFoundError):
            used = (record if record.exists() else path).stat().st_mtime
            if used < before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                if path != record:
                    record.unlink(missing_ok=True)
                log.info("removed %s, which was not used for %g days", path, max_age_days)
