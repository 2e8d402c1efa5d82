"""Tokens per second of the RNN trainer with parameter servers: the PyTorch tutorial, one process, hpcdist.

    python benchmarks/rnn.py [--rounds 6] [--only "ours;ours, async"] [--cases realistic,toy] [--json]

One server and one trainer process (or two trainers) with one thread each, on the same text, with the same sizes and
SGD, without dropout, which the tutorial's program lacks. hpcdist is the real `hpcdist run` with metrics, progress and
shipping; the tutorial is the model of `examples/tutorials/rnn_parameter_server.py`, driven by `baselines/rnn.py`. All
contenders are started once and run in turn; meanwhile the others are stopped by SIGSTOP, so that other load affects all
of them. The rate of a turn is that between its first and its last step. Ratios are computed within each round; the
results are medians over rounds.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import (
    BASELINES,
    HPCDIST,
    MALLOC_ENV,
    Readings,
    argument_parser,
    clean_env,
    loss_readings,
    median,
    median_ratio,
    signal_tree,
)

#: Steps of a contender before the measurement, and the time limit for them.
WARM_STEPS, WARM_S = 5, 300.0


@dataclass(frozen=True)
class Case:
    """Sizes, and targets as multiples of the baseline by contender."""

    title: str
    rnn: Mapping[str, Any]
    turn_s: float
    log_every: int
    goals: Mapping[str, float] = field(default_factory=dict)


CASES = {
    "realistic": Case(
        "10,000 × 200, batch 20 × 35",
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
        "10 × 2, batch 3 × 5",
        {"vocab_size": 10, "embedding_size": 2, "hidden_size": 3, "num_layers": 4, "batch_size": 3, "bptt": 5},
        turn_s=1.5,
        log_every=25,
        goals={"ours": 1.4},
    ),
}
TEXT = {"max_corpus_mb": 4.0, "dropout": 0.0}


class Contender:
    """A training without end that runs only in its turns."""

    def __init__(self, case: Case, *, trainers: int = 1, env: Mapping[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rnn_"))
        self.tokens_per_step = trainers * case.rnn["batch_size"] * case.rnn["bptt"]
        with open(self.folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                self.command(case, trainers),
                cwd=self.folder,
                env={**clean_env(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def command(self, case: Case, trainers: int) -> list[str]:
        raise NotImplementedError

    def readings(self) -> Readings:
        """Return the steps so far."""
        raise NotImplementedError

    def wait_warm(self) -> None:
        end = time.monotonic() + WARM_S
        while not (readings := self.readings()) or readings[-1][0] < WARM_STEPS:
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{self.process.args!r} does not train:\n{(self.folder / 'output').read_text()[-4000:]}")
            time.sleep(0.2)

    def signal(self, number: signal.Signals) -> None:
        signal_tree(self.process.pid, number)

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
        return [*HPCDIST, "run", "rnn_lm", *(f"{key}={value}" for key, value in keys.items()), *self.options]

    def readings(self) -> Readings:
        return loss_readings(self.folder / "language" / "ours")


class OursAsync(Ours):
    options = ("rnn.mode=async",)


class Baseline(Contender):
    flags: tuple[str, ...] = ()

    def command(self, case: Case, trainers: int) -> list[str]:
        sizes = json.dumps({**case.rnn, **TEXT})
        return [
            sys.executable,
            str(BASELINES / "rnn.py"),
            "--rnn",
            sizes,
            "--out",
            str(self.folder / "steps"),
            *self.flags,
        ]

    def readings(self) -> Readings:
        path = self.folder / "steps"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # without a partly written last line
        return [(int(step), float(at)) for step, at in map(str.split, lines)]


class OneProcess(Baseline):
    flags = ("--local",)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CONTENDERS: dict[str, Callable[[Case], Contender]] = {
    "baseline": lambda case: Baseline(case, env=ONE_THREAD),
    "baseline, with our MALLOC_*": lambda case: Baseline(case, env={**ONE_THREAD, **MALLOC_ENV}),
    "one process, no RPC": lambda case: OneProcess(case, env={**ONE_THREAD, **MALLOC_ENV}),
    "ours": Ours,
    "ours, async": OursAsync,
    "ours, 2 trainers": lambda case: Ours(case, trainers=2),
    "ours, 2 trainers, async": lambda case: OursAsync(case, trainers=2),
}
BOUND = "one process, no RPC"


@contextmanager
def started(case: Case, names: list[str]) -> Iterator[dict[str, Contender]]:
    """Yield all contenders, started and stopped after their first steps."""
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
    """Return the tokens per second by contender and round."""
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
    """Wait until a step after the last turn is on disk, and with it all earlier ones."""
    end = time.monotonic() + WARM_S
    while contender.readings()[-1][1] <= after and time.monotonic() < end:
        time.sleep(0.2)


def rate_within(readings: Readings, began: float, ended: float) -> float:
    """Return the steps per second within a turn; NaN if it contains fewer than two readings.

    Steps that were interrupted by a stop began in an earlier turn and do not count.
    """
    within = [(step, at) for step, at in readings if began <= at <= ended]
    if len(within) < 2:
        return math.nan
    (first_step, first), (last_step, last) = within[0], within[-1]
    return (last_step - first_step) / (last - first)


def table_rows(case: Case, rates: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    base = rates["baseline"]
    bound = median_ratio(rates[BOUND], base) if BOUND in rates else None
    return [
        {
            "case": f"{case.title}: {contender}",
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
    parser = argument_parser(__doc__, rounds=6)
    parser.add_argument("--only", default="", help="contenders, separated by semicolons; the baseline always runs")
    parser.add_argument("--cases", default=",".join(CASES))
    arguments = parser.parse_args()
    chosen = [name for name in CONTENDERS if not arguments.only or name in ("baseline", *arguments.only.split(";"))]
    table, raw = [], {}
    for name in arguments.cases.split(","):
        case = CASES[name]
        rates = measure(name, case, chosen, arguments.rounds)
        table += table_rows(case, rates)
        raw[name] = rates
        print(f"{case.title}{'tokens/s':>{50 - len(case.title)}}   over baseline")
        for contender, values in rates.items():
            ratio = median_ratio(values, rates["baseline"])
            print(f"  {contender:36} {median(values):9.0f}   {ratio:.2f}")
    if arguments.json:
        print(json.dumps({"table": table, "tokens_per_s": raw}))


if __name__ == "__main__":
    main()
