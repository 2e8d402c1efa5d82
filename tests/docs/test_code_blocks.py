"""The code blocks of README, tutorials and how-to guides work as printed.

A console block marked `test` is executed in a temporary folder that holds the page's `file=NAME` blocks.
`tests/slurm/test_tutorial.py` executes the blocks that are marked `slurm` as well.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import ROOT, blocks, pages

pytestmark = pytest.mark.processes


def pages_with_tests() -> Iterator[object]:
    for page in pages():
        if any({"test"} == {*block.words} for block in blocks(page)):
            yield pytest.param(page, id=page.stem)


@pytest.mark.parametrize("page", [*pages_with_tests()])
def test_console_blocks_run(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # Small threads and one database: the pages show the defaults, the test needs no more.
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for block in blocks(page):
        if block.words != ("test",):
            continue
        for command in block.commands:
            done = subprocess.run(
                shlex.split(command), cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=120
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_python_blocks_are_valid() -> None:
    for page in (*pages(),):
        for block in blocks(page):
            if block.language == "python":
                compile(block.text, str(page.relative_to(ROOT)), "exec")


def test_the_trainer_of_the_readme_trains(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks(ROOT / "README.md") if block.language == "python"]
    (config,) = [block.text for block in blocks(ROOT / "README.md") if "mymodule:train" in block.text]
    (tmp_path / "mymodule.py").write_text(code)
    (tmp_path / "config.yaml").write_text(config)
    hpcdist = Path(sys.executable).with_name("hpcdist")
    command = [hpcdist, "run", "config.yaml", "params.total_steps=20", "launch.num_ranks=2", "name=readme"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 steps" in done.stdout
