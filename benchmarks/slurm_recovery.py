"""Seconds from SIGKILL of a rank to the next completed step in a Slurm job, by default and with `launch.fork=false`.

    python benchmarks/slurm_recovery.py [--rounds 3] [--kills 3] [--nodes 2] [--tasks 2] [--json] [KEY=VALUE …]

As `recovery.py`, with the same model, in a job on a dev cluster, which this script starts unless one is running. A rank
of each node is killed in turn. The preflight is off, the contenders alternate, and the results are medians of the
rounds, whose results are the medians of their kills. `processes` contains the end of the failed step and the start of
the next one. Further settings of the runs, such as those of a container, follow the options.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baselines.fault_task import Task
from fault_runs import MAX_RESTARTS, MarkReader, Running, data_settings
from harness import BASELINES, HPCDIST, argument_parser, clean_env, commit_all, median
from recovery import (
    LIMIT_S,
    SAVE_EVERY,
    STEPS_BETWEEN,
    has_reached,
    kill_and_measure,
    print_rows,
    restored_at,
)
from slurm_start import dev_cluster, output_of

CONTENDERS = {"each rank imports": "false", "forked": "true"}
CONFIG = """\
experiment: faults
trainer: fault_trainer:train
launch: {{device: cpu, num_threads: 1, max_restarts: {max_restarts}}}
preflight: off
"""


@dataclass(frozen=True)
class SlurmRun(Running):
    """A run in a job of the dev cluster."""

    job: str
    env: Mapping[str, str]

    def require_alive(self) -> None:
        """End the benchmark if the job has ended."""
        if not output_of("squeue", "--noheader", f"--jobs={self.job}", env=self.env):
            text = "".join(path.read_text() for path in Path(self.task.folder).rglob("submitit/*.out"))
            sys.exit(f"job {self.job} has ended:\n{text[-4000:]}")


@contextmanager
def submitted(task: Task, fork: str, shape: list[str], env: Mapping[str, str]) -> Iterator[SlurmRun]:
    """Submit the task from a new repository beside its folder; cancel the job at the end of the block."""
    folder = Path(task.folder)
    project = folder / "project"
    project.mkdir(parents=True)
    for name in ("fault_task.py", "fault_training.py", "fault_trainer.py"):
        shutil.copy(BASELINES / name, project)
    (project / "config.yaml").write_text(CONFIG.format(max_restarts=MAX_RESTARTS))
    commit_all(project)
    settings = [f"runs_dir={folder}/runs", "name=ours", f"params.task={task.write()}", f"launch.fork={fork}", *shape]
    # The nodes of a dev cluster see this machine's /tmp.
    command = [*HPCDIST, "submit", "config.yaml", "--cluster", "devcluster", "--force", *settings]
    log = folder / "output.log"
    with open(log, "w") as file:
        process = subprocess.Popen(
            [*command, f"checkpoint.every_steps={task.save_every}"], cwd=project, env=env, stdout=file, stderr=file
        )
        if process.wait() != 0:
            sys.exit(log.read_text())
    job = re.search(r"job (\d+)", log.read_text())
    assert job is not None
    try:
        yield SlurmRun(process, time.time(), MarkReader(folder / "marks.jsonl"), log, task, job[1], env)
    finally:
        subprocess.run(["scancel", job[1]], env=env, check=True)
        while output_of("squeue", "--noheader", env=env):
            time.sleep(0.1)


def measure_round(fork: str, shape: list[str], num_kills: int, env: Mapping[str, str]) -> dict[str, float]:
    """Submit a run and kill its ranks; return the medians."""
    folder = Path(tempfile.mkdtemp(prefix="slurm_recovery_"))
    task = Task(folder=str(folder), model="mlp", steps=10**6, save_every=SAVE_EVERY, **data_settings())
    measured: list[dict[str, float]] = []
    try:
        with submitted(task, fork, shape, env) as running:
            for number in range(num_kills):
                first = restored_at(running)
                if not running.wait_for(partial(has_reached, first + STEPS_BETWEEN), LIMIT_S):
                    sys.exit(f"{STEPS_BETWEEN} steps took more than {LIMIT_S:g} s")
                ranks = running.reader.newest_ranks()
                measured.append(kill_and_measure(running, sorted(ranks)[-1 if number % 2 else 0]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {part: median([one[part] for one in measured]) for part in measured[0]}


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--kills", type=int, default=3, help="per contender and round")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=2, help="ranks per node")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    shape = [f"cluster.nodes={arguments.nodes}", f"cluster.tasks_per_node={arguments.tasks}", *arguments.settings]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    with dev_cluster(arguments.nodes) as cluster_env:
        env = {**clean_env(), **cluster_env, "OMP_NUM_THREADS": "1"}
        for number in range(arguments.rounds):
            for name, fork in CONTENDERS.items():
                results[name].append(measure_round(fork, shape, arguments.kills, env))
                shown = "  ".join(f"{part} {seconds:.2f}" for part, seconds in results[name][-1].items())
                print(f"round {number + 1}, {name}: {shown}", file=sys.stderr, flush=True)

    print(f"{arguments.nodes} nodes with {arguments.tasks} ranks, medians of {arguments.rounds} rounds; seconds\n")
    rows = print_rows(results)
    if arguments.json:
        print(json.dumps({"benchmark": "slurm_recovery", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
