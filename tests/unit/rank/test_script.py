"""Unmodified scripts as trainers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.config.topology import Roles, Topology
from hpcdist.rank.script import script_environment
from hpcdist.run.folder import RunDir

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

SCRIPT = """\
import gc, os
assert gc.isenabled()
os.environ["SET_BEFORE_TORCH"] = "yes"
import torch
print(torch.COLLECTS, torch.SET, gc.isenabled(), gc.get_freeze_count() > 0)
import torch.inner
print(torch.inner.COLLECTS)
"""
RUN = """\
import sys
from pathlib import Path
from types import SimpleNamespace
from hpcdist.run.folder import RunDir
from hpcdist.rank import script
script.script_environment = lambda topology, run, roles: {}
script.run_script(sys.argv[1:], RunDir(Path(sys.argv[1]).parent), None, None)
"""


def test_garbage_collection_is_disabled_only_during_the_import_of_torch(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import gc, os; COLLECTS = gc.isenabled(); SET = os.environ['SET_BEFORE_TORCH']"
    )
    (package / "inner.py").write_text("import gc; COLLECTS = gc.isenabled()")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["False yes True True", "True"], done.stderr


def test_script_without_torch_runs_where_torch_is_not_installed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("try:\n    import torch\nexcept ModuleNotFoundError as error:\n    print(error)\n")
    hidden = f"import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n{RUN}"
    done = subprocess.run([sys.executable, "-c", hidden, str(script)], capture_output=True, text=True, check=False)
    assert done.stdout == "No module named 'torch'\n", done.stderr


def test_module_runs_like_a_script(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "part.py").write_text("VALUE = 3\n")
    (package / "train.py").write_text(
        "import sys\nfrom .part import VALUE\nprint(__name__, __spec__.name, VALUE, sys.argv)\n"
    )
    found = {}
    for module in ("package.train", "package.missing"):
        found[module] = subprocess.run(
            [sys.executable, "-c", RUN, "-m", module, "--lr", "0.10"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
    done = found["package.train"]
    expected = f"__main__ package.train 3 ['{package}/train.py', '--lr', '0.10']\n"
    assert done.stdout == expected, done.stderr
    assert found["package.missing"].stderr.endswith("TrainerError: trainer.script: no module 'package.missing'\n")


def test_environment_has_the_variables_of_torchrun_and_the_role(tmp_path: Path) -> None:
    topology = Topology(
        rank=2,
        world_size=4,
        local_rank=0,
        local_world_size=2,
        node_rank=1,
        num_nodes=2,
        master_addr="n1",
        master_port=29500,
        launcher="slurm",
        job_id="7",
        attempt=2,
    )
    run = RunDir(tmp_path)
    roles = {"trainer": 1, "server": 3}
    assert script_environment(topology, run, Roles.of(roles, 4)) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "server",
        "ROLE_RANK": "1",
        "ROLE_WORLD_SIZE": "3",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "7",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "HPCDIST_RUN_DIR": str(tmp_path),
        "HPCDIST_CHECKPOINT_DIR": str(run.checkpoints),
        "HPCDIST_ATTEMPT": "2",
        "HPCDIST_ROLE": "server",
        "HPCDIST_ROLE_INDEX": "1",
        "HPCDIST_ROLES": '{"trainer": 1, "server": 3}',
    }
    without = script_environment(topology, run, Roles.of({}, 4))
    assert (without["HPCDIST_ROLE"], without["HPCDIST_ROLE_INDEX"]) == ("trainer", "2")
