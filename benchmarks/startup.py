"""Seconds from the command to the first all-reduce of 2 ranks, and how long small commands take.

    python benchmarks/startup.py [--rounds 7] [--json]

`hpcdist run` with a trainer, and with the unchanged bare script, against `torchrun` of that script: all start in a
small git repository, take turns, and count until rank 0 has the sum. Shipping to MLflow, heartbeats, logs and the
snapshot of the code are on. The ratio is taken within a round; medians over rounds.
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
from collections.abc import Callable, Mapping
from pathlib import Path

BASELINES = Path(__file__).parent / "baselines"
HPCDIST = [sys.executable, "-m", "hpcdist"]
NUM_RANKS = 2

TRAINER_CONFIG = """\
experiment: startup
trainer: first_all_reduce_trainer:train
launch: {device: cpu, num_ranks: 2, num_threads: 1}
"""
SCRIPT_CONFIG = """\
experiment: startup
trainer: {script: [first_all_reduce.py]}
launch: {device: cpu, num_ranks: 2, num_threads: 1}
"""


def make_project(folder: Path) -> None:
    """A user's repository: the two programs and their configs, committed."""
    for name in ("first_all_reduce.py", "first_all_reduce_trainer.py"):
        shutil.copy(BASELINES / name, folder)
    (folder / "trainer.yaml").write_text(TRAINER_CONFIG)
    (folder / "script.yaml").write_text(SCRIPT_CONFIG)
    identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def call(command: list[str], folder: Path, env: Mapping[str, str]) -> float:
    """Run a command to its end; the time at which it was started."""
    began = time.time()
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return began


def contenders(project: Path, runs: Path, out: Path) -> dict[str, Callable[[Mapping[str, str]], float]]:
    """What to measure: each returns its seconds."""

    def until_sum(command: list[str]) -> Callable[[Mapping[str, str]], float]:
        def measure(env: Mapping[str, str]) -> float:
            out.unlink(missing_ok=True)
            began = call(command, project, env)
            return float(out.read_text()) - began

        return measure

    def whole(command: list[str]) -> Callable[[Mapping[str, str]], float]:
        def measure(env: Mapping[str, str]) -> float:
            began = call(command, project, env)
            return time.time() - began

        return measure

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)]
    run = [*HPCDIST, "run"]
    return {
        "torchrun": until_sum([*torchrun, "first_all_reduce.py", str(out)]),
        "hpcdist run, trainer": until_sum([*run, "trainer.yaml", f"runs_dir={runs}", f"params.out={out}"]),
        "hpcdist run, script": until_sum(
            [*run, "script.yaml", f"runs_dir={runs}", f"trainer.script=[first_all_reduce.py,{out}]"]
        ),
        "hpcdist --help": whole([*HPCDIST, "--help"]),
        "hpcdist config": whole([*HPCDIST, "config", "ddp_digits"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="contenders whose names contain this")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()

    own = ("HPCDIST_", "MLFLOW_", "OMP_", "MALLOC_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    env |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="startup_") as name:
        project, runs = Path(name) / "project", Path(name) / "runs"
        project.mkdir()
        make_project(project)
        measures = contenders(project, runs, Path(name) / "sum.txt")
        times: dict[str, list[float]] = {key: [] for key in measures if arguments.only in key or key == "torchrun"}
        # The first round fills the page cache and writes byte code.
        for number in range(arguments.rounds + 1):
            for key, values in times.items():
                seconds = measures[key](env)
                if number > 0:
                    values.append(seconds)

    print(f"{NUM_RANKS} gloo ranks, median of {arguments.rounds} rounds\n")
    print(f"{'':24}{'s':>8}{'min':>8}{'max':>8}  over torchrun")
    rows = {}
    for key, values in times.items():
        over = statistics.median(value / other for value, other in zip(values, times["torchrun"], strict=True))
        rows[key] = {"s": statistics.median(values), "over_torchrun": over}
        print(f"{key:24}{rows[key]['s']:8.3f}{min(values):8.3f}{max(values):8.3f}  {over:.3f}")
    if arguments.json:
        print(json.dumps({"benchmark": "startup", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
