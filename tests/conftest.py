"""Fixtures and hooks of all tests: a clean environment, groups for pytest-xdist, the fault table, container images."""

import fcntl
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import session_locks
import torch
from containers import Containers, missing_requirement
from hpcdist_runs import create_database
from io_faults import compile_library
from slurm_cluster import take_turn
from slurm_faults import Cell, MatrixEntry, as_lines, matrix_lines
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from hpcdist.run.folder import Attempt, RunDir

#: Variables that configure the tests. All others of HPCDIST_*, Slurm and MLflow are removed once, before hpcdist is
#: imported, which sets some of MLFLOW_* itself.
_STEER_TESTS = (
    "HPCDIST_DATA_DIR",
    "HPCDIST_DOCS_IMAGES",
    "HPCDIST_PROCTRACK",
    "HPCDIST_REQUIRE_BROWSER",
    "HPCDIST_REQUIRE_COMPILER",
    "HPCDIST_REQUIRE_CONTAINERS",
    "HPCDIST_REQUIRE_POSTGRESQL",
    "HPCDIST_REQUIRE_SLURM",
    "HPCDIST_TEST_RUNTIMES",
)
for _name in list(os.environ):
    if _name.startswith(("HPCDIST_", "SLURM_", "SBATCH_", "MLFLOW_")) and _name not in _STEER_TESTS:
        del os.environ[_name]
# Threads of OpenMP wait for each other in loops: beside other workers, two threads take four times the processor time
# of one. Programs that tests start inherit the variable; hpcdist sets that of ranks.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
#: A shell starts background processes with SIGINT ignored, nohup with SIGHUP. Child processes inherit that, so tests of
#: signals would fail.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def run(runs_dir: Path) -> RunDir:
    return RunDir.create(runs_dir / "exp" / "first")


@pytest.fixture
def attempt(run: RunDir) -> Attempt:
    return run.new_attempt()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with empty tables, made once for all workers of pytest-xdist, since that takes seconds."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    path = folder / "empty.db"
    with (folder / "empty.db.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            num_started = len(started)
            create_database(folder / "incomplete.db").rename(path)
            del started[num_started:]  # a process of the session, not of the test that comes first
    return path


# --- processes, and tests that run beside each other

TESTS = Path(__file__).parent
#: The tests of one of these folders share a service and run in one worker; elsewhere the tests of a file do. The groups
#: begin in this order, before all others: those that mostly wait run beside those that compute.
GROUPS = ("faults", "slurm", "multiproc", "container", "browser")
#: Runs in the worker of `slurm`, before it: its dev cluster and that of `slurm`, which is up from the first test to the
#: end of the session, exclude each other.
OWN_DEV_CLUSTER = "tests/faults/test_many_nodes.py"
PROCESS_EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
#: Processes that the setup and the call of the running test have started.
started: list[str] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if folder_of(item) in GROUPS:
            item.add_marker(pytest.mark.processes)
    order = {folder: number for number, folder in enumerate(GROUPS)}
    items.sort(key=lambda item: order.get(folder_of(item), len(order)))


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def group_of(nodeid: str) -> str:
    """Return the name of the tests that run in one worker with this one."""
    file = nodeid.partition("::")[0]
    folder = file.removeprefix("tests/").partition("/")[0]
    if file == OWN_DEV_CLUSTER:
        return "slurm"
    return folder if folder in GROUPS else file


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist has no types
    """Runs all tests of a group in one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    # `--dist loadgroup` does not see the marker `xdist_group` with pytest 9.2 and pytest-xdist 3.8.
    config.option.loadscopereorder = False  # keep the order of `GROUPS`
    return GroupScheduling(config, log)


def _note_process(event: str, arguments: tuple[object, ...]) -> None:
    # Threads of an earlier test, such as a section of the doctor, may still start processes.
    if event in PROCESS_EVENTS and threading.current_thread() is threading.main_thread():
        started.append(f"{event} {arguments[0] if arguments else ''}")


sys.addaudithook(_note_process)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    # Before pytest-timeout begins to count: the other session may take an hour.
    if os.geteuid() == 0 and group_of(item.nodeid) == "slurm":
        take_turn()
    started.clear()
    return (yield)


# --- the table of faults


def properties(report: pytest.TestReport, kind: str) -> list[Any]:
    """Return the values that a test has recorded under a name."""
    return [value for name, value in report.user_properties if name == kind]


class FaultTable:
    """Collects the rows from the test reports, including those of workers of pytest-xdist."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.matrix: list[MatrixEntry] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.matrix += [MatrixEntry(**entry) for entry in properties(report, "matrix")]
        if report.when == "call":
            self.cells += [Cell(**row) for row in properties(report, "cell")]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.cells:
            terminalreporter.section("faults")
            terminalreporter.write("\n".join(as_lines(self.cells)) + "\n")
        if self.matrix:
            terminalreporter.section("container runtimes and faults")
            terminalreporter.write("\n".join(matrix_lines(self.matrix)) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable())
    capture = config.pluginmanager.getplugin("capturemanager")
    session_locks.uncaptured = capture.global_and_fixture_disabled


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """Return this test's row in the table that pytest prints at the end."""
    return Cell(fault=request.node.name.partition("[")[0].removeprefix("test_").replace("_", " "), trainer="ddp")


def matrix_entry(item: pytest.Item, report: pytest.TestReport) -> MatrixEntry | None:
    """Return the entry of a test of the matrix if this report decides its verdict; None for other reports."""
    if item.path.name != "test_runtime_matrix.py" or not isinstance(item, pytest.Function):
        return None
    if report.passed and report.when != "call":
        return None
    more = [str(value) for name, value in item.callspec.params.items() if name != "runtime"]
    fault = " ".join([item.originalname.removeprefix("test_").replace("_", " "), *more])
    verdict = f"{report.duration:.0f} s" if report.passed else "skipped" if report.skipped else "FAILED"
    return MatrixEntry(str(item.callspec.params["runtime"]), fault, verdict)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    found = getattr(item, "funcargs", {}).get("cell")
    if isinstance(found, Cell) and report.when == "call":
        found.seconds = report.duration
        found.verdict = "ok" if report.passed else "FAILED"
        report.user_properties.append(("cell", asdict(found)))
    if (entry := matrix_entry(item, report)) is not None:
        report.user_properties.append(("matrix", asdict(entry)))
    # Only `make unit` depends on the marker. The teardown is not counted: it may end fixtures of the whole session.
    is_unit = "not processes" in item.config.option.markexpr
    if is_unit and started and report.when == "call" and report.passed:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} starts processes without the marker `processes`: {started[0]}"
    return report


# --- faults of file operations


@pytest.fixture(scope="session")
def io_faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that injects faults, see `io_faults.py`."""
    return compile_library(tmp_path_factory.mktemp("io_faults"))


# --- container images, built once for all tests

REQUIRE_CONTAINERS = "HPCDIST_REQUIRE_CONTAINERS"
"""With 1, missing container tools are a failure instead of a skip."""


@pytest.fixture(scope="session")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Containers:
    found = Containers(tmp_path_factory.mktemp("containers"))
    if (reason := missing_requirement(found)) is not None:
        if os.environ.get(REQUIRE_CONTAINERS) == "1":
            pytest.fail(f"{REQUIRE_CONTAINERS}=1, but {reason}")
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def image(containers: Containers) -> Callable[[str], str]:
    """Return a function that returns the name of the image of a target, built on first use."""
    return cache(containers.build)
