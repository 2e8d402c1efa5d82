"""Another user who may write to the folder above all runs replaces it during the start of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacker import NOBODY
from hpcdist_runs import Runs

#: In the parent of the ranks and before its imports: the attacker puts a copy of the runs with another config and
#: another module of the code in their place.
SITE = """
import os, shutil, sys
if "hpcdist.rank.parent" in sys.orig_argv:
    runs, planted = {runs!r}, {runs!r} + ".planted"
    # The attacker cannot read the identity.
    shutil.copytree(runs, planted, symlinks=True, ignore=shutil.ignore_patterns("identity", "key"))
    for folder, _, files in os.walk(planted):
        for path in [folder, *(os.path.join(folder, name) for name in files)]:
            os.lchown(path, {nobody}, {nobody})
            if path.endswith("/config.yaml"):
                text = open(path).read().replace("counting:train", "evil:train")
                open(path, "w").write(text)
            if path.endswith("/code"):
                for name in ("evil.py", "usercustomize.py", "sitecustomize.py"):
                    open(os.path.join(path, name), "w").write("import sys; print(sys.argv, file=open({marker!r}, 'a'))")
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid({nobody})
        os.setuid({nobody})
        os.rename(runs, runs + ".old")
        os.rename(planted, runs)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def runs(empty_database: Path) -> Iterator[Runs]:
    """Runs in a folder of the group `nogroup`, which has the mode of many project folders."""
    root = Path(tempfile.mkdtemp(dir="/var/tmp"))
    os.chown(root, 0, NOBODY)
    root.chmod(0o2770)
    yield Runs(root, empty_database)
    shutil.rmtree(root)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
def test_folder_that_another_user_replaces_during_the_imports_is_not_used(runs: Runs, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    text = SITE.format(runs=str(runs.folder), nobody=NOBODY, marker=str(marker))
    (tmp_path / "sitecustomize.py").write_text(text)
    path = f"launch.env.PYTHONPATH={tmp_path}:{runs.no_mlflow}"
    words = runs.config("first", "trainer=counting:train", "params.until=3", "tracking.drain_timeout_s=0", path)
    code, output = runs.command("run", *words)
    assert code == 2
    assert f"others may write to {runs.folder.parent} (mode 2770)" in output
    # This site trusts the group.
    code, output = runs.command("run", *words, HPCDIST_TRUSTED_GROUPS="nogroup")
    assert (runs.folder.parent / "runs.old").exists(), output
    assert not marker.exists(), marker.read_text()
    assert code == 2, output
    assert f"{runs.folder}/digits/first has been replaced by another one" in output.splitlines()[-1]
    assert "Traceback" not in output
