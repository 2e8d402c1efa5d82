"""Duration of a training step of the DDP trainer, compared with a bare DDP loop, Accelerate and Lightning.

    python benchmarks/ddp_step.py [--rounds 5] [--batch-sizes 8 64] [--steps N] [--only ours,bare] [--json]

Two gloo ranks with one thread each train `simple_cnn` with Adam on the same data: MNIST in $HPCDIST_DATA_DIR, or
synthetic images of its size. hpcdist is the real `hpcdist run` with all features: progress, metrics every 50 steps,
system metrics every 2 s, checkpoints, and shipping to sqlite during training. The contenders alternate. The result of a
round is the mean duration of a step, checkpoints included, without the first third of the steps, in which processes,
caches and allocators settle. Ratios are computed within each round; the results are medians over rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness import (
    BASELINES,
    HPCDIST,
    MALLOC_ENV,
    Readings,
    argument_parser,
    call,
    clean_env,
    installed,
    loss_readings,
    median_ratio,
)

#: Steps per round by batch size; each number fits into one epoch of MNIST on two ranks.
STEPS = {8: 1200, 64: 300}
#: Steps between two readings of the clock; a sixth of all steps if they are fewer.
WINDOW = 50
MIN_STEPS = 6
NUM_RANKS = 2
IMAGE_SIZE = 28
NUM_SYNTHETIC = 60_000


@dataclass(frozen=True)
class Setting:
    """Data and batch size, equal for all contenders."""

    data: str
    root: str
    batch_size: int
    steps: int

    @property
    def window(self) -> int:
        return min(WINDOW, self.steps // MIN_STEPS)

    def script_arguments(self, out: Path) -> list[str]:
        return [
            *("--data", self.data, "--root", self.root, "--num-samples", str(NUM_SYNTHETIC)),
            *("--image-size", str(IMAGE_SIZE), "--batch-size", str(self.batch_size)),
            *("--steps", str(self.steps), "--window", str(self.window), "--out", str(out)),
        ]

    def overrides(self, folder: Path) -> list[str]:
        return [
            f"runs_dir={folder}",
            "name=ours",
            f"data.name={self.data}",
            *([f"data.root={self.root}"] if self.root else []),
            f"data.image_size={IMAGE_SIZE}",
            f"data.num_samples={NUM_SYNTHETIC}",
            f"data.batch_size={self.batch_size}",
            f"stop.max_steps={self.steps}",
            f"checkpoint.every_steps={self.steps // 4}",
            f"tracking.log_every_steps={self.window}",
            "tracking.system_interval_s=2",
            f"launch.num_ranks={NUM_RANKS}",
            "launch.device=cpu",
            "launch.num_threads=1",
        ]


def run_ours(setting: Setting, folder: Path, env: Mapping[str, str]) -> Readings:
    call([*HPCDIST, "run", "ddp_mnist", *setting.overrides(folder)], folder, env)
    return loss_readings(folder / "mnist" / "ours")


def run_script(name: str, extra_env: Mapping[str, str]) -> Callable[[Setting, Path, Mapping[str, str]], Readings]:
    """Return a function that runs a script of benchmarks/baselines by torchrun."""

    def run(setting: Setting, folder: Path, env: Mapping[str, str]) -> Readings:
        out = folder / "readings.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)]
        command = [*torchrun, str(BASELINES / f"{name}.py"), *setting.script_arguments(out)]
        call(command, folder, {**env, "OMP_NUM_THREADS": "1", **extra_env})
        readings: Readings = [(step, time) for step, time in json.loads(out.read_text())]
        return readings

    return run


CONTENDERS = {
    "ours": run_ours,
    "bare": run_script("bare_ddp", {}),
    "bare, with our MALLOC_*": run_script("bare_ddp", MALLOC_ENV),
    "bare, without exchange": run_script("bare_ddp", {"WITHOUT_EXCHANGE": "1"}),
    "accelerate": run_script("accelerate_ddp", {}),
    "lightning": run_script("lightning_ddp", {}),
}
#: Packages of contenders that the extra `bench` installs.
PACKAGES = {"accelerate": "accelerate", "lightning": "lightning"}


def step_ms(readings: Readings) -> float:
    """Return the mean duration of a step without the first third of the steps."""
    total = readings[-1][0]
    steady = [(step, time) for step, time in readings if step >= total / 3]
    (first_step, first), (last_step, last) = steady[0], steady[-1]
    return (last - first) / (last_step - first_step) * 1000


def measure(setting: Setting, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds per step by contender and round."""
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names:
            folder = Path(tempfile.mkdtemp(prefix="ddp_step_"))
            try:
                times[name].append(step_ms(CONTENDERS[name](setting, folder, clean_env())))
            finally:
                shutil.rmtree(folder)
        shown = "  ".join(f"{name} {values[-1]:.2f}" for name, values in times.items())
        print(f"batch {setting.batch_size}, round {number + 1}: {shown}", file=sys.stderr, flush=True)
    return times


def main() -> None:
    parser = argument_parser(__doc__, rounds=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=sorted(STEPS), choices=sorted(STEPS))
    parser.add_argument("--steps", type=int, help="steps of each batch size instead of its own number")
    parser.add_argument("--only", default=",".join(CONTENDERS), help="contenders, separated by commas or semicolons")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < MIN_STEPS:
        parser.error(f"--steps {arguments.steps}: use {MIN_STEPS} or more")
    names = installed([name for name in CONTENDERS if name in arguments.only], PACKAGES)

    root = os.environ.get("HPCDIST_DATA_DIR", "")
    data = "mnist" if root else "synthetic"
    result: dict[str, object] = {"benchmark": "ddp_step", "data": data, "rounds": arguments.rounds}
    print(f"{data}, {NUM_RANKS} ranks, ms per step, median of {arguments.rounds} rounds\n")
    print(f"{'':28}{'batch':>6}{'ms':>8}{'min':>8}{'max':>8}  over bare")
    for batch_size in arguments.batch_sizes:
        setting = Setting(data, root, batch_size, arguments.steps or STEPS[batch_size])
        times = measure(setting, names, arguments.rounds)
        bare = times.get("bare", [])
        rows = {}
        for name, values in times.items():
            over = median_ratio(values, bare) if bare else float("nan")
            rows[name] = {"step_ms": statistics.median(values), "over_bare": over}
            low, high = min(values), max(values)
            print(f"{name:28}{batch_size:6}{rows[name]['step_ms']:8.2f}{low:8.2f}{high:8.2f}  {over:.3f}")
        result[f"batch_{batch_size}"] = rows
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
