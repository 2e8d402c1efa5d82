"""Our parameter-server RNN against the tutorial's (`baselines/rnn.py`) and against one process without RPC.

    python benchmarks/rnn.py [--rounds 6] [--only "ours;ours, async"] [--cases realistic,toy] [--json]

One server and one trainer process (or two trainers), one thread each; the same text, sizes and optimizer (SGD). Ours is
the real `hpcdist run` with metrics, progress and shipping. All contenders are started, and stand still (SIGSTOP) but
for the one whose turn it is, so that neighbours' load meets all of them. A turn's figure is the rate between its first
step and its last; ratios are taken within a round, medians over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hpcdist.supervisor.plan import processor_env
from hpcdist.tracking.journal_reader import read_records

BASELINE = Path(__file__).parent / "baselines" / "rnn.py"
#: (steps done, unix time in s)
Readings = list[tuple[int, float]]
#: A contender is warm after so many steps; it may take so long to get there.
WARM_STEPS, WARM_S = 5, 300.0


@dataclass(frozen=True)
class Case:
    """Sizes, and what is to be reached as a multiple of the baseline, by contender."""

    rnn: Mapping[str, Any]
    turn_s: float
    log_every: int
    goals: Mapping[str, float] = field(default_factory=dict)


CASES = {
    "realistic": Case(
        {
            "vocab_size": 10_000,
            "embedding_size": 200,
            "hidden_size": 200,
            "num_layers": 2,
            "batch_size": 20,
            "bptt": 35,
        },
        turn_s=4.0,
        log_every=2,
        goals={"ours": 1.15},
    ),
    # The tutorial's own sizes.
    "toy": Case(
        {"vocab_size": 10, "embedding_size": 2, "hidden_size": 3, "num_layers": 4, "batch_size": 3, "bptt": 5},
        turn_s=1.5,
        log_every=25,
        goals={"ours": 1.4},
    ),
}
NAMES = {"realistic": "10,000 × 200, batch 20 × 35", "toy": "10 × 2, batch 3 × 5"}
MALLOC = {key: value for key, value in processor_env(1, use_gpus=False).items() if key.startswith("MALLOC_")}


TEXT = {"max_corpus_mb": 4.0, "eval_fraction": 0.01}


class Contender:
    """A training that runs for ever, in turns."""

    def __init__(self, case: Case, *, trainers: int = 1, env: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rnn_"))
        self.tokens_per_step = trainers * case.rnn["batch_size"] * case.rnn["bptt"]
        kept = {
            key: value for key, value in os.environ.items() if not key.startswith(("HPCDIST_", "MALLOC_", "MLFLOW_"))
        }
        with open(self.folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                self.command(case, trainers),
                cwd=self.folder,
                env={**kept, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def command(self, case: Case, trainers: int) -> list[str]:
        raise NotImplementedError

    def readings(self) -> Readings:
        """So far."""
        raise NotImplementedError

    def wait_warm(self) -> None:
        end = time.monotonic() + WARM_S
        while not (readings := self.readings()) or readings[-1][0] < WARM_STEPS:
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{self.process.args} does not train:\n{(self.folder / 'output').read_text()[-4000:]}")
            time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        """To all its processes: ranks lead process groups of their own."""
        try:
            everyone = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in everyone:
            if process.is_running():
                process.send_signal(number)

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Ours(Contender):
    options: tuple[str, ...] = ()

    def command(self, case: Case, trainers: int) -> list[str]:
        keys = {
            **{f"rnn.{key}": value for key, value in {**case.rnn, **TEXT}.items()},
            "runs_dir": self.folder,
            "name": "ours",
            "roles.trainer": trainers,
            "optim.name": "sgd",
            "optim.momentum": 0,
            "optim.lr": 0.05,
            "optim.max_grad_norm": "null",
            "schedule.name": "constant",
            "stop.max_epochs": 1_000_000,
            "tracking.log_every_steps": case.log_every,
            "tracking.register_as": "null",
            "launch.device": "cpu",
            "launch.num_threads": 1,
        }
        command = [sys.executable, "-m", "hpcdist", "run", "rnn_lm"]
        return [*command, *(f"{key}={value}" for key, value in keys.items()), *self.options]

    def readings(self) -> Readings:
        path = self.folder / "language" / "ours" / "journal" / "attempt-001.rank-00000.jsonl"
        records = read_records(path)[0] if path.exists() else []
        return [(record.step, record.time_ms / 1000) for record in records if "train/loss" in record.metrics]


class OursAsync(Ours):
    options = ("rnn.mode=async",)


class Baseline(Contender):
    flags: tuple[str, ...] = ()

    def command(self, case: Case, trainers: int) -> list[str]:
        sizes = json.dumps({**case.rnn, **TEXT})
        return [sys.executable, str(BASELINE), "--rnn", sizes, "--out", str(self.folder / "steps"), *self.flags]

    def readings(self) -> Readings:
        path = self.folder / "steps"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last one may be half written
        return [(int(step), float(at)) for step, at in map(str.split, lines)]


class OneProcess(Baseline):
    flags = ("--local",)


ONE = {"OMP_NUM_THREADS": "1"}
CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "baseline": lambda case: Baseline(case, env=ONE),
    "baseline, with our MALLOC_*": lambda case: Baseline(case, env={**ONE, **MALLOC}),
    "one process, no RPC": lambda case: OneProcess(case, env={**ONE, **MALLOC}),
    "ours": Ours,
    "ours, async": OursAsync,
    "ours, 2 trainers": lambda case: Ours(case, trainers=2),
    "ours, 2 trainers, async": lambda case: OursAsync(case, trainers=2),
}
BOUND = "one process, no RPC"


@contextmanager
def started(case: Case, names: list[str]) -> Iterator[dict[str, Contender]]:
    """All contenders, warm and standing still."""
    running: dict[str, Contender] = {}
    try:
        for name in names:
            running[name] = CONTENDERS[name](case)
            running[name].wait_warm()
            running[name].signal(signal.SIGSTOP)
        yield running
    finally:
        for contender in running.values():
            contender.close()


def measure(case_name: str, case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Tokens a second by contender and round."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {}
    with started(case, names) as running:
        for _, name in itertools.product(range(rounds), names):
            running[name].signal(signal.SIGCONT)
            began = time.time()
            time.sleep(case.turn_s)
            turns[name].append((began, time.time()))
            running[name].signal(signal.SIGSTOP)
        for name, contender in running.items():
            contender.signal(signal.SIGCONT)
            wait_for_record(contender, turns[name][-1][1])
            contender.signal(signal.SIGSTOP)
            rates[name] = [contender.tokens_per_step * rate_within(contender.readings(), *turn) for turn in turns[name]]
            print(
                f"{case_name}, {name}: {' '.join(f'{rate:.0f}' for rate in rates[name])}", file=sys.stderr, flush=True
            )
    return rates


def wait_for_record(contender: Contender, after: float) -> None:
    """Until a step after the last turn is on disk, and with it all before."""
    end = time.monotonic() + WARM_S
    while contender.readings()[-1][1] <= after and time.monotonic() < end:
        time.sleep(0.2)


def rate_within(readings: Readings, began: float, ended: float) -> float:
    """Steps a second; those that a stop has interrupted do not count, since they began in an earlier turn.

    NaN for a turn in which the neighbours left too little.
    """
    within = [(step, at) for step, at in readings if began <= at <= ended]
    if len(within) < 2:
        return math.nan
    (first_step, first), (last_step, last) = within[0], within[-1]
    return (last_step - first_step) / (last - first)


def median_ratio(rates: list[float], base: list[float]) -> float:
    return median([rate / other for rate, other in zip(rates, base, strict=True)])


def median(values: list[float]) -> float:
    """Of those that there are."""
    found = [value for value in values if not math.isnan(value)]
    return statistics.median(found) if found else math.nan


def rows(name: str, case: Case, rates: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    base = rates["baseline"]
    bound = median_ratio(rates[BOUND], base) if BOUND in rates else None
    return [
        {
            "case": f"{NAMES[name]}: {contender}",
            "unit": "tokens/s",
            "baseline": median(base),
            "ours": median(values),
            "ratio": median_ratio(values, base),
            "bound": bound,
            "goal": case.goals.get(contender),
        }
        for contender, values in rates.items()
        if contender.startswith("ours")
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
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
            print(f"  {contender:36} {median(values):9.0f}   {ratio:.2f}")
    if arguments.json:
        print(json.dumps({"table": table, "tokens_per_s": raw}))


if __name__ == "__main__":
    main()
