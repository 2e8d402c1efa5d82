"""Another user plants folders, files and links where a run or a command would use its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacker import NOBODY
from hpcdist_runs import Runs

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
SCRIPT = "import os, torch._dynamo; print('cache:', os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp, which all users can enter and write to."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    root.chmod(0o1777)
    yield root
    shutil.rmtree(root)


def test_planted_caches_of_torch_compile_are_not_used(shared: Path, tmp_path: Path, empty_database: Path) -> None:
    runs = Runs(tmp_path, empty_database)
    (runs.project / "cache.py").write_text(SCRIPT)
    for name in ("torchinductor_root", "torchinductor_0"):
        (shared / name).mkdir()
        os.chown(shared / name, NOBODY, NOBODY)
    code, output = runs.command("run", "name=cached", "tracking.drain_timeout_s=0", "cache.py", TMPDIR=str(shared))
    assert code == 0, output
    run = runs.folder / "cache/cached"
    for log in (run / "attempts/001").glob("rank-*.log"):
        assert f"cache: {run}/torchinductor\n" in log.read_text()
    assert not list(shared.glob("torchinductor_*/*"))
