"""MLflow's UI shows runs, metrics, artifacts and models as they were logged."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hpcdist_runs import HPCDIST, Runs, finish, unused_port, wait_for
from playwright.sync_api import Locator, Page, expect

from hpcdist.files.atomic import read_json

#: 45 steps an epoch.
MONDAY = ["data.batch_size=16", "stop.max_epochs=2", "tracking.register_as=weekend-model", "tracking.tags.team=vision"]
FAILING = ["trainer=counting:train", "params.until=40", "params.raise_at=20", "launch.max_restarts=0"]
STOPPED = ["trainer=counting:train", "params.until=100000"]
SWEPT = ["trainer=counting:train", "params.until=40", "--sweep", "seed=1,2", "--sweep", "optim.lr=0.01"]
#: A chart with its title and buttons.
CARD = "experiment-view-compare-runs-card"


@dataclass(frozen=True)
class Weekend:
    """A finished, a failed and a stopped run, a sweep of two cells, and the UI that shows them."""

    runs: Runs
    link: str  #: that `hpcdist ui` printed, token included
    token_file: Path
    output: str  #: what `hpcdist run` printed of the one that finished

    @property
    def url(self) -> str:
        return self.link.partition("/?token=")[0]

    @property
    def token(self) -> str:
        return self.link.partition("/?token=")[2]

    def page_of(self, name: str, tab: str = "") -> str:
        """Return the address of a run's page, or of one of its tabs."""
        known = read_json(self.runs.run_dir(name).mlflow) or {}
        return f"{self.url}/#/experiments/{known['experiment_id']}/runs/{known['run_id']}/{tab}"

    def series(self, name: str, metric: str) -> list[float]:
        """Return the values of a metric in the store, in the order of steps."""
        return [
            value for _, value in sorted((step, value) for key, step, value in self.runs.points(name) if key == metric)
        ]


@pytest.fixture(scope="module")
def weekend(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weekend]:
    runs = Runs(tmp_path_factory.mktemp("weekend"))
    runs.database = runs.folder / "mlflow.db"  # the default of `hpcdist run` and `hpcdist ui`
    commit(runs.project)
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            process = runs.start(*words)
            stack.callback(process.kill)  # also if the test is interrupted
            return process

        monday = start("run", *config("monday", *MONDAY))
        # The first run creates the tables of the database; the others start afterwards.
        wait_for(lambda: "run_id" in (read_json(runs.run_dir("monday").mlflow) or {}), "the first MLflow run")
        state = tmp_path_factory.mktemp("ui")
        answers = stack.enter_context(ui(runs, state))
        failing = start("run", *config("failing", *FAILING))
        stopped = start("run", *config("stopped", *STOPPED))
        swept = start("run", *config("tune", *SWEPT))
        wait_for(lambda: runs.attempt("stopped").beat(0).exists(), "a step of the run that is to be stopped")
        for process, expected in ((start("stop", "stopped"), 0), (stopped, 0), (failing, 1), (swept, 0), (monday, 0)):
            code, output = finish(process)
            assert code == expected, output
        (token_file,) = state.glob("hpcdist/ui/*.token")
        yield Weekend(runs, answers(), token_file, output)


@pytest.fixture
def page(page: Page, weekend: Weekend) -> Page:
    """Return a page on which the printed link has been opened."""
    page.goto(weekend.link)
    return page


def config(name: str, *overrides: str) -> list[str]:
    often = ["tracking.log_every_steps=2", "tracking.system_interval_s=1"]
    return ["ddp_digits", f"name={name}", "launch.num_ranks=2", *often, *overrides]


