"""A start on another node finds what an earlier one has compiled: the calls of the C++ compiler are counted."""

import shutil
from pathlib import Path

import pytest
from hpcdist_runs import Runs

SCRIPT = """\
import time
import torch

compiled = torch.compile(lambda x: x.sin() + 1)
began = time.perf_counter()
compiled(torch.ones(8))
print(f"first call: {time.perf_counter() - began:.1f} s")
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: apt-get install g++")
def test_another_node_compiles_nothing_again(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    (runs.project / "compiled.py").write_text(SCRIPT)
    calls = tmp_path / "calls"
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)

    def num_compilations(name: str, node: str, *overrides: str) -> int:
        """Run the script on a node, that is with a local disk of its own, and count how often it calls the compiler."""
        calls.write_text("")
        disk = tmp_path / node
        disk.mkdir(mode=0o700, exist_ok=True)
        words = ["run", "experiment=exp", f"name={name}", *overrides, "compiled.py"]
        code, output = runs.command(*words, TMPDIR=str(disk), CXX=str(compiler), **runs.unshipped)
        assert code == 0, output
        built = [line for line in calls.read_text().splitlines() if " -shared " in line]
        print(f"{name}: {len(built)} compilations, {output}")
        return len(built)

    assert num_compilations("first", "node1") > 0
    assert num_compilations("second", "node2") == 0
    log = (runs.folder / "exp/second/attempts/001/rank-00000.log").read_text()
    assert f"compiled files were copied from {runs.folder}/.hpcdist-compiled/torch-" in log
    # The control: without the folder, a third node compiles.
    empty = tmp_path / "empty"
    assert num_compilations("control", "node3", f"launch.cache_dir={empty}") > 0
    assert [path.suffix for path in empty.glob("torch-*.zip")] == [".zip"]
