"""The pictures of README and the documentation (`make screenshots`): settings over seeds, and a run with a killed rank.

All runs have the same model and data, those of the sweep the same number of steps, and all train long enough that their
start does not dominate.
"""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import Runs, finish, rank_of, wait_for
from mlflow_site import START_TIMEOUT_S, UNFOLD, Site, ui
from PIL import Image
from playwright.sync_api import Page, expect

from hpcdist.host.json_files import read_json
from hpcdist.review.ledger import read_ledger
from hpcdist.tracking.uri import experiment_page

FOLDER = os.environ.get("HPCDIST_DOCS_IMAGES")
pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="`make screenshots` takes the pictures, in twenty minutes"),
    pytest.mark.timeout(7200),
]
CONFIG = ["ddp_digits", "launch.num_ranks=2", "model.name=resnet18", "data.image_size=32", "data.batch_size=128"]
# About 90 seconds on two quiet cores.
CONFIG += ["stop.max_epochs=32", "checkpoint.every_steps=5", "tracking.drain_timeout_s=600"]
SWEEP = ["name=tune", "--sweep", "optim.lr=0.0003,0.003", "--repeat", "3"]
#: Of the run with a killed rank: longer, because the start of both attempts counts against its goodput.
LONGER = "stop.max_epochs=80"
MIN_GOODPUT = 0.8
SWEEP_TIMEOUT_S = 3600
WIDTH = 1280


@contextmanager
def shown(runs: Runs, state: Path) -> Iterator[Site]:
    """Show runs by `hpcdist ui`."""
    with ui(runs, state) as link:
        address = link()
        (token_file,) = state.glob("hpcdist/ui/*.token")
        yield Site(runs, address, token_file)


@pytest.fixture(scope="module")
def site(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a finished sweep, shown by `hpcdist ui`."""
    runs = Runs(tmp_path_factory.mktemp("sweep"))
    runs.database = runs.folder / "mlflow.db"
    code, output = finish(runs.start("run", *CONFIG, *SWEEP), timeout_s=SWEEP_TIMEOUT_S)
    assert code == 0, output
    with shown(runs, tmp_path_factory.mktemp("ui")) as site:
        yield site


@pytest.fixture(scope="module")
def killed_site(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Return a finished run with a killed rank, shown by `hpcdist ui`."""
    runs = Runs(tmp_path_factory.mktemp("killed"))
    runs.database = runs.folder / "mlflow.db"
    runs.experiment = "digits-killed"
    process = runs.start("run", *CONFIG, LONGER, f"experiment={runs.experiment}", "name=killed-rank")
    attempt = runs.attempt("killed-rank")
    wait_for(lambda: (attempt.read_beat(1) or {"step": 0})["step"] > 50, "50 steps", timeout_s=START_TIMEOUT_S)
    (victim,) = (child.pid for child in psutil.Process(process.pid).children(recursive=True) if rank_of(child) == 1)
    os.kill(victim, signal.SIGKILL)
    code, output = finish(process, timeout_s=SWEEP_TIMEOUT_S)
    assert code == 0, output
    with shown(runs, tmp_path_factory.mktemp("ui")) as site:
        yield site


def open_link(page: Page, site: Site) -> None:
    """Open the printed link in the size of the pictures."""
    page.set_viewport_size({"width": WIDTH, "height": 720})
    page.goto(site.link)
    page.wait_for_url(lambda url: "token=" not in url)


def take(page: Page, name: str, height: int = 720) -> None:
    """Write a picture of a page to the folder of the documentation."""
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.wait_for_timeout(1000)  # for the new layout of the charts
    path = Path(FOLDER or "") / f"{name}.png"
    page.screenshot(path=path)
    with Image.open(path) as picture:  # a third of the bytes
        picture.quantize(256).save(path, optimize=True)


def test_table_of_the_experiment(page: Page, site: Site) -> None:
    open_link(page, site)
    ids = read_json(site.runs.run_dir("tune").mlflow) or {}
    page.goto(experiment_page(f"{site.url}/", ids["experiment_id"]))
    page.get_by_text(re.compile("^Best eval/accuracy: ")).locator(UNFOLD).click()
    expect(page.locator("table tr").filter(has_text="tune lr=0.003").first).to_contain_text("(n=3)")
    take(page, "mlflow-experiment", height=900)


def test_report_of_the_sweep(page: Page, site: Site) -> None:
    open_link(page, site)
    page.goto((site.runs.run_dir("tune").path / "report.html").as_uri())
    expect(page.get_by_role("img").locator("polygon")).to_have_count(2)
    take(page, "sweep", height=1000)


def test_run_with_a_killed_rank(page: Page, killed_site: Site) -> None:
    open_link(page, killed_site)
    run = killed_site.runs.run_dir("killed-rank")
    goodput = read_ledger(run).goodput
    assert goodput is not None
    page.goto((run.path / "report.html").as_uri())
    expect(page.get_by_role("cell", name="rank 1 on", exact=False).first).to_contain_text("killed by SIGKILL")
    take(page, "report", height=1400)
    page.goto(killed_site.page_of("killed-rank"))
    expect(page.get_by_text("About this run").first).to_be_visible()
    take(page, "mlflow-run")
    assert goodput > MIN_GOODPUT, "the machine is busy: README must not show this"
