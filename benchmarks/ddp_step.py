"""A training step of our DDP trainer against a bare DDP loop, Accelerate and Lightning.

    python benchmarks/ddp_step.py [--rounds 5] [--batch-sizes 8 64] [--only ours,bare] [--json]

Two gloo ranks on this machine, one thread each, `simple_cnn`, Adam, the same training set: MNIST under
$HPCDIST_DATA_DIR, or synthetic images of its size where that is not set. Ours is the real `hpcdist run` with
everything on: progress, metrics every 50 steps, system metrics every 2 s, checkpoints, shipping to sqlite while it
trains. Contenders take turns; a round's figure is the mean step over all but its first third (when processes, caches
and allocators settle), checkpoints included. Ratios are taken within a round; medians over rounds.
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
from dataclasses import dataclass
from pathlib import Path

from hpcdist.supervisor.plan import processor_env
from hpcdist.tracking.journal_reader import read_records

BASELINES = Path(__file__).parent / "baselines"
#: Steps a round by batch size; each fits into one epoch of MNIST on two ranks.
STEPS = {8: 2400, 64: 450}
WINDOW = 50
NUM_RANKS = 2
IMAGE_SIZE = 28
NUM_SYNTHETIC = 60_000
#: Readings of the clock: (steps done, unix time in s).
Readings = list[tuple[int, float]]


@dataclass(frozen=True)
class Setting:
    """One batch size: what every contender gets."""

    data: str
    root: str
    batch_size: int
    steps: int

    def script_arguments(self, out: Path) -> list[str]:
        return [
            *("--data", self.data, "--root", self.root, "--num-samples", str(NUM_SYNTHETIC)),
            *("--image-size", str(IMAGE_SIZE), "--batch-size", str(self.batch_size)),
            *("--steps", str(self.steps), "--window", str(WINDOW), "--out", str(out)),
        ]

    def overrides(self, folder: Path) -> list[str]:
        return [
            f"runs_dir={folder}",
            "name=ours",
            f"data.name={self.data}",
            f"data.root={self.root}",
            "data.download=false",
            f"data.image_size={IMAGE_SIZE}",
            f"data.num_samples={NUM_SYNTHETIC}",
            f"data.batch_size={self.batch_size}",
            f"stop.max_steps={self.steps}",
            f"checkpoint.every_steps={self.steps // 4}",
            f"tracking.log_every_steps={WINDOW}",
            "tracking.system_interval_s=2",
            f"launch.num_ranks={NUM_RANKS}",
            "launch.device=cpu",
            "launch.num_threads=1",
        ]


def run_ours(setting: Setting, folder: Path, env: Mapping[str, str]) -> Readings:
    _call([sys.executable, "-m", "hpcdist", "run", "ddp_mnist", *setting.overrides(folder)], folder, env)
    records, _ = read_records(folder / "mnist" / "ours" / "journal" / "attempt-001.rank-00000.jsonl")
    return [(record.step, record.time_ms / 1000) for record in records if "train/loss" in record.metrics]


def run_script(name: str, extra_env: Mapping[str, str]) -> Callable[[Setting, Path, Mapping[str, str]], Readings]:
    def run(setting: Setting, folder: Path, env: Mapping[str, str]) -> Readings:
        out = folder / "readings.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)]
        command = [*torchrun, str(BASELINES / f"{name}.py"), *setting.script_arguments(out)]
        _call(command, folder, {**env, "OMP_NUM_THREADS": "1", **extra_env})
        readings: Readings = [(step, time) for step, time in json.loads(out.read_text())]
        return readings

    return run


MALLOC_ENV = {key: value for key, value in processor_env(1, use_gpus=False).items() if key.startswith("MALLOC_")}
CONTENDERS = {
    "ours": run_ours,
    "bare": run_script("bare_ddp", {}),
    "bare, with our MALLOC_*": run_script("bare_ddp", MALLOC_ENV),
    "bare, without exchange": run_script("bare_ddp", {"WITHOUT_EXCHANGE": "1"}),
    "accelerate": run_script("accelerate_ddp", {}),
    "lightning": run_script("lightning_ddp", {}),
}


def _call(command: list[str], folder: Path, env: Mapping[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def step_ms(readings: Readings) -> float:
    """Mean duration of a step after the first third of them."""
    total = readings[-1][0]
    steady = [(step, time) for step, time in readings if step >= total / 3]
    (first_step, first), (last_step, last) = steady[0], steady[-1]
    return (last - first) / (last_step - first_step) * 1000


def measure(setting: Setting, names: list[str], rounds: int) -> dict[str, list[float]]:
    own = ("HPCDIST_", "MALLOC_", "OMP_", "MLFLOW_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix="ddp_step_"))
            try:
                times[name].append(step_ms(CONTENDERS[name](setting, folder, env)))
            finally:
                shutil.rmtree(folder)
        shown = "  ".join(f"{name} {values[-1]:.2f}" for name, values in times.items())
        print(f"batch {setting.batch_size}, round {number + 1}: {shown}", file=sys.stderr, flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=sorted(STEPS), choices=sorted(STEPS))
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, separated by commas or semicolons")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    arguments = parser.parse_args()
    names = [name for name in CONTENDERS if name in arguments.only]

    root = os.environ.get("HPCDIST_DATA_DIR", "")
    data = "mnist" if root else "synthetic"
    result: dict[str, object] = {"benchmark": "ddp_step", "data": data, "rounds": arguments.rounds}
    print(f"{data}, {NUM_RANKS} ranks, ms per step, median of {arguments.rounds} rounds\n")
    print(f"{'':28}{'batch':>6}{'ms':>8}{'min':>8}{'max':>8}  over bare")
    for batch_size in arguments.batch_sizes:
        setting = Setting(data, root, batch_size, STEPS[batch_size])
        times = measure(setting, names, arguments.rounds)
        bare = times.get("bare", [])
        rows = {}
        for name, values in times.items():
            ratios = [value / other for value, other in zip(values, bare, strict=False)]
            over = statistics.median(ratios) if ratios else float("nan")
            rows[name] = {"step_ms": statistics.median(values), "over_bare": over}
            low, high = min(values), max(values)
            print(f"{name:28}{batch_size:6}{rows[name]['step_ms']:8.2f}{low:8.2f}{high:8.2f}  {over:.3f}")
        result[f"batch_{batch_size}"] = rows
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
