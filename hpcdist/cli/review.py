"""Commands for the review of runs in MLflow: `hpcdist ui` and `hpcdist sync`."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from hpcdist import logs
from hpcdist.cli.options import RUNS, Experiment, RunNames, RunsDir, TrackingUri
from hpcdist.errors import HpcdistError, UserMistake

app = typer.Typer()


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Start MLflow's UI on the runs' database, for this user only.

    The server listens on 127.0.0.1 and requires a token, which is new at each start: open one of the printed links,
    to an experiment or to one of its prepared views. Scripts read the token from the printed file. If the store is an
    MLflow server, the links to that server are printed and nothing is started.

    Examples:

        hpcdist ui

        hpcdist ui --port 5001 --runs-dir /shared/me/runs
    """
    from hpcdist.run.lookup import find_runs
    from hpcdist.run.runs_dir import require_own
    from hpcdist.tracking.client.uri import choose_uri, sqlite_path
    from hpcdist.tracking.pages import links
    from hpcdist.tracking.server import ui as server
    from hpcdist.tracking.server.server_process import require_free

    store = tracking_uri or choose_uri(os.environ, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    if store.startswith("http"):
        address = links.web_address(store)
        print(f"the UI of this MLflow server is at {address}")
        for line in links.of_experiments(find_runs(runs_dir), store, f"{address}/"):
            print(line)
        return
    if (database := sqlite_path(store)) is not None:
        require_own(database, "the database")
    server.require_app()
    require_free(server.HOST, port, "--port")  # a link to a server of another user would give that user the token
    token, file = server.make_token(port, os.environ)
    address = f"http://{server.HOST}:{port}"
    page = f"{address}/?token={token}"
    print(f"all experiments: {links.experiments_page(page)}")
    for line in links.of_experiments(find_runs(runs_dir), store, page):
        print(line)
    print(f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {shlex.quote(str(file))})")
    print("MLflow is starting: the links work after it prints `Uvicorn running`", flush=True)
    os.environ |= server.variables(store, file)
    os.umask(0o077)  # a new database and uploaded artifacts are private to the user
    command = server.command(port)
    os.execv(command[0], command)


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
    from hpcdist.tracking.shipping.sync_runs import Watch, exit_code, sync_run

    del tracking_uri  # its callback has set HPCDIST_TRACKING_URI
    if runs and (all_runs or watch):
        raise UserMistake("names of runs exclude --all and --watch, which upload all runs: use one of both")
    if watch:
        logs.configure()
        return Watch(runs_dir, os.environ, lambda run: experiment in (None, run.experiment)).forever(interval_s)
    if runs:
        chosen = [resolve_run(name, runs_dir) for name in runs]
    else:
        listing = list_runs(runs_dir)
        chosen = listing.runs
        if listing.note:
            print(listing.note)
    code = 0
    for found in chosen:
        if experiment not in (None, found.experiment):
            continue
        try:
            print(f"{found.name}: {sync_run(found, os.environ)[0]}")
        except (HpcdistError, OSError) as error:
            code = max(code, exit_code(error))
            print(f"{found.name}: {error}", file=sys.stderr)
    return code
