"""One file with all files of a compiler's cache: it is written on a shared file system and unpacked on local disks.

A single file, because shared file systems are slow with thousands of small ones. Its names are those in the cache,
which torch derives from the content, so a file of a known name is neither written nor unpacked again.
"""

import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from hpcdist.host.files import open_regular, write_atomic
from hpcdist.host.locks import WAIT_S, exclusive

SUFFIX = ".zip"
#: Limit of one archive. Beyond it, the files that were added first are left out.
MAX_ARCHIVE_BYTES = 2**30
#: Limit of all archives of a folder: beyond it, the least recently used ones are removed.
MAX_BYTES = 2 * 2**30
#: Files that are left out: unfinished ones, locks, and large ones that are quickly made again.
_LEFT_OUT_SUFFIXES = (".tmp", ".lock", ".o", ".gch")
_LEFT_OUT_FOLDERS = ("locks",)
_LEFT_OUT_PREFIXES = (".", "tmp.pid")
#: Age of an unfinished archive at which its writer was certainly killed.
_LEFT_AFTER_S = 3600.0
#: Part of an archive that is copied at once.
_COPIED_BYTES = 1 << 22
#: Length of the header of a library in the 64-bit format.
_ELF_HEADER_BYTES = 64


def unpack(archive: Path, folder: Path) -> int:
    """Write the files of an archive that are missing in `folder`. Returns their number.

    Each file appears with its whole content. Raises OSError, and BadZipFile if the archive is damaged.
    """
    num_files = 0
    with open_regular(archive) as file, ZipFile(file) as stored:
        os.utime(archive)  # it is in use
        for entry in stored.infolist():
            path = folder / entry.filename
            if path.exists() or not path.resolve().is_relative_to(folder.resolve()):
                continue
            content = _content(stored, entry)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, content, mode=0o700, within_s=0)
            num_files += 1
    return num_files


def pack(
    folder: Path,
    archive: Path,
    max_bytes: int = MAX_ARCHIVE_BYTES,
    within_s: float = WAIT_S,
    *,
    is_damaged: bool = False,
) -> int:
    """Add the files of `folder` to an archive that does not have them. Returns their number.

    Writers on other nodes wait for each other, and a reader sees either the old or the new archive.

    Args:
        max_bytes: limit of the content.
        within_s: time to wait for another writer.
        is_damaged: whether files of the archive are to be read, so that damaged ones are left out.

    Raises OSError, and RunFolderError if another process writes for longer than `within_s`.
    """
    with exclusive(archive.with_suffix(".lock"), within_s=within_s):
        _remove_unfinished(archive)
        known = _entries(archive)
        names = {entry.filename for entry in known}
        added = [path for path in cached_files(folder) if path.relative_to(folder).as_posix() not in names]
        if not added:
            return 0
        unfinished = archive.with_name(f".{archive.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with _new_file(unfinished) as file:
                num_added = _write(file, folder, added, archive, known, max_bytes, is_damaged)
            os.replace(unfinished, archive)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
    return num_added


def limit(folder: Path, kept: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove archives of a folder that were not used for the longest time, but not `kept`, until they fit the limit."""
    archives = []
    for path in folder.glob(f"[!.]*{SUFFIX}"):
        with suppress(OSError):  # another process has removed it
            archives.append((path.stat().st_mtime, path.stat().st_size, path))
    excess = sum(size for _, size, _ in archives) - max_bytes
    for _, size, path in sorted(archives):
        if excess <= 0:
            return
        if path != kept:
            path.unlink(missing_ok=True)
            excess -= size


def cached_files(folder: Path) -> Iterator[Path]:
    """Yield the complete files of a compiler's cache, without those that other processes do not need."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT_FOLDERS and not _is_temporary(name)]
        for name in names:
            path = Path(place, name)
            if not _is_temporary(name) and path.suffix not in _LEFT_OUT_SUFFIXES and _is_complete(path):
                yield path


def _is_temporary(name: str) -> bool:
    return name.startswith(_LEFT_OUT_PREFIXES)


def _is_complete(path: Path) -> bool:
    """Return whether a file is regular and complete. A linker writes a library in place, and its headers last."""
    if path.is_symlink() or not path.is_file():
        return False
    if path.suffix != ".so":
        return True
    try:
        with open_regular(path) as file:
            header = file.read(_ELF_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    if len(header) < _ELF_HEADER_BYTES or not header.startswith(b"\x7fELF"):
        return False
    # The offset of the table of sections, the size of an entry, and their number.
    offset = int.from_bytes(header[40:48], "little")
    entry_size = int.from_bytes(header[58:60], "little")
    num_entries = int.from_bytes(header[60:62], "little")
    return offset > 0 and offset + entry_size * num_entries <= size


def _entries(archive: Path) -> list[ZipInfo]:
    """Return the files of an archive; none if there is no archive, or a damaged one, which is written again."""
    try:
        with open_regular(archive) as file, ZipFile(file) as stored:
            return stored.infolist()
    except (FileNotFoundError, BadZipFile):
        return []


def _content(archive: ZipFile, entry: ZipInfo) -> bytes:
    """Return the content of a file, which has its checksum. Raises BadZipFile if it is damaged."""
    try:
        return archive.read(entry)
    except zlib.error as error:
        raise BadZipFile(f"{entry.filename}: {error}") from error


def _write(
    file: BinaryIO,
    folder: Path,
    added: list[Path],
    archive: Path,
    known: list[ZipInfo],
    max_bytes: int,
    is_damaged: bool,
) -> int:
    """Write the added files, and as many of the old archive's newest as fit. Returns the number of added files."""
    room = max_bytes
    fitting = []
    for path in added:
        size = path.stat().st_size
        if size <= room:
            room -= size
            fitting.append(path)
    kept: list[ZipInfo] = []
    for entry in reversed(known):
        if entry.file_size > room:
            break
        room -= entry.file_size
        kept.insert(0, entry)
    copies = bool(kept) and kept == known and not is_damaged
    if copies:  # as it is, which is much quicker than to pack everything again
        with open_regular(archive) as old_file:
            shutil.copyfileobj(old_file, file, _COPIED_BYTES)
    with ZipFile(file, "a" if copies else "w", ZIP_DEFLATED, compresslevel=1) as new:
        if kept and not copies:
            with open_regular(archive) as old_file, ZipFile(old_file) as old:
                for entry in kept:
                    with suppress(BadZipFile):  # a damaged file is compiled again
                        new.writestr(entry.filename, _content(old, entry))
        for path in fitting:
            new.writestr(path.relative_to(folder).as_posix(), path.read_bytes())
    return len(fitting)


def _new_file(path: Path) -> BinaryIO:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "w+b")


def _remove_unfinished(archive: Path) -> None:
    """Remove the files that killed writers have left."""
    for path in archive.parent.glob(f".{archive.name}.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFT_AFTER_S:
                path.unlink()
