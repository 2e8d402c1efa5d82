"""The prepared views of an experiment open in MLflow's UI by their links, with their columns and values."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlflow_site import Site
from playwright.sync_api import Locator, Page, expect

from hpcdist.run.lookup import find_runs
from hpcdist.tracking import links

# MLflow 3.17 uses a loader option that SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def open_view(page: Page, site: Site, name: str) -> None:
    """Open a view by the link that `hpcdist ui` prints, in a window in which all of its columns are visible."""
    page.set_viewport_size({"width": 3000, "height": 1400})
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


def columns(page: Page) -> list[str]:
    """Return the names of the columns from left to right."""
    cells = page.locator(".ag-header-cell")
    expect(cells.nth(3)).to_be_visible()
    found = cells.evaluate_all("cells => cells.map(cell => [cell.getBoundingClientRect().x, cell.innerText.trim()])")
    return [name for _, name in sorted(found) if name]


def expect_value(cell: Locator, value: float) -> None:
    expect(cell).to_have_text(str(value)) if len(str(value)) < 8 else expect(cell).to_contain_text(str(value)[:5])


def test_overview_compares_all_runs(page: Page, site: Site, screenshots: Path) -> None:
    open_view(page, site, "Overview")
    expect(cell(page, "failing", "tags.`hpcdist.state`")).to_have_text("failed")
    expect(cell(page, "finished", "tags.`hpcdist.state`")).to_have_text("finished")
    expect(cell(page, "finished", "tags.`hpcdist.world_size`")).to_have_text("2")
    print(columns(page))
    page.screenshot(path=screenshots / "view-overview.png")


def test_failures_are_grouped_by_state_with_their_causes(page: Page, site: Site, screenshots: Path) -> None:
    open_view(page, site, "Failures")
    expect(page.get_by_text("Group: failed")).to_be_visible()
    print(columns(page))
    page.screenshot(path=screenshots / "view-failures.png")


def test_cost_by_cause(page: Page, site: Site, screenshots: Path) -> None:
    open_view(page, site, "Cost")
    expect(page.get_by_role("link", name="finished", exact=True)).to_be_visible()
    print(columns(page))
    page.screenshot(path=screenshots / "view-cost.png")


def test_cells_of_a_sweep_are_grouped_with_their_axes(page: Page, site: Site, screenshots: Path) -> None:
    open_view(page, site, "Sweep")
    expect(page.get_by_text("Group: tune")).to_be_visible()
    print(columns(page))
    page.screenshot(path=screenshots / "view-sweep.png")
