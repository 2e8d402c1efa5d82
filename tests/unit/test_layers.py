"""Imports: which module may import which, and private names of other packages."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from functools import reduce
from pathlib import Path

import pytest

import hpcdist
from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml

PACKAGE = Path(hpcdist.__file__).parent

#: From the lowest layer to the highest. A module imports from its own package and from packages of lower lines only.
#: A module belongs to the longest name that fits it. Names in one line are independent of each other.
LAYERS = """
errors
host
config devcluster
slurm
run
checkpoint containers environments review data.download
tracking
rank
supervisor
checks
job
data
trainers
cli
"""

#: Imports against the order: module → imported module, with the reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("config.trainer_declaration", "trainers"): "imports the declaration of a trainer when a config names that trainer"
}

#: May be imported where torch is not installed, such as on a login node.
NO_TORCH = """
errors host config devcluster slurm run containers environments review tracking supervisor cli
checks.doctor_page checks.doctor_report checks.machine_checks
checks.node_facts checks.node_links checks.node_probe checks.preflight
checks.resource_checks checks.runs_folder_checks checks.runtime_checks checks.slurm_checks checks.store_checks
trainers.comm.results
rank.processes rank.parent rank.private_network rank.network_interface
""".split()  # noqa: SIM905

ORDER = {name: number for number, line in enumerate(LAYERS.strip().splitlines()) for name in line.split()}


def imports_of(source: str, module: str) -> set[str]:
    """Return the modules that a source imports; for `from a import b` both `a` and `a.b`, as `b` may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found |= {str(argument.value) for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return found


def read_imports(package: Path) -> dict[str, set[str]]:
    """Return the imports by module (`job.srun`; the name of a package stands for its `__init__`)."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = imports_of(path.read_text(), ".".join(("hpcdist", *parts)))
    return found


IMPORTS = read_imports(PACKAGE)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def layer(module: str) -> str:
    """Return the longest name in `LAYERS` that a module belongs to; empty where none does."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in ORDER), "")


def own_imports(module: str) -> set[str]:
    """Return the modules of hpcdist that a module imports."""
    names = {name.removeprefix("hpcdist.") for name in IMPORTS[module] if name.startswith("hpcdist.")}
    return {name for name in names if name in IMPORTS}


def users_of(*libraries: str) -> set[str]:
    return {module for module, imports in IMPORTS.items() if any(within(name, *libraries) for name in imports)}


def third_party(imports: set[str]) -> set[str]:
    return {name for name in imports if name.partition(".")[0] not in {*sys.stdlib_module_names, "hpcdist", ""}}


def test_every_form_of_import_is_found() -> None:
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from c import d
def f():
    from . import h
    from ..i import j
    importlib.import_module("k.l")
"""
    found = imports_of(source, "hpcdist.slurm.client")
    assert found >= {"a.b", "c", "c.d", "hpcdist.slurm.h", "hpcdist.i", "hpcdist.i.j", "k.l"}
    assert "torch" in IMPORTS["trainers.ddp.train"]


def test_imports_follow_the_layers() -> None:
    assert [module for module in IMPORTS if module not in ("", "__main__") and not layer(module)] == []
    against = {
        (module, name)
        for module in IMPORTS
        if layer(module)
        for name in own_imports(module)
        if layer(name) != layer(module) and ORDER[layer(name)] >= ORDER[layer(module)]
    }
    assert against == set(EXCEPTIONS)


def test_trainers_do_not_import_each_other() -> None:
    def trainer(module: str) -> str:
        return module.split(".")[1] if within(module, "trainers") and "." in module else ""

    found = {
        (m, name) for m in IMPORTS if trainer(m) for name in own_imports(m) if trainer(name) not in ("", trainer(m))
    }
    assert found == set()


def test_the_stub_has_the_types_of_all_public_names() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    found = {alias.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert found == vars(hpcdist)["_HOMES"]
    assert {*found, "__version__"} == set(vars(hpcdist)["__all__"])


def test_libraries_are_used_in_one_place() -> None:
    assert users_of("omegaconf") == {"config.loading"}
    assert users_of("submitit") <= {"job.submit", "job.submitit_entry"}
    assert {module for module in users_of("mlflow") if not within(module, "tracking")} <= {"checkpoint.export"}


@pytest.mark.processes
def test_a_login_node_needs_no_torch() -> None:
    found = {module for module in users_of("torch", "torchvision") if within(module, *NO_TORCH)}
    assert found == set()
    declarations = [module for module in IMPORTS if within(module, "trainers") and module.count(".") <= 1]
    modules = [*(module for module in IMPORTS if within(module, *NO_TORCH)), *declarations]
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(f'hpcdist.{{name}}')\n"
        "print([name for name in ('torch', 'torchvision') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "imported by what these modules import"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("start", "forbidden"),
    [
        ("import hpcdist.rank.worker", {"omegaconf", "psutil", "mlflow", "numpy", "typer"}),
        ("import hpcdist.job.batch_step",
         {"omegaconf", "mlflow", "numpy", "typer", "rich", "tarfile", "importlib.metadata"}),
        ("import hpcdist.job.submit", {"omegaconf", "mlflow", "numpy", "rich", "submitit", "tarfile"}),
        ("import hpcdist.checks.node_probe", {"torch", "psutil", "numpy", "omegaconf"}),  # with a broken torch, too
    ],
    ids=["rank", "batch step", "submission", "probe"],
)  # fmt: skip
def test_processes_start_without_slow_imports(start: str, forbidden: set[str], tmp_path: Path) -> None:
    """Each of these costs as much time as all modules of hpcdist together, also when only the config is read."""
    (tmp_path / "config.yaml").write_text(to_yaml(load_config("ddp_digits")))
    code = (
        f"{start}, sys\n"
        "from hpcdist.config.loading import load_run_config\n"
        f"load_run_config({start.split()[1]}.Path({str(tmp_path / 'config.yaml')!r}), [], {{}})\n"
        f"print(sorted({forbidden} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


#: They run in ranks, in containers and on nodes where nothing else is installed, or start quickly.
STANDARD_LIBRARY = """
errors host.files host.json_files host.locks host.ownership host.retry host.network config.redaction config.schema
config.topology config.roles config.slurm_notation run.folder
tracking.journal supervisor.ending supervisor.restart_policy supervisor.local_launcher
checks.node_probe checks.node_facts checks.node_links checks.preflight
""".split()  # noqa: SIM905


def test_packages_that_need_the_standard_library_alone() -> None:
    found = {module: third_party(imports) for module, imports in IMPORTS.items() if within(module, *STANDARD_LIBRARY)}
    assert len(found) >= len(STANDARD_LIBRARY)
    assert {module: names for module, names in found.items() if names} == {}


# --- private names of other packages: a release that renames one fails here, and not in a run

#: Methods that hpcdist overrides: after a rename, nothing would call them.
OVERRIDDEN = [
    ("mlflow.store.artifact.artifact_repo", "ArtifactRepository._log_artifact_async"),
    ("torch.nn.parallel", "DistributedDataParallel._sync_buffers"),
]


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


@pytest.mark.processes  # imports of MLflow and torch call uname and ldconfig
def test_private_names_of_other_packages_exist() -> None:
    private = set.union(*(used(path) for path in PACKAGE.rglob("*.py")))
    # A name of `sys.modules["…"]` is one of a module that may not be imported.
    names = {(module, name) for module, name in private if not module.startswith("sys.modules")}
    assert ("torch", "_foreach_norm") in names
    missing = []
    for module, name in [*names, *OVERRIDDEN]:
        try:
            reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            missing.append(str(error))
    assert missing == []
