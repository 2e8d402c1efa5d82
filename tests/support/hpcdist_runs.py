"""Runs started with the real command: start and wait for them, then read their checkpoints and MLflow records."""

import importlib.util
import os
import secrets
import select
import shutil
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import pytest
import torch

from hpcdist.host.json_files import read_json
from hpcdist.rank.processes import RANK_MODULE, shown_place
from hpcdist.run.folder import Attempt, RunDir

# --- Stacks of the processes of a command that does not end, for the message of the test that waits for it


#: Frames of each thread; the innermost ones come first.
MAX_FRAMES = 6

SPY_TIMEOUT_S = 30.0


def kill_with_stacks(pid: int) -> str:
    """Kill a process and all its descendants; return what each of their threads did."""
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
        text = "\n".join(_stacks(process) for process in processes)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return text
    return "the process has ended"


def _stacks(process: psutil.Process) -> str:
    try:
        title = f"== {process.pid}: {' '.join(process.cmdline())[:150]}"
        command = [str(Path(sys.executable).with_name("py-spy")), "dump", "--pid", str(process.pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_TIMEOUT_S, check=False)
    except (psutil.NoSuchProcess, subprocess.TimeoutExpired) as error:
        return f"== {process.pid}: {error}"
    if done.returncode != 0:
        return f"{title}\n{done.stderr[:200]}"
    threads = [thread.strip("\n").splitlines() for thread in done.stdout.split("\nThread ")[1:]]
    return "\n".join([title, *(line for thread in threads for line in thread[: MAX_FRAMES + 1])])


# --- Runs started with the real command: start and wait for them, then read their checkpoints and MLflow records

HPCDIST = Path(sys.executable).with_name("hpcdist")

USER_CODE = Path(__file__).resolve().parent / "user_code"


#: Metrics that depend only on the training, not on its speed.
TRAINING_METRICS = ("train/loss", "train/lr", "train/epoch", "eval/loss", "eval/accuracy")


#: 45 steps per epoch; checkpoints at 20, 40, 45, 60, 80 and 90, of which the last two (and the best) are kept.
TRAINING = ["data.batch_size=16", "data.augment=true", "stop.max_epochs=2", "checkpoint.every_steps=20"]

LAST_STEP = 90


#: A step in the second epoch, before its first checkpoint.
HOLD_STEP = 50

HOLD_OVERRIDES = ["trainer=gated:train", f"params.hold_at={HOLD_STEP}"]

T = TypeVar("T")

#: Shortest and longest pause between two looks at a condition. In between, a pause takes PAUSE_RATIO times as long as
#: the look: programs of Slurm and searches through all processes would take a good part of a core from the ranks.
POLL_S, MAX_POLL_S, PAUSE_RATIO = 0.02, 0.5, 5


def wait_for(condition: Callable[[], T], description: str, *, timeout_s: float = 600.0) -> T:
    """Return the value of the condition as soon as it is true; raise AssertionError after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        looked_s = time.monotonic() - began
        assert began + looked_s < end, f"waited {timeout_s:g} s for {description}"
        time.sleep(min(MAX_POLL_S, max(POLL_S, PAUSE_RATIO * looked_s)))


def unused_port() -> int:
    """Return a port of this machine on which no process listens.

    It is below Linux's default range of outgoing connections, one of which could take it before a slow server does.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def create_database(path: Path) -> Path:
    """Create an empty MLflow database."""
    # In a subprocess: importing MLflow takes seconds and emits warnings of its dependencies.
    code = "import sys; from hpcdist.tracking.mlflow_client import open_client; open_client(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{path}"], check=True)
    return path


