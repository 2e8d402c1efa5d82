"""Useful steps per second of a training whose ranks are killed, compared with torchrun and Lightning.

    python benchmarks/goodput.py [--steps 3000] [--kill-every 20] [--max-kills N] [--rounds 1] [--keep FILE] [--json]

Two gloo ranks train `simple_cnn` on MNIST ($HPCDIST_DATA_DIR, otherwise scikit-learn's digits) for a number of steps,
with a checkpoint every 25 steps and an evaluation every 100. A randomly chosen rank is killed by SIGKILL at random
times, on average every 20 s. All contenders have the same seed, hence the same times and ranks; if the time falls into
a restart, the rank is killed as soon as its training has begun. Every contender also runs without kills.

    torchrun, torch.save          a script that saves with torch.save, restarted by `torchrun --max-restarts`
    Lightning, ModelCheckpoint    the same with Lightning and its checkpoint callback, restarted by torchrun as well
    hpcdist                       `hpcdist run`, with heartbeats, metrics and shipping to MLflow

Useful steps are those of the final weights, and the time begins with the command: `goodput` is the number of steps over
the wall time. The contenders alternate; ratios are computed within each round, the results are medians. With `--keep`
every finished run is written to a file, and a repeated command continues after the last one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from baselines.fault_task import Task
from fault_runs import CONTENDERS, NUM_RANKS, PACKAGES, Running, data_settings, is_alive, started
from harness import argument_parser, installed, median

SAVE_EVERY = 25
EVAL_EVERY = 100
#: A contender that takes longer is stopped; its useful steps until then count.
LIMIT_S = 1800.0
Result = dict[str, Any]


class Killer:
    """Kills ranks at the times that a seed determines.

    Args:
        mean_s: mean interval; intervals are uniform between half and one and a half of it. 0 for no kills.
        max_kills: number of kills after which the ranks are left alone.
    """

    def __init__(self, seed: int, mean_s: float, max_kills: int) -> None:
        self._random = random.Random(seed)
        self._mean_s = mean_s
        self._max_kills = max_kills
        self._at_s = 0.0
        self._rank = 0
        self.num_kills = 0
        self._draw()

    def _draw(self) -> None:
        self._at_s += self._random.uniform(0.5 * self._mean_s, 1.5 * self._mean_s)
        self._rank = self._random.randrange(NUM_RANKS)

    def poll(self, running: Running) -> None:
        """Kill a rank if it is time."""
        if not self._mean_s or self.num_kills == self._max_kills:
            return
        if time.time() < running.began + self._at_s:
            return
        pid = running.reader.newest_ranks().get(self._rank)
        if pid is None or not is_alive(pid):
            return  # a restart is in progress
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.num_kills += 1
        self._draw()


def train(name: str, task: Task, killer: Killer, target: float) -> Result:
    """Train with one contender; return its steps, times and evaluations."""

    def over(marks: Sequence[Any]) -> bool:
        killer.poll(running)
        return any(mark.event == "step" and mark.step >= task.steps for mark in marks[-20:])

    with started(name, task) as running:
        running.wait_for(over, LIMIT_S)
        end = time.time()
    marks = running.reader.update()
    steps = [mark for mark in marks if mark.event == "step" and mark.rank == 0]
    reached = max((mark.step for mark in steps), default=0)
    finished = reached >= task.steps
    seconds = (next(mark.time for mark in steps if mark.step >= task.steps) if finished else end) - running.began
    evaluations = [mark for mark in marks if mark.event == "accuracy"]
    good = [mark.time - running.began for mark in evaluations if mark.value >= target]
    return {
        "contender": name,
        "steps": min(reached, task.steps),
        "done_steps": len(steps),
        "s": seconds,
        "kills": killer.num_kills,
        "accuracy": evaluations[-1].value if evaluations else float("nan"),
        "to_target_s": good[0] if good else float("nan"),
    }


def read_results(path: Path | None, settings: Mapping[str, Any]) -> list[Result]:
    """Return the results of earlier commands with the same settings."""
    if path is None or not path.exists():
        return []
    results: list[Result] = [json.loads(line) for line in path.read_text().splitlines()]
    return [result for result in results if result["settings"] == settings]


def measure(arguments: Any) -> list[Result]:
    """Run what is missing; return all results."""
    settings = {name: getattr(arguments, name) for name in ("steps", "kill_every", "max_kills", "target")}
    names = installed([name for name in CONTENDERS if arguments.only in name], PACKAGES)
    results = read_results(arguments.keep, settings)
    present = {(result["round"], result["contender"], result["killed"]) for result in results}
    for number in range(arguments.rounds):
        for killed in (False, True):
            for name in names:
                if (number, name, killed) in present:
                    continue
                folder = Path(tempfile.mkdtemp(prefix="goodput_"))
                task = Task(
                    folder=str(folder),
                    model="cnn",
                    steps=arguments.steps,
                    save_every=SAVE_EVERY,
                    eval_every=EVAL_EVERY,
                    **data_settings(),
                )
                killer = Killer(number, arguments.kill_every if killed else 0.0, arguments.max_kills)
                load = os.getloadavg()[0]
                try:
                    result = train(name, task, killer, arguments.target)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                result |= {"killed": killed, "round": number, "load": load, "settings": settings}
                results.append(result)
                print(describe(result), file=sys.stderr, flush=True)
                if arguments.keep is not None:
                    with open(arguments.keep, "a") as file:
                        file.write(json.dumps(result) + "\n")
    return results


def describe(result: Result) -> str:
    return (
        f"round {result['round'] + 1}, {result['contender']}, {result['kills']} kills: {result['steps']} useful steps"
        f" of {result['done_steps']} in {result['s']:.1f} s, accuracy {result['accuracy']:.3f},"
        f" load {result['load']:.1f}"
    )


def rate(results: Sequence[Result], name: str, *, killed: bool) -> list[float]:
    """Return the useful steps per second by round."""
    return [r["steps"] / r["s"] for r in results if r["contender"] == name and r["killed"] == killed]


def show(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Print a line per contender and return its figures."""
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':28}{'steps/s':>9}{'with kills':>12}{'ratio':>8}{'kills':>7}{'redone':>8}{'to accuracy':>13}  over")
    names = [name for name in CONTENDERS if rate(results, name, killed=True)]
    base = [r["to_target_s"] for r in results if r["contender"] == "hpcdist" and r["killed"]]
    ours = rate(results, "hpcdist", killed=True)
    for name in names:
        whole, killed = rate(results, name, killed=False), rate(results, name, killed=True)
        own = [r for r in results if r["contender"] == name and r["killed"]]
        to_target = [r["to_target_s"] for r in own]
        rows[name] = {
            "undisturbed": statistics.median(whole),
            "killed": statistics.median(killed),
            "ratio": median([k / w for k, w in zip(killed, whole, strict=False)]),
            "slowdown": median([w / k for k, w in zip(killed, whole, strict=False)]),
            "kills": statistics.median(r["kills"] for r in own),
            "redone": statistics.median(r["done_steps"] - r["steps"] for r in own),
            "to_target_s": median(to_target),
            "over_ours": median([k / o for o, k in zip(ours, killed, strict=False)]) if ours else float("nan"),
            "time_over_ours": median([t / o for t, o in zip(to_target, base, strict=False)]) if base else float("nan"),
        }
        row = rows[name]
        print(
            f"{name:28}{row['undisturbed']:9.2f}{row['killed']:12.2f}{row['ratio']:8.3f}{row['kills']:7.0f}"
            f"{row['redone']:8.0f}{row['to_target_s']:11.1f} s {row['time_over_ours']:5.2f}"
        )
    for name in names:
        if name != "hpcdist" and ours:
            print(f"useful steps per second of hpcdist over {name}: {1 / rows[name]['over_ours']:.2f}")
    return rows


def main() -> None:
    parser = argument_parser(__doc__, rounds=1)
    parser.add_argument("--steps", type=int, default=3_000, help="of the whole training")
    parser.add_argument("--kill-every", type=float, default=20.0, help="mean seconds between two kills")
    parser.add_argument("--max-kills", type=int, default=10**6, help="kills after which the ranks are left alone")
    parser.add_argument("--target", type=float, default=0.98, help="accuracy whose time is reported")
    parser.add_argument("--keep", type=Path, help="file of the results, with which a repeated command continues")
    parser.add_argument("--only", default="", help="only the contenders whose names contain this")
    arguments = parser.parse_args()
    results = measure(arguments)
    kills = f"a rank killed every {arguments.kill_every:g} s on average"
    print(f"{NUM_RANKS} gloo ranks, {arguments.steps} steps, {kills}, median of {arguments.rounds} rounds\n")
    rows = show(results)
    if arguments.json:
        print(json.dumps({"benchmark": "goodput", "rounds": arguments.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
