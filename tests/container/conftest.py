"""Our images, built once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from containers import STRANGER, Containers, why_not

REQUIRE = "HPCDIST_REQUIRE_CONTAINERS"
"""Set to 1, it turns the skip for want of containers into a failure: for machines that must run them."""


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    found = Containers(tmp_path_factory.mktemp("containers"))
    if (reason := why_not(found)) is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def image(containers: Containers) -> Callable[[str], str]:
    """The name of the image of a target, built on first use."""
    return cache(containers.build)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder for runs that belongs to somebody whom the image does not know."""
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, STRANGER, STRANGER)
    return folder
