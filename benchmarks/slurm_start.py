"""Seconds from `hpcdist submit` to the first optimizer step, compared with sbatch and srun of the same script.

    python benchmarks/slurm_start.py [--rounds 7] [--nodes 2] [--tasks 1] [--no-warm-up] [--json]

Both submit from the same git repository to a dev cluster (`hpcdist devcluster`), which this script starts unless one is
running, and alternate on its empty queue. The time begins with the command and ends when rank 0 has done its first
step. For hpcdist it includes validation, the snapshot of the code, submitit, the preflight check of the nodes and the
supervisor. The ratio is computed within each round; the results are medians.

After the submission, `hpcdist submit` creates the MLflow run. On this machine, the import of MLflow takes cores from
the ranks, which a login node does not share. In the row `apart`, the command is stopped (SIGSTOP) from the submission
to the first step.

CPU time, which depends little on other load, is reported as well: of the submitting command (the import of MLflow
included), of the batch step and of the step of the ranks, from sacct.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from harness import BASELINES, HPCDIST, NO_WARM_UP, argument_parser, clean_env, commit_all, median_ratio, signal_tree

from hpcdist.devcluster import cluster, cluster_status
from hpcdist.devcluster.settings import Layout

STEP_WITHIN_S = 600.0
PARTS = ("command", "batch", "ranks")
#: Names of the step of the ranks: of a job of hpcdist, or of the command of a hand-written srun.
RANKS = {"ranks-001", "bash"}
_SUBMITTED = re.compile(r"job (\d+)")

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
    """Yield the variables of a running cluster; a cluster that was started here is stopped at the end."""
    layout = Layout()
    was_up = cluster_status.status(layout).is_up
    if not was_up:
        cluster.up(layout, {"num_nodes": num_nodes}, env={})
    try:
        yield cluster_status.client_env(layout)
    finally:
        if not was_up:
            cluster.down(layout)


def make_project(folder: Path, out: Path, *, nodes: int, tasks: int) -> None:
    """Create a user's repository: the script, its config and a hand-written batch script, committed."""
    shutil.copy(BASELINES / "first_step.py", folder)
    (folder / "config.yaml").write_text(CONFIG.format(out=out))
    by_hand = HAND_WRITTEN.format(nodes=nodes, tasks=tasks, folder=folder.parent, python=sys.executable, out=out)
    (folder / "job.sh").write_text(by_hand)
    commit_all(folder)


def until_first_step(
    command: list[str], project: Path, out: Path, env: Mapping[str, str], *, apart: bool
) -> dict[str, float]:
    """Return the seconds to the first step (`s`) and the CPU seconds of PARTS, as soon as the queue is empty.

    Args:
        apart: whether to stop the command from the submission to the first step.
    """
    out.unlink(missing_ok=True)
    before = cpu_of_children()
    with open(project.parent / "command.log", "w+") as log:
        began = time.time()
        process = subprocess.Popen(command, cwd=project, env=env, stdout=log, stderr=log)
        is_stopped = False
        try:
            while not out.exists():
                if time.time() > began + STEP_WITHIN_S:
                    text = "".join(path.read_text() for path in [Path(log.name), *project.parent.rglob("*.out")])
                    sys.exit(f"{' '.join(command)}: no step in {STEP_WITHIN_S:g} s\n{text[-4000:]}")
                if apart and not is_stopped and _SUBMITTED.search(Path(log.name).read_text()):
                    signal_tree(process.pid, signal.SIGSTOP)
                    is_stopped = True
                time.sleep(0.01)
        finally:
            if is_stopped:
                signal_tree(process.pid, signal.SIGCONT)
        seconds = float(out.read_text()) - began
        process.wait()
        log.seek(0)
        job = _SUBMITTED.search(log.read())
    assert job is not None
    command_s = cpu_of_children() - before
    while output_of("squeue", "--noheader", env=env):
        time.sleep(0.1)
    return {"s": seconds, "command": command_s, **cpu_of_job(job[1], env)}