class Runs:
    """A runs folder with its own MLflow database and a folder of user code, from which runs are started.

    Args:
        root: an existing folder.
        database: an empty MLflow database to copy, because creating one takes seconds.
        experiment: experiment of the runs.
    """

    program = HPCDIST  #: the command `hpcdist`

    def __init__(self, root: Path, database: Path | None = None, experiment: str = "digits") -> None:
        self.experiment = experiment
        self.folder = root / "runs"
        self.folder.mkdir(exist_ok=True)
        self.database = root / "mlflow.db"
        self.project = root / "project"
        shutil.copytree(USER_CODE, self.project, ignore=shutil.ignore_patterns("__pycache__"))
        if database is not None:
            shutil.copy(database, self.database)
        # Ranks without MLflow skip the export of the final model, which takes seconds per run.
        self.no_mlflow = root / "no_mlflow"
        self.no_mlflow.mkdir()
        (self.no_mlflow / "mlflow.py").write_text("raise ModuleNotFoundError('not available in this test')\n")

    @property
    def unshipped(self) -> dict[str, str]:
        """Variables of a command for tests that do not look into MLflow: its shipper ends instead of importing it."""
        return {"PYTHONPATH": os.pathsep.join([str(self.no_mlflow), *_import_path_of_tests()])}

    def env(self, **more: str) -> dict[str, str]:
        """Return this environment without variables that configure a run, and with `more`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HPCDIST_RUNS", "HPCDIST_TRACK", "MLFLOW_"))}
        return {**kept, "HPCDIST_RUNS_DIR": str(self.folder), "COLUMNS": "200", "NO_COLOR": "1", **more}

    def start(self, *arguments: str, prefix: Sequence[str] = (), **env: str) -> subprocess.Popen[str]:
        """Start `hpcdist ARGUMENTS` with an optional command prefix; read its output with `finish`."""
        return subprocess.Popen(
            [*prefix, str(self.program), *arguments],
            cwd=self.project,
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def command(self, *arguments: str, **env: str) -> tuple[int, str]:
        """Run `hpcdist ARGUMENTS`; return exit code and output."""
        return finish(self.start(*arguments, **env))

    def config(self, name: str, *overrides: str, export: bool = False) -> list[str]:
        """Return the arguments of `hpcdist run` for a short run; `export` also exports the final model."""
        return [
            "ddp_digits",
            f"name={name}",
            f"tracking.uri=sqlite:///{self.database}",
            "tracking.register_as=null",
            "tracking.log_every_steps=2",
            "tracking.system_interval_s=1",
            "tracking.drain_timeout_s=200",
            "launch.device=" + os.environ.get("TEST_DEVICE", "cpu"),
            *([] if export else [f"launch.env.PYTHONPATH={os.pathsep.join(self._import_path())}"]),
            *overrides,
        ]

    def _import_path(self) -> list[str]:
        return [str(self.no_mlflow), str(self.project), *_import_path_of_tests()]

    def run_dir(self, name: str) -> RunDir:
        return RunDir(self.folder / self.experiment / name)

    def attempt(self, name: str, number: int = 1) -> Attempt:
        return self.run_dir(name).attempt(number)

    def step(self, name: str, attempt: int = 1, rank: int = 0) -> int:
        """Return the step of a rank's last heartbeat; 0 before its first step."""
        return int((read_json(self.attempt(name, attempt).beat(rank)) or {}).get("step", 0))

    def wait_step(self, name: str, attempt: int, step: int) -> None:
        """Wait until rank 0 of an attempt has done a number of steps."""
        wait_for(lambda: self.step(name, attempt) >= step, f"step {step} of attempt {attempt}", timeout_s=800)

    def wait_until_held(self, name: str, num_ranks: int = 2, attempt: int = 1) -> list[int]:
        """Wait until the trainer of `gated.py` holds all ranks of an attempt; return their process ids."""
        paths = [self.attempt(name, attempt).path / f"held-{rank}" for rank in range(num_ranks)]
        wait_for(lambda: all(path.exists() for path in paths), "the ranks to be held")
        return [int(path.read_text()) for path in paths]

    def release(self, name: str) -> None:
        (self.attempt(name).path / "release").touch()

    def holder_pid(self, name: str) -> int:
        lease = wait_for(lambda: read_json(self.run_dir(name).lease), "the lease")
        assert lease is not None
        return int(lease["pid"])

    # --- results of a run

    def points(self, name: str) -> list[tuple[str, int, float]]:
        """Return all metric points of the run in MLflow: (key, step, value)."""
        rows = self._query("select key, step, value from metrics where run_uuid = ?", self.mlflow_id(name))
        return [(key, step, value) for key, step, value in rows]

    def series(self, name: str) -> dict[tuple[str, int], float]:
        """Return the points of TRAINING_METRICS by (key, step), and assert that MLflow has every point once."""
        points = self.points(name)
        counts = Counter((key, step) for key, step, _ in points)
        assert not [item for item in counts.items() if item[1] > 1], "points that are in MLflow more than once"
        return {(key, step): value for key, step, value in points if key in TRAINING_METRICS}

    def mlflow_status(self, name: str) -> str:
        return str(self._query("select status from runs where run_uuid = ?", self.mlflow_id(name))[0][0])

    def tags(self, name: str) -> dict[str, str]:
        """Return the tags of the run in MLflow."""
        return dict(self._query("select key, value from tags where run_uuid = ?", self.mlflow_id(name)))

    def params(self, name: str) -> dict[str, str]:
        return dict(self._query("select key, value from params where run_uuid = ?", self.mlflow_id(name)))

    def param(self, name: str, key: str) -> str:
        return self.params(name)[key]

    def datasets(self, name: str) -> list[tuple[str, str]]:
        """Return name and source of each data set of the run in MLflow."""
        join = "datasets join inputs on inputs.source_id = datasets.dataset_uuid"
        return self._query(f"select name, dataset_source from {join} where destination_id = ?", self.mlflow_id(name))

    def artifacts(self, name: str, folder: str) -> Path:
        """Return the path of a folder of the run's artifacts in MLflow."""
        uri = str(self._query("select artifact_uri from runs where run_uuid = ?", self.mlflow_id(name))[0][0])
        return Path(uri.removeprefix("file://")) / folder

    def mlflow_id(self, name: str) -> str:
        return str((read_json(self.run_dir(name).mlflow) or {})["run_id"])

    def _query(self, text: str, *values: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self.database)
        try:
            return connection.execute(text, values).fetchall()
        finally:
            connection.close()

    def checkpoint_steps(self, name: str) -> list[int]:
        found = [path for path in self.run_dir(name).checkpoints.glob("step-*") if (path / "manifest.json").exists()]
        return sorted(int(path.name.removeprefix("step-")) for path in found)

    def final_state(self, name: str) -> dict[str, Any]:
        """Return the content of the newest checkpoint, including the random number generators of all ranks."""
        folder = self.run_dir(name).checkpoints / f"step-{self.checkpoint_steps(name)[-1]:08d}"
        return {file: torch.load(folder / file, weights_only=True) for file in ("model.pt", "trainer.pt")}


