"""Which files are the text of a language model."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hpcdist.data import text_files
from hpcdist.data.text_files import find_text_files
from hpcdist.errors import ConfigError


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub" / ".git").mkdir(parents=True)
    for name in ("b.txt", "a.md", "image.png", ".hidden.txt", "sub/c.txt", "sub/.git/d.txt"):
        (tmp_path / name).write_text("text")
    return tmp_path


def test_patterns_match_files_once_and_sorted(folder: Path) -> None:
    patterns = [f"{folder}/**/*.txt", f"{folder}/a.md", f"{folder}/b.txt"]
    assert names(find_text_files(patterns, key="k")) == ["a.md", "b.txt", "c.txt"]


def test_a_name_may_have_characters_of_a_glob(folder: Path) -> None:
    (folder / "a[1].txt").touch()
    assert names(find_text_files([f"{folder}/a[1].txt"], key="k")) == ["a[1].txt"]


def test_a_folder_has_files_with_the_given_endings(folder: Path) -> None:
    assert names(find_text_files([str(folder)], key="k", folder_suffixes=(".txt",))) == ["b.txt", "c.txt"]
    with pytest.raises(ConfigError, match=r"k: .* has no files \.jsonl: for other text use a glob, such as .*/\*\*/"):
        find_text_files([str(folder)], key="k", folder_suffixes=(".jsonl",))


def test_a_folder_that_cannot_be_read_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refused(path: Any) -> Any:
        if Path(path) == folder / "sub":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigError, match=rf"^k: {folder}/sub cannot be read: Permission denied$"):
        find_text_files([str(folder)], key="k", folder_suffixes=(".txt",))


def test_a_pattern_must_match_a_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rnn\.files: .*nothing.* matches no file"):
        find_text_files([f"{folder}/b.txt", f"{folder}/nothing*"], key="rnn.files")
    with pytest.raises(ConfigError, match="matches no file"):
        find_text_files([str(folder)], key="k")


def test_the_default_is_the_standard_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_text_files([], key="k")
    assert {"abc.py", "typing.py"} <= set(names(library))
    assert not any("site-packages" in path.parts for path in library)
    monkeypatch.setattr(text_files.sysconfig, "get_path", lambda name: str(folder))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"k: .* has no source of Python's standard library: set it to text files"):
        find_text_files([], key="k")
