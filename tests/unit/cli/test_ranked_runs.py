"""`hpcdist runs --sort best`: the results of ended runs, the best one first."""

import io
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import Make, make_sweep
from rich.console import Console

from hpcdist.cli.ranked_runs import as_data, rank_runs, show_rankings
from hpcdist.host.json_files import write_json
from hpcdist.run import mlflow_limits
from hpcdist.run.folder import RunDir
from hpcdist.run.lookup import find_runs
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, write_training
from hpcdist.tracking.journal import JournalWriter


@pytest.fixture
def make(make_bare: Make) -> Make:
    """Return a function that makes a run with a best value; `cell` is the seed of a cell of the sweep `grid`."""

    def make(name: str, value: float | None, status: str = "finished", mode: str = "max", cell: int = 0) -> RunDir:
        run = make_bare(name, status=status, created=1.0, attempt=1)
        run.config.write_text(f"checkpoint: {{monitor: eval/{mode}, monitor_mode: {mode}}}\n")
        if value is not None:
            save = run.checkpoints / "step-00000010"
            save.mkdir()
            write_json(save / "manifest.json", {"step": 10, "created": 2.0, "metrics": {f"eval/{mode}": value}})
        if cell:
            write_json(
                run.path / "cell.json", {"sweep": "grid", "label": name, "values": {"optim.lr": 1, "seed": cell}}
            )
        return run

    return make


def log(run: RunDir, metrics: Mapping[str, float]) -> None:
    """Log metrics as `hpcdist.log` does."""
    with JournalWriter(run.journal) as journal:
        journal.log(metrics, 7)


def test_best_results_come_first_for_each_metric(make: Make, runs_dir: Path) -> None:
    for name, value in (("low", 0.5), ("high", 0.75)):
        make(name, value)
    make("loss", 0.25, mode="min")
    make("live", 0.9, status="running")
    make("broken", None, status="failed")
    ranked, notes = rank_runs(find_runs(runs_dir))
    shown = [(row["metric"], row["place"], row["name"]) for row in as_data(ranked)]
    assert shown == [("eval/max", 1, "exp/high"), ("eval/max", 2, "exp/low"), ("eval/min", 1, "exp/loss")]
    assert notes == ["1 run not ended", "1 ended run without a result"]
    assert rank_runs(find_runs(runs_dir), "other") == ([], [])


def test_seeds_of_a_setting_count_with_their_mean(make: Make, runs_dir: Path) -> None:
    make_sweep(runs_dir / "exp", "a", "b")
    make("a", 0.7, cell=1)
    make("b", 0.9, cell=2)
    make("single", 0.85)
    first, second = as_data(rank_runs(find_runs(runs_dir))[0])
    assert (first["name"], first["against_best"]) == ("exp/single", None)
    assert (second["name"], second["text"]) == ("exp/grid lr=1", "0.80 ± 0.14 s.d. (n=2)")
    assert second["against_best"]["word"] == "too few seeds"
    assert [run["value"] for run in second["runs"]] == [0.9, 0.7]


def test_finished_script_counts_with_its_last_value(make: Make, runs_dir: Path) -> None:
    """Of a run that ended early, or a metric of which the best direction is unknown, there is no result."""
    logged: tuple[tuple[str, str, dict[str, float]], ...] = (
        ("low", "finished", {"loss": 0.5, "grad": 2.0}),
        ("lower", "finished", {"loss": 0.25}),
        ("monitored", "finished", {"loss": 0.1, "eval/max": 0.75}),
        ("no loss", "finished", {"time/data_s": 1.0, "world_size": 2.0}),
        ("failed", "failed", {"loss": 0.1}),
        ("board", "finished", {"Accuracy/test": 0.5, "Loss/train": 2.0}),
        ("unknown", "finished", {"reward": 3.0, "loss_scale": 65536.0}),
        ("diverged", "finished", {"loss": math.nan}),
    )
    for name, status, metrics in logged:
        log(make(name, None, status), metrics)
    make("evaluated", 0.5)
    ranked, notes = rank_runs(find_runs(runs_dir))
    rows = {row["name"]: row for row in as_data(ranked)}
    assert {name: (row["kind"], row["text"]) for name, row in rows.items()} == {
        "exp/lower": ("loss · last value · lowest is best", "0.25"),
        "exp/low": ("loss · last value · lowest is best", "0.5"),
        "exp/board": ("Loss/train · last value · lowest is best", "2"),
        "exp/monitored": ("eval/max · last value · highest is best", "0.75"),
        "exp/evaluated": ("eval/max · highest is best", "0.5"),
    }
    assert rows["exp/lower"]["runs"][0]["step"] == 7
    assert notes == ["4 ended runs without a result"]


def test_last_values_on_different_data_are_not_compared(make: Make, runs_dir: Path) -> None:
    for name in ("mnist", "digits"):
        for metric in ("train/loss", "eval/max"):
            run = make(f"{name}-{metric[:4]}", None)
            log(run, {metric: 0.5})
            data = (DatasetRecord(name=name), DatasetRecord(name=name, split="test"))
            write_training(run.attempt(1), TrainingRecord(datasets=data))
    kinds = {row["name"]: (row["kind"], row["place"]) for row in as_data(rank_runs(find_runs(runs_dir))[0])}
    assert kinds == {
        "exp/mnist-trai": ("train/loss · last value · mnist (train) · lowest is best", 1),
        "exp/digits-trai": ("train/loss · last value · digits (train) · lowest is best", 1),
        "exp/mnist-eval": ("eval/max · last value · mnist (test) · highest is best", 1),
        "exp/digits-eval": ("eval/max · last value · digits (test) · highest is best", 1),
    }


def test_monitored_metric_may_have_a_name_that_mlflow_rejects(make: Make, runs_dir: Path) -> None:
    run = make("first", None)
    run.config.write_text("checkpoint: {monitor: acc@1, monitor_mode: max}\n")
    log(run, {"acc@1": 0.75, "loss": 0.5})
    (row,) = as_data(rank_runs(find_runs(runs_dir))[0])
    assert (row["metric"][:7], row["value"], row["mode"]) == ("acc_1--", 0.75, "max")


def test_script_without_a_monitored_metric_causes_no_warning(
    make: Make, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make("first", None)
    run.config.write_text("checkpoint: {monitor: ''}\n")
    log(run, {"loss": 0.5})
    mlflow_limits.clean_name.cache_clear()
    mlflow_limits._note_change.cache_clear()
    (row,) = as_data(rank_runs(find_runs(runs_dir))[0])
    assert (row["metric"], caplog.messages) == ("loss", []), "not that MLflow refuses an empty name"


@pytest.mark.parametrize("width", [60, 140])
def test_table_cuts_no_name(make: Make, runs_dir: Path, width: int) -> None:
    name = "a-name-of-fifty-columns-" + "x" * 26
    make(name, 0.5)
    make("b", 0.25)
    console = Console(file=io.StringIO(), width=width)
    show_rankings(console, *rank_runs(find_runs(runs_dir)), runs_dir)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert f"exp/{name}" in text
    assert "too few seeds (-0.25)" in text


def test_without_results_the_folder_is_named(runs_dir: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    show_rankings(console, *rank_runs([]), runs_dir)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == f"no results under {runs_dir.absolute()}\n"
