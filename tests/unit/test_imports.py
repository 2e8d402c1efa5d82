"""Which module may import what: the layers of the design, held by a walk over every import statement.

Imports inside functions and under TYPE_CHECKING count too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hpcdist
from hpcdist.config import load_config, to_yaml

PACKAGE = Path(hpcdist.__file__).parent


def imports_of(source: str, module: str) -> set[str]:
    """Every module that a source imports; for `from a import b` both `a` and `a.b`, as `b` may be a module."""
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


def walk(package: Path) -> dict[str, set[str]]:
    """Imports by module (`launch.local`, `cli`; a package's `__init__` by its folder's name)."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = imports_of(path.read_text(), ".".join(("hpcdist", *parts)))
    return found


IMPORTS = walk(PACKAGE)
ROOMS = (
    "commands",
    "schema",
    "launch",
    "cluster",
    "tracking",
    "runtime",
    "trainers",
    "parameter_server",
    "models",
    "data",
    "diagnose",
    "devcluster",
    "images",
    "preflight",
    "comm",
)
#: What shows a benchmark, wherever it has run.
REPORTS = ("comm.results", "comm.report", "comm.compare", "comm.bottleneck", "comm.plots")
GROUND_FLOOR = (
    "errors",
    "schema",
    "document",
    "config",
    "formats",
    "ownership",
    "lookup",
    "rundir",
    "redaction",
    "secret_file",
    "runs_dir",
    "lease",
    "pace",
    "standing",
    "sweep",
    "sweepdir",
    "logs",
    "boxed",
    "compiler",
    "cluster",
    "models",
    "data",
)


def of(*rooms: str) -> dict[str, set[str]]:
    """The modules of some rooms (a room is a module or a folder)."""
    return {name: imports for name, imports in IMPORTS.items() if within(name, *rooms)}


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def users_of(*libraries: str) -> set[str]:
    return {module for module, imports in IMPORTS.items() if any(within(name, *libraries) for name in imports)}


