"""`hpcdist compare`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli, one_line

from hpcdist.run.folder import RunDir

pytestmark = pytest.mark.processes  # runs are created with the commit that git reports


@pytest.fixture
def two(make: Callable[..., RunDir]) -> tuple[RunDir, RunDir]:
    return make("first", status="finished", attempt=1), make("second", "optim.lr=0.5", status="failed", attempt=1)


def test_compare_prints_the_differences(hpcdist: Cli, two: tuple[RunDir, RunDir]) -> None:
    result = hpcdist("compare", "first", "second")
    assert result.code == 0
    assert result.err == ""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.out.splitlines() if "│" in line]
    assert ["optim.lr", "0.001", "0.5"] in rows
    assert ["state", "finished", "failed"] in rows
    assert not [row for row in rows if row[0].startswith("data.")]
    document = json.loads(hpcdist("compare", "first", "second", "--json").out)
    assert document["runs"] == ["first", "second"]
    assert document["differences"]["config"] == {"optim.lr": ["0.001", "0.5"]}


def test_runs_of_the_same_name_are_labelled_by_experiment(
    hpcdist: Cli, make: Callable[..., RunDir], tmp_path: Path
) -> None:
    first = make("first")
    other = tmp_path / "runs" / "other" / "first"
    other.parent.mkdir()
    first.path.rename(other)
    make("first")
    assert json.loads(hpcdist("compare", "exp/first", "other/first", "--json").out)["runs"] == [
        "exp/first", "other/first",
    ]  # fmt: skip


def test_compare_needs_two_runs(hpcdist: Cli, two: tuple[RunDir, RunDir]) -> None:
    expected = "only first is given: name a second run to compare it with"
    assert one_line(hpcdist("compare", "first")) == expected
    assert one_line(hpcdist("compare", "first", str(two[0].path))) == expected
    assert one_line(hpcdist("compare", "first", "none")).startswith("no run 'none' under ")
