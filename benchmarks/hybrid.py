"""DDP trainers with embedding tables on parameter servers: hpcdist, the PyTorch tutorial, and one process without RPC.

    python benchmarks/hybrid.py [--rounds 3] [--only large,small] [--steps N] [--json]

Two trainers on this machine, one thread per process. hpcdist is the real `hpcdist run hybrid_clicks` with
metrics, progress and shipping to sqlite, on a click log of the same size; its dense part has one layer more than the
baseline's. The baseline is the program of the tutorial (examples/tutorials/ddp_with_rpc.py) with SGD, the bound one
process with sparse gradients (baselines/hybrid_one_process.py). The contenders alternate. Results are batches per
second of all trainers over the last two thirds of the steps; for hpcdist over the last half, because MLflow is
imported in the first seconds of a run and takes a third of a core. Ratios are computed within each round; the results
are medians.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from harness import (
    BASELINES,
    HPCDIST,
    TUTORIALS,
    argument_parser,
    call,
    clean_env,
    loss_readings,
    median_ratio,
    tutorial_env,
)
from pyarrow import parquet

from hpcdist.trainers.hybrid.train import EVAL_FRACTION

BOUND = BASELINES / "hybrid_one_process.py"
NUM_TRAINERS = 2
#: hpcdist logs six times.
MIN_STEPS = 6


@dataclass(frozen=True)
class Case:
    """A table and its batches: `bags` per trainer, and the steps of hpcdist, the baseline and one process."""

    name: str
    rows: int
    dim: int
    bags: int
    bag_size: int
    servers: int
    steps: tuple[int, int, int]
    goal: float

    @property
    def title(self) -> str:
        return f"{self.rows:,} × {self.dim}, {self.bags:,} bags of {self.bag_size}"


CASES = (
    Case("large", 1_000_000, 64, 1024, 20, 2, (900, 30, 180), 18.0),
    Case("small", 100, 16, 10, 4, 1, (3000, 1500, 6000), 1.6),
)


def run_ours(case: Case, folder: Path, env: Mapping[str, str]) -> float:
    steps, window = case.steps[0], case.steps[0] // MIN_STEPS
    num_samples = math.ceil(steps * case.bags * NUM_TRAINERS / (1 - EVAL_FRACTION))
    log = _write_log(folder / "clicks.parquet", case, num_samples)
    config = folder / "ours.yaml"  # overrides would add to the tables of the shipped config
    roles = f"{{trainer: {NUM_TRAINERS}, parameter_server: {case.servers}}}"
    config.write_text(f"{{trainer: hybrid, roles: {roles}, hybrid: {{tables: {{only: {case.rows}}}}}}}\n")
    command = [
        *(*HPCDIST, "run", str(config), "experiment=clicks", "checkpoint.monitor=eval/auc"),
        *(
            f"runs_dir={folder}",
            "name=ours",
            f"hybrid.embedding_dim={case.dim}",
            "hybrid.hidden_sizes=[8]",
        ),
        *("hybrid.table_optimizer=sgd", f"hybrid.batch_size={case.bags}", f"hybrid.file={log}"),
        "optim.name=sgd",
        *("stop.max_epochs=1", f"tracking.log_every_steps={window}", "tracking.register_as=null"),
        *("launch.device=cpu", "launch.num_threads=1"),
    ]
    call(command, folder, env)
    readings = loss_readings(folder / "clicks" / "ours")
    (first, began), (last, ended) = readings[2], readings[-1]
    return NUM_TRAINERS * (last - first) / (ended - began)


def _write_log(path: Path, case: Case, num_samples: int) -> Path:
    """Write a click log with uniform rows, in bags of equal size."""
    draw = np.random.default_rng(0)
    rows = draw.integers(case.rows, size=num_samples * case.bag_size)
    bags = pa.FixedSizeListArray.from_arrays(rows, case.bag_size).cast(pa.list_(pa.int64()))
    labels = draw.integers(2, size=num_samples).astype(np.float32)
    parquet.write_table(pa.table({"label": labels, "only": bags}), path, row_group_size=1 << 16)
    return path


def run_baseline(case: Case, folder: Path, env: Mapping[str, str]) -> float:
    program = TUTORIALS / "ddp_with_rpc.py"
    sizes = {"words": case.rows, "dimension": case.dim, **_batches(case, case.steps[1])}
    command = [sys.executable, "-W", "ignore", str(program), "--optimizer", "SGD", *_options(sizes)]
    printed = re.search(r"([\d.]+) batches/s of", call(command, folder, tutorial_env()))
    if printed is None:
        sys.exit("the baseline ended without a result")
    return float(printed[1])


def run_one_process(case: Case, folder: Path, env: Mapping[str, str]) -> float:
    sizes = {"rows": case.rows, "dim": case.dim, **_batches(case, case.steps[2])}
    command = [sys.executable, "-W", "ignore", str(BOUND), *_options(sizes)]
    return float(call(command, folder, {**env, "OMP_NUM_THREADS": "1"}))


def _batches(case: Case, steps: int) -> dict[str, int]:
    return {"bags": case.bags, "bag-size": case.bag_size, "steps": steps}


def _options(values: Mapping[str, int]) -> list[str]:
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Return the batches per second by contender and round."""
    contenders = {
        "baseline": run_baseline,
        "ours": run_ours,
        "one process": run_one_process,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            folder = Path(tempfile.mkdtemp(prefix="hybrid_"))
            try:
                rates[name].append(contender(case, folder, clean_env()))
            finally:
                shutil.rmtree(folder)
        shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
        print(f"{case.name}, round {number + 1}: {shown}", file=sys.stderr, flush=True)
    return rates


def row(case: Case, rates: Mapping[str, list[float]]) -> dict[str, str | float | None]:
    """Return one row of the table of trainers."""
    return {
        "case": case.title,
        "unit": "batches/s",
        "baseline": statistics.median(rates["baseline"]),
        "ours": statistics.median(rates["ours"]),
        "ratio": median_ratio(rates["ours"], rates["baseline"]),
        "bound": median_ratio(rates["one process"], rates["baseline"]),
        "goal": case.goal,
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--only", default="", help="cases, separated by commas")
    parser.add_argument("--steps", type=int, help="at most this number of steps of each contender")
    arguments = parser.parse_args()
    if arguments.steps is not None and arguments.steps < MIN_STEPS:
        parser.error(f"--steps {arguments.steps}: use {MIN_STEPS} or more")
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only.split(",")]
    table = []
    for case in chosen:
        if arguments.steps is not None:
            case = replace(case, steps=tuple(min(steps, arguments.steps) for steps in case.steps))
        table.append(row(case, measure(case, arguments.rounds)))
    print(f"{'case':<48}{'baseline':>10}{'ours':>10}{'ratio':>8}{'bound':>8}{'goal':>7}")
    for line in table:
        numbers = f"{line['baseline']:>10.1f}{line['ours']:>10.1f}{line['ratio']:>7.2f}×{line['bound']:>7.2f}×"
        print(f"{line['case']:<48}{numbers}{line['goal']:>6}×")
    print("batches per second of both trainers; the bound is one process with one thread and without RPC")
    if arguments.json:
        print(json.dumps({"table": table}))


if __name__ == "__main__":
    main()
