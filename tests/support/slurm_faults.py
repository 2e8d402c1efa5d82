"""Fault injection for runs on the dev cluster, and the checks that every run must pass after a fault."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP, TRAINING_METRICS, assert_states_equal, wait_for
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, SlurmRuns

from hpcdist.devcluster import cluster_commands, cluster_processes, cluster_status, node_faults, settings


@dataclass(frozen=True)
class Subject:
    """A trainer under test; every fault test runs once per subject."""

    name: str
    overrides: tuple[str, ...]  #: of a run that is held at `hold_at`
    hold_at: int
    last_save: int  #: step of the last checkpoint before `hold_at`
    interval: int  #: steps between two checkpoints
    last_step: int


#: 2 nodes with 2 ranks each.
DDP = Subject(
    name="ddp", overrides=tuple(HOLD_OVERRIDES), hold_at=HOLD_STEP, last_save=45, interval=20, last_step=LAST_STEP
)
SUBJECTS = (DDP,)


class FaultScene:
    """A run that suffers a fault, the control run, and their row of the fault table."""

    def __init__(self, runs: SlurmRuns, subject: Subject, control: str, cell: Cell) -> None:
        self.runs = runs
        self.cluster: DevCluster = runs.cluster
        self.subject = subject
        self.control = control
        self.cell = cell
        self.name = ""
        self.job = ""
        #: Jobs of the run before `job`.
        self.earlier_jobs: tuple[str, ...] = ()
        self._is_gated = False

    def submit(self, fault: str, *overrides: str) -> None:
        """Submit the run, named after the fault."""
        self.cell.fault = fault
        self.name = f"{self.subject.name}-{fault.replace(' ', '-').replace(',', '')}"
        self._is_gated = set(self.subject.overrides) <= set(overrides)
        self.job = self.runs.submit(self.name, *overrides)

    def submit_held(self, fault: str, *overrides: str) -> None:
        """Submit the run and wait until all ranks are held at `subject.hold_at`."""
        self.submit(fault, *self.subject.overrides, *overrides)
        self.wait_until_held()

    def wait_until_held(self) -> list[int]:
        """Wait until all ranks are held and the heartbeats tell so; return their process ids."""
        pids = self.runs.wait_until_held(self.name, NUM_RANKS)
        if self._is_gated:  # other ranks are held before their first step
            self.wait_step(self.subject.hold_at - 1)  # a killed supervisor leaves no later sign of the lost steps
        return pids

    def release(self) -> None:
        self.runs.release(self.name)

    def pid_of(self, rank: int) -> int:
        return int((self.runs.attempt(self.name).path / f"held-{rank}").read_text())

    def start_now(self) -> None:
        self.runs.start_now(self.job)

    def num_starts(self) -> int:
        """Return the number of times that Slurm has started the job."""
        return int(self.cluster.job(self.job)["Restarts"]) + 1

    def kill_node(self, node: str) -> None:
        """Simulate a power failure of a node, then release the ranks, so that the other ranks notice it."""
        node_faults.kill_node(self.cluster.layout, node)
        assert self.cluster.node_members()[node] == []
        self.release()

    def steps(self) -> str:
        """Return the ids and names of the job's steps that are running according to Slurm."""
        return self.cluster.run("squeue", "--steps", f"--jobs={self.job}", "--noheader", "--format=%i %j")

    def kill_stepd(self, node: str) -> None:
        """Kill the slurmstepd of the ranks on a node, but not the ranks."""
        (number,) = [line.split()[0] for line in self.steps().splitlines() if "ranks-001" in line]
        step = f"slurmstepd: [{number}]".encode()
        members = self.cluster.node_members()[node]
        (pid,) = [pid for pid in members if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(step)]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists(), "the slurmstepd to end")

    def _daemon(self, name: str) -> settings.Daemon:
        return next(d for d in settings.daemons(self.cluster.settings, self.cluster.layout) if d.name == name)

    def pid_of_daemon(self, name: str) -> int | None:
        return cluster_processes.pid_of(self.cluster.layout, self._daemon(name))

    def kill_daemon(self, name: str) -> int:
        """Kill one of Slurm's daemons, but not its children; return its process id."""
        pid = self.pid_of_daemon(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.pid_of_daemon(name) is None, f"{name} to end")
        return pid

    def start_daemon(self, name: str) -> None:
        """Start a daemon and wait until it responds."""
        cluster_commands.start_daemon(self.cluster.layout, self._daemon(name))
        wait_for(lambda: self.pid_of_daemon(name) is not None, f"{name} to run")
        if name == "slurmctld":
            ping = ["scontrol", "ping"]
            wait_for(
                lambda: cluster_commands.succeeds(ping, env=cluster_status.client_env(self.cluster.layout)),
                f"{name} to respond",
            )
        else:
            layout, node = self.cluster.layout, name.removeprefix("slurmd-")
            cluster_status.wait_for_node(self.cluster.settings, layout, node, self._daemon(name))

    def wait_restarted(self) -> None:
        self.runs.wait_restarted(self.job)

    def assert_recovered(self, *, max_lost_steps: int, sync: bool = True) -> None:
        """Assert that the run ends with the results of the control run, on disk and in MLflow, and leaves no process.

        Args:
            max_lost_steps: steps that an attempt may have to repeat.
            sync: run `hpcdist sync` first; not needed if the job itself reaches the tracking server.
        """
        runs, cell, name = self.runs, self.cell, self.name
        state = runs.wait_end(name, self.job)
        cell.starts, cell.attempts, cell.restarts = self.num_starts(), state.attempt, state.restarts
        assert state.status == "finished", f"{state}\n{runs.job_log(name)}"
        assert self.cluster.job(self.job)["JobState"] == "COMPLETED"
        if sync:
            code, output = runs.command("sync", name)
            assert code == 0, output
        lost = [self._steps_done(number) - runs.resumed_at(name, number + 1) for number in range(1, state.attempt)]
        cell.steps_lost = sum(lost)
        assert all(0 <= steps <= max_lost_steps for steps in lost), lost
        self._compare_with_control()
        runs.assert_no_process_left(name)
        causes = runs.ledger(name, self.job, *self.earlier_jobs).seconds
        assert min(causes["start"], causes["compute"]) > 0, causes
        if self._is_gated:  # other ranks may die before a heartbeat with their last steps
            assert bool(cell.steps_lost) <= (causes.get("redone", 0) > 0), "steps that were lost are done again"

    def assert_recovered_from_checkpoint(self) -> None:
        """Assert that the run has recovered and has lost steps, at most those since the last checkpoint."""
        self.assert_recovered(max_lost_steps=self.subject.interval)
        assert self.cell.steps_lost, "no step was lost: the fault had no effect"

    def _steps_done(self, attempt: int) -> int:
        """Return the last step that any rank of an attempt has recorded."""
        folder = self.runs.attempt(self.name, attempt)
        beats = [self.runs.step(self.name, attempt, rank) for rank in range(NUM_RANKS)]
        held = [self.subject.hold_at] if self._is_gated and attempt == 1 and (folder.path / "held-0").exists() else []
        return max(beats + held)

    def _compare_with_control(self) -> None:
        runs, cell, name = self.runs, self.cell, self.name
        assert runs.checkpoint_steps(name)[-1] == self.subject.last_step
        cell.weights = "differ"
        assert_states_equal(runs.final_state(name), runs.final_state(self.control))
        cell.weights = "equal"
        cell.points = "wrong"
        expected = runs.series(self.control)
        assert {key for key, _ in expected} == set(TRAINING_METRICS)
        assert runs.series(name) == expected
        cell.points = "once"
        cell.mlflow = runs.mlflow_status(name)
        assert cell.mlflow == "FINISHED"

    def wait_queued(self) -> str:
        """Wait until the run is queued again; return the reason that the supervisor recorded."""
        return self.runs.wait_requeued(self.name).reason

    def wait_step(self, step: int) -> None:
        """Wait until rank 0 of the first attempt has done a number of steps."""
        self.runs.wait_step(self.name, 1, step)


