"""`hpcdist cost`."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Cli, one_line
from timed_runs import BEGAN, account, add_attempt

from hpcdist.host.files import write_json
from hpcdist.review.ledger import CAUSES
from hpcdist.run.folder import RunDir
from hpcdist.run.records import NodeShare, Resources
from hpcdist.run.sweeps import SweepDir
from hpcdist.slurm import client
from hpcdist.slurm.output import AccountedStart

pytestmark = pytest.mark.processes  # runs are created with the commit that git reports

Make = Callable[..., RunDir]


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def runs(make: Make) -> list[RunDir]:
    """Two runs on cores, one on GPUs, and one of an older version."""
    found = [make("first"), make("second"), make("gpu", "experiment=other"), make("old")]
    gpus = Resources(unit="GPU", nodes={"g1": NodeShare(allocated=2, share=1, ranks=[0, 1])})
    add_attempt(found[0], 1, 3601, [account(1, 3601)] * 4)
    add_attempt(found[1], 1, 7201, [account(1, 3601, closed=False)] * 4, failed=True)
    add_attempt(found[2], 1, 3601, [account(1, 3601)] * 2, gpus)
    for number, run in enumerate(found):
        run.write_state(
            replace(run.read_state(), created=time.mktime((2026, 10 + number // 2, 15, 12, 0, 0, 0, 0, -1)))
        )
        write_json(run.environment, {"user": "ada" if number != 1 else "bob"})
    return found


def test_cost_of_one_run_has_one_line_for_each_cause(hpcdist: Cli, runs: list[RunDir]) -> None:
    result = hpcdist("cost", "second")
    assert (result.code, result.err) == (0, "")
    assert all(cause in result.out for cause in CAUSES)
    assert "core-hours" in result.out
    assert "goodput: 40.0%" in result.out
    down = next(line for line in result.out.splitlines() if "down" in line)
    assert [word for word in down.split() if word[0].isdigit()] == ["4.00", "40.0%"]


def test_cost_of_all_runs_has_one_line_for_each_run(hpcdist: Cli, runs: list[RunDir]) -> None:
    result = hpcdist("cost", "--by", "run")
    assert result.err == "1 runs without a ledger are left out, such as runs that have not started: old\n"
    assert [name in result.out for name in ("/first", "/second", "/gpu", "/old")] == [True, True, True, False]
    assert "evaluation" not in result.out, "causes without hours have no column"


def test_a_run_with_unreadable_files_is_named_and_left_out(hpcdist: Cli, runs: list[RunDir]) -> None:
    phases = runs[0].attempt(1).phases
    phases.symlink_to(phases)
    result = hpcdist("cost", "--by", "run")
    assert (result.code, "/first" in result.out, "/second" in result.out) == (0, False, True)
    assert f"run first is left out: [Errno 40] Too many levels of symbolic links: '{phases}'\n" in result.err
    assert one_line(hpcdist("cost", "first")).startswith("run first is left out: ")


def test_narrow_terminal_shows_the_largest_losses(
    hpcdist: Cli, runs: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from hpcdist.cli import review

    monkeypatch.setattr(review, "console", lambda: Console(width=100))
    assert "down 40%, idle 20%" in hpcdist("cost", "--by", "run").out


def test_cells_of_a_sweep_are_told_apart_on_a_narrow_terminal(
    hpcdist: Cli, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    from hpcdist.cli import review

    for rate in ("0.1", "0.01"):
        run = make(f"ddp-20261122-121700-1a2b-optim.lr_{rate}-seed_1")
        add_attempt(run, 1, 3601, [account(1, 3601)] * 4)
    monkeypatch.setattr(review, "console", lambda: Console(width=80))
    out = hpcdist("cost", "--by", "run").out
    assert "…" not in out
    text = "".join(line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│"))
    assert all(f"optim.lr_{rate}-seed_1" in text for rate in ("0.1", "0.01"))


def test_csv_has_all_causes_in_hours(hpcdist: Cli, runs: list[RunDir]) -> None:
    found = rows(hpcdist("cost", "--csv", "--by", "run").out)
    assert [row["run"].partition("/")[2] for row in found] == ["first", "second", "gpu"]
    assert list(found[0]) == ["run", "unit", "runs", "allocated", "goodput", *CAUSES, "queue", "energy_kwh"]
    assert float(found[1]["down"]) == 4.0
    assert float(found[0]["allocated"]) == pytest.approx(5 * 3601 / 3600)
    assert (found[0]["unit"], found[2]["unit"], found[0]["energy_kwh"]) == ("core", "GPU", "")


def test_costs_are_summed_by_user_and_month(hpcdist: Cli, runs: list[RunDir]) -> None:
    found = rows(hpcdist("cost", "--csv", "--by", "month,user").out)
    assert [(row["user"], row["month"], row["unit"], row["runs"]) for row in found] == [
        ("ada", "2026-10", "core", "1"),
        ("ada", "2026-11", "GPU", "1"),
        ("bob", "2026-10", "core", "1"),
    ]
    found = rows(hpcdist("cost", "--csv", "--by", "user").out)
    assert [(row["user"], row["unit"]) for row in found] == [("ada", "GPU"), ("ada", "core"), ("bob", "core")]
    assert [row["experiment"] for row in rows(hpcdist("cost", "other", "--csv", "--by", "experiment").out)] == ["other"]
    assert "one of user, month, experiment, run" in one_line(hpcdist("cost", "--by", "group"))


def test_accounting_completes_the_starts_of_a_job(
    hpcdist: Cli, runs: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = AccountedStart(
        name="train",
        began=BEGAN - 20,
        ended=BEGAN + 7300,
        queue_s=3600.0,
        nodes="n[1-2]",
        cores=5,
        gpus=0,
        energy_j=7.2e6,
    )
    asked: list[str] = []

    def accounted_starts(job_id: str) -> list[AccountedStart]:
        asked.append(job_id)
        return [start, replace(start, name="other", began=BEGAN + 9000)]

    monkeypatch.setattr(client, "accounted_starts", accounted_starts)
    write_json(runs[1].path / "slurm.json", {"job_id": "41", "job_name": "train"})
    write_json(runs[1].path / "job.json", {"job_id": "41", "starts": {"0": {"nodes": "n[1-2]", "began": BEGAN - 20.0}}})
    for _ in range(2):
        (row,) = rows(hpcdist("cost", "second", "--csv").out)
        assert float(row["allocated"]) == pytest.approx(5 * 7320 / 3600, rel=1e-6)
        assert (float(row["queue"]), float(row["energy_kwh"])) == (1.0, 2.0)
    assert asked == ["41"], "complete records are not queried again"
    assert "energy: 2 kWh" in hpcdist("cost", "second").out


def test_cost_of_a_sweep_is_that_of_its_cells(
    hpcdist: Cli, runs: list[RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = SweepDir(Path("runs") / "exp" / "grid")
    monkeypatch.setattr(SweepDir, "cells", lambda self: runs[:2])
    monkeypatch.setattr("hpcdist.run.lookup.resolve", lambda name, runs_dir: sweep)
    assert len(rows(hpcdist("cost", "grid", "--csv").out)) == 2


def test_nothing_to_show(hpcdist: Cli, make: Make) -> None:
    make("old")
    assert hpcdist("cost", "old").out == "no runs with a ledger\n"
    assert "no run" in one_line(hpcdist("cost", "absent"))
