"""Run all benchmarks in sequence and write the results to RESULTS.md.

    python benchmarks/run_all.py [--only ddp_step,startup]

RESULTS.md is rewritten except for the part below the line `## Notes`. With `--only`, the results of the other
benchmarks are kept. `benchmarks/gpu.sh` is run by hand on a machine with GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
RAW = HERE / "results.json"
NOTES = "## Notes\n"
PACKAGES = ("torch", "torchvision", "numpy", "mlflow", "accelerate", "lightning")


@dataclass(frozen=True)
class Figure:
    """One row of the table: a number in the JSON of a benchmark, and its upper limit."""

    title: str
    path: tuple[str, ...]
    unit: str = ""
    target: float | None = None


@dataclass(frozen=True)
class Benchmark:
    """A script and the figures of its JSON. Benchmarks of trainers also print rows of the table of trainers, `table`:

    [{"case", "unit", "baseline", "ours", "ratio", "bound", "goal"}]. Ratio, bound and goal are multiples of the
    baseline, bound and goal can be None, and more is better.
    """

    name: str
    arguments: tuple[str, ...]
    figures: tuple[Figure, ...]

    @property
    def command(self) -> list[str]:
        return [f"benchmarks/{self.name}.py", *self.arguments]


def _step_figures(batch_size: int, target: float) -> Iterator[Figure]:
    title = f"training step, batch {batch_size}"
    path = (f"batch_{batch_size}",)
    yield Figure(f"{title}: hpcdist over bare DDP", (*path, "ours", "over_bare"), target=target)
    for name in ("accelerate", "lightning", "bare, with our MALLOC_*", "bare, without exchange"):
        yield Figure(f"{title}: {name}", (*path, name, "over_bare"))


BENCHMARKS = (
    Benchmark("ddp_step", ("--rounds", "3"), (*_step_figures(8, 0.95), *_step_figures(64, 1.0))),
    Benchmark(
        "startup",
        ("--rounds", "9"),
        (
            Figure(
                "command to first step: trainer over torchrun",
                ("rows", "hpcdist run, trainer", "over_torchrun"),
                target=0.5,
            ),
            Figure(
                "command to first step, 8 ranks: trainer over torchrun",
                ("by_ranks", "8", "hpcdist run, trainer", "over_torchrun"),
                target=0.3,
            ),
            Figure(
                "command to first step, 8 ranks: unchanged script over torchrun",
                ("by_ranks", "8", "hpcdist run, script", "over_torchrun"),
            ),
            Figure(
                "command to first step: unchanged script over torchrun",
                ("rows", "hpcdist run, script", "over_torchrun"),
            ),
            Figure("`hpcdist --help`", ("rows", "hpcdist --help", "s"), "s", 0.2),
            Figure("`hpcdist config`", ("rows", "hpcdist config", "s"), "s", 0.2),
        ),
    ),
    Benchmark(
        "start_calls",
        (),
        (
            Figure("files that a rank opens at its start, each rank imports", ("rows", "each rank imports", "open")),
            Figure("files that a rank opens at its start, forked", ("rows", "forked", "open")),
        ),
    ),
    Benchmark(
        "recovery",
        ("--rounds", "3", "--kills", "5"),
        (
            Figure("SIGKILL of a rank to the next step, 10 MB", ("rows", "hpcdist", "total"), "s", 1.0),
            Figure("SIGKILL of a rank to the next step: over torchrun", ("rows", "hpcdist", "over"), target=0.25),
            Figure("SIGKILL of a rank to the next step: torchrun", ("rows", "torchrun, torch.save", "total"), "s"),
        ),
    ),
    Benchmark(
        "goodput",
        ("--rounds", "1"),
        (
            Figure(
                "time with a rank killed every 20 s over time without", ("rows", "hpcdist", "slowdown"), target=1.11
            ),
            Figure("the same: torchrun and torch.save", ("rows", "torchrun, torch.save", "slowdown")),
            Figure("the same: Lightning", ("rows", "Lightning, ModelCheckpoint", "slowdown")),
            Figure(
                "useful steps/s with kills: torchrun and torch.save over hpcdist",
                ("rows", "torchrun, torch.save", "over_ours"),
                target=0.5,
            ),
            Figure(
                "useful steps/s with kills: Lightning over hpcdist",
                ("rows", "Lightning, ModelCheckpoint", "over_ours"),
                target=0.5,
            ),
        ),
    ),
    Benchmark(
        "checkpoint_stall",
        (),
        (
            Figure("checkpoint stall over torch.save", ("over_torch_save", "ours"), target=0.25),
            Figure("one memcpy over torch.save (lower limit)", ("over_torch_save", "memcpy")),
        ),
    ),
    Benchmark(
        "log_record",
        (),
        (
            Figure("journal record of one metric", ("median_us", "journal, 1"), "µs", 20),
            Figure("journal record of five metrics", ("median_us", "journal, 5"), "µs", 20),
            Figure("MLflow's `log_metric`, sqlite", ("median_us", "MLflow sqlite, log_metric, 1"), "µs"),
            Figure("MLflow's `log_metric`, server", ("median_us", "MLflow server, log_metric, 1"), "µs"),
            Figure("MLflow's asynchronous `log_batch`, server", ("median_us", "MLflow server, asynchronous, 1"), "µs"),
        ),
    ),
    Benchmark(
        "shipping",
        (),
        (
            Figure(
                "CPU time of reading a journal of 13 MB with a late record",
                ("rows", "300 keys, late record", "cpu_s"),
                "s",
            ),
            Figure(
                "resident memory of reading a million points out of order",
                ("rows", "a million points, out of order", "resident_mb"),
                "MB",
            ),
        ),
    ),
    Benchmark(
        "timing",
        (),
        (
            Figure("step timer, share of a DDP step at batch 8 (one rank)", ("batch_8", "percent"), "%", 0.5),
            Figure("step timer, per step", ("cost_us",), "µs"),
        ),
    ),
    Benchmark("pipeline", ("--rounds", "3"), ()),
    Benchmark(
        "scale",
        (),
        (
            Figure("4,096 simulated ranks: supervisor, share of one core", ("sizes", "4096", "cpu_percent"), "%", 5),
            Figure("4,096 simulated ranks: file-system calls", ("sizes", "4096", "calls_per_s"), "/s", 230),
            Figure("64 simulated ranks: file-system calls", ("sizes", "64", "calls_per_s"), "/s", 230),
            # 1 is linear; see LINEAR_UP_TO in scale.py.
            Figure("fastest growth of a cost with the number of ranks, exponent", ("largest_power",), target=1.2),
        ),
    ),
    Benchmark(
        "slurm_start",
        (),
        (
            Figure("submit on a login node, over sbatch", ("rows", "hpcdist submit, apart", "over"), target=1.15),
            Figure("the same, on the cores of the ranks", ("rows", "hpcdist submit", "over")),
        ),
    ),
    Benchmark(
        "slurm_recovery",
        ("--rounds", "3"),
        (
            Figure("SIGKILL of a rank to the next step in a job, forked", ("rows", "forked", "total"), "s"),
            Figure("the same: forked over each rank imports", ("rows", "forked", "over")),
        ),
    ),
    Benchmark(
        "fork_cost",
        (),
        (
            Figure("CPU time of forking a rank", ("rows", "parent", "fork_ms"), "ms"),
            Figure("memory of the process that forks ranks (PSS)", ("rows", "parent", "pss_mb"), "MB"),
        ),
    ),
    Benchmark(
        "rpc",
        (),
        (
            Figure("RPC of 8 MiB, one call at a time: torch's time over hpcdist's", ("torch_over_hpcdist", "8 MiB, 1")),
            Figure("RPC of 8 MiB, 8 calls in flight: torch's time over hpcdist's", ("torch_over_hpcdist", "8 MiB, 8")),
        ),
    ),
    Benchmark("rl", ("--rounds", "3", "--seconds", "8"), ()),
    Benchmark("rnn", ("--rounds", "3"), ()),
    Benchmark("hybrid", ("--rounds", "3"), ()),
)


def run(benchmark: Benchmark) -> dict[str, Any]:
    """Run a benchmark and return its report, its JSON, date, duration, machine and the load average before it."""
    load, began = os.getloadavg()[0], time.time()
    print(f"$ python {' '.join(benchmark.command)}", flush=True)
    done = subprocess.run(
        [sys.executable, *benchmark.command, "--json"],
        cwd=HERE.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *report, last = done.stdout.rstrip().splitlines()
    print("\n".join(report), flush=True)
    return {
        "report": "\n".join(report).strip(),
        "values": json.loads(last),
        "date": time.strftime("%Y-%m-%d %H:%M", time.localtime(began)),
        "minutes": (time.time() - began) / 60,
        "load_before": load,
        "machine": machine_facts(),
    }


def machine_facts() -> str:
    """Return the processor, the operating system and the versions."""
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", text)
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    return (
        f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores usable,"
        f" {int(memory[1]) / 2**20 if memory else 0:.0f} GiB, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}, {', '.join(versions)}"
    )


def rows(benchmark: Benchmark, result: Mapping[str, Any]) -> Iterator[str]:
    for figure in benchmark.figures:
        value: Any = result["values"]
        for key in figure.path:
            value = value.get(key) if value is not None else None
        if value is None:  # older results may lack a figure
            continue
        unit = f" {figure.unit}" if figure.unit else ""
        target = "" if figure.target is None else f"≤ {figure.target:g}{unit}"
        verdict = "" if figure.target is None else ("met" if value <= figure.target else "**missed**")
        yield f"| {figure.title} | {value:.3g}{unit} | {target} | {verdict} |"


def trainer_rows(name: str, table: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    def multiple(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}×"

    for row in table:
        goal, bound = row["goal"], row["bound"]
        verdict = "" if goal is None else ("met" if row["ratio"] >= goal else "**missed**")
        yield (
            f"| {name} | {row['case']} | {row['baseline']:.3g} {row['unit']} | {row['ours']:.3g} {row['unit']}"
            f" | {multiple(row['ratio'])} | {multiple(bound)} | {(goal and '≥ ' + multiple(goal)) or ''} | {verdict} |"
        )


def trainer_table(shown: Iterable[tuple[Benchmark, Mapping[str, Any]]]) -> list[str]:
    lines = [
        row
        for benchmark, result in shown
        if "table" in result["values"]
        for row in trainer_rows(benchmark.name, result["values"]["table"])
    ]
    head = ["| trainer | case | baseline | hpcdist | ratio | bound | goal | |", "|---|---|---|---|---|---|---|---|"]
    return ["", *head, *lines] if lines else []


def render(results: Mapping[str, Mapping[str, Any]], notes: str) -> str:
    lines = [
        "# Benchmark results",
        "",
        "`benchmarks/run_all.py` (`make bench`) writes this page except the notes at the end. Compare ratios within",
        "one run: absolute times depend on the load of the shared machine.",
        "",
        "GPU figures are in the notes: `benchmarks/gpu.sh` ran on other machines.",
        "",
        "| figure | measured | target | |",
        "|---|---|---|---|",
    ]
    shown = [(benchmark, results[benchmark.name]) for benchmark in BENCHMARKS if benchmark.name in results]
    for benchmark, result in shown:
        lines += rows(benchmark, result)
    lines += trainer_table(shown)
    for benchmark, result in shown:
        lines += [
            "",
            f"## {benchmark.name}",
            "",
            f"`python {' '.join(benchmark.command)}`, {result['date']}, {result['minutes']:.0f} min,"
            f" load average {result['load_before']:.1f} before",
            *(["", result["machine"]] if "machine" in result else []),
            "",
            "```",
            result["report"],
            "```",
        ]
    return "\n".join(lines) + "\n\n" + notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of benchmarks, separated by commas")
    arguments = parser.parse_args()
    chosen = [item for item in BENCHMARKS if not arguments.only or item.name in arguments.only.split(",")]
    results: dict[str, Any] = json.loads(RAW.read_text()) if arguments.only and RAW.exists() else {}
    old = RESULTS.read_text() if RESULTS.exists() else ""
    notes = NOTES + (old.partition("\n" + NOTES)[2] or "\n")
    for benchmark in chosen:
        results[benchmark.name] = run(benchmark)
        # Written after each benchmark, so that a later failure does not discard the results.
        RESULTS.write_text(render(results, notes))
        RAW.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
