"""The archive of a compiler's cache: what is packed, two writers, damage, and the limits of its size."""

import os
import threading
import zipfile
from pathlib import Path

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.host.compiled_archive import cached_files, limit, pack, unpack
from hpcdist.host.locks import exclusive


def library(size: int = 200, sections_at: int = 100) -> bytes:
    """Return a library of the 64-bit format; its table of sections has one entry of 64 bytes."""
    header = bytearray(size)
    header[:4] = b"\x7fELF"
    header[40:48] = sections_at.to_bytes(8, "little")
    header[58:62] = b"\x40\0\x01\0"
    return bytes(header)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of two files."""
    folder = tmp_path / "cache"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab/code.py").write_text("1")
    (folder / "ab/code.so").write_bytes(library())
    return folder


def test_files_arrive_unchanged_and_private(cache: Path, tmp_path: Path) -> None:
    archive, there = tmp_path / "a.zip", tmp_path / "there"
    assert pack(cache, archive) == 2
    assert unpack(archive, there) == 2
    assert (there / "ab/code.so").read_bytes() == library()
    for path in (archive, there / "ab/code.so"):
        assert path.stat().st_mode & 0o077 == 0
    assert unpack(archive, there) == 0
    assert pack(there, archive) == 0, "all of it is stored"


def test_unfinished_and_linked_files_are_left_out(cache: Path) -> None:
    for name in ("x.tmp", "x.o", ".hidden", "locks/x", "tmp.pid_1/x", "x.so", "y.so", "short.so"):
        (cache / name).parent.mkdir(exist_ok=True)
        (cache / name).write_bytes(b"\x7fELF" if name == "short.so" else b"")
    (cache / "cut.so").write_bytes(library()[:-40])
    (cache / "unwritten.so").write_bytes(library(sections_at=0))
    (cache / "link.py").symlink_to("/etc/passwd")
    assert {path.name for path in cached_files(cache)} == {"code.py", "code.so"}


def test_two_writers_add_to_each_other(tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    caches = [tmp_path / name for name in "abcd"]
    for folder in caches:
        folder.mkdir()
        (folder / f"{folder.name}.py").write_text(folder.name * 10_000)
    writers = [threading.Thread(target=pack, args=(folder, archive)) for folder in caches]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert unpack(archive, tmp_path / "there") == len(caches)
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_writer_does_not_wait_for_ever(cache: Path, tmp_path: Path) -> None:
    with exclusive(tmp_path / "a.lock"), pytest.raises(RunFolderError, match="locked by another process"):
        pack(cache, tmp_path / "a.zip", within_s=0)


def test_damaged_archive_is_written_again(cache: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    archive.write_bytes(b"no archive")
    with pytest.raises(zipfile.BadZipFile):
        unpack(archive, tmp_path / "there")
    assert pack(cache, archive) == 2
    content = bytearray(archive.read_bytes())
    content[content.index(b"code.py") + len(b"code.py")] ^= 0xFF  # of the file's data
    archive.write_bytes(content)
    with pytest.raises(zipfile.BadZipFile):
        unpack(archive, tmp_path / "there")
    (cache / "new.py").write_text("2")
    assert pack(cache, archive, is_damaged=True) == 1
    assert unpack(archive, tmp_path / "elsewhere") == 2, "without the damaged one"


def test_files_are_added_to_an_archive(cache: Path, tmp_path: Path) -> None:
    archive = tmp_path / "a.zip"
    assert pack(cache, archive) == 2
    (cache / "new.py").write_text("2")
    assert pack(cache, archive) == 1
    assert unpack(archive, tmp_path / "there") == 3
    assert (tmp_path / "there" / "new.py").read_text() == "2"


def test_names_outside_of_the_folder_are_ignored(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../outside", "1")
        archive.writestr("/outside", "1")
        archive.writestr("inside", "1")
    assert unpack(tmp_path / "a.zip", tmp_path / "there") == 1
    assert not (tmp_path / "outside").exists()


def test_oldest_files_leave_a_full_archive(tmp_path: Path) -> None:
    folder, archive = tmp_path / "cache", tmp_path / "a.zip"
    folder.mkdir()
    for name in ("first", "second", "third"):
        (folder / name).write_text("x" * 100)
        assert pack(folder, archive, max_bytes=250) == 1
        (folder / name).unlink()
    with zipfile.ZipFile(archive) as stored:
        assert stored.namelist() == ["second", "third"]
    (folder / "large").write_text("x" * 300)
    assert pack(folder, archive, max_bytes=250) == 0


def test_archives_unused_for_longest_are_removed(tmp_path: Path) -> None:
    for used_at, name in enumerate(("old", "used", "new", "kept")):
        path = tmp_path / f"{name}.zip"
        path.write_bytes(bytes(100))
        os.utime(path, (used_at, used_at))
    os.utime(tmp_path / "kept.zip", (-1, -1))
    limit(tmp_path, tmp_path / "kept.zip", 300)
    assert sorted(path.stem for path in tmp_path.glob("*.zip")) == ["kept", "new", "used"]
