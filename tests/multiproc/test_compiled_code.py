"""A start on another node finds what an earlier one has compiled: the calls of the C++ compiler are counted."""

import shutil
from pathlib import Path
from zipfile import ZipFile

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


#: Is killed as soon as what it has compiled is kept; without the timer and the end of the process, only a step does so.
KILLED = """\
import os, pathlib, signal, time
import torch
import hpcdist
from hpcdist.rank import compile_cache

compile_cache._EVERY_S = 1e6
compiled = torch.compile(lambda x: x.sin() + 1)
archives = pathlib.Path(os.environ["ARCHIVES"])
compiled(torch.ones(8))
assert not list(archives.glob("torch-*.zip"))
hpcdist.should_stop(1)
until = time.monotonic() + 300
while not list(archives.glob("torch-*.zip")):
    assert time.monotonic() < until, "nothing is kept"
    time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: apt-get install g++")
def test_process_killed_after_its_first_step_has_kept_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    (runs.project / "killed.py").write_text(KILLED)
    archives = tmp_path / "archives"
    words = ["run", "experiment=exp", "name=killed", "launch.max_restarts=0", f"launch.cache_dir={archives}"]
    disk = tmp_path / "node"
    disk.mkdir(mode=0o700)
    code, output = runs.command(*words, "killed.py", TMPDIR=str(disk), ARCHIVES=str(archives), **runs.unshipped)
    assert code == 1
    assert "was killed by SIGKILL" in output, output
    (archive,) = archives.glob("torch-*.zip")
    with ZipFile(archive) as kept:
        assert [name for name in kept.namelist() if name.endswith(".so")]


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
