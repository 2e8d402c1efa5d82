"""`hpcdist bench`: reports, comparisons with earlier runs, and rejected requests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from sample_comm import sample

from hpcdist.bench.results import ARTIFACT, Results
from hpcdist.cli import app
from hpcdist.config.loading import load_config
from hpcdist.run import create
from hpcdist.run.folder import RunDir
from hpcdist.supervisor import local_run

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Result]:
    """Run `hpcdist bench` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["hpcdist", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)

    return call


@pytest.fixture
def left(tmp_path: Path) -> Callable[..., RunDir]:
    """Make a finished benchmark in `runs/comm`; each is newer than the ones before."""
    times = iter(range(1000, 2000))

    def left(name: str, results: Results | None, *, status: Any = "finished", experiment: str = "comm") -> RunDir:
        config = load_config("bench_comm", [f"name={name}", f"runs_dir={tmp_path}/runs", f"experiment={experiment}"])
        run = create.create_run(config, tmp_path)
        run.write_state(replace(run.read_state(), status=status, created=float(next(times))))
        if results is not None:
            (run.artifacts / ARTIFACT).parent.mkdir(parents=True)
            (run.artifacts / ARTIFACT).write_text(results.to_json())
        return run

    return left


def mistake(result: Result) -> str:
    """Return the message of a rejected command: one line, with nothing on standard output."""
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("hpcdist: ")
    assert result.err.count("\n") == 1
    return result.err.removeprefix("hpcdist: ").rstrip()


def slower(results: Results, factor: float) -> Results:
    rows = [
        replace(row, median_s=factor * row.median_s, p99_s=factor * row.p99_s, min_s=factor * row.min_s)
        for row in results.rows
    ]
    return replace(results, rows=rows)


def test_help_lists_the_commands(bench: Callable[..., Result]) -> None:
    for arguments, words in (((), ("comm", "show")), (("comm",), ("--submit", "--cluster", "--compare", "--dry-run"))):
        result = bench(*arguments, "--help")
        assert result.code == 0
        assert all(word in result.out for word in words)


def test_show_prints_the_report(bench: Callable[..., Result], left: Callable[..., RunDir]) -> None:
    left("first", sample())
    result = bench("show", "fir")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("4 ranks on 4 nodes (n1, n2, n3, n4), gloo on cpu, partition main")
    assert result.out.rstrip().splitlines()[-1].startswith("bottleneck: all 12 pairs have equal bandwidth")


def test_csv_and_json_are_complete(bench: Callable[..., Result], left: Callable[..., RunDir]) -> None:
    left("first", sample())
    assert bench("show", "first", "--csv").out.startswith("operation,variant,mode,")
    assert len(json.loads(bench("show", "first", "--json").out)["rows"]) == len(sample().rows)
    assert mistake(bench("show", "first", "--json", "--csv")) == "--csv, --json and --compare exclude each other"


def test_compare_with_a_run_by_name(bench: Callable[..., Result], left: Callable[..., RunDir]) -> None:
    left("first", sample())
    left("second", slower(sample(), 4.0))
    out = bench("show", "second", "--compare", "first").out
    assert "compared with first: all_reduce[sum] is slower at 29 of 29 sizes" in out
    assert "compared with second: nothing is slower" in bench("show", "first", "--compare", "second").out


def test_last_is_the_newest_comparable_run(bench: Callable[..., Result], left: Callable[..., RunDir]) -> None:
    left("oldest", sample())
    left("baseline", sample())
    left("elsewhere", sample(), experiment="other")
    left("two-nodes", sample(2))
    left("gpu", replace(sample(), partition="gpu"))
    left("broken", sample(), status="failed")
    left("stopped", replace(sample(), complete=False))
    left("nothing", None)
    left("now", sample())
    left("later", sample())
    assert "\ncompared with baseline: nothing is slower" in bench("show", "now", "--compare", "last").out
    out = bench("show", "two-nodes", "--compare", "last").out
    assert "\nno comparison: " in out


def test_incomparable_runs_are_rejected_with_both_values(
    bench: Callable[..., Result], left: Callable[..., RunDir]
) -> None:
    left("four", sample())
    left("gpu", replace(sample(2), partition="gpu", backend="nccl"))
    result = bench("show", "four", "--compare", "gpu")
    assert (result.code, result.err) == (
        2,
        "hpcdist: not comparable with run gpu: partition main now and gpu before, backend gloo now and nccl before,"
        " number of ranks 4 now and 2 before, number of nodes 4 now and 2 before\n",
    )


def test_incomparable_runs_are_rejected_before_the_start(
    bench: Callable[..., Result], left: Callable[..., RunDir]
) -> None:
    four = left("four", replace(sample(), partition="main"))
    before = set(four.path.parent.iterdir())
    here = mistake(bench("comm", "--compare", "four", "launch.num_ranks=2"))
    assert here == (
        "not comparable with run four: partition none now and main before, number of nodes 1 now and 4 before,"
        " number of ranks 2 now and 4 before"
    )
    there = mistake(bench("comm", "--compare", "four", "--cluster", "devcluster", "cluster.partition=high"))
    assert there == (
        "not comparable with run four: number of nodes 2 now and 4 before, partition high now and main before"
    )
    backend = mistake(
        bench("comm", "--compare", "four", "--submit", "cluster.nodes=4", "launch.backend=nccl", "launch.device=cuda")
    )
    assert backend == "not comparable with run four: backend nccl now and gloo before"
    assert set(four.path.parent.iterdir()) == before


def test_missing_runs_are_errors(bench: Callable[..., Result], left: Callable[..., RunDir]) -> None:
    left("empty", None)
    assert mistake(bench("show", "nowhere")).startswith("no run 'nowhere' under ")
    assert "comm/results.json does not exist: is this a run of `hpcdist bench comm`" in mistake(bench("show", "empty"))
    assert mistake(bench("comm", "--compare", "nowhere")).startswith("no run 'nowhere' under ")
    assert "exclude each other" in mistake(bench("comm", "--compare", "last", "--detach"))


def test_a_benchmark_in_the_background_prints_how_to_see_its_report(
    bench: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "detach", lambda run, env: 4711)
    result = bench("comm", "--detach", "name=left")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("report after the end of the run: hpcdist bench show left\n")


def test_a_dry_run_starts_nothing(bench: Callable[..., Result], tmp_path: Path) -> None:
    result = bench("comm", "--dry-run", "name=planned", "launch.num_ranks=3")
    assert (result.code, "3 × cpu, gloo" in result.out) == (0, True)
    result = bench("comm", "--dry-run", "--cluster", "devcluster", "name=planned", "cluster.nodes=4")
    assert (result.code, "#SBATCH --nodes=4" in result.out) == (0, True)
    assert not (tmp_path / "runs").exists()