def cpu_of_children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cpu_of_job(job: str, env: Mapping[str, str]) -> dict[str, float]:
    """Return the CPU seconds of a job's batch step and of the step of its ranks, once sacct lists them."""
    for _ in range(300):
        listing = output_of(
            "sacct", "--noheader", "--parsable2", f"--jobs={job}", "--format=JobName,End,TotalCPU", env=env
        )
        steps = {name: cpu for name, end, cpu in map(sacct_fields, listing.splitlines()) if end != "Unknown"}
        if "batch" in steps and (ranks := RANKS & steps.keys()):
            return {"batch": steps["batch"], "ranks": steps[ranks.pop()]}
        time.sleep(0.1)
    sys.exit(f"sacct does not list job {job}:\n{listing}")


def sacct_fields(line: str) -> tuple[str, str, float]:
    """Return the name of a job or step, its end, and CPU seconds (from `01:02.345` or `1-02:03:04`)."""
    name, end, cpu = line.split("|")
    days, _, clock = cpu.rpartition("-")
    seconds = 86400.0 * int(days or 0)
    for power, part in enumerate(reversed(clock.split(":"))):
        seconds += 60**power * float(part)
    return name, end, seconds


def output_of(*command: str, env: Mapping[str, str]) -> str:
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def show(rounds: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Print a line per command and return the medians."""
    print(f"{'':22}{'s':>8}{'min':>8}{'max':>8}{'over':>8}    CPU s:" + "".join(f"{part:>9}" for part in PARTS))
    rows = {}
    for key, values in rounds.items():
        times = [value["s"] for value in values]
        over = median_ratio(times, [value["s"] for value in rounds["sbatch + srun"]])
        cpu = {part: statistics.median(value[part] for value in values) for part in PARTS}
        rows[key] = {"s": statistics.median(times), "over": over, **cpu}
        print(
            f"{key:22}{rows[key]['s']:8.3f}{min(times):8.3f}{max(times):8.3f}{over:8.3f}          "
            + "".join(f"{seconds:9.3f}" for seconds in cpu.values())
        )
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=7)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tasks", type=int, default=1, help="per node")
    parser.add_argument("--no-warm-up", action="store_true", help=NO_WARM_UP)
    arguments = parser.parse_args()

    # The upload of the last submission may still write there at the end.
    place = tempfile.TemporaryDirectory(prefix="slurm_start_", ignore_cleanup_errors=True)
    with place as name, dev_cluster(arguments.nodes) as client:
        # Unbuffered, so that the output shows the submission.
        env = {**clean_env("SLURM_", "SBATCH_"), **client, "PYTHONUNBUFFERED": "1"}
        project, out = Path(name) / "project", Path(name) / "first_step.txt"
        project.mkdir()
        make_project(project, out, nodes=arguments.nodes, tasks=arguments.tasks)
        shape = [f"cluster.nodes={arguments.nodes}", f"cluster.tasks_per_node={arguments.tasks}"]
        # The nodes of a dev cluster see this machine's /tmp.
        flags = ["--cluster", "devcluster", "--force"]
        submit = [*HPCDIST, "submit", "config.yaml", *flags, *shape, f"runs_dir={name}/runs"]
        commands = {"sbatch + srun": ["sbatch", "job.sh"], "hpcdist submit": submit, "hpcdist submit, apart": submit}
        rounds: dict[str, list[dict[str, float]]] = {key: [] for key in commands}
        # A first round, which fills the page cache and creates MLflow's database, does not count.
        warm_ups = 0 if arguments.no_warm_up else 1
        for number in range(warm_ups + arguments.rounds):
            for key, values in rounds.items():
                measured = until_first_step(commands[key], project, out, env, apart=key.endswith("apart"))
                if number >= warm_ups:
                    values.append(measured)

    print(f"{arguments.nodes} nodes × {arguments.tasks} gloo ranks, median of {arguments.rounds} rounds\n")
    rows = show(rounds)
    if arguments.json:
        print(json.dumps({"benchmark": "slurm_start", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
