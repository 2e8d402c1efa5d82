"""DDP trainers with embedding tables on servers: ours, the tutorial's way, and one process without RPC.

    python benchmarks/hybrid.py [--rounds 3] [--only large,small] [--json]

Two trainers on this machine, one thread a process. Ours is the real `hpcdist run hybrid_clicks` in `mode: sync` and
`async`, with metrics, progress and shipping to sqlite, on a synthetic click log of the same sizes; its dense part has
the baseline's linear layer and one more. The baseline (baselines/hybrid.py) and the bound, one process with sparse
gradients, get batches drawn beforehand. Contenders take turns; figures are batches a second of all trainers over the
last two thirds of the steps (of ours the last half: while MLflow is being imported, in the first seconds of a run, it
takes a third of a core), ratios are taken within a round, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.tracking.journal_reader import read_records

BASELINE = Path(__file__).parent / "baselines" / "hybrid.py"
NUM_TRAINERS = 2
BASELINE_RANKS = NUM_TRAINERS + 2


@dataclass(frozen=True)
class Case:
    """A table, and batches of it: `bags` a trainer. `steps` of ours, of the baseline and of one process."""

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


def run_ours(case: Case, mode: str, folder: Path, env: Mapping[str, str]) -> float:
    steps, window = case.steps[0], case.steps[0] // 6
    test = 64
    num_samples = steps * case.bags * NUM_TRAINERS + test
    config = folder / "ours.yaml"  # tables given on the command line would be beside those of a shipped config
    roles = f"{{trainer: {NUM_TRAINERS}, parameter_server: {case.servers}}}"
    config.write_text(f"{{trainer: hybrid, roles: {roles}, hybrid: {{tables: {{only: {case.rows}}}}}}}\n")
    command = [
        *(sys.executable, "-m", "hpcdist", "run", str(config), "experiment=clicks", "checkpoint.monitor=eval/auc"),
        *(
            f"runs_dir={folder}",
            "name=ours",
            f"hybrid.mode={mode}",
            f"hybrid.embedding_dim={case.dim}",
            "hybrid.hidden_sizes=[8]",
        ),
        *("hybrid.table_optimizer=sgd", f"hybrid.batch_size={case.bags}", f"hybrid.max_bag_size={case.bag_size}"),
        *(
            "hybrid.fixed_bags=true",
            "hybrid.skew=0",
            "hybrid.num_numeric_columns=0",
            f"hybrid.num_samples={num_samples}",
        ),
        *(f"hybrid.eval_fraction={test / num_samples}", "optim.name=sgd", "hybrid.export_max_mb=0"),
        *("stop.max_epochs=1", f"tracking.log_every_steps={window}", "tracking.register_as=null"),
        *("launch.device=cpu", "launch.num_threads=1"),
    ]
    _call(command, folder, env)
    records, _ = read_records(folder / "clicks" / "ours" / "journal" / "attempt-001.rank-00000.jsonl")
    at = [(record.step, record.time_ms / 1000) for record in records if "train/loss" in record.metrics]
    (first, began), (last, ended) = at[2], at[-1]
    return NUM_TRAINERS * (last - first) / (ended - began)


def run_baseline(case: Case, folder: Path, env: Mapping[str, str]) -> float:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = {"BASELINE_PORT": str(one.getsockname()[1]), "DDP_PORT": str(other.getsockname()[1])}
    base = {**env, **ports, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(BASELINE), *_sizes(case, case.steps[1])],
            env={**base, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(BASELINE_RANKS)
    ]
    outputs = [rank.communicate() for rank in ranks]
    if failed := [error for rank, (_, error) in zip(ranks, outputs, strict=True) if rank.returncode]:
        sys.exit(f"the baseline failed:\n{failed[0][-4000:]}")
    return float(outputs[NUM_TRAINERS][0])


def run_one_process(case: Case, folder: Path, env: Mapping[str, str]) -> float:
    command = [sys.executable, "-W", "ignore", str(BASELINE), *_sizes(case, case.steps[2]), "--one-process"]
    return float(_call(command, folder, {**env, "OMP_NUM_THREADS": "1"}))


def _sizes(case: Case, steps: int) -> list[str]:
    values = {"rows": case.rows, "dim": case.dim, "bags": case.bags, "bag-size": case.bag_size, "steps": steps}
    return [part for name, value in values.items() for part in (f"--{name}", str(value))]


def _call(command: list[str], folder: Path, env: Mapping[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    own = ("HPCDIST_", "MALLOC_", "OMP_", "MLFLOW_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    contenders = {
        "baseline": run_baseline,
        "ours, sync": lambda *where: run_ours(where[0], "sync", *where[1:]),
        "ours, async": lambda *where: run_ours(where[0], "async", *where[1:]),
        "one process": run_one_process,
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            folder = Path(tempfile.mkdtemp(prefix="hybrid_"))
            try:
                rates[name].append(contender(case, folder, env))
            finally:
                shutil.rmtree(folder)
        shown = "  ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items())
        print(f"{case.name}, round {number + 1}: {shown}", file=sys.stderr, flush=True)
    return rates


def row(case: Case, rates: Mapping[str, list[float]], name: str) -> dict[str, str | float | None]:
    """One line of the trainers' table; times the baseline of the same round."""

    def times(contender: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[contender], rates["baseline"], strict=True))

    return {
        "case": f"{case.title}{'' if name == 'ours, sync' else ', async'}",
        "unit": "batches/s",
        "baseline": statistics.median(rates["baseline"]),
        "ours": statistics.median(rates[name]),
        "ratio": times(name),
        "bound": times("one process"),
        "goal": case.goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases, separated by commas")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON in the last line")
    arguments = parser.parse_args()
    chosen = [case for case in CASES if not arguments.only or case.name in arguments.only.split(",")]
    table = []
    for case in chosen:
        rates = measure(case, arguments.rounds)
        table += [row(case, rates, name) for name in ("ours, sync", "ours, async")]
    print(f"{'case':<48}{'baseline':>10}{'ours':>10}{'ratio':>8}{'bound':>8}{'goal':>7}")
    for line in table:
        numbers = f"{line['baseline']:>10.1f}{line['ours']:>10.1f}{line['ratio']:>7.2f}×{line['bound']:>7.2f}×"
        print(f"{line['case']:<48}{numbers}{line['goal']:>6}×")
    print("batches a second of both trainers; the bound is one process without RPC, of one thread")
    if arguments.json:
        print(json.dumps({"table": table}))


if __name__ == "__main__":
    main()
