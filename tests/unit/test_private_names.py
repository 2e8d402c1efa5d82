"""Private names of other packages that hpcdist uses: a release that renames one fails here, and not in a run.

pyproject.toml has upper bounds for these packages. The test runs with their newest releases in CI before a bound rises.
"""

from __future__ import annotations

import ast
import importlib
import sys
from functools import reduce
from pathlib import Path

import pytest

import hpcdist

#: Module and attribute. The modules of ELSEWHERE check the names that they use themselves when they start.
NAMES = [
    ("torch", "_foreach_add_"),
    ("torch", "_foreach_copy_"),
    ("torch", "_foreach_mul_"),
    ("torch", "_foreach_norm"),
    ("torch._C._distributed_c10d", "_dump_fr_trace_json"),
    ("torch.cuda", "_is_in_bad_fork"),
    ("torch.distributed", "Reducer._rebuild_buckets"),
    ("torch.nn.parallel", "DistributedDataParallel._sync_buffers"),
    ("torch.utils._pytree", "tree_flatten"),
    ("torch.utils._pytree", "tree_unflatten"),
    # Overridden: after a rename, the methods of this name would not be called.
    ("mlflow.store.tracking.abstract_store", "AbstractStore._search_runs"),
    ("mlflow.store.artifact.artifact_repo", "ArtifactRepository._log_artifact_async"),
    ("submitit.slurm.slurm", "_make_sbatch_string"),
    ("atexit", "_run_exitfuncs"),
    ("os", "_exit"),
    ("sys", "_current_frames"),
    ("threading", "_shutdown"),
    ("_io", "_IOBase"),
]
#: Modules of hpcdist/rank whose private names of torch have checks of their own.
ELSEWHERE = ("process_group.py", "private_network.py", "rendezvous_store.py", "rpc.py", "rpc_torch.py", "rpc_zmq.py")


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_private_name_exists(module: str, name: str) -> None:
    assert callable(reduce(getattr, name.split("."), importlib.import_module(module)))


def test_private_attributes_exist() -> None:
    import torch
    from mlflow import MlflowClient

    module = torch.nn.BatchNorm1d(2)
    assert set(module._buffers) == {"running_mean", "running_var", "num_batches_tracked"}
    assert list(torch.nn.Sequential(module)._modules.values()) == [module]
    assert "_tracking_client" in MlflowClient.__init__.__code__.co_names


def used(path: Path) -> set[tuple[str, str]]:
    """Return the private names that a module imports, or reads from an imported module outside of hpcdist."""
    tree = ast.parse(path.read_text())
    modules, found = dict[str, str](), set[tuple[str, str]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name.split(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (module := node.module or "").split(".")[0] != "hpcdist":
            names = [alias.name for alias in node.names]
            found |= {(module, name) for name in names if "._" in module or (name[0] == "_" != name[1])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr[0] == "_" != node.attr[1]:
            module = modules.get(ast.unparse(node.value).split(".")[0], "hpcdist")
            if not module.startswith("hpcdist"):
                found.add((ast.unparse(node.value), node.attr))
    return found


def test_the_list_is_complete() -> None:
    package = Path(hpcdist.__file__).parent
    files = [path for path in package.rglob("*.py") if path.name not in ELSEWHERE]
    assert set.union(*map(used, files)) - set(NAMES) == {("sys.modules['torch'].cuda", "_is_in_bad_fork")}
    assert "torch" in sys.modules
