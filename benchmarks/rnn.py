"""Our parameter-server RNN against the tutorial's (`baselines/rnn.py`) and against one process without RPC.

    python benchmarks/rnn.py [--rounds 3] [--only ours,baseline] [--cases realistic,toy] [--json]

One server and one trainer process (or two trainers), one thread each; the same text, sizes and optimizer (SGD). Ours is
the real `hpcdist run` with metrics, progress and shipping. Contenders take turns; a round's figure is the rate over all
but the first third of the steps. Ratios are taken within a round; medians over rounds.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdist.launch.plan import processor_env
from hpcdist.tracking.journal import read_records

BASELINE = Path(__file__).parent / "baselines" / "rnn.py"
#: Readings of the clock: (steps done, unix time in s).
Readings = list[tuple[int, float]]


@dataclass(frozen=True)
class Case:
    """Sizes, and what is to be reached as a multiple of the baseline, by contender."""

    rnn: Mapping[str, Any]
    steps: int
    window: int
    goals: Mapping[str, float] = field(default_factory=dict)


CASES = {
    "realistic": Case(
        {"vocab_size": 10_000, "embedding": 200, "hidden": 200, "layers": 2, "batch_size": 20, "bptt": 35},
        steps=45,
        window=5,
        goals={"ours": 1.15},
    ),
    # The tutorial's own sizes.
    "toy": Case(
        {"vocab_size": 10, "embedding": 2, "hidden": 3, "layers": 4, "batch_size": 3, "bptt": 5},
        steps=600,
        window=50,
        goals={"ours": 1.4},
    ),
}
NAMES = {"realistic": "10,000 × 200, batch 20 × 35", "toy": "10 × 2, batch 3 × 5"}
MALLOC = {key: value for key, value in processor_env(1, use_gpus=False).items() if key.startswith("MALLOC_")}


def run_ours(trainers: int, *overrides: str) -> Callable[[Case, Path, Mapping[str, str]], Readings]:
    def run(case: Case, folder: Path, env: Mapping[str, str]) -> Readings:
        keys = {
            **{f"rnn.{key}": value for key, value in case.rnn.items()},
            "rnn.corpus_mb": 4.0,
            "rnn.sample_tokens": 0,
            "rnn.held_out": 0.01,
            "runs_dir": folder,
            "name": "ours",
            "roles.trainer": trainers,
            "optim.name": "sgd",
            "optim.momentum": 0,
            "optim.lr": 0.05,
            "optim.clip_norm": "null",
            "schedule.name": "constant",
            "stop.steps": case.steps,
            "tracking.log_every": case.window,
            "tracking.register_as": "null",
            "launch.device": "cpu",
            "launch.threads": 1,
        }
        command = [sys.executable, "-m", "hpcdist", "run", "rnn_lm"]
        _call([*command, *(f"{key}={value}" for key, value in keys.items()), *overrides], folder, env)
        records, _ = read_records(folder / "language" / "ours" / "journal" / "attempt-001.rank-00000.jsonl")
        return [(record.step, record.time_ms / 1000) for record in records if "train/loss" in record.metrics]

    return run


def run_baseline(*flags: str, **more: str) -> Callable[[Case, Path, Mapping[str, str]], Readings]:
    def run(case: Case, folder: Path, env: Mapping[str, str]) -> Readings:
        out = folder / "readings.json"
        sizes = json.dumps({**case.rnn, "corpus_mb": 4.0, "held_out": 0.01})
        steps = ["--steps", str(case.steps), "--window", str(case.window)]
        command = [sys.executable, str(BASELINE), "--rnn", sizes, *steps, "--out", str(out), *flags]
        _call(command, folder, {**env, "OMP_NUM_THREADS": "1", **more})
        return [(step, time) for step, time in json.loads(out.read_text())]

    return run


CONTENDERS = {
    "baseline": run_baseline(),
    "baseline, with our MALLOC_*": run_baseline(**MALLOC),
    "one process, no RPC": run_baseline("--local", **MALLOC),
    "ours": run_ours(1),
    "ours, async": run_ours(1, "rnn.mode=async"),
    "ours, 2 trainers": run_ours(2),
    "ours, 2 trainers, async": run_ours(2, "rnn.mode=async"),
}
BOUND = "one process, no RPC"


def _call(command: list[str], folder: Path, env: Mapping[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def tokens_per_s(name: str, case: Case, readings: Readings) -> float:
    steady = [(step, time) for step, time in readings if step >= case.steps / 3]
    (first_step, first), (last_step, last) = steady[0], steady[-1]
    trainers = 2 if "2 trainers" in name else 1
    return trainers * case.rnn["batch_size"] * case.rnn["bptt"] * (last_step - first_step) / (last - first)


def measure(name: str, case: Case, contenders: list[str], rounds: int) -> dict[str, list[float]]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HPCDIST_", "MALLOC_", "MLFLOW_"))}
    rates: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(rounds):
        for contender in contenders:
            folder = Path(tempfile.mkdtemp(prefix="rnn_"))
            try:
                rates[contender].append(tokens_per_s(contender, case, CONTENDERS[contender](case, folder, env)))
            finally:
                shutil.rmtree(folder)
        shown = "  ".join(f"{contender} {values[-1]:.0f}" for contender, values in rates.items())
        print(f"{name}, round {number + 1}, tokens/s: {shown}", file=sys.stderr, flush=True)
    return rates


def median_ratio(rates: list[float], base: list[float]) -> float:
    return statistics.median(rate / other for rate, other in zip(rates, base, strict=True))


def rows(name: str, case: Case, rates: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    base = rates["baseline"]
    bound = median_ratio(rates[BOUND], base) if BOUND in rates else None
    return [
        {
            "case": f"{NAMES[name]}: {contender}",
            "unit": "tokens/s",
            "baseline": statistics.median(base),
            "ours": statistics.median(values),
            "ratio": median_ratio(values, base),
            "bound": bound,
            "goal": case.goals.get(contender),
        }
        for contender, values in rates.items()
        if contender.startswith("ours")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders, separated by semicolons; the baseline always runs")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--json", action="store_true", help="print the figures as the last line")
    arguments = parser.parse_args()
    chosen = [name for name in CONTENDERS if not arguments.only or name in ("baseline", *arguments.only.split(";"))]
    table, raw = [], {}
    for name in arguments.cases.split(","):
        rates = measure(name, CASES[name], chosen, arguments.rounds)
        table += rows(name, CASES[name], rates)
        raw[name] = rates
        print(f"{NAMES[name]}{'tokens/s':>{50 - len(NAMES[name])}}   over baseline")
        for contender, values in rates.items():
            ratio = median_ratio(values, rates["baseline"])
            print(f"  {contender:36} {statistics.median(values):9.0f}   {ratio:.2f}")
    if arguments.json:
        print(json.dumps({"table": table, "tokens_per_s": raw}))


if __name__ == "__main__":
    main()
