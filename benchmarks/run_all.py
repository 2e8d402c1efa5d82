"""Run all benchmarks in sequence and write the results to RESULTS.md.

    python benchmarks/run_all.py [--only ddp_step,startup]

results.json keeps the last result of each benchmark for each kind of machine: processor, number of cores and GPU.
RESULTS.md shows all of them; its part below the line `## Notes` is kept. `benchmarks/gpu.sh` is run by hand on a
machine with GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
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

from hpcdist.host.gpu_info import visible_devices
from hpcdist.host.machine import cpu_name, num_cores
from hpcdist.run.snapshot import git_output

HERE = Path(__file__).parent
RESULTS = HERE / "RESULTS.md"
RAW = HERE / "results.json"
NOTES = "## Notes\n"
PACKAGES = ("torch", "torchvision", "numpy", "mlflow", "accelerate", "lightning")
#: What `run` returns for one benchmark on one machine, as results.json has it.
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """One row of the table: a number in the JSON of a benchmark, and its upper limit."""

    title: str
    path: tuple[str, ...]
    unit: str = ""
    target: float | None = None

    def value(self, values: Any) -> float | None:
        """Return the number in the JSON of the benchmark; None if it is not there."""
        for key in self.path:
            values = values.get(key) if values is not None else None
        return None if values is None else float(values)


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
        "sharded_checkpoint",
        ("--rounds", "15"),
        (
            Figure("FSDP2 state: stall over `dcp.save`", ("ratios", "stall over dcp.save"), target=0.25),
            Figure("FSDP2 state: stall over `dcp.async_save`", ("ratios", "stall over dcp.async_save"), target=1.0),
            Figure(
                "FSDP2 state: processor time of the stall over `dcp.async_save`",
                ("ratios", "stall_cpu over dcp.async_save"),
                target=1.0,
            ),
            Figure("FSDP2 state: time until durable over `dcp.save`", ("ratios", "durable over dcp.save"), target=1.0),
            Figure("FSDP2 state: three steps after a save", ("rows", "hpcdist", "step_over_usual"), target=1.3),
            Figure("the same: `dcp.async_save`", ("rows", "dcp.async_save", "step_over_usual")),
            Figure(
                "FSDP2 state: peak memory of a save beyond a rank's part",
                ("rows", "hpcdist", "peak_over_part_mb"),
                "MB",
                64,
            ),
        ),
    ),
    Benchmark(
        "lm",
        (),
        (
            Figure("trainer `lm`: CPU time of a token over a bare FSDP2 loop", ("ours_over_bare",), target=1.02),
            Figure(
                "trainer `lm`: CPU time of a token over a bare FSDP2 loop that keeps gathered weights, as it does",
                ("ours_over_bare_kept",),
            ),
            Figure("trainer `lm`: CPU time of a token over Lightning Fabric", ("ours_over_fabric",), target=1.0),
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
                ("rows", "one key, out of order", "resident_mb"),
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
    Benchmark(
        "token_windows",
        (),
        (
            Figure("order of 10^9 windows of tokens, CPU time per window", ("rows", "order", "us"), "µs", 2.0),
            Figure("reading windows of 2,048 tokens, per CPU second", ("rows", "length 2048", "tokens_per_s")),
            Figure("tokens of a text over encoding it alone, CPU time", ("rows", "build", "over_alone"), target=1.2),
        ),
    ),
    Benchmark("rl", ("--rounds", "3", "--seconds", "8"), ()),
    Benchmark("rnn", ("--rounds", "3"), ()),
    Benchmark("hybrid", ("--rounds", "3"), ()),
)


def run(benchmark: Benchmark) -> dict[str, Any]:
    """Run a benchmark and return its report, its JSON, date, commit, duration, machine and the load average before."""
    load, began, commit = os.getloadavg()[0], time.time(), commit_of(HERE.parent)
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
        "commit": commit,
        "minutes": (time.time() - began) / 60,
        "load_before": load,
        "machine": machine_facts(),
    }


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout, with `-dirty` if files other than the results differ from it."""
    commit = git_output(checkout, "rev-parse", "--short=8", "HEAD").strip()
    not_results = [f":(exclude,top)benchmarks/{path.name}" for path in (RESULTS, RAW)]
    changed = git_output(checkout, "status", "--porcelain", "--", ":/", *not_results)
    return f"{commit}-dirty" if changed else commit


def machine_kind() -> str:
    """Return the kind of this machine, such as `AMD EPYC, 2 logical CPUs, no GPU`."""
    devices = visible_devices(os.environ) or "GPUs of an unknown kind"
    return f"{cpu_name()}, {'no GPU' if devices == 'CPU' else devices}"


def machine_facts() -> str:
    """Return the processor, the operating system and the versions."""
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    versions = [f"{name} {metadata.version(name)}" for name in PACKAGES if importlib.util.find_spec(name)]
    return (
        f"{cpu_name()}, {num_cores()} cores usable, {int(memory[1]) / 2**20 if memory else 0:.0f} GiB,"
        f" {platform.system()} {platform.release()}, Python {platform.python_version()}, {', '.join(versions)}"
    )


