"""Faults that strike runs on the dev cluster: what each trainer's run looks like, and how it must end."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from fault_table import Cell
from hpcdist_runs import HOLD_OVERRIDES, HOLD_STEP, LAST_STEP, TRAINING_METRICS, assert_states_equal, wait_for
from slurm_cluster import DevCluster
from slurm_runs import NUM_RANKS, SlurmRuns

from hpcdist.devcluster import argv, cluster, nodes, processes, system
from hpcdist.files.atomic import read_json


@dataclass(frozen=True)
class Subject:
    """A trainer that faults strike; further ones are further rows of the table."""

    name: str
    overrides: tuple[str, ...]  #: of a run that is held in its middle
    hold_at: int
    last_save: int  #: the checkpoint before that step
    interval: int  #: steps between two checkpoints
    last_step: int


#: 2 nodes with 2 ranks each.
DDP = Subject(
    name="ddp", overrides=tuple(HOLD_OVERRIDES), hold_at=HOLD_STEP, last_save=45, interval=20, last_step=LAST_STEP
)
SUBJECTS = (DDP,)


class FaultScene:
    """One fault and one trainer: the run that is struck, the run that was not, and the row of the table."""

    def __init__(self, runs: SlurmRuns, subject: Subject, control: str, cell: Cell) -> None:
        self.runs = runs
        self.cluster: DevCluster = runs.cluster
        self.subject = subject
        self.control = control
        self.cell = cell
        self.name = ""
        self.job = ""
        self._is_gated = False

    def submit(self, fault: str, *overrides: str) -> None:
        """Submit the run that the fault is to strike."""
        self.cell.fault = fault
        self.name = f"{self.subject.name}-{fault.replace(' ', '-').replace(',', '')}"
        self._is_gated = set(self.subject.overrides) <= set(overrides)
        self.job = self.runs.submit(self.name, *overrides)

    def submit_held(self, fault: str, *overrides: str) -> None:
        """The same, returning when all ranks are held at `subject.hold_at`."""
        self.submit(fault, *self.subject.overrides, *overrides)
        self.wait_until_held()

    def wait_until_held(self) -> list[int]:
        """Process ids of the ranks, once all are held."""
        return self.runs.wait_until_held(self.name, NUM_RANKS)

    def release(self) -> None:
        self.runs.release(self.name)

    def pid_of(self, rank: int) -> int:
        return int((self.runs.attempt(self.name).path / f"held-{rank}").read_text())

    def start_now(self) -> None:
        self.runs.start_now(self.job)

    def lives(self) -> int:
        """How often Slurm has started the job."""
        return int(self.cluster.job(self.job)["Restarts"]) + 1

    def kill_node(self, node: str) -> None:
        """A power cut, with the ranks released so that those that are left run into it."""
        nodes.kill_node(self.cluster.layout, node)
        assert processes.node_members(self.cluster.layout, self.cluster.settings)[node] == []
        self.release()

    def steps(self) -> str:
        """The job's steps that Slurm counts as running, with their names."""
        return self.cluster.run("squeue", "--steps", f"--jobs={self.job}", "--noheader", "--format=%i %j")

    def kill_stepd(self, node: str) -> None:
        """Kill the slurmstepd of the ranks on a node; it alone."""
        (number,) = [line.split()[0] for line in self.steps().splitlines() if "attempt-001" in line]
        step = f"slurmstepd: [{number}]".encode()
        members = processes.node_members(self.cluster.layout, self.cluster.settings)[node]
        (pid,) = [pid for pid in members if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(step)]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists(), "the slurmstepd to be gone")

    def _daemon(self, name: str) -> argv.Daemon:
        return next(d for d in argv.daemons(self.cluster.settings, self.cluster.layout) if d.name == name)

    def pid_of_daemon(self, name: str) -> int | None:
        return processes.pid_of(self.cluster.layout, self._daemon(name))

    def kill_daemon(self, name: str) -> int:
        """Kill a daemon of Slurm's alone; returns its process id."""
        pid = self.pid_of_daemon(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.pid_of_daemon(name) is None, f"{name} to be gone")
        return pid

    def start_daemon(self, name: str) -> None:
        """Start it again, and wait until it answers."""
        system.start(self.cluster.layout, self._daemon(name))
        wait_for(lambda: self.pid_of_daemon(name) is not None, f"{name} to run")
        if name == "slurmctld":
            ping = ["scontrol", "ping"]
            wait_for(lambda: system.succeeds(ping, env=cluster.client_env(self.cluster.layout)), f"{name} to answer")
        else:
            layout, node = self.cluster.layout, name.removeprefix("slurmd-")
            cluster.wait_for_node(self.cluster.settings, layout, node, self._daemon(name))

    def wait_second_life(self) -> None:
        """The job runs again, by whoever's decision; Slurm's own hold of it is cut short."""

        def runs_again() -> bool:
            facts = self.cluster.job(self.job)
            if facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime":
                self.start_now()
            return facts["JobState"] == "RUNNING" and int(facts["Restarts"]) > 0

        self.cluster.until(runs_again, f"job {self.job} runs again", within_s=150)

    def conclude(self, *, lost_at_most: int, sync: bool = True, timeout_s: float = 150) -> None:
        """Assert that the run has ended as the control did, on disk and in MLflow, and has left no process.

        Args:
            lost_at_most: steps that each of its attempts may have to do again.
            sync: ship what the job itself did not; with a server it has shipped all.
        """
        runs, cell, name = self.runs, self.cell, self.name
        state = runs.wait_end(name, self.job, timeout_s)
        cell.lives, cell.attempts, cell.restarts = self.lives(), state.attempt, state.restarts
        assert state.status == "finished", f"{state}\n{runs.job_log(name)}"
        assert self.cluster.job(self.job)["JobState"] == "COMPLETED"
        if sync:
            code, output = runs.command("sync", name)
            assert code == 0, output
        lost = [self._steps_done(number) - runs.resumed_at(name, number + 1) for number in range(1, state.attempt)]
        cell.steps_lost = sum(lost)
        assert all(0 <= steps <= lost_at_most for steps in lost), lost
        self._compare()
        runs.assert_no_process_left(name)

    def conclude_hard(self, timeout_s: float = 150) -> None:
        """A hard fault may cost what came after the last checkpoint, and this one did cost something."""
        self.conclude(lost_at_most=self.subject.interval, timeout_s=timeout_s)
        assert self.cell.steps_lost, "the fault cost nothing: did it strike?"

    def _steps_done(self, attempt: int) -> int:
        """The last step that an attempt is known to have done, by any rank."""
        folder = self.runs.attempt(self.name, attempt)
        beats = [(read_json(folder.beat(rank)) or {}).get("step", 0) for rank in range(NUM_RANKS)]
        held = [self.subject.hold_at] if self._is_gated and attempt == 1 and (folder.path / "held-0").exists() else []
        return int(max(beats + held))

    def _compare(self) -> None:
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
        """The reason for which the run waits again."""
        return self.runs.wait_status(self.name, "queued").reason

    def wait_step(self, step: int, timeout_s: float = 90) -> None:
        """Rank 0 of the first attempt has done so many steps."""
        beat = self.runs.attempt(self.name).beat(0)
        wait_for(lambda: int((read_json(beat) or {}).get("step", 0)) >= step, f"step {step}", timeout_s=timeout_s)
