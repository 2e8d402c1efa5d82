"""Commands for the review of runs: `hpcdist ui`, `hpcdist report` and `hpcdist sync`."""

from __future__ import annotations

import os
import shlex
import webbrowser
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist import logs
from hpcdist.cli.options import RUNS, Experiment, OptionalRunName, RunNames, RunsDir, TrackingUri, flag, named
from hpcdist.errors import HpcdistError, TrackingError, UserMistake
from hpcdist.logs import say

if TYPE_CHECKING:
    from hpcdist.run.folder import RunDir

app = typer.Typer()


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUri = None,
    all_links: Annotated[bool, flag("--links", "Print links to all experiments and their views, too.")] = False,
) -> None:
    """Upload what MLflow lacks, start its UI on the runs' database, for this user only, and print the link to open.

    The link leads to the experiment of the newest run. The server listens on 127.0.0.1 and requires a token, which is
    new at each start and part of the link. If the store is an MLflow server, nothing is started.

    Examples:

        hpcdist ui

        hpcdist ui --port 5001 --runs-dir /shared/me/runs --links
    """
    from hpcdist.files.ownership import require_safe
    from hpcdist.run.lookup import find_runs
    from hpcdist.tracking.client.uri import choose_uri, sqlite_path
    from hpcdist.tracking.pages import links
    from hpcdist.tracking.server import ui as server

    store = tracking_uri or choose_uri(os.environ, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    if (database := sqlite_path(store)) is not None:
        require_safe(database)
    is_server = store.startswith("http")
    if not is_server:
        server.require_app()
        listener = server.listen(port)
    runs = find_runs(runs_dir)
    _upload(runs, quick=True)
    if is_server:
        address = links.web_address(store)
        for line in links.of_experiments(runs, store, f"{address}/") if all_links else []:
            say(line)
        say(f"review in MLflow: {links.of_newest(runs, store, f'{address}/')}")
        return
    token, file = server.make_token(port, os.environ)
    address = f"http://{server.HOST}:{port}"
    page = f"{address}/?token={token}"
    if all_links:
        say(f"all experiments: {links.experiments_page(page)}")
        for line in links.of_experiments(runs, store, page):
            say(line)
        say(f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {shlex.quote(str(file))})")
    say("MLflow is starting, and prints its link then; Ctrl-C ends it")
    os.environ |= server.variables(store, file, links.of_newest(runs, store, page))
    os.umask(0o077)  # a new database and uploaded artifacts are private to the user
    command = server.command(port)
    os.dup2(listener.fileno(), 0)  # its standard input
    listener.close()
    os.execv(command[0], command)


@app.command()
def report(
    run: OptionalRunName = None,
    open_it: Annotated[bool, flag("--open", "Open it in the browser.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write the report of a run, one HTML page, as of now, and print its path.

    Examples:

        hpcdist report

        hpcdist report digits/first --open
    """
    from hpcdist.files.ownership import is_mine
    from hpcdist.files.short_path import short_path
    from hpcdist.review.html_report import write_report
    from hpcdist.run.lookup import resolve_run
    from hpcdist.tracking.journal.metric_series import read_series

    found = resolve_run(named(run, runs_dir), runs_dir)
    if is_mine(found.path):
        write_report(found, read_series(found))
    elif not found.report.is_file():
        raise UserMistake(f"{found.report} does not exist, and only the owner of the run can write it")
    say(short_path(found.report))
    if open_it and not webbrowser.open(found.report.absolute().as_uri()):
        raise UserMistake(f"no browser was found: open {found.report.absolute()} on a machine that has one")


@app.command()
def sync(
    runs: RunNames = None,
    experiment: Experiment = None,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUri = None,
    all_runs: Annotated[bool, typer.Option("--all", help="All runs, which is the default.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Repeat until Ctrl-C or SIGTERM, with a log line per change.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=1, help="Time between two passes of --watch.")
    ] = 60.0,
) -> int:
    """Upload records that MLflow does not have yet, and close runs of dead supervisors or jobs.

    Only runs of the calling user are uploaded, and only from folders that no other user can write to.

    Examples:

        hpcdist sync

        hpcdist sync ddp-2026

        hpcdist sync --all --watch --interval 30
    """
    from hpcdist.run.lookup import list_runs, resolve_run
    from hpcdist.tracking.shipping.sync_runs import Watch

    del tracking_uri  # its callback has set HPCDIST_TRACKING_URI
    if runs and (all_runs or watch):
        raise UserMistake("names of runs exclude --all and --watch, which upload all runs: use one of both")
    if watch:
        logs.configure()
        return Watch(runs_dir, os.environ, lambda run: experiment in (None, run.experiment)).forever(interval_s)
    listing = list_runs(runs_dir)
    chosen = [resolve_run(name, runs_dir) for name in runs] if runs else listing.runs
    if listing.note and not runs:
        say(listing.note)
    code, counts = _upload([run for run in chosen if experiment in (None, run.experiment)], verbose=bool(runs))
    if not runs:
        results = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "nothing to upload"
        say(f"{counts.total()} run{'s' * (counts.total() != 1)}: {results}")
    return code


def _upload(runs: Sequence[RunDir], *, verbose: bool = False, quick: bool = False) -> tuple[int, Counter[str]]:
    """Upload the records that MLflow does not have, and print a line for each run that has some.

    Args:
        verbose: print a line for each run.
        quick: send no request for complete runs, and none after the store has failed once.

    Returns:
        The exit code, and the number of runs by result.
    """
    from hpcdist.tracking.journal.shipping_state import is_complete
    from hpcdist.tracking.shipping.sync_runs import NOTHING_NEW, exit_code, sync_run

    code, counts = 0, Counter[str]()
    for run in runs:
        try:
            if quick and is_complete(run):
                continue
            text, is_busy = sync_run(run, os.environ)
        except (HpcdistError, OSError) as error:
            code = max(code, exit_code(error))
            counts["failed"] += 1
            say(f"{run.name}: {error}", error=True)
            if quick and isinstance(error, TrackingError):
                break
            continue
        kind = "running" if is_busy else "unchanged" if text in NOTHING_NEW else "uploaded"
        counts[kind] += 1
        if verbose or kind != "unchanged":
            say(f"{run.name}: {text}")
    return code, counts