def crossings(rooms: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    targets = tuple(f"hpcdist.{room}" for room in forbidden)
    return [f"{m} → {name}" for m, imports in of(*rooms).items() for name in sorted(imports) if within(name, *targets)]


def foreign(imports: set[str]) -> set[str]:
    """What is neither the standard library nor hpcdist."""
    return {name for name in imports if name.partition(".")[0] not in {*sys.stdlib_module_names, "hpcdist", ""}}


def own(imports: set[str]) -> set[str]:
    return {".".join(name.split(".")[1:2]) for name in imports if name.startswith("hpcdist.")}


def test_the_walk_sees_every_form_of_import() -> None:
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from c import d
def f():
    import e as g
    from . import h
    from ..i import j
    importlib.import_module("k.l")
"""
    found = imports_of(source, "hpcdist.launch.local")
    assert found >= {"a.b", "c", "c.d", "e", "hpcdist.launch.h", "hpcdist.i", "hpcdist.i.j", "k.l"}


def test_the_walk_sees_the_package() -> None:
    assert {"cli", "launch.supervisor", "cluster", "trainers.ddp", "tracking.shipper"} <= set(IMPORTS)
    assert "torch" in IMPORTS["trainers.ddp"]
    assert {name.partition(".")[0] for name in IMPORTS if "." in name} <= set(ROOMS), "a room without rules"


def test_omegaconf_ends_where_loading_ends() -> None:
    assert users_of("omegaconf") == {"config", "document"}


def test_submitit_is_known_to_the_slurm_launcher_alone() -> None:
    assert users_of("submitit") <= {"launch.submission.slurm", "launch.submission.sbatch", "launch.job.no_numpy"}


def test_mlflow_is_known_to_tracking_and_the_export_alone() -> None:
    assert {module for module in users_of("mlflow") if not within(module, "tracking")} <= {"runtime.export"}


def test_a_login_node_needs_no_torch() -> None:
    ground = ("config", "schema", "rundir", "lease", "standing", "logs", "boxed", "errors")
    rooms = (
        "cli",
        "commands",
        "view",
        "following",
        "diagnose",
        "launch",
        "cluster",
        "tracking",
        "devcluster",
        "images",
        *REPORTS,
    )
    found = {module for module in users_of("torch", "torchvision") if within(module, *rooms, *ground)}
    assert found == {"images.probe"}, "which is piped into a container, and runs there"


def test_what_a_login_node_imports_brings_no_torch_along() -> None:
    """The imports themselves, with all that they import in turn."""
    modules = list(
        of(
            "cli",
            "commands",
            "view",
            "following",
            "diagnose",
            "launch",
            "cluster",
            "tracking",
            "rundir",
            "lease",
            "config",
            *REPORTS,
        )
    )
    code = (
        "import importlib, sys\n"
        f"for name in {modules}: importlib.import_module(f'hpcdist.{{name}}')\n"
        "print([name for name in ('torch', 'torchvision') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("start", "forbidden"),
    [
        ("import hpcdist.runtime.worker", {"omegaconf", "psutil", "mlflow", "numpy", "typer"}),
        ("import hpcdist.launch.job.batch", {"omegaconf", "mlflow", "numpy", "typer", "rich", "importlib.metadata"}),
    ],
    ids=["rank", "batch step"],
)
def test_what_a_start_waits_for_is_not_imported_in_vain(start: str, forbidden: set[str], tmp_path: Path) -> None:
    """Each costs a rank or a batch step as much as all that is ours: also not when the config is read."""
    (tmp_path / "config.yaml").write_text(to_yaml(load_config("ddp_digits")))
    code = (
        f"{start}, sys\n"
        "from hpcdist.config import load_run_config\n"
        f"load_run_config({start.split()[1]}.Path({str(tmp_path / 'config.yaml')!r}), [], {{}})\n"
        f"print(sorted({forbidden} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_trainers_never_import_each_other() -> None:
    """`pipeline` may import `pipeline_engines`, a part of itself that would not go into one sitting."""
    found = [crossing.partition(" → hpcdist.") for crossing in crossings(("trainers",), ("trainers",))]
    assert [
        f"{module} → {name}" for module, _, name in found if not name.startswith(f"{module.partition('_')[0]}_")
    ] == []


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        (
            ("models", "data"),
            ("runtime", "launch", "tracking", "trainers", "diagnose", "cluster", "cli", "commands", "view"),
        ),
        (GROUND_FLOOR, ("runtime", "launch", "tracking", "trainers", "diagnose", "cli", "commands", "view")),
        (("launch",), ("runtime", "trainers", "diagnose", "models", "data", "cli", "commands", "view")),
        (("tracking",), ("runtime", "launch", "trainers", "diagnose", "models", "data", "cli", "commands", "view")),
        (("runtime",), ("launch", "trainers", "diagnose", "models", "data", "cli", "commands", "view")),
        (("comm",), ("launch", "trainers", "diagnose", "models", "data", "cli", "commands", "view")),
        (("trainers",), ("launch", "diagnose", "cli", "commands", "view")),
        (("parameter_server",), ("launch", "tracking", "trainers", "diagnose", "data", "cli", "commands", "view")),
        (
            ("devcluster",),
            ("launch", "tracking", "runtime", "trainers", "models", "data", "diagnose", "cli", "commands", "view"),
        ),
        (
            ("images",),
            ("launch", "tracking", "runtime", "trainers", "models", "data", "diagnose", "cli", "commands", "view"),
        ),
        (("view",), ("runtime", "trainers", "models", "data", "following", "diagnose", "cli", "commands")),
        (("following",), ("runtime", "trainers", "models", "data", "diagnose", "cli", "commands")),
        (("diagnose",), ("runtime", "trainers", "models", "data", "launch", "tracking", "cli", "commands", "view")),
        (("devcluster",), ("launch", "runtime", "tracking", "trainers", "models", "data", "view")),
    ],
    ids=lambda rooms: "-".join(rooms[:2]),
)
def test_imports_point_one_way(rooms: tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    assert crossings(rooms, forbidden) == []


@pytest.mark.parametrize(
    ("room", "allowed"),
    [
        ("errors", set()),
        ("boxed", set()),
        ("schema", {"schema"}),
        ("logs", set()),
        ("redaction", {"errors"}),
        ("cluster", {"errors", "cluster"}),
        ("file_retry", set()),
        ("runs_dir", {"errors"}),
        ("foreign", set()),
        ("rundir", {"errors", "file_retry", "foreign", "formats", "runs_dir"}),
        ("tracking.journal", {"errors", "file_retry", "foreign", "formats", "tracking"}),
        ("tracking.names", set()),
        ("launch.policy", set()),
        ("preflight", {"cluster", "errors", "preflight", "rundir"}),
        ("launch.local", {"launch", "rundir"}),
    ],
)
def test_rooms_of_the_standard_library_alone(room: str, allowed: set[str]) -> None:
    for module, imports in of(room).items():
        assert foreign(imports) == set(), module
        assert own(imports) <= allowed, module


def test_the_dev_cluster_needs_the_command_lines_library_alone() -> None:
    for module, imports in of("devcluster").items():
        assert foreign(imports) == ({"typer"} if module == "devcluster.commands" else set()), module
        assert own(imports) <= {"errors", "rundir", "devcluster"}, module
