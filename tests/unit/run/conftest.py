"""Fixtures of several files: a run folder, and a project with or without git."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Git = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    return path


@pytest.fixture
def git(project: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Return a function that runs git in the project, independent of this machine's configuration."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "ada@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def git(*arguments: str, cwd: Path = project) -> str:
        done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, check=True)
        return done.stdout.decode(errors="surrogateescape")

    git("init", "--quiet")
    return git


@pytest.fixture(params=[False, True], ids=["plain", "git"])
def in_git(request: pytest.FixtureRequest) -> bool:
    """Whether the project is a git work tree; the test runs with both."""
    if request.param:
        request.getfixturevalue("git")
    return bool(request.param)
