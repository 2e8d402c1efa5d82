"""MLflow's UI shows the logged runs, metrics, artifacts and models."""

import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import finish, rank_of, wait_for
from mlflow_site import START_TIMEOUT_S, UNFOLD, Site, config, request_status
from playwright.sync_api import Locator, Page, expect

from hpcdist.host.json_files import read_json
from hpcdist.tracking.sent_points import is_complete

#: A chart with its title and buttons.
CARD = "experiment-view-compare-runs-card"


@pytest.fixture
def page(page: Page, site: Site) -> Page:
    """Return a page that has opened the printed link."""
    page.goto(site.link)
    page.wait_for_url(lambda url: "token=" not in url)  # the page of the link sets the cookie, and opens this one
    return page


def test_panel_of_the_assistant_stays_closed(page: Page) -> None:
    """MLflow shows either the panel or the button that opens it."""
    expect(page.locator(".assistant-fab-label")).to_have_count(1)


def test_pages_without_a_parameter_are_for_training(page: Page, site: Site) -> None:
    page.goto("about:blank")
    page.goto(f"{site.url}/#/experiments")
    expect(page.locator("aside").get_by_role("link", name="Model registry")).to_be_visible()
    page.evaluate("localStorage.removeItem('mlflow.workflowType_v1')")
    page.reload()
    expect(page.locator("aside").get_by_role("link", name="Prompts")).to_be_visible()


def test_open_ui_uploads_runs_that_nothing_else_uploads(site: Site) -> None:
    """As a Slurm job, which cannot write to a database, the run has no shipper."""
    # Short, so that the run `baseline` stays the best one.
    arguments = config("unshipped", "tracking.drain_timeout_s=0", "stop.max_epochs=1")
    code, output = site.runs.command("run", *arguments, **site.runs.unshipped)
    assert code == 0, output
    folder = site.runs.run_dir("unshipped")
    wait_for(lambda: is_complete(folder), "the upload", timeout_s=START_TIMEOUT_S)
    assert site.runs.mlflow_status("unshipped") == "FINISHED"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_requests_of_other_users_are_rejected(site: Site) -> None:
    nobody = 65534
    ids = read_json(site.runs.run_dir("baseline").mlflow) or {}
    api = f"{site.url}/api/2.0/mlflow"
    listing = f"{api}/runs/get?run_id={ids['run_id']}"
    json_body = ("Content-Type: application/json",)
    delete = f'{{"run_id": "{ids["run_id"]}"}}'
    assert request_status(listing, user=nobody) == 401
    assert request_status(f"{api}/runs/delete", *json_body, body=delete, user=nobody) == 401
    assert request_status(f"{site.url}/get-artifact?path=config.yaml&run_id={ids['run_id']}", user=nobody) == 401
    assert request_status(listing, "Authorization: Bearer guessed", user=nobody) == 401
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["cat", site.token_file], user=nobody, check=True, capture_output=True)
    # The same request with the token is accepted.
    assert request_status(listing, f"Authorization: Bearer {site.token_file.read_text()}") == 200
    assert site.token_file.read_text() == site.token
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if site.token.encode() in command]


def test_link_sets_the_cookie_and_a_reload_needs_no_token(page: Page, site: Site) -> None:
    page.context.clear_cookies()
    page.goto(f"{site.url}/?token=of-an-earlier-start")
    expect(page.get_by_text("open the link that `hpcdist ui` printed")).to_be_visible()
    page.goto(site.experiment_page.replace(f"{site.url}/", site.link))
    for _ in range(2):
        expect(listed(page, "baseline")).to_be_visible()
        assert site.token not in page.url
        page.reload()
    assert page.evaluate("document.cookie") == ""


def test_model_metrics_are_plotted_as_logged(page: Page, site: Site) -> None:
    page.goto(site.page_of("baseline", "model-metrics"))
    for metric, num_points in (("train/loss", 45), ("train/lr", 45), ("eval/accuracy", 2), ("eval/loss", 2)):
        values = site.series("baseline", metric)
        assert len(values) == num_points
        expect_curve(page, metric, values)


def test_models_tab_shows_kept_checkpoints_with_metrics(page: Page, site: Site) -> None:
    ids = read_json(site.runs.run_dir("baseline").mlflow) or {}
    page.set_viewport_size({"width": 2400, "height": 1000})  # the metrics are columns at the right
    page.goto(f"{site.url}/#/experiments/{ids['experiment_id']}/models?workflowType=machine_learning")
    best = max(site.series("baseline", "eval/accuracy"))
    steps = site.runs.checkpoint_steps("baseline")
    for step in steps:
        expect(page.get_by_role("link", name=f"baseline step-{step}", exact=True)).to_be_visible()
    for metric in ("eval/accuracy", "eval/loss"):
        expect(page.get_by_role("columnheader", name=metric, exact=True)).to_be_visible()
    expect(page.get_by_role("gridcell").filter(has_text=f"{best}"[:8]).first).to_be_visible()
    page.get_by_role("link", name=f"baseline step-{steps[-1]}", exact=True).click()
    expect(page.get_by_role("heading", name=f"baseline step-{steps[-1]}")).to_be_visible()
    expect(page.get_by_text(str(site.runs.run_dir("baseline").checkpoints)).first).to_be_visible()


