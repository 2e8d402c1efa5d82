"""Processes of a run are killed at random moments: no run is lost, and the results are those of an undisturbed run."""

import random
import subprocess
import time
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hpcdist_runs import HPCDIST, Runs, assert_states_equal, rank_of, wait_for
from slurm_faults import Cell

from hpcdist.rank.processes import PARENT_MODULE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1500)]

NUM_KILLS = 25
#: Longest time between two kills, in seconds; a restart takes about one.
MOST_S = 2.5
#: Frequent checkpoints, and more steps than are done between two kills.
COMMON = [
    "checkpoint.every_steps=20",
    "tracking.log_every_steps=20",
    "launch.num_threads=1",
    "launch.max_restarts=1000",
]
#: 11 kB, 34 steps.
TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
CONFIGS = {
    "ddp": ["ddp_digits", "stop.max_epochs=10", "data.batch_size=16"],
    "hybrid": [
        *("hybrid_clicks", "experiment=digits", "hybrid.tables={user: 60, item: 30, tag: 5}"),
        *("hybrid.num_samples=12800", "hybrid.batch_size=128", "stop.max_epochs=10"),
    ],
    "lm": [  # on the same mesh, here two shards, a resume is bit-equal
        *("lm_small", "experiment=digits", f"lm.corpus.files=[{TEXT}]", "lm.corpus.tokenizer=byte"),
        *("lm.model={hidden_size: 32, num_heads: 2, num_layers: 1, intermediate_size: 48}", "lm.sequence_length=32"),
        *("lm.mesh.shard=2", "lm.eval_every_steps=null", "data.global_batch_size=10", "stop.max_epochs=99"),
        *("stop.max_steps=900", "launch.num_ranks=2"),
    ],
}
#: Victims and how often they are chosen.
VICTIMS = {"rank": 8, "parent of the ranks": 1, "supervisor": 1}


class KilledRun:
    """A run with a command that is started again whenever it ends early."""

    def __init__(self, runs: Runs, name: str, arguments: list[str], moments: random.Random) -> None:
        self.runs = runs
        self.name = name
        self.kills: Counter[str] = Counter()
        self.num_resumed = 0
        self._moments = moments
        self._log = runs.folder.parent / f"{name}.log"
        self._process = self._start("run", *arguments)
        wait_for(lambda: runs.attempt(name).path.exists() or self.has_ended(), "the first attempt")

    def _start(self, *arguments: str) -> psutil.Popen:
        with open(self._log, "ab") as output:
            return psutil.Popen(
                [str(HPCDIST), *arguments],
                cwd=self.runs.project,
                env=self.runs.env(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def has_ended(self) -> bool:
        """Return whether the training is finished; resume the run if its command has ended before."""
        code = self._process.poll()
        if code == 0:
            return True
        if code is not None:
            self.num_resumed += 1
            self._process = self._start("resume", self.name)
        return False

    def kill(self) -> None:
        """Kill a process of the run after a random time, unless the run ends before."""
        with suppress(psutil.TimeoutExpired):
            self._process.wait(self._moments.uniform(0.05, MOST_S))
        chosen, *_ = self._moments.choices(list(VICTIMS), list(VICTIMS.values()))
        number = self._moments.random()
        try:
            found = self._processes(chosen)
            if not found or self._process.poll() is not None:
                return
            ranks = self._processes("rank") + self._processes("parent of the ranks")
            found[int(number * len(found))].kill()
        except psutil.NoSuchProcess:
            return
        self.kills[chosen] += 1
        if chosen == "supervisor":
            # The shipper delivers the rest first, with the lowest priority.
            _, alive = psutil.wait_procs(ranks, timeout=240)
            assert not alive, f"ranks have outlived their supervisor: {alive}"

    def _processes(self, kind: str) -> list[psutil.Process]:
        if kind == "supervisor":
            return [self._process]
        found = []
        for each in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                is_rank = rank_of(each) is not None
                if is_rank if kind == "rank" else not is_rank and PARENT_MODULE in each.cmdline():
                    found.append(each)
        return found

    def wait(self) -> None:
        """Wait until the training is finished."""

        def is_finished() -> bool:
            with suppress(psutil.TimeoutExpired):
                self._process.wait(5)
            return self.has_ended()

        wait_for(is_finished, f"{self.name}: {self._log.read_text()[-2000:]}", timeout_s=600)

    def has_no_processes(self) -> bool:
        return not self.processes_left()

    def processes_left(self) -> list[list[str]]:
        """Return the command lines of processes that belong to the run's folder."""
        folder = str(self.runs.run_dir(self.name).path)
        found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [words for words in found if folder in " ".join(words)]


def results(runs: Runs, name: str) -> tuple[dict[str, Any], dict[tuple[str, int], float]]:
    """Return the last checkpoint with all shards, and the metrics of the training in MLflow, each point once."""
    code, output = runs.command("sync", name)
    assert code == 0, output
    folder = runs.run_dir(name).checkpoints / f"step-{runs.checkpoint_steps(name)[-1]:08d}"
    state = {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}
    points = runs.points(name)
    assert len({(key, step) for key, step, _ in points}) == len(points), "duplicate points in MLflow"
    kept = ("train/loss", "train/epoch", "eval/")
    return state, {(key, step): value for key, step, value in points if key.startswith(kept)}


@pytest.mark.parametrize("trainer", CONFIGS)
def test_run_survives_kills_at_random_moments(tmp_path: Path, empty_database: Path, cell: Cell, trainer: str) -> None:
    """A rank, the parent process that forks the ranks, or the supervisor; the run is resumed if its supervisor ends."""
    cell.fault, cell.trainer = f"SIGKILL at {NUM_KILLS} random moments", trainer
    runs = Runs(tmp_path, empty_database)
    config, *overrides = CONFIGS[trainer]

    def arguments(name: str) -> list[str]:
        data = f"data.root={tmp_path / 'data'}"
        return [config, *runs.config(name, *COMMON, data, *overrides)[1:]]

    code, output = runs.command("run", *arguments("control"))
    assert code == 0, output
    state, series = results(runs, "control")
    moments = random.Random(f"{trainer} 16")
    kills: Counter[str] = Counter()
    cell.attempts = cell.restarts = 0
    for number in count(1):
        began = time.monotonic()
        run = KilledRun(runs, f"killed-{number}", arguments(f"killed-{number}"), moments)
        while kills.total() + run.kills.total() < NUM_KILLS and not run.has_ended():
            run.kill()
        run.wait()
        kills += run.kills
        last = runs.run_dir(run.name).read_state()
        print(
            f"{run.name}: {dict(run.kills)}, {run.num_resumed} times resumed, {time.monotonic() - began:.0f} s, {last}"
        )
        assert last.status == "finished"
        cell.attempts, cell.restarts = cell.attempts + last.attempt, cell.restarts + last.restarts
        wait_for(run.has_no_processes, f"the processes of {run.name} to end", timeout_s=600)
        cell.weights, cell.points = "differ", "wrong"
        found_state, found_series = results(runs, run.name)
        assert_states_equal(found_state, state)
        cell.weights = "equal"
        assert found_series == series
        cell.points, cell.mlflow = "once", runs.mlflow_status(run.name)
        if kills.total() >= NUM_KILLS:
            break
    assert kills["rank"], "the moments are those of a start alone"
    assert cell.mlflow == "FINISHED"
