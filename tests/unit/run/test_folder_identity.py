"""Processes of a run refuse a folder that another user has put in the place of the run folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.run.folder import VARIABLE, RunDir, identity, require_same

REPLACED = "has been replaced by another one"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    run.config.write_text("trainer: evil:train\n")
    return run


def test_identity_stays_with_the_folder(run: RunDir, tmp_path: Path) -> None:
    env = {VARIABLE: identity(run.path)}
    assert identity(run.path) == env[VARIABLE]
    assert (run.path / "identity").stat().st_mode & 0o777 == 0o600
    moved = run.path.rename(tmp_path / "moved")
    require_same(moved, env)
    require_same(tmp_path / "missing", {})
    (moved / "identity").write_text("damaged")
    with pytest.raises(RunFolderError, match=REPLACED):
        require_same(moved, env)
    assert identity(moved) != env[VARIABLE]


@pytest.mark.parametrize("kind", ["missing", "link to the file", "other run", "pipe"])
def test_another_folder_cannot_have_the_identity(run: RunDir, tmp_path: Path, kind: str) -> None:
    env = {VARIABLE: identity(run.path)}
    old = run.path.rename(tmp_path / "old")
    run.path.mkdir()
    if kind == "link to the file":
        (run.path / "identity").symlink_to(old / "identity")
    elif kind == "other run":
        identity(run.path)
    elif kind == "pipe":
        os.mkfifo(run.path / "identity")
    with pytest.raises(RunFolderError, match=REPLACED) as found:
        require_same(run.path, env)
    assert found.value.exit_code == 2


#: Puts another folder in the place of the run folder.
SWAP = "import os\nos.rename({run!r}, {old!r})\nos.rename({planted!r}, {run!r})\n"


@pytest.mark.processes
@pytest.mark.parametrize(("module", "code"), [("rank.worker", 2), ("rank.parent", 69), ("tracking.shipper", 2)])
def test_each_process_checks_the_folder_at_its_start(run: RunDir, tmp_path: Path, module: str, code: int) -> None:
    """The folder is swapped before the process starts; that of the parent of ranks while it imports torch."""
    env = {**os.environ, VARIABLE: identity(run.path), "HPCDIST_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    env |= {f"HPCDIST_{name}": "0" for name in ("RANK", "LOCAL_RANK", "NODE_RANK")}
    env |= {f"HPCDIST_{name}": "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NUM_NODES", "ATTEMPT", "JOB_ID")}
    env |= {"HPCDIST_MASTER_ADDR": "127.0.0.1", "HPCDIST_MASTER_PORT": "1", "PYTHONPATH": str(tmp_path)}
    planted = shutil.copytree(run.path, tmp_path / "planted", ignore=shutil.ignore_patterns("identity"))
    swap = SWAP.format(run=str(run.path), old=str(tmp_path / "old"), planted=str(planted))
    (tmp_path / "evil.py").write_text("raise SystemExit('planted')\n")
    (tmp_path / "torch.py").write_text(swap)
    if module != "rank.parent":
        exec(swap)
    command = [sys.executable, "-m", f"hpcdist.{module}", str(run.path)]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run(command, env=env, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, REPLACED in done.stderr) == (code, True), done.stderr
    assert "planted" not in done.stderr
    assert {path.name for path in run.path.iterdir()} == {
        "attempts",
        "checkpoints",
        "config.yaml",
        "journal",
        "state.json",
    }