def test_report_opens_in_the_artifact_viewer(page: Page, site: Site) -> None:
    page.goto(site.page_of("baseline", "artifacts"))
    page.get_by_text("report.html", exact=True).click()
    report = page.frame_locator("iframe")  # a sandbox
    expect(report.get_by_role("heading", name="baseline", exact=True)).to_be_visible()
    for heading in ("Run", "Timeline", "Ledger", "Trainer ddp", "Metrics", "Environment", "Config"):
        expect(report.get_by_role("heading", name=heading, exact=True)).to_be_attached()
    expect(report.get_by_role("img", name="train/loss, eval/loss").locator("polyline")).to_have_count(2)
    expect(report.locator("table.matrix td")).to_have_count(100)
    for scheme, colour in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        expect(report.locator("body")).to_have_css("background-color", colour)


def test_parent_run_of_a_sweep_expands_to_its_cells(page: Page, site: Site) -> None:
    page.goto(site.page_of("tune"))
    expect(page.get_by_role("status").filter(has_text=re.compile(r"^\s*Finished\s*$"))).to_be_visible()
    reason = page.get_by_role("status", name="hpcdist.reason", exact=True)
    expect(reason).to_have_text("hpcdist.reason: 2 cells")
    expect(page.get_by_role("row", name="seed 1, 2", exact=True)).to_be_attached()
    page.goto(site.experiment_page)
    expect(page.get_by_role("link", name="tune", exact=True)).to_be_visible()
    cells = [page.get_by_role("link", name=f"seed={seed} lr=0.01", exact=True) for seed in (1, 2)]
    expect(cells[0]).to_be_hidden()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="tune", exact=True))
    row.get_by_role("button").first.click()
    for cell in cells:
        expect(cell).to_be_visible()


def test_list_of_experiments_shows_the_best_result(page: Page, site: Site) -> None:
    page.goto(f"{site.url}/#/experiments")
    expect(page.get_by_text(re.compile("^Best eval/accuracy: "))).to_be_visible()


def test_experiment_lists_its_runs_below_the_table_of_the_best(page: Page, site: Site) -> None:
    page.goto(site.experiment_page)
    for run in ("baseline", "failing", "stopped", "tune"):
        expect(listed(page, run)).to_be_visible()
    # The description: its first line alone until a click on the arrow.
    headline = page.get_by_text(re.compile("^Best eval/accuracy: .* ± .*, baseline"))
    expect(headline).to_be_visible()
    top = page.locator(".ag-row").first.bounding_box()
    headline.locator(UNFOLD).click()
    row = page.locator("table tr").filter(has=page.get_by_role("link", name="baseline", exact=True))
    expect(row.first).to_contain_text("finished")
    page.wait_for_function(
        "top => document.querySelector('.ag-row').getBoundingClientRect().top > top + 100", arg=top["y"] if top else 0
    )
    expect(page.get_by_text("hpcdist runs --experiment")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 1920])
def test_pages_in_both_themes(page: Page, site: Site, tmp_path: Path, theme: str, width: int) -> None:
    """Take screenshots, to be looked at in HPCDIST_DOCS_IMAGES or the folder of the test."""
    folder = Path(os.environ.get("HPCDIST_DOCS_IMAGES", tmp_path))
    page.evaluate(f"localStorage.setItem('_mlflow_dark_mode_toggle_enabled', '{str(theme == 'dark').lower()}')")
    of_runs = {name: site.page_of(name) for name in ("baseline", "failing", "tune")}
    page.set_viewport_size({"width": width, "height": 900})
    for name, address in {"experiment": site.experiment_page, **of_runs}.items():
        page.goto("about:blank")
        page.goto(address)
        ready = page.get_by_text("About this run") if name in of_runs else page.locator(".ag-row")
        expect(ready.first).to_be_visible()
        page.screenshot(path=folder / f"{name.lower()}-{width}-{theme}.png")


@pytest.mark.slow
def test_report_shows_that_a_rank_was_killed(page: Page, site: Site) -> None:
    # The last test, because its run is better than the others.
    runs, attempt = site.runs, site.runs.attempt("larger-batch")
    process = runs.start("run", *config("larger-batch", "stop.max_epochs=10", "checkpoint.every_steps=20"))
    wait_for(lambda: (attempt.read_beat(1) or {"step": 0})["step"] > 60, "60 steps")
    (victim,) = (one.pid for one in psutil.Process(process.pid).children(recursive=True) if rank_of(one) == 1)
    os.kill(victim, signal.SIGKILL)
    code, output = finish(process)
    assert code == 0, output
    page.goto((runs.run_dir("larger-batch").path / "report.html").as_uri())
    expect(page.get_by_role("cell", name="rank 1 on", exact=False).first).to_contain_text("killed by SIGKILL")
    expect(page.get_by_text("trained 230 steps, 10 epochs").first).to_be_visible()


def listed(page: Page, run: str) -> Locator:
    """Return the link of a run in the list of runs; the table above it has one, too."""
    return page.locator(".ag-row").get_by_role("link", name=run, exact=True)


def expect_curve(page: Page, metric: str, values: list[float]) -> None:
    """Expect a chart with one marker per value, the logged values, and a line through them."""
    # MLflow renders a chart when it becomes visible; the search moves it to the top.
    page.get_by_placeholder("Search metric charts").fill(metric)
    card = page.get_by_test_id(CARD).filter(has=page.get_by_title(metric, exact=True))
    plot = card.locator(".js-plotly-plot")
    markers = plot.locator(".scatterlayer .point")
    expect(markers).to_have_count(len(values))
    expect(markers.first).to_be_visible()
    expect(plot.locator(".js-line").first).to_have_attribute("d", re.compile("^M.+L"))
    assert plot.evaluate("plot => Array.from(plot.data[0].y)") == pytest.approx(values)
