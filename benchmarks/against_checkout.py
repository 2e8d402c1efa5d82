"""Throughput of shipped configs compared with another checkout, in alternating order: the cost of a change.

    python benchmarks/against_checkout.py OTHER_CHECKOUT [--rounds 5] [CONFIG METRIC STEPS ...]

OTHER_CHECKOUT has its own .venv. CONFIG may have settings, such as "rl_cartpole rl.mode=async". The result of a run is
the median of the metric without the first fifth of the points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

THIS_CHECKOUT = Path(__file__).resolve().parents[1]
CASES = [
    ("rl_cartpole", "train/env_steps_per_s", "400"),
    ("rnn_lm", "train/tokens_per_s", "400"),
    ("hybrid_clicks", "train/samples_per_s", "400"),
    ("pipeline_resnet50", "train/samples_per_s", "40"),
]


def throughput(checkout: Path, config: str, metric: str, steps: str) -> float:
    """Train a config in a checkout and return the median of the metric."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"runs_dir={folder}", "name=run", f"stop.max_steps={steps}", "stop.threshold=1e9"]
        settings += ["tracking.log_every_steps=10", "tracking.system_interval_s=0", "tracking.drain_timeout_s=1"]
        subprocess.run(
            [checkout / ".venv/bin/hpcdist", "run", *config.split(), *settings],
            cwd=checkout,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        (journal,) = Path(folder).glob("*/run/journal/attempt-001.rank-00000.jsonl")
        records = [json.loads(line) for line in journal.read_text().splitlines()]
    values = [record["m"][metric] for record in records if metric in record.get("m", {})]
    median: float = statistics.median(values[len(values) // 5 :])
    return median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, metavar="OTHER_CHECKOUT")
    parser.add_argument("case", nargs="*", metavar="CONFIG METRIC STEPS")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cases = [tuple(arguments.case[i : i + 3]) for i in range(0, len(arguments.case), 3)] or CASES
    for config, metric, steps in cases:
        ratios = []
        for number in range(arguments.rounds):
            order = (THIS_CHECKOUT, arguments.other) if number % 2 else (arguments.other, THIS_CHECKOUT)
            figures = {checkout: throughput(checkout, config, metric, steps) for checkout in order}
            ratios.append(figures[THIS_CHECKOUT] / figures[arguments.other])
            print(
                f"{config} {metric}: {figures[THIS_CHECKOUT]:.0f} here, {figures[arguments.other]:.0f} there",
                flush=True,
            )
        print(f"{config}: {statistics.median(ratios):.3f} of the other checkout (median of {arguments.rounds} rounds)")


if __name__ == "__main__":
    main()
