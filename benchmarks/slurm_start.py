"""Seconds from `hpcdist submit` to the first optimizer step, over a hand-written sbatch + srun of the same script.

    python benchmarks/slurm_start.py [--rounds 7] [--nodes 2] [--tasks 1] [--json]

Both submit from the same git repository to a dev cluster (`hpcdist devcluster`), which is brought up here unless one
is up, and take turns on its empty queue. The clock runs from the start of the command until rank 0 has done its step.
With hpcdist this takes in the checks before, the snapshot of the code, submitit, the supervisor and the MLflow run.
The ratio is taken within a round; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpcdist.devcluster import cluster
from hpcdist.devcluster.settings import Layout

SCRIPT = Path(__file__).parent / "baselines" / "first_step.py"
HPCDIST = [sys.executable, "-m", "hpcdist"]
STEP_WITHIN_S = 120.0

HAND_WRITTEN = """\
#!/bin/bash
#SBATCH --job-name=by-hand
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --cpus-per-task=1
#SBATCH --time=30
#SBATCH --partition=main
#SBATCH --output={folder}/by-hand-%j.out
export OMP_NUM_THREADS=1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --cpus-per-task=1 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \\
  exec {python} first_step.py {out}'
"""
CONFIG = """\
experiment: start
trainer: {{script: [first_step.py, {out}]}}
launch: {{device: cpu, threads: 1}}
"""


@contextmanager
def dev_cluster(num_nodes: int) -> Iterator[dict[str, str]]:
    """Variables that lead to a cluster; one that was brought up here is taken down again."""
    layout = Layout()
    was_up = cluster.status(layout).is_up
    if not was_up:
        cluster.up(layout, {"num_nodes": num_nodes}, env={})
    try:
        yield cluster.client_env(layout)
    finally:
        if not was_up:
            cluster.down(layout)


def make_project(folder: Path, out: Path, *, nodes: int, tasks: int) -> None:
    """A user's repository: the script, its config and a batch script by hand, committed."""
    shutil.copy(SCRIPT, folder)
    (folder / "config.yaml").write_text(CONFIG.format(out=out))
    by_hand = HAND_WRITTEN.format(nodes=nodes, tasks=tasks, folder=folder.parent, python=sys.executable, out=out)
    (folder / "job.sh").write_text(by_hand)
    identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def until_first_step(command: list[str], project: Path, out: Path, env: Mapping[str, str]) -> float:
    """Seconds from the command to the first step; returns when the queue is empty again."""
    out.unlink(missing_ok=True)
    with open(project.parent / "commands.log", "a") as log:
        began = time.time()
        process = subprocess.Popen(command, cwd=project, env=env, stdout=log, stderr=log)
        while not out.exists():
            if time.time() > began + STEP_WITHIN_S:
                text = "".join(path.read_text() for path in project.parent.rglob("*.out"))
                sys.exit(f"{' '.join(command)}: no step in {STEP_WITHIN_S:g} s\n{text[-4000:]}")
            time.sleep(0.01)
        seconds = float(out.read_text()) - began
        process.wait()
    while subprocess.run(["squeue", "--noheader"], env=env, capture_output=True, text=True, check=True).stdout:
        time.sleep(0.1)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=1, help="per node")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()

    own = ("HPCDIST_", "MLFLOW_", "OMP_", "MALLOC_", "SLURM_", "SBATCH_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    with tempfile.TemporaryDirectory(prefix="slurm_start_") as name, dev_cluster(arguments.nodes) as client:
        env |= client
        project, out = Path(name) / "project", Path(name) / "first_step.txt"
        project.mkdir()
        make_project(project, out, nodes=arguments.nodes, tasks=arguments.tasks)
        shape = [f"cluster.nodes={arguments.nodes}", f"cluster.tasks_per_node={arguments.tasks}"]
        submit = [*HPCDIST, "submit", "config.yaml", "--cluster", "devcluster", *shape, f"runs_dir={name}/runs"]
        commands = {"sbatch + srun": ["sbatch", "job.sh"], "hpcdist submit": submit}
        times: dict[str, list[float]] = {key: [] for key in commands}
        # The first round fills the page cache, writes byte code and makes MLflow's database.
        for number in range(arguments.rounds + 1):
            for key, values in times.items():
                seconds = until_first_step(commands[key], project, out, env)
                if number > 0:
                    values.append(seconds)

    print(f"{arguments.nodes} nodes × {arguments.tasks} gloo ranks, median of {arguments.rounds} rounds\n")
    print(f"{'':24}{'s':>8}{'min':>8}{'max':>8}  over sbatch + srun")
    rows = {}
    for key, values in times.items():
        pairs = zip(values, times["sbatch + srun"], strict=True)
        rows[key] = {"s": statistics.median(values), "over": statistics.median(ours / other for ours, other in pairs)}
        print(f"{key:24}{rows[key]['s']:8.3f}{min(values):8.3f}{max(values):8.3f}  {rows[key]['over']:.3f}")
    if arguments.json:
        print(json.dumps({"benchmark": "slurm_start", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
