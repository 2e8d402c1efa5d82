"""A run whose ranks a parent process forks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_scene import Scene
from named_pipe import NamedPipe


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
