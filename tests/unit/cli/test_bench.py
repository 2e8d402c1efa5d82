"""`hpcdist bench`: reports, comparisons with earlier runs, and rejected requests."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Make, Result, one_line
from sample_comm import sample

from hpcdist.config.loading import load_config
from hpcdist.run import create
from hpcdist.run.folder import RunDir
from hpcdist.supervisor import local as supervisor_local
from hpcdist.trainers.comm.results import ARTIFACT, Results

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@pytest.fixture
def bench(hpcdist: Cli) -> Cli:
    """Run `hpcdist bench` in this process, in an empty folder."""
    return functools.partial(hpcdist, "bench")


@pytest.fixture
def make_benchmark(tmp_path: Path) -> Make:
    """Make a finished benchmark in `runs/comm`, newer than all others."""
    times = iter(range(1000, 2000))

    def make(name: str, results: Results | None, *, status: Any = "finished", experiment: str = "comm") -> RunDir:
        config = load_config("bench_comm", [f"name={name}", f"runs_dir={tmp_path}/runs", f"experiment={experiment}"])
        run = create.create_run(config, tmp_path)
        run.write_state(replace(run.read_state(), status=status, created=float(next(times))))
        if results is not None:
            (run.artifacts / ARTIFACT).parent.mkdir(parents=True)
            (run.artifacts / ARTIFACT).write_text(results.to_json())
        return run

    return make


def mistake(result: Result) -> str:
    """Return the message of a rejected command, which prints nothing else."""
    assert result.out == ""
    return one_line(result)


def slower(results: Results, factor: float) -> Results:
    rows = [
        replace(row, median_s=factor * row.median_s, p99_s=factor * row.p99_s, min_s=factor * row.min_s)
        for row in results.rows
    ]
    return replace(results, rows=rows)


def test_show_prints_the_report(bench: Cli, make_benchmark: Make) -> None:
    make_benchmark("first", sample())
    result = bench("show", "fir")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("4 ranks on 4 nodes (n1, n2, n3, n4), gloo on cpu, partition main")
    assert result.out.rstrip().splitlines()[-1].startswith("bottleneck: all 12 pairs have equal bandwidth")


def test_show_prints_json(bench: Cli, make_benchmark: Make) -> None:
    make_benchmark("first", sample())
    assert len(json.loads(bench("show", "first", "--json").out)["rows"]) == len(sample().rows)
    assert mistake(bench("show", "first", "--json", "--compare", "last")) == "--json and --compare exclude each other"


def test_show_compares_with_a_named_run(bench: Cli, make_benchmark: Make) -> None:
    make_benchmark("first", sample())
    make_benchmark("second", slower(sample(), 4.0))
    out = bench("show", "second", "--compare", "first").out
    assert "compared with first: all_reduce is slower at 29 of 29 sizes" in out
    assert "compared with second: nothing is slower" in bench("show", "first", "--compare", "second").out


def test_show_compares_with_the_newest_comparable_run(bench: Cli, make_benchmark: Make) -> None:
    make_benchmark("oldest", sample())
    make_benchmark("baseline", sample())
    make_benchmark("elsewhere", sample(), experiment="other")
    make_benchmark("two-nodes", sample(2))
    make_benchmark("gpu", replace(sample(), partition="gpu"))
    make_benchmark("broken", sample(), status="failed")
    make_benchmark("stopped", replace(sample(), complete=False))
    make_benchmark("nothing", None)
    make_benchmark("now", sample())
    make_benchmark("later", sample())
    assert "\ncompared with baseline: nothing is slower" in bench("show", "now", "--compare", "last").out
    out = bench("show", "two-nodes", "--compare", "last").out
    assert "\nno comparison: " in out


def test_compare_rejects_incomparable_runs_with_both_values(bench: Cli, make_benchmark: Make) -> None:
    make_benchmark("four", sample())
    make_benchmark("gpu", replace(sample(2), partition="gpu", backend="nccl"))
    result = bench("show", "four", "--compare", "gpu")
    assert (result.code, result.err) == (
        2,
        "hpcdist: not comparable with run gpu: partition main now and gpu before, backend gloo now and nccl before,"
        " number of ranks 4 now and 2 before, number of nodes 4 now and 2 before\n",
    )


def test_bench_rejects_unknown_runs_and_runs_without_results(bench: Cli, make_benchmark: Make) -> None:
    make_benchmark("empty", None)
    assert mistake(bench("show", "nowhere")).startswith("no run 'nowhere' under ")
    assert "comm/results.json does not exist: is this a run of `hpcdist bench comm`" in mistake(bench("show", "empty"))
    assert mistake(bench("comm", "--compare", "nowhere")).startswith("no run 'nowhere' under ")
    assert "exclude each other" in mistake(bench("comm", "--compare", "last", "--detach"))


def test_detached_benchmark_prints_the_report_command(bench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_local, "detach", lambda run, env: 4711)
    result = bench("comm", "--detach", "name=first")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("report after the end of the run: hpcdist bench show first\n")


def test_dry_run_of_a_benchmark_starts_nothing(bench: Cli, tmp_path: Path) -> None:
    result = bench("comm", "--dry-run", "name=planned", "launch.num_ranks=3")
    assert (result.code, "3 × cpu, gloo" in result.out) == (0, True)
    result = bench("comm", "--dry-run", "--cluster", "devcluster", "name=planned", "cluster.nodes=4")
    assert (result.code, "#SBATCH --nodes=4" in result.out) == (0, True)
    assert not (tmp_path / "runs").exists()
