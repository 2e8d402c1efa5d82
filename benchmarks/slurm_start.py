"""Seconds from `hpcdist submit` to the first optimizer step, over a hand-written sbatch + srun of the same script.

    python benchmarks/slurm_start.py [--rounds 7] [--nodes 2] [--tasks 1] [--json]

Both submit from the same git repository to a dev cluster (`hpcdist devcluster`), which is brought up here unless one
is up, and take turns on its empty queue. The clock runs from the start of the command until rank 0 has done its step.
With hpcdist this takes in the checks before, the snapshot of the code, submitit, the supervisor and the MLflow run.
The ratio is taken within a round; medians over rounds.

Beside the seconds stands the processor time of all processes, to their ends, which neighbours hardly move: of the
command that submits (MLflow's import at low priority included), of the batch step and of the ranks' step, by sacct.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
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
PARTS = ("command", "batch", "ranks")

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
launch: {{device: cpu, num_threads: 1}}
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


def until_first_step(command: list[str], project: Path, out: Path, env: Mapping[str, str]) -> dict[str, float]:
    """Seconds from the command to the first step (`s`), and of CPU time by PARTS; returns when the queue is empty."""
    out.unlink(missing_ok=True)
    before = cpu_of_children()
    with open(project.parent / "command.log", "w+") as log:
        began = time.time()
        process = subprocess.Popen(command, cwd=project, env=env, stdout=log, stderr=log)
        while not out.exists():
            if time.time() > began + STEP_WITHIN_S:
                text = "".join(path.read_text() for path in [Path(log.name), *project.parent.rglob("*.out")])
                sys.exit(f"{' '.join(command)}: no step in {STEP_WITHIN_S:g} s\n{text[-4000:]}")
            time.sleep(0.01)
        seconds = float(out.read_text()) - began
        process.wait()
        log.seek(0)
        job = re.search(r"job (\d+)", log.read())
    assert job is not None
    of_command = cpu_of_children() - before
    while ask("squeue", "--noheader", env=env):
        time.sleep(0.1)
    return {"s": seconds, "command": of_command, **cpu_of_job(job[1], env)}


def cpu_of_children() -> float:
    """CPU seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of_job(job: str, env: Mapping[str, str]) -> dict[str, float]:
    """CPU seconds of a job's batch step and of its ranks' step, as soon as accounting has them."""
    for _ in range(300):
        listing = ask("sacct", "--noheader", "--parsable2", f"--jobs={job}", "--format=JobID,End,TotalCPU", env=env)
        steps = {name: cpu for name, end, cpu in map(sacct_fields, listing.splitlines()) if end != "Unknown"}
        if {job, f"{job}.batch", f"{job}.0"} <= steps.keys():
            return {"batch": steps[f"{job}.batch"], "ranks": steps[f"{job}.0"]}
        time.sleep(0.1)
    sys.exit(f"sacct knows nothing of job {job}:\n{listing}")


def sacct_fields(line: str) -> tuple[str, str, float]:
    """Job or step, its end, and CPU seconds (`01:02.345`, `1-02:03:04`)."""
    name, end, cpu = line.split("|")
    days, _, clock = cpu.rpartition("-")
    seconds = 86400.0 * int(days or 0)
    for power, part in enumerate(reversed(clock.split(":"))):
        seconds += 60**power * float(part)
    return name, end, seconds


def ask(*command: str, env: Mapping[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def show(rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print a line for each way to submit; returns the medians, by way."""
    print(f"{'':16}{'s':>8}{'min':>8}{'max':>8}{'over':>8}    CPU s:" + "".join(f"{part:>9}" for part in PARTS))
    rows = {}
    for key, values in rounds.items():
        times = [value["s"] for value in values]
        over = statistics.median(
            ours["s"] / by_hand["s"] for ours, by_hand in zip(values, rounds["sbatch + srun"], strict=True)
        )
        cpu = {part: statistics.median(value[part] for value in values) for part in PARTS}
        rows[key] = {"s": statistics.median(times), "over": over, **cpu}
        print(
            f"{key:16}{rows[key]['s']:8.3f}{min(times):8.3f}{max(times):8.3f}{over:8.3f}          "
            + "".join(f"{seconds:9.3f}" for seconds in cpu.values())
        )
    return rows


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
        rounds: dict[str, list[dict[str, float]]] = {key: [] for key in commands}
        # The first round fills the page cache, writes byte code and makes MLflow's database.
        for number in range(arguments.rounds + 1):
            for key, values in rounds.items():
                measured = until_first_step(commands[key], project, out, env)
                if number > 0:
                    values.append(measured)

    print(f"{arguments.nodes} nodes × {arguments.tasks} gloo ranks, median of {arguments.rounds} rounds\n")
    rows = show(rounds)
    if arguments.json:
        print(json.dumps({"benchmark": "slurm_start", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
