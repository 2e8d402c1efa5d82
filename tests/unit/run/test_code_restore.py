"""Restored code of a recorded run: the copy of its folder, or its commit with its patch."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.errors import UserMistake
from hpcdist.run import snapshot
from hpcdist.run.create import create_run
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import CodeState, find_code, take

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "ada@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=project, capture_output=True, check=True, text=True).stdout

    git("init", "--quiet")
    return git


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(runs_dir=str(tmp_path / "runs"), trainer=TrainerConfig(target="mine:train"))


@pytest.fixture
def recorded(git: Git, config: Config, tmp_path: Path) -> tuple[CodeState, RunDir]:
    """A run with a commit, changes, a new file in the index and an untracked one; the project then moves on.

    The run was started in a subfolder.
    """
    project = tmp_path / "project"
    (project / "src" / "mine.py").write_text("x = 1\n")
    (project / "gone.py").write_text("x = 1\n")
    (project / "data.bin").write_bytes(b"\0\1" * 50)
    git("add", ".")
    git("commit", "--quiet", "-m", "first")
    (project / "src" / "mine.py").write_text("x = 2\n")
    (project / "added.py").write_text("y = 2\n")
    (project / "data.bin").write_bytes(b"\0\2" * 50)
    (project / "gone.py").unlink()
    git("add", "added.py")
    (project / "untracked.py").write_text("z = 2\n")
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    code = take(config, run, project / "src")
    (project / "untracked.py").unlink()
    git("add", ".")
    git("commit", "--quiet", "-m", "second")
    (project / "src" / "mine.py").write_text("x = 3\n")
    return code, run


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def new_run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs" / "exp" / "second")


@pytest.mark.processes
def test_the_commit_and_the_patch_give_the_code_of_the_run(
    recorded: tuple[CodeState, RunDir], config: Config, tmp_path: Path, git: Git
) -> None:
    code, first = recorded
    patch = (first.path / "code.patch").read_bytes()
    before = git("status", "--porcelain"), git("rev-parse", "HEAD"), git("worktree", "list")
    source = find_code(code, patch, None, [tmp_path, tmp_path / "project"])
    assert source.text == f"commit {str(code.git_commit)[:12]} of {tmp_path / 'project'} with code.patch"
    assert source.missing == ("files that were not in git: untracked.py",)
    second = new_run(tmp_path)
    assert source.restore(second, config) == code
    expected = contents(first.code)
    assert expected.pop("untracked.py") == b"z = 2\n"
    assert contents(second.code) == expected
    assert (second.path / "code.patch").read_bytes() == patch
    assert (git("status", "--porcelain"), git("rev-parse", "HEAD"), git("worktree", "list")) == before


@pytest.mark.processes
def test_the_copy_of_the_run_folder_is_complete(
    recorded: tuple[CodeState, RunDir], config: Config, tmp_path: Path
) -> None:
    code, first = recorded
    source = find_code(replace(code, left_out=["a.pem", "b.py:3"]), b"patch", first, [])
    assert source.missing == ("likely secrets, which the run's record left out: a.pem, b.py:3",)
    second = new_run(tmp_path)
    source.restore(second, config)
    assert contents(second.code) == contents(first.code)
    assert (second.path / "code.patch").read_bytes() == b"patch"


@pytest.mark.processes
def test_a_shipped_trainer_needs_no_code(config: Config, tmp_path: Path) -> None:
    state = CodeState(cwd="/gone", root="/gone", git_commit="abc", git_dirty=False, copied=False)
    source = find_code(state, b"", None, [])
    assert source.text == "the installed hpcdist, which contains the trainer"
    second = new_run(tmp_path)
    assert source.restore(second, config) == state
    assert not second.code.exists()


@pytest.mark.processes
def test_code_that_is_nowhere_is_an_error(recorded: tuple[CodeState, RunDir], tmp_path: Path) -> None:
    code, _ = recorded
    other = replace(code, git_commit="0" * 40)
    message = r"commit 000000000000 of the run is not in a git repository at .*: name one with --repository"
    with pytest.raises(UserMistake, match=message):
        find_code(other, b"", None, [tmp_path, tmp_path / "project"])
    with pytest.raises(UserMistake, match="it was not in git, and its run folder is not here: `--with-current-code`"):
        find_code(replace(code, git_commit=None), b"", None, [tmp_path / "project"])


@pytest.mark.processes
def test_a_patch_that_does_not_fit_is_an_error(
    recorded: tuple[CodeState, RunDir], config: Config, tmp_path: Path
) -> None:
    code, first = recorded
    patch = (first.path / "code.patch").read_bytes().replace(b"-x = 1", b"-x = 9")
    source = find_code(code, patch, None, [tmp_path / "project"])
    with pytest.raises(UserMistake, match=r"git apply failed: error: .* patch does not apply"):
        source.restore(new_run(tmp_path), config)


@pytest.mark.processes
def test_files_that_were_not_in_git_are_missing(recorded: tuple[CodeState, RunDir], tmp_path: Path) -> None:
    code, _ = recorded
    source = find_code(replace(code, untracked=list("abcdefg"), num_untracked=90), b"", None, [tmp_path / "project"])
    assert source.missing == ("files that were not in git: a, b, c, d, e and 85 more",)


# --- Creation of a run folder that fails halfway.


@pytest.mark.parametrize("removable", [True, False])
def test_failed_creation_removes_the_folder_and_reports_the_first_error(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removable: bool
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def deny(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    config = load_config("ddp_digits", [f"runs_dir={runs_dir}", "name=first"])
    monkeypatch.setattr(snapshot, "take", fail)
    if not removable:
        monkeypatch.setattr(shutil, "rmtree", deny)
    with pytest.raises(OSError, match="No space left"):
        create_run(config, tmp_path)
    assert config.folder.exists() is not removable
