"""scripts/test_packages.sh installs a runtime again when its recipe or its sources have changed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]

pytestmark = pytest.mark.processes


def stamp(checkout: Path, recipe: str) -> str:
    script = '. "$1/scripts/runtimes/installed.sh"; stamp "$2"'
    command = ["bash", "-euo", "pipefail", "-c", script, "bash", str(checkout), recipe]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.mark.parametrize(
    ("changed", "recipes"),
    [
        ("tests/vendor/pyxis-0.24.tar.gz", {"pyxis"}),
        ("scripts/runtimes/enroot.sh", {"enroot"}),
        ("scripts/runtimes/prefix.sh", {"apptainer", "enroot", "pyxis"}),
    ],
)
def test_changed_source_is_installed_again(tmp_path: Path, changed: str, recipes: set[str]) -> None:
    for folder in ("scripts/runtimes", "tests/vendor"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder)
    before = {recipe: stamp(tmp_path, recipe) for recipe in ("apptainer", "enroot", "pyxis")}
    assert all(len(text) == 64 for text in before.values())
    with (tmp_path / changed).open("ab") as file:
        file.write(b"\n")
    assert {recipe for recipe, text in before.items() if stamp(tmp_path, recipe) != text} == recipes
