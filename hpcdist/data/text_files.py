"""Find files of text: those that patterns match, or the source of Python's standard library."""

import glob
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from hpcdist.errors import ConfigError

#: Folders with third-party code, or with data rather than code: tests, character tables, texts of `help`.
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}


def find_text_files(patterns: Sequence[str], *, key: str, folder_suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files that patterns match, or without patterns the source of Python's standard library, sorted.

    Args:
        patterns: paths or globs, where `**` includes subfolders.
        key: the config key of the patterns, for errors.
        folder_suffixes: endings of the files that are taken of a folder, and of its subfolders; without them, a folder
            matches no file.

    Raises ConfigError for a pattern without files, and for a folder that cannot be read.
    """
    if not patterns:
        return _library_files(key)
    matching: set[Path] = set()
    for pattern in patterns:
        if folder_suffixes and Path(pattern).is_dir():
            files = _files_in(Path(pattern), folder_suffixes, key)
            problem = (
                f"{pattern} has no files {', '.join(folder_suffixes)}: for other text use a glob, such as"
                f" {pattern}/**/*.py"
            )
        elif Path(pattern).is_file():  # its name may have characters of a glob
            files = {Path(pattern)}
            problem = ""
        else:
            files = {path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file()}
            problem = f"{pattern!r} matches no file"
        if not files:
            raise ConfigError(f"{key}: {problem}")
        matching |= files
    return sorted(matching)


def _files_in(folder: Path, suffixes: Sequence[str], key: str) -> set[Path]:
    """Return the files with these endings in a folder and its subfolders, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{key}: {error.filename} cannot be read: {error.strerror}")

    files = set()
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]  # the others are not walked then
        for path in [Path(place, name) for name in names]:
            if path.suffix in suffixes and not path.name.startswith(".") and path.is_file():
                files.add(path)
    return files


def _library_files(key: str) -> list[Path]:
    """Return the source files of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY]  # which are not walked then
        files += [Path(place, name) for name in names if name.endswith(".py")]
    if not files:
        raise ConfigError(f"{key}: {folder} has no source of Python's standard library: set it to text files")
    return sorted(files)