@dataclass(frozen=True)
class Measured:
    """The last result of a benchmark on one kind of machine."""

    benchmark: Benchmark
    machine: int  #: number of the kind of machine on the page
    result: Result

    @property
    def last_run(self) -> str:
        """Return the date, the commit and the machine, such as `2026-11-27 c213e1b8 (1)`."""
        return f"{self.result['date'][:10]} {self.result['commit'] or 'unknown commit'} ({self.machine})"


def last_runs(results: Mapping[str, Mapping[str, Result]]) -> list[list[Measured]]:
    """Return the results of each benchmark that has some, newest first."""
    found = []
    for benchmark in BENCHMARKS:
        measured = [
            Measured(benchmark, number, of_machine[benchmark.name])
            for number, of_machine in enumerate(results.values(), 1)
            if benchmark.name in of_machine
        ]
        found.append(sorted(measured, key=lambda one: str(one.result["date"]), reverse=True))
    return [measured for measured in found if measured]


def figure_rows(measured: Iterable[Measured], figure: Figure) -> Iterator[str]:
    for one in measured:
        value = figure.value(one.result["values"])
        if value is None:  # older results, and those without all packages, may lack a figure
            continue
        unit = f" {figure.unit}" if figure.unit else ""
        target = "" if figure.target is None else f"≤ {figure.target:g}{unit}"
        verdict = "" if figure.target is None else ("met" if value <= figure.target else "**missed**")
        yield f"| {figure.title} | {value:.3g}{unit} | {target} | {verdict} | {one.last_run} |"


def trainer_rows(measured: Iterable[Measured]) -> Iterator[str]:
    """Yield the rows of a benchmark of a trainer: those of one case follow each other."""

    def multiple(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}×"

    found = [(row, one) for one in measured for row in one.result["values"].get("table", ())]
    cases = list(dict.fromkeys(row["case"] for row, _ in found))
    for row, one in sorted(found, key=lambda pair: cases.index(pair[0]["case"])):
        goal, bound = row["goal"], row["bound"]
        verdict = "" if goal is None else ("met" if row["ratio"] >= goal else "**missed**")
        yield (
            f"| {one.benchmark.name} | {row['case']} | {row['baseline']:.3g} {row['unit']}"
            f" | {row['ours']:.3g} {row['unit']} | {multiple(row['ratio'])} | {multiple(bound)}"
            f" | {(goal and '≥ ' + multiple(goal)) or ''} | {verdict} | {one.last_run} |"
        )


def trainer_table(shown: Iterable[Iterable[Measured]]) -> list[str]:
    lines = [row for measured in shown for row in trainer_rows(measured)]
    head = [
        "| trainer | case | baseline | hpcdist | ratio | bound | goal | | last run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return ["", *head, *lines] if lines else []


def result_lines(one: Measured) -> list[str]:
    """Return the conditions and the output of one result."""
    result = one.result
    return [
        "",
        f"`python {' '.join(one.benchmark.command)}`, {result['date']}, commit {result['commit'] or 'unknown'},"
        f" machine {one.machine}, {result['minutes']:.0f} min, load average {result['load_before']:.1f} before",
        "",
        result["machine"],
        "",
        "```",
        result["report"],
        "```",
    ]


def render(results: Mapping[str, Mapping[str, Result]], notes: str) -> str:
    lines = [
        "# Benchmark results",
        "",
        "`benchmarks/run_all.py` (`make bench`) writes this page except the notes at the end. Compare ratios within",
        "one run: absolute times depend on the load of the shared machine.",
        "",
        "Each row ends with the date, the commit and the machine of its last run; a figure has a row for each machine,",
        "the newest first. Machines:",
        "",
        *(f"{number}. {kind}" for number, kind in enumerate(results, 1)),
        "",
        "GPU figures are in the notes: `benchmarks/gpu.sh` ran on other machines.",
        "",
        "| figure | measured | target | | last run |",
        "|---|---|---|---|---|",
    ]
    shown = last_runs(results)
    for measured in shown:
        for figure in measured[0].benchmark.figures:
            lines += figure_rows(measured, figure)
    lines += trainer_table(shown)
    for measured in shown:
        lines += ["", f"## {measured[0].benchmark.name}"]
        for one in measured:
            lines += result_lines(one)
    return "\n".join(lines) + "\n\n" + notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of benchmarks, separated by commas")
    arguments = parser.parse_args()
    chosen = [item for item in BENCHMARKS if not arguments.only or item.name in arguments.only.split(",")]
    results: dict[str, dict[str, Any]] = json.loads(RAW.read_text()) if RAW.exists() else {}
    of_machine = results.setdefault(machine_kind(), {})
    old = RESULTS.read_text() if RESULTS.exists() else ""
    notes = NOTES + (old.partition("\n" + NOTES)[2] or "\n")
    for benchmark in chosen:
        of_machine[benchmark.name] = run(benchmark)
        # Written after each benchmark, so that a later failure does not discard the results.
        RESULTS.write_text(render(results, notes))
        RAW.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
