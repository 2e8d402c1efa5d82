"""Fixtures of several files: a run whose ranks a parent process forks, and pipes of fake ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import supervisor_scene
from forked_scene import Scene
from supervisor_scene import NamedPipe


@pytest.fixture
def scene(tmp_path: Path, runs_dir: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path / "code", runs_dir)
    with scene.launcher:
        yield scene
    assert scene.parents() == []


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NamedPipe]:
    with NamedPipe(tmp_path / "pipe") as pipe:
        yield pipe


@pytest.fixture
def messages(scene: supervisor_scene.Scene) -> Iterator[NamedPipe]:
    """A pipe for lines from fake ranks to the test."""
    with NamedPipe(scene.run.path / "said", reopened=True) as pipe:  # the name is fixed in fake_rank.py
        yield pipe


@pytest.fixture
def alive(scene: supervisor_scene.Scene) -> Iterator[NamedPipe]:
    """A pipe that the grandchildren of fake ranks hold open."""
    with NamedPipe(scene.run.path / "alive") as pipe:
        yield pipe