# --- The table at the end of `make faults`: one row per fault and trainer.


#: The devices of ranks with the GPUs of `tests/simgpu`.
SIMULATED_GPUS = "simulated GPUs"

COLUMNS = (
    *("fault", "trainer", "devices", "s", "steps lost", "starts"),
    *("attempts", "restarts", "weights", "points", "MLflow", ""),
)


@dataclass
class Cell:
    """A row of the table. Tests fill it in step by step, so that a failed test leaves a partial row."""

    fault: str
    trainer: str
    devices: str = "cpu"
    seconds: float = 0.0
    steps_lost: int | None = None  #: total number of steps that were repeated
    starts: int | None = None  #: of the Slurm job
    attempts: int | None = None
    restarts: int | None = None
    weights: str = "?"
    points: str = "?"
    mlflow: str = "?"
    verdict: str = "not run"


def as_lines(cells: Sequence[Cell]) -> list[str]:
    """Render the table with aligned columns."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for cell in cells:
        values = [getattr(cell, field.name) for field in fields(cell)]
        rows.append(tuple(f"{v:.0f}" if isinstance(v, float) else "-" if v is None else str(v) for v in values))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


@dataclass(frozen=True)
class MatrixEntry:
    """One entry of the matrix of container runtimes and faults."""

    runtime: str
    fault: str
    verdict: str  #: `12 s`, `FAILED` or `skipped`


def matrix_lines(entries: Sequence[MatrixEntry]) -> list[str]:
    """Render one row per runtime and one column per fault."""
    runtimes, faults = (list(dict.fromkeys(getattr(e, name) for e in entries)) for name in ("runtime", "fault"))
    verdicts = {(entry.runtime, entry.fault): entry.verdict for entry in entries}
    rows = [["runtime", *faults], *([r, *(verdicts.get((r, fault), "-") for fault in faults)] for r in runtimes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(faults) + 1)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
