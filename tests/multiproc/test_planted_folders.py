"""A run in a folder like /tmp, in which another user has taken all names that hpcdist, MLflow and torch use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacker import NOBODY, as_other_user
from hpcdist_runs import Runs

SCRIPT = "import os, torch._dynamo; print('cache:', os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
FOLDERS = (".environments", "mlartifacts", "torchinductor_root", "torchinductor_0")
LINKS = ("mlflow.db", "mlflow.db-journal", "mlflow.db-wal", "mlflow.db-shm", "mlflow.db.lock", ".sync.lock")


@pytest.fixture
def planted() -> Iterator[Path]:
    """A folder with mode 1777 and what the other user has made in it; the links lead to `victim` beside it."""
    if os.getuid() != 0:
        pytest.skip("only root can act as a second user")
    parent = Path(tempfile.mkdtemp(dir="/var/tmp"))
    parent.chmod(0o755)
    (parent / "victim").write_text("valuable")
    (folder := parent / "runs").mkdir()
    folder.chmod(0o1777)
    for name in FOLDERS:
        (folder / name).mkdir()
    for name in LINKS:
        (folder / name).symlink_to(parent / "victim")
    for path in folder.iterdir():
        os.lchown(path, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(parent)


def readable(folder: Path) -> list[str]:
    """Return the files and links below a folder that this user can read."""
    found = [os.path.join(place, name) for place, _, names in os.walk(folder) for name in names]
    return sorted(os.path.basename(path) for path in found if os.access(path, os.R_OK))


def test_planted_names_stop_no_run_and_get_nothing_of_it(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_root")  # as an import of torch._dynamo sets it
    runs = Runs(tmp_path)
    runs.folder.rmdir()
    runs.folder = planted
    (runs.project / "cache.py").write_text(SCRIPT)
    code, output = runs.command("run", "experiment=exp", "name=first", "cache.py", TMPDIR=str(planted))
    assert code == 0, output
    code, output = runs.command("sync", "exp/first", TMPDIR=str(planted))
    assert code == 0, output
    run = planted / "exp/first"
    assert (planted / ".hpcdist-0/mlflow.db").is_file()
    assert f"cache: {run}/torchinductor\n" in (run / "attempts/001/rank-00000.log").read_text()
    assert (planted.parent / "victim").read_text() == "valuable"
    assert [name for name in FOLDERS if os.listdir(planted / name)] == []
    assert as_other_user(lambda: readable(planted.parent)) == sorted([*LINKS, "victim"])
