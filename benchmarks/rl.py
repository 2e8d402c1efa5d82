"""Environment steps a second of our RL trainer against the tutorial's, learning included; how soon CartPole is solved.

    python benchmarks/rl.py [--rounds 3] [--seconds 15] [--seeds 5] [--only "64 environments"] [--json]

Two observers and an agent on this machine, one thread each. Ours is the real `hpcdist run rl_cartpole` with
everything on; what counts are transitions learnt from, over all but the first third of a run. Contenders take turns,
ratios are taken within a round, medians over rounds. The bound is stepping as many environments and doing nothing
else, in two processes at once. The baseline's time to solve is bounded by how long it was run: it never got there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from hpcdist.tracking.journal_reader import Record, read_records
from hpcdist.trainers.rl.environments import Problem, make_environments

BASELINE = Path(__file__).parent / "baselines" / "rl.py"
THRESHOLD = 475.0
SOLVED_IN_S = 5.0
#: What is overridden in `rl_cartpole`, environments per observer, and times the baseline to reach.
CASES: dict[str, tuple[list[str], int, float | None]] = {
    "8 environments": (["rl.num_envs=8", "rl.num_rollout_steps=256", "stop.max_steps=150"], 8, 100.0),
    "64 environments": (["stop.max_steps=300"], 64, 250.0),
    "64 environments, async": (["rl.mode=async", "stop.max_steps=300"], 64, None),
    "64 environments, remote inference": (["rl.inference=remote", "stop.max_steps=20"], 64, None),
}


def call(command: list[str]) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HPCDIST_", "MLFLOW_", "MALLOC_"))}
    done = subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def run_baseline(seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(call([sys.executable, str(BASELINE), str(seconds)]).splitlines()[-1])
    return result


def run_ours(*overrides: str) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        call(
            [
                *(sys.executable, "-m", "hpcdist", "run", "rl_cartpole", f"runs_dir={folder}", "name=ours"),
                *("launch.device=cpu", "launch.num_threads=1", "rl.record_episode=false", "tracking.register_as=null"),
                *("tracking.drain_timeout_s=5", *overrides),  # what MLflow has at the end is of no interest here
            ]
        )
        return read_records(Path(folder) / "cartpole" / "ours" / "journal" / "attempt-001.rank-00000.jsonl")[0]


def steps_per_s(overrides: list[str]) -> float:
    records = run_ours("stop.threshold=1000", "rl.updates_per_epoch=1000", "stop.max_epochs=9", *overrides)
    key = "train/env_steps"
    points = [(item.step, item.metrics[key], item.time_ms) for item in records if key in item.metrics]
    steady = [point for point in points if point[0] >= points[-1][0] / 3]
    (_, first_steps, first_ms), (_, last_steps, last_ms) = steady[0], steady[-1]
    return (last_steps - first_steps) / (last_ms - first_ms) * 1000


def solved_in_s(seed: int) -> float:
    """Seconds of training and evaluation until the mean of 100 greedy episodes was 475 or more."""
    evaluations = [item.metrics for item in run_ours(f"seed={seed}") if "eval/return" in item.metrics]
    assert evaluations[-1]["eval/return"] >= THRESHOLD, f"seed {seed} ended at {evaluations[-1]}"
    return evaluations[-1]["eval/after_s"]


def step_alone(num_envs: int) -> float:
    """Environment steps a second of one process that only steps."""
    envs = make_environments(Problem.of("CartPole-v1", {}), num_envs, np.random.default_rng(0))
    actions = np.random.default_rng(0).integers(2, size=(20_000, num_envs))
    began = time.perf_counter()
    for chosen in actions:
        envs.step(chosen)
    return actions.size / (time.perf_counter() - began)


def bound(num_envs: int) -> float:
    with get_context("spawn").Pool(2) as pool:
        return sum(pool.map(step_alone, [num_envs] * 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of the baseline, a round")
    parser.add_argument("--seeds", type=int, default=5, help="runs until solved")
    parser.add_argument("--only", default="", help="a case's name")
    parser.add_argument("--json", action="store_true", help="print JSON as the last line")
    arguments = parser.parse_args()
    cases = {name: case for name, case in CASES.items() if arguments.only in ("", name)}
    baseline: list[float] = []
    ours: dict[str, list[float]] = {name: [] for name in cases}
    bounds: dict[str, list[float]] = {name: [] for name in cases}
    best = 0.0
    for number in range(arguments.rounds):
        result = run_baseline(arguments.seconds)
        baseline.append(result["steps_per_s"])
        best = max(best, result["best_mean_return"])
        assert result["solved_s"] is None, "the baseline has solved it: compare the times"
        for name, (overrides, num_envs, _) in cases.items():
            ours[name].append(steps_per_s(overrides))
            bounds[name].append(bound(num_envs))
        shown = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in ours.items())
        load = os.getloadavg()[0]
        print(f"round {number + 1}: baseline {baseline[-1]:,.0f} steps/s, {shown}, load {load:.1f}", flush=True)
    table: list[dict[str, Any]] = [
        {
            "case": name,
            "unit": "steps/s",
            "baseline": statistics.median(baseline),
            "ours": statistics.median(ours[name]),
            "ratio": statistics.median(a / b for a, b in zip(ours[name], baseline, strict=True)),
            "bound": statistics.median(a / b for a, b in zip(bounds[name], baseline, strict=True)),
            "goal": goal,
        }
        for name, (_, _, goal) in cases.items()
    ]
    print(f"best mean return over 100 episodes of the baseline in {arguments.seconds:g} s: {best:.0f}")
    if arguments.seeds:
        times = [solved_in_s(seed) for seed in range(1, arguments.seeds + 1)]
        median = statistics.median(times)
        print(f"solved by ours in {', '.join(f'{seconds:.2f}' for seconds in times)} s, median {median:.2f} s")
        at_most = 60 / arguments.seconds
        table.append(
            {
                "case": f"CartPole-v1 solved, median of {arguments.seeds} seeds",
                "unit": "solved/min",
                "baseline": at_most,
                "ours": 60 / median,
                "ratio": 60 / median / at_most,
                "bound": None,
                "goal": 60 / SOLVED_IN_S / at_most,
            }
        )
    for row in table:
        goal, limit = (f"{row[key]:.4g}x" if row[key] is not None else "-" for key in ("goal", "bound"))
        figures = f"{row['baseline']:>9,.1f} {row['ours']:>11,.1f} {row['unit']:<10} {row['ratio']:>6.4g}x"
        print(f"{row['case']:<42} {figures}  bound {limit}  goal {goal}")
    if arguments.json:
        print(json.dumps({"table": table, "baseline": baseline, "ours": ours}))


if __name__ == "__main__":
    main()
