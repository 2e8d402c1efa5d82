"""Runs of all kinds in one MLflow database, and the `hpcdist ui` that shows them, for the tests of MLflow's UI."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpcdist_runs import HPCDIST, Runs, finish, unused_port, wait_for

from hpcdist.host.json_files import read_json
from hpcdist.review.markdown import TRAINING_PAGES
from hpcdist.tracking.mlflow_client import open_client
from hpcdist.tracking.uri import experiment_page

#: Two epochs of 45 steps.
FINISHED = ["data.batch_size=16", "stop.max_epochs=2", "tracking.register_as=digits-model"]
FAILING = ["trainer=counting:train", "params.until=40", "params.raise_at=20", "launch.max_restarts=0"]
STOPPED = ["trainer=counting:train", "params.until=100000"]
SWEEP = ["trainer=counting:train", "params.until=40", "--sweep", "seed=1,2", "--sweep", "optim.lr=0.01"]
#: From the first line of an experiment's description to the arrow that unfolds the rest, the second button beside it.
UNFOLD = "xpath=ancestor::div[count(.//button)=2][1]//button[2]"
#: Time limit for the start of a process; on a busy machine, the import of MLflow takes more than a minute.
START_TIMEOUT_S = 240


@dataclass(frozen=True)
class Site:
    """A finished, a failed and a stopped run, a sweep of two cells, and a running `hpcdist ui`.

    Attributes:
        link: The link that `hpcdist ui` printed, with the token.
    """

    runs: Runs
    link: str
    token_file: Path

    @property
    def url(self) -> str:
        return self.link.partition("/?token=")[0]

    @property
    def token(self) -> str:
        return self.link.partition("/?token=")[2]

    @property
    def experiment_page(self) -> str:
        """The address of the list of runs."""
        ids = read_json(self.runs.run_dir("baseline").mlflow) or {}
        return experiment_page(f"{self.url}/", ids["experiment_id"])

    def page_of(self, name: str, tab: str = "") -> str:
        """Return the address of a run's page, or of one of its tabs."""
        ids = read_json(self.runs.run_dir(name).mlflow) or {}
        return f"{self.url}/#/experiments/{ids['experiment_id']}/runs/{ids['run_id']}/{tab}?{TRAINING_PAGES}"

    def series(self, name: str, metric: str) -> list[float]:
        """Return the values of a metric in the store, in the order of steps."""
        return [
            value for _, value in sorted((step, value) for key, step, value in self.runs.points(name) if key == metric)
        ]


@contextmanager
def started_site(folder: Path, state: Path) -> Iterator[Site]:
    """Run everything, with `folder` for the runs and `state` for the files of `hpcdist ui`."""
    runs = Runs(folder)
    runs.database = runs.folder / "mlflow.db"  # the default of `hpcdist run` and `hpcdist ui`
    with ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            process = runs.start(*words)
            stack.callback(process.kill)  # also if the test is interrupted
            return process

        # Concurrent runs would wait for the first one to create the tables.
        open_client(f"sqlite:///{runs.database}")
        finished = start("run", *config("baseline", *FINISHED))
        link = stack.enter_context(ui(runs, state))
        failing = start("run", *config("failing", *FAILING))
        stopped = start("run", *config("stopped", *STOPPED))
        swept = start("run", *config("tune", *SWEEP))
        wait_for(
            lambda: runs.attempt("stopped").beat(0).exists(),
            "the first step of the run to stop",
            timeout_s=START_TIMEOUT_S,
        )
        for process, expected in ((start("stop", "stopped"), 0), (stopped, 0), (failing, 1), (swept, 0), (finished, 0)):
            code, output = finish(process, timeout_s=600)
            assert code == expected, output
        (token_file,) = state.glob("hpcdist/ui/*.token")
        yield Site(runs, link(), token_file)


def config(name: str, *overrides: str) -> list[str]:
    tracking = ["tracking.log_every_steps=2", "tracking.system_interval_s=1", "tracking.drain_timeout_s=600"]
    return ["ddp_digits", f"name={name}", "launch.num_ranks=2", *tracking, *overrides]


@contextmanager
def ui(runs: Runs, state: Path) -> Iterator[Callable[[], str]]:
    """Start `hpcdist ui`. Yields a function that waits for the server and returns its link."""
    port = unused_port()
    log = state / "ui.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            [str(HPCDIST), "ui", "--port", str(port)],
            env=runs.env(XDG_STATE_HOME=str(state), HPCDIST_RUNS_DIR=str(runs.folder)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def is_running() -> bool:
        assert process.poll() is None, log.read_text()
        return True

    def wait_for_link() -> str:
        printed = re.compile(rf"^review in MLflow: (http://127.0.0.1:{port}/[?]token=[^#\s]+)#", re.M)
        wait_for(lambda: is_running() and printed.search(log.read_text()), "the link", timeout_s=START_TIMEOUT_S)
        # The link is printed when the server answers.
        assert request_status(f"http://127.0.0.1:{port}/health") == 401
        return printed.search(log.read_text())[1]  # type: ignore[index]

    try:
        yield wait_for_link
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


#: An HTTP client that needs only the standard library, since the other user cannot read this checkout.
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


def request_status(url: str, *headers: str, body: str = "", user: int | None = None) -> int:
    """Send a GET, or a POST if there is a body, and return the HTTP status; 0 without a response.

    Args:
        user: Id of the user who sends the request.
    """
    command = ["python3", "-I", "-c", CLIENT, url, body, *headers]
    done = subprocess.run(command, user=user, cwd="/", check=True, capture_output=True, text=True)
    return int(done.stdout)
