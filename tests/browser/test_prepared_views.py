"""The prepared views of an experiment open in MLflow's UI by their links, with their columns and values."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

import pytest
from mlflow_site import Site
from playwright.sync_api import Locator, Page, expect

from hpcdist.run.lookup import find_runs
from hpcdist.run.records import CAUSES
from hpcdist.tracking import links


def open_view(page: Page, site: Site, name: str) -> None:
    """Open a view by the link that `hpcdist ui` prints, in a window in which all of its columns are visible."""
    page.set_viewport_size({"width": 3600, "height": 1400})
    store = f"sqlite:///{site.runs.database}"
    lines = links.of_experiments(find_runs(site.runs.folder), store, site.link)
    (link,) = (line.removeprefix(f"  {name}: ") for line in lines if line.startswith(f"  {name}: "))
    page.goto(link)
    expect(page.get_by_test_id("saved-views-trigger")).to_have_text(name)


def cell(page: Page, run: str, column: str) -> Locator:
    """Return the cell of a run in a column with an id of MLflow's UI. Pinned columns have rows of their own."""
    row = page.locator(".ag-row").filter(has=page.get_by_role("link", name=run, exact=True))
    index = row.get_attribute("row-index")
    return page.locator(f".ag-row[row-index='{index}'] .ag-cell[col-id='{column}']")


def expect_columns(page: Page, *names: str) -> None:
    """Expect these columns after the name and the time of creation, from left to right."""
    header = page.locator(".ag-header-cell")
    expect(header.filter(has_text=names[-1])).to_be_visible()
    places = header.evaluate_all("cells => cells.map(cell => [cell.getBoundingClientRect().x, cell.innerText.trim()])")
    assert [name for _, name in sorted(places) if name] == ["Run Name", "Created", *names]


def expect_metric(page: Page, site: Site, run: str, metric: str) -> None:
    """Expect the last value of a metric, which the UI shows as JavaScript does."""
    shown = cell(page, run, f"metrics.`{metric}`")
    expect(shown).to_have_text(re.compile(r"\d"))
    assert float(shown.inner_text()) == pytest.approx(site.series(run, metric)[-1])


def test_overview_compares_all_runs(page: Page, site: Site, docs_image: Callable[[Page, str], None]) -> None:
    open_view(page, site, "Overview")
    for run, state in (("finished", "finished"), ("failing", "failed"), ("stopped", "stopped"), ("tune", "finished")):
        expect(cell(page, run, "tags.`hpcdist.state`")).to_have_text(state)
    expect_columns(
        page,
        "hpcdist.state",
        "hpcdist.best",
        "Duration",
        "hpcdist.cost",
        "eval/accuracy",
        "train/loss",
        "train/samples_per_s",
        "hpcdist.nodes",
        "hpcdist.world_size",
        "Dataset",
    )
    best = max(site.series("finished", "eval/accuracy"))
    expect(cell(page, "finished", "tags.`hpcdist.best`")).to_have_text(re.compile(rf"{best:.6g} at step \d+"))
    expect(cell(page, "finished", "tags.`hpcdist.cost`")).to_have_text(re.compile(r"core-hours, goodput \d+ %"))
    for metric in ("eval/accuracy", "train/loss", "train/samples_per_s"):
        expect_metric(page, site, "finished", metric)
    expect(cell(page, "finished", "tags.`hpcdist.nodes`")).to_have_text(socket.gethostname())
    expect(cell(page, "finished", "tags.`hpcdist.world_size`")).to_have_text("2")
    expect(cell(page, "finished", "attributes.`Dataset`")).to_contain_text("digits")
    docs_image(page, "mlflow-overview")


def test_failures_are_grouped_by_state_with_their_causes(page: Page, site: Site) -> None:
    open_view(page, site, "Failures")
    for group in ("failed", "finished", "stopped"):
        expect(page.get_by_text(f"Group: {group}", exact=True)).to_be_visible()
    expect_columns(
        page,
        "hpcdist.state",
        "hpcdist.interruptions",
        "hpcdist.attempts",
        "hpcdist.lost_steps",
        "hpcdist.nodes",
        "Duration",
        "hpcdist.reason",
    )
    causes = cell(page, "failing", "tags.`hpcdist.interruptions`")
    expect(causes).to_contain_text("1: rank ")
    expect(causes).to_contain_text("a mistake in the user's own code after step")
    expect(cell(page, "finished", "tags.`hpcdist.interruptions`")).to_have_text(re.compile("^-?$"))
    expect(cell(page, "failing", "tags.`hpcdist.reason`")).to_contain_text(
        "a mistake in the user's own code after step"
    )
    expect(cell(page, "failing", "tags.`hpcdist.attempts`")).to_have_text("1")
    expect(cell(page, "finished", "tags.`hpcdist.lost_steps`")).to_have_text("0")
    first = page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0']")
    expect(first).to_contain_text("Group: failed")


def test_cost_is_shown_by_cause(page: Page, site: Site) -> None:
    open_view(page, site, "Cost")
    expect(page.get_by_role("link", name="finished", exact=True)).to_be_visible()
    names = [f"usage/{name}" for name in ("allocated", "goodput", *CAUSES, "queue")]
    expect_columns(page, "hpcdist.cost", *names, "Duration")
    for name in names:
        expect_metric(page, site, "finished", name)


def test_cells_of_a_sweep_are_grouped_with_their_axes(page: Page, site: Site) -> None:
    open_view(page, site, "Sweep")
    expect(page.get_by_text("Group: tune", exact=True)).to_be_visible()
    expect_columns(page, "seed", "optim.lr", "train/loss", "hpcdist.state", "Duration")
    for seed in (1, 2):
        expect(cell(page, f"seed={seed} lr=0.01", "params.`seed`")).to_have_text(str(seed))
        expect(cell(page, f"seed={seed} lr=0.01", "params.`optim.lr`")).to_have_text("0.01")
    expect(page.get_by_role("link", name="finished", exact=True)).to_be_hidden()