def _import_path_of_tests() -> list[str]:
    return list(filter(None, [os.environ.get("PYTHONPATH")]))


def finish(process: subprocess.Popen[str], timeout_s: float = 600.0) -> tuple[int, str]:
    """Wait for a process of `Runs.start`; return exit code and output. One that does not end fails with its stacks."""
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stacks = kill_with_stacks(process.pid)
            output, _ = process.communicate()
            # The output first: a report that is cut keeps the stacks, which have the reason.
            pytest.fail(f"not ended within {timeout_s:g} s:\n{output[-2000:]}\n{stacks}", pytrace=False)
    return process.returncode, output


def assert_states_equal(left: Any, right: Any, path: str = "") -> None:
    """Assert that two nested states are bit-equal."""
    assert type(left) is type(right), path
    if isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_states_equal(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_states_equal(*pair, f"{path}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype, path
        assert torch.equal(left, right), f"{path} differs"
    else:
        assert left == right, path


def assert_equals_control(runs: Runs, name: str, control: str) -> None:
    """Assert that a run has the same last checkpoint (bit by bit) and metric points as an uninterrupted one."""
    assert runs.checkpoint_steps(name)[-1] == LAST_STEP
    assert_states_equal(runs.final_state(name), runs.final_state(control))
    expected = runs.series(control)
    assert {key for key, _ in expected} == set(TRAINING_METRICS)
    assert len(expected) == 3 * LAST_STEP // 2 + 2 * 2
    assert runs.series(name) == expected
    assert runs.mlflow_status(name) == "FINISHED"


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a process, by its name if a parent has forked it; None for another process."""
    if process.cmdline()[1:4] == ["-P", "-m", RANK_MODULE]:
        return int(process.environ()["HPCDIST_RANK"])
    found = shown_place(process.name())
    return None if found is None else found[0]


class Descendants:
    """The descendants of a process. A pidfd of each reports its end also after its parent has changed."""

    def __init__(self, pid: int) -> None:
        self.processes = psutil.Process(pid).children(recursive=True)
        self.commands = [" ".join(process.cmdline()) for process in self.processes]
        self._descriptors = {os.pidfd_open(process.pid): process for process in self.processes}

    def wait_until_ended(self, timeout_s: float) -> None:
        """Wait until all processes have ended; raise AssertionError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        alive = dict(self._descriptors)
        while alive and time.monotonic() < end:
            poll = select.poll()
            for descriptor in alive:
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll(1000 * max(0.0, end - time.monotonic())):
                del alive[descriptor]
        for descriptor in self._descriptors:
            os.close(descriptor)
        assert not alive, f"still alive after {timeout_s:g} s: {list(alive.values())}"


# --- sockets


def listening(pid: int) -> set[tuple[str, int]]:
    """Return host and port of the listening TCP sockets of a process, in its network namespace.

    psutil would read the sockets of the namespace of this process.
    """
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:  # TCP_LISTEN
                host, port = local.split(":")
                words = struct.pack(f"={len(host) // 8}I", *(int(host[i : i + 8], 16) for i in range(0, len(host), 8)))
                # The store's socket is of IPv6 and also listens on IPv4 addresses.
                found.add((socket.inet_ntop(family, words).removeprefix("::ffff:"), int(port, 16)))
    return found


# --- The MLflow runs of a sweep, for tests of local sweeps and of sweeps on Slurm.


class Child(NamedTuple):
    status: str
    parent: str | None  #: name of the parent run
    run_id: str


def mlflow_runs(database: Path, sweep: str) -> dict[str, Child]:
    """Return the MLflow run of the sweep and its children by name, and assert that each name is unique."""
    query = """
        select run.run_uuid, run.name, run.status, parent.name from runs run
        left join tags tag on tag.run_uuid = run.run_uuid and tag.key = 'mlflow.parentRunId'
        left join runs parent on parent.run_uuid = tag.value
        where ? in (run.name, parent.name) and run.lifecycle_stage = 'active'
    """
    connection = sqlite3.connect(database)
    try:
        rows = connection.execute(query, (sweep,)).fetchall()
    finally:
        connection.close()
    found = {name: Child(status, parent, run_id) for run_id, name, status, parent in rows}
    assert len(found) == len(rows), rows
    return found


def repair_trainer(project: Path) -> None:
    """Change the trainer of `picky.py` so that it accepts every seed."""
    path = project / "picky.py"
    path.write_text(path.read_text().replace("BAD_SEED = 2", "BAD_SEED = -1"))


# --- A Python in which torch is not installed, for the functions that search it.


def hide_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `importlib.util.find_spec` find no torch."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "torch" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
