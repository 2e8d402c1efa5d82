"""Environment steps per second of the RL trainer, learning included, and time to solve CartPole.

    python benchmarks/rl.py [--rounds 3] [--seconds 15] [--seeds 5] [--only "64 environments"] [--updates N] [--json]

Two observers and an agent on this machine, one thread each, compared with the program of the PyTorch
tutorial (examples/tutorials/rl_observers.py).
hpcdist is the real `hpcdist run rl_cartpole` with all features; the result is the number of transitions learned from
per second, without the first third of a run. The contenders alternate, ratios are computed within each round, and the
results are medians. The bound is the rate at which two processes step as many environments and do nothing else. The
baseline never solves the problem, so the duration of its runs is a lower limit of its time.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from harness import HPCDIST, TUTORIALS, argument_parser, call, clean_env, median_ratio, tutorial_env

from hpcdist.host.json_files import read_json_lines
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import Record, read_records
from hpcdist.trainers.rl.environments import Problem, make_environments

ENV = {**clean_env(), "OMP_NUM_THREADS": "1"}
THRESHOLD = 475.0
SOLVED_IN_S = 5.0
#: Overrides of `rl_cartpole`, environments per observer, and target as a multiple of the baseline.
CASES: dict[str, tuple[list[str], int, float | None]] = {
    "8 environments": (["rl.num_envs=8", "rl.num_rollout_steps=256", "stop.max_steps=150"], 8, 100.0),
    "64 environments": (["stop.max_steps=300"], 64, 250.0),
    "64 environments, async": (["rl.mode=async", "stop.max_steps=300"], 64, None),
}


def run_baseline(seconds: float) -> dict[str, float]:
    """Run the tutorial's program for some seconds; return its speed, and the best mean return that it has printed."""
    command = [sys.executable, "-W", "ignore", str(TUTORIALS / "rl_observers.py"), "--rounds", "1000000"]
    steps_per_s, best, began = 0.0, 0.0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=tutorial_env(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the program starts its ranks itself
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                printed = re.search(r"mean return ([\d.]+), (\d+) environment steps/s", line)
                if printed is None:
                    continue
                began = began or time.monotonic()
                best, steps_per_s = max(best, float(printed[1])), float(printed[2])
                if time.monotonic() - began >= seconds:
                    break
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not steps_per_s:
        sys.exit("the baseline ended without a result")
    return {"steps_per_s": steps_per_s, "best_mean_return": best}


def run_ours(*overrides: str) -> tuple[list[Record], float]:
    """Train; return the records of the agent, and the Unix time in s at which its training began."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(*HPCDIST, "run", "rl_cartpole", f"runs_dir={folder}", "name=ours"),
            *("launch.device=cpu", "launch.num_threads=1", "tracking.register_as=null"),
            *("tracking.drain_timeout_s=5", *overrides),  # the benchmark does not read from MLflow
        ]
        call(command, None, ENV)
        run = RunDir.open(Path(folder) / "cartpole" / "ours")
        (start,) = [phase for phase in read_json_lines(run.attempt(1).phases) if phase["cause"] == "start"]
        return read_records(run.journal / "attempt-001.rank-00000.jsonl")[0], start["ended"]


def steps_per_s(overrides: list[str]) -> float:
    records, _ = run_ours("stop.threshold=1000", "rl.updates_per_epoch=1000", "stop.max_epochs=9", *overrides)
    key = "train/env_steps"
    points = [(item.step, item.metrics[key], item.time_ms) for item in records if key in item.metrics]
    steady = [point for point in points if point[0] >= points[-1][0] / 3]
    (_, first_steps, first_ms), (_, last_steps, last_ms) = steady[0], steady[-1]
    return (last_steps - first_steps) / (last_ms - first_ms) * 1000


def solved_in_s(seed: int) -> float:
    """Return the seconds of training and evaluation until the mean return of 100 greedy episodes reaches 475."""
    records, began = run_ours(f"seed={seed}")
    last = [item for item in records if "eval/return" in item.metrics][-1]
    assert last.metrics["eval/return"] >= THRESHOLD, f"seed {seed} ended at {last.metrics}"
    return last.time_ms / 1000 - began


def step_alone(num_envs: int) -> float:
    """Return the environment steps per second of one process that only steps."""
    envs = make_environments(Problem.of("CartPole-v1"), num_envs, np.random.default_rng(0))
    actions = np.random.default_rng(0).integers(2, size=(20_000, num_envs))
    began = time.perf_counter()
    for chosen in actions:
        envs.step(chosen)
    return actions.size / (time.perf_counter() - began)


def bound(num_envs: int) -> float:
    """Return the environment steps per second of two such processes."""
    with get_context("spawn").Pool(2) as pool:
        return sum(pool.map(step_alone, [num_envs] * 2))


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of the baseline in each round")
    parser.add_argument("--seeds", type=int, default=5, help="number of runs until solved")
    parser.add_argument("--only", default="", help="name of a case")
    parser.add_argument("--updates", type=int, help="updates of each case instead of its own number")
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
        assert best < THRESHOLD, "the baseline has solved the problem: compare the times"
        for name, (overrides, num_envs, _) in cases.items():
            if arguments.updates is not None:
                overrides = [*overrides, f"stop.max_steps={arguments.updates}"]
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
            "ratio": median_ratio(ours[name], baseline),
            "bound": median_ratio(bounds[name], baseline),
            "goal": goal,
        }
        for name, (_, _, goal) in cases.items()
    ]
    print(f"best mean return of the baseline, a moving average, in {arguments.seconds:g} s: {best:.0f}")
    if arguments.seeds:
        times = [solved_in_s(seed) for seed in range(1, arguments.seeds + 1)]
        median = statistics.median(times)
        print(f"solved in {', '.join(f'{seconds:.2f}' for seconds in times)} s, median {median:.2f} s")
        baseline_limit = 60 / arguments.seconds
        table.append(
            {
                "case": f"CartPole-v1 solved, median of {arguments.seeds} seeds",
                "unit": "solved/min",
                "baseline": baseline_limit,
                "ours": 60 / median,
                "ratio": 60 / median / baseline_limit,
                "bound": None,
                "goal": 60 / SOLVED_IN_S / baseline_limit,
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