def commit(project: Path) -> None:
    """Make the folder a git work tree with everything committed."""
    git = ["git", "-C", str(project), "-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "as it was on Friday"]):
        subprocess.run([*git, *words], check=True)


@contextmanager
def ui(runs: Runs, state: Path) -> Iterator[Callable[[], str]]:
    """Start `hpcdist ui`. Yields a function that waits for the server and returns its link."""
    port = unused_port()
    log = state / "ui.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [str(HPCDIST), "ui", "--port", str(port), "--runs-dir", str(runs.folder)],
            env=runs.env(XDG_STATE_HOME=str(state)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        return ask(f"http://127.0.0.1:{port}/health") == 401

    def answers() -> str:
        wait_for(is_up, "MLflow's UI to answer")
        return re.search(rf"^all experiments: (http://127.0.0.1:{port}/[?]token=\S+)$", log.read_text(), re.M)[1]  # type: ignore[index]

    try:
        yield answers
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


#: A client of the standard library alone, for users who cannot read this checkout.
CLIENT = """
import sys, urllib.error, urllib.request
url, body, *headers = sys.argv[1:]
request = urllib.request.Request(url, body.encode() or None, dict(header.split(": ", 1) for header in headers))
try:
    print(urllib.request.urlopen(request, timeout=20).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print(0)
"""


def ask(url: str, *headers: str, body: str = "", user: int | None = None) -> int:
    """Return the status of a GET, or of a POST with a body, optionally as another user; 0 without a response."""
    words = ["python3", "-I", "-c", CLIENT, url, body, *headers]
    done = subprocess.run(words, user=user, cwd="/", check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_other_users_of_the_machine_are_refused(weekend: Weekend) -> None:
    nobody = 65534
    known = read_json(weekend.runs.run_dir("monday").mlflow) or {}
    api = f"{weekend.url}/api/2.0/mlflow"
    listing = f"{api}/runs/get?run_id={known['run_id']}"
    json_body = ("Content-Type: application/json",)
    delete = f'{{"run_id": "{known["run_id"]}"}}'
    assert ask(listing, user=nobody) == 401
    assert ask(f"{api}/runs/delete", *json_body, body=delete, user=nobody) == 401
    assert ask(f"{weekend.url}/get-artifact?path=config.yaml&run_id={known['run_id']}", user=nobody) == 401
    assert ask(listing, "Authorization: Bearer guessed", user=nobody) == 401
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(["cat", weekend.token_file], user=nobody, check=True, capture_output=True)
    # The server does not reject all requests.
    assert ask(listing, f"Authorization: Bearer {weekend.token_file.read_text()}") == 200
    assert weekend.token_file.read_text() == weekend.token
    # No process of the server shows the token to other users.
    assert not [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists() and weekend.token.encode() in path.read_bytes()
    ]


def test_mlflows_own_client_uses_the_token_as_printed(weekend: Weekend) -> None:
    search = "mlflow.search_runs(search_all_experiments=True, output_format='list')"
    code = f"import mlflow; print([run.info.run_name for run in {search}])"
    for token, expected in ((weekend.token, "monday"), ("of-an-earlier-start", "each start makes a new token")):
        env = weekend.runs.env(MLFLOW_TRACKING_URI=weekend.url, MLFLOW_TRACKING_TOKEN=token)
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert expected in done.stdout + done.stderr


def test_the_link_opens_the_list_and_a_reload_stays(page: Page, weekend: Weekend) -> None:
    page.context.clear_cookies()
    page.goto(f"{weekend.url}/?token=of-an-earlier-start")
    expect(page.get_by_text("open the link that `hpcdist ui` printed")).to_be_visible()
    known = read_json(weekend.runs.run_dir("monday").mlflow) or {}
    page.goto(f"{weekend.link}#/experiments/{known['experiment_id']}/runs?workflowType=machine_learning")
    for _ in range(2):
        expect(page.get_by_role("link", name="monday", exact=True)).to_be_visible()
        assert weekend.token not in page.url
        page.reload()
    assert page.evaluate("document.cookie") == ""


def test_the_front_page_leads_to_every_run(page: Page, weekend: Weekend, screenshots: Path) -> None:
    # Without this click MLflow shows LLM traces instead of training runs, and no tag changes that.
    page.get_by_role("button", name="Model training").click()
    page.get_by_role("link", name="digits", exact=True).click()
    for name in ("monday", "failing", "stopped"):
        expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()
    page.screenshot(path=screenshots / "the_list_of_runs.png")
    page.get_by_role("link", name="monday", exact=True).click()
    expect(page.get_by_role("heading", name="monday", exact=True)).to_be_visible()
    page.get_by_role("tab", name="Model metrics").click()
    expect_curve(page, "train/loss", weekend.series("monday", "train/loss"))


def test_overview_of_the_run_that_finished(page: Page, weekend: Weekend) -> None:
    page.goto(weekend.page_of("monday"))
    expect_status(page, "Finished")
    expect_tag(page, "hpcdist.state", "finished")
    expect_tag(page, "hpcdist.reason", "trained 90 steps, 2 epochs")
    expect_tag(page, "hpcdist.attempts", "1")
    expect_tag(page, "hpcdist.world_size", "2")
    expect_tag(page, "hpcdist.git_commit", head(weekend.runs.project))
    expect_tag(page, "hpcdist.git_dirty", "false")
    expect_tag(page, "team", "vision")
    for row in (
        "data.batch_size 16",
        "optim.lr 0.002",
        "stop.max_epochs 2",
        "launch.num_ranks 2",
        "trainer.target ddp",
    ):
        expect(page.get_by_role("row", name=row, exact=True)).to_be_attached()
    link = page.get_by_role("link", name="eval/accuracy", exact=True)
    shown = page.get_by_role("row").filter(has=link).get_by_role("cell").last.inner_text()
    printed = re.search(r"eval/accuracy\W+([\d.]+)", weekend.output)
    assert printed, weekend.output
    assert float(shown) == pytest.approx(float(printed[1]), rel=1e-5)
    expect(page.get_by_role("heading", name="Logged models (1)")).to_be_attached()


def test_model_metrics_are_drawn_as_logged(
    page: Page, weekend: Weekend, docs_image: Callable[[Page, str], None]
) -> None:
    page.goto(weekend.page_of("monday", "model-metrics"))
    for metric, num_points in (("train/loss", 45), ("train/lr", 45), ("eval/accuracy", 2), ("eval/loss", 2)):
        values = weekend.series("monday", metric)
        assert len(values) == num_points
        expect_curve(page, metric, values)
    show_all(page)
    docs_image(page, "mlflow-metrics")


def test_system_metrics_are_drawn_in_their_tab(page: Page, weekend: Weekend) -> None:
    page.goto(weekend.page_of("monday", "system-metrics"))
    for metric in ("system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"):
        values = weekend.series("monday", metric)
        assert len(values) >= 2
        expect_curve(page, metric, values)
    show_all(page)


def test_artifacts_can_be_read(page: Page, weekend: Weekend, screenshots: Path) -> None:
    run = weekend.runs.run_dir("monday")
    page.goto(weekend.page_of("monday", "artifacts"))
    for folder in ("checkpoints", "final", "logs", "attempt-001"):
        page.get_by_text(folder, exact=True).click()
    expect(page.get_by_text("manifest.json", exact=True)).to_be_visible()
    page.get_by_text("rank-00000.log", exact=True).click()
    expect(page.locator("code").first).to_contain_text(run.attempt(1).log(0).read_text().splitlines()[0])
    page.screenshot(path=screenshots / "a_log_of_a_rank.png")
    page.get_by_text("config.yaml", exact=True).click()
    expect(page.locator("code").first).to_contain_text("batch_size: 16")
    assert page.locator("code").first.inner_text().split() == run.config.read_text().split()


def test_the_model_is_registered(page: Page, weekend: Weekend) -> None:
    page.goto(f"{weekend.url}/#/models/weekend-model")
    expect(page.get_by_role("heading", name="weekend-model")).to_be_visible()
    page.get_by_role("link", name="Version 1", exact=True).click()
    page.get_by_role("link", name="monday", exact=True).click()
    expect(page.get_by_role("heading", name="monday", exact=True)).to_be_visible()


@pytest.mark.parametrize(
    ("name", "status", "state", "reason"),
    [
        ("failing", "Failed", "failed", "failed with ValueError: a mistake in the user's own code at step"),
        ("stopped", "Killed", "stopped", "stopped with everything saved (`hpcdist stop` by"),
    ],
    ids=["failing", "stopped"],
)
def test_a_run_that_did_not_finish(
    page: Page, weekend: Weekend, name: str, status: str, state: str, reason: str
) -> None:
    page.goto(weekend.page_of(name))
    expect_status(page, status)
    expect_tag(page, "hpcdist.state", state)
    # The page shortens a long tag; a click shows all of it.
    tag(page, "hpcdist.reason").click()
    expect(page.get_by_role("dialog")).to_contain_text(reason)
    expect(page.get_by_role("dialog")).to_contain_text(weekend.runs.run_dir(name).read_state().reason)


def test_the_cells_of_a_sweep_are_below_it(
    page: Page, weekend: Weekend, screenshots: Path, docs_image: Callable[[Page, str], None]
) -> None:
    page.goto(weekend.page_of("tune"))
    expect_status(page, "Finished")
    expect_tag(page, "hpcdist.reason", "2 cells: 2 finished")
    expect(page.get_by_role("row", name="seed 1, 2", exact=True)).to_be_attached()
    experiment = (read_json(weekend.runs.run_dir("tune").mlflow) or {})["experiment_id"]
    page.goto(f"{weekend.url}/#/experiments/{experiment}/runs")
    expect(page.get_by_role("link", name="tune", exact=True)).to_be_visible()
    cells = [page.get_by_role("link", name=f"seed={seed} lr=0.01", exact=True) for seed in (1, 2)]
    expect(cells[0]).to_be_hidden()
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="tune", exact=True))
    row.get_by_role("button").first.click()
    for cell in cells:
        expect(cell).to_be_visible()
    page.screenshot(path=screenshots / "a_sweep.png")
    docs_image(page, "mlflow-sweep")


def expect_curve(page: Page, metric: str, values: list[float]) -> None:
    """Expect a chart with a dot for each value, at the height of that value, and a line that joins them."""
    # Charts further down are created when they are scrolled to; a search moves each to the top.
    page.get_by_placeholder("Search metric charts").fill(metric)
    card = page.get_by_test_id(CARD).filter(has=page.get_by_title(metric, exact=True))
    plot = card.locator(".js-plotly-plot")
    dots = plot.locator(".scatterlayer .point")
    expect(dots).to_have_count(len(values))
    expect(dots.first).to_be_visible()
    expect(plot.locator(".js-line").first).to_have_attribute("d", re.compile("^M.+L"))
    assert plot.evaluate("plot => Array.from(plot.data[0].y)") == pytest.approx(values)


def show_all(page: Page) -> None:
    """Clear the search, and expect a second chart."""
    page.get_by_placeholder("Search metric charts").clear()
    expect(page.get_by_test_id(CARD).nth(1).locator(".scatterlayer .point").first).to_be_visible()


def expect_status(page: Page, status: str) -> None:
    """Expect this text in the line `Status` under `About this run`."""
    expect(page.get_by_role("status").filter(has_text=re.compile(rf"^\s*{status}\s*$"))).to_be_visible()


def tag(page: Page, key: str) -> Locator:
    return page.get_by_role("status", name=key, exact=True)


def expect_tag(page: Page, key: str, value: str) -> None:
    expect(tag(page, key)).to_have_text(f"{key}: {value}")


def head(project: Path) -> str:
    """Return the commit of a work tree."""
    command = ["git", "-C", str(project), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
