"""Seconds from the command to the first step of the ranks, and duration of short commands.

    python benchmarks/startup.py [--rounds 7] [--ranks 2 8] [--no-warm-up] [--json]

`hpcdist run` with a trainer and with an unchanged script, compared with `torchrun` of that script. All start in a small
git repository, in turn; the time ends when rank 0 has done a step of DDP and SGD. Shipping to MLflow, heartbeats, logs
and the snapshot of the code are enabled. The ratio is computed within each round; the results are medians.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness import BASELINES, HPCDIST, NO_WARM_UP, argument_parser, call, clean_env, commit_all, median_ratio

TRAINER_CONFIG = """\
experiment: startup
trainer: first_step_trainer:train
launch: {{device: cpu, num_ranks: {num_ranks}, num_threads: 1}}
"""
SCRIPT_CONFIG = """\
experiment: startup
trainer: {{script: [first_step.py]}}
launch: {{device: cpu, num_ranks: {num_ranks}, num_threads: 1}}
"""


def make_project(folder: Path, num_ranks: int) -> None:
    """Create a user's repository: the two programs and their configs, committed."""
    for name in ("first_step.py", "first_step_trainer.py"):
        shutil.copy(BASELINES / name, folder)
    (folder / "trainer.yaml").write_text(TRAINER_CONFIG.format(num_ranks=num_ranks))
    (folder / "script.yaml").write_text(SCRIPT_CONFIG.format(num_ranks=num_ranks))
    commit_all(folder)


def contenders(project: Path, runs: Path, out: Path, num_ranks: int) -> dict[str, Callable[[Mapping[str, str]], float]]:
    """Return functions that run a command and return its seconds, by name."""

    def until_step(command: list[str]) -> Callable[[Mapping[str, str]], float]:
        def measure(env: Mapping[str, str]) -> float:
            out.unlink(missing_ok=True)
            began = time.time()
            done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
            # Whatever happens after it: torch's ranks may abort when gloo's threads end (torch 2.15, sometimes).
            if not out.exists():
                sys.exit(f"{' '.join(command)} made no step:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
            return float(out.read_text()) - began

        return measure

    def whole(command: list[str]) -> Callable[[Mapping[str, str]], float]:
        def measure(env: Mapping[str, str]) -> float:
            began = time.time()
            call(command, project, env)
            return time.time() - began

        return measure

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    run = [*HPCDIST, "run"]
    return {
        "torchrun": until_step([*torchrun, "first_step.py", str(out)]),
        "hpcdist run, trainer": until_step([*run, "trainer.yaml", f"runs_dir={runs}", f"params.out={out}"]),
        "hpcdist run, script": until_step(
            [*run, "script.yaml", f"runs_dir={runs}", f"trainer.script=[first_step.py,{out}]"]
        ),
        "hpcdist --help": whole([*HPCDIST, "--help"]),
        "hpcdist config": whole([*HPCDIST, "config", "ddp_digits"]),
    }


def measure(num_ranks: int, rounds: int, only: str, *, warm_up: bool) -> dict[str, list[float]]:
    """Return the seconds of each contender by round."""
    env = {**clean_env(), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="startup_") as name:
        project, runs = Path(name) / "project", Path(name) / "runs"
        project.mkdir()
        make_project(project, num_ranks)
        measures = contenders(project, runs, Path(name) / "step.txt", num_ranks)
        times: dict[str, list[float]] = {key: [] for key in measures if only in key or key == "torchrun"}
        # A first round, which fills the page cache and writes byte code, does not count.
        warm_ups = 1 if warm_up else 0
        for number in range(warm_ups + rounds):
            for key, values in times.items():
                seconds = measures[key](env)
                if number >= warm_ups:
                    values.append(seconds)
    return times


def show(num_ranks: int, times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Print a line per contender and return the medians."""
    rounds = len(times["torchrun"])
    print(f"{num_ranks} gloo ranks, median of {rounds} rounds\n")
    print(f"{'':24}{'s':>8}{'min':>8}{'max':>8}  over torchrun")
    rows = {}
    for key, values in times.items():
        over = median_ratio(values, times["torchrun"])
        rows[key] = {"s": statistics.median(values), "over_torchrun": over}
        print(f"{key:24}{rows[key]['s']:8.3f}{min(values):8.3f}{max(values):8.3f}  {over:.3f}")
    print()
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--no-warm-up", action="store_true", help=NO_WARM_UP)
    parser.add_argument("--only", default="", help="measure only torchrun and the names that contain this")
    arguments = parser.parse_args()

    rows = {}
    for number, num_ranks in enumerate(arguments.ranks):
        # The short commands do not depend on the number of ranks.
        only = arguments.only if number == 0 else arguments.only or "run, "
        rows[num_ranks] = show(num_ranks, measure(num_ranks, arguments.rounds, only, warm_up=not arguments.no_warm_up))
    if arguments.json:
        print(json.dumps({"benchmark": "startup", "rounds": arguments.rounds, "rows": rows[arguments.ranks[0]],
                          "by_ranks": rows}))  # fmt: skip


if __name__ == "__main__":
    main()
