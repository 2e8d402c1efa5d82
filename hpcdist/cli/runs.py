"""Commands for runs that are there: look, stop, ship, show; and for configs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpcdist.cli.options import RUNS, Overrides, RunName, RunsDir, console
from hpcdist.errors import HpcdistError, UserMistake

if TYPE_CHECKING:
    from hpcdist.run.folder import RunDir
    from hpcdist.run.sweep_folder import SweepDir

app = typer.Typer()


@app.command()
def runs(runs_dir: RunsDir = RUNS) -> None:
    """List all runs.

    Example:  hpcdist runs
    """
    from hpcdist.cli.render import show_runs
    from hpcdist.run.lookup import list_runs

    show_runs(console(), list_runs(runs_dir), runs_dir)


@app.command()
def status(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """Show how a run stands: state, attempts, each rank's last step, newest checkpoint; of a sweep, its cells.

    Example:  hpcdist status ddp-2026
    """
    from hpcdist.cli.render import show_status
    from hpcdist.run.lookup import resolve
    from hpcdist.run.sweep_folder import SweepDir

    found = resolve(run, runs_dir)
    if isinstance(found, SweepDir):
        _show_sweep(found)
    else:
        show_status(console(), found)


@app.command()
def logs(
    run: RunName,
    rank: Annotated[int, typer.Option(help="Whose log.")] = 0,
    attempt: Annotated[int | None, typer.Option(help="Which attempt; the last one by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Print a rank's log.

    Examples:

        hpcdist logs ddp-2026 --rank 1

        hpcdist logs ddp-2026 -f
    """
    from hpcdist.cli.follow import stream_log
    from hpcdist.run.lookup import resolve_run

    for text in stream_log(resolve_run(run, runs_dir), rank, attempt, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()


@app.command()
def stop(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """Ask a run to save, then stop; one that waits in the queue is taken out. `hpcdist resume` goes on from there.

    Of a sweep all cells are stopped, and no more are begun.

    Example:  hpcdist stop ddp-2026
    """
    _end(run, runs_dir, "stop")


@app.command()
def cancel(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """End a run, or all cells of a sweep, at once; what came after the newest checkpoint is lost.

    Example:  hpcdist cancel ddp-2026
    """
    _end(run, runs_dir, "cancel")


def _end(name: str, runs_dir: Path, action: Literal["stop", "cancel"]) -> None:
    from hpcdist.files.ownership import require_mine
    from hpcdist.run.lookup import resolve
    from hpcdist.run.stop import end, end_sweep
    from hpcdist.run.sweep_folder import SweepDir

    found = resolve(name, runs_dir)
    require_mine(found.path, action)
    print("\n".join(end_sweep(found, action) if isinstance(found, SweepDir) else [end(found, action)]))


def _show_sweep(sweep: SweepDir) -> None:
    from hpcdist.cli.sweep_tables import show_cells

    cells = sweep.cells()
    labels = [str(cell["label"]) for cell in sweep.read()["cells"]]
    best = next((found for run in cells if (found := _best_metric(run))), "eval/accuracy")
    show_cells(sweep.name, list(zip(labels, cells, strict=True)), best)


def _best_metric(run: RunDir) -> str:
    """Return the metric that decides on a run's best checkpoint, nothing where its config cannot be read."""
    from hpcdist.config.loading import load_run_config

    try:
        return load_run_config(run.config, [], {}, require_secrets=False).checkpoint.monitor
    except UserMistake:
        return ""


@app.command("config")
def show_config(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A YAML file or shipped config.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="List every key with type, default and meaning.")] = False,
    as_json: Annotated[bool, typer.Option("--json-schema", help="Print the JSON Schema of a config.")] = False,
) -> None:
    """Print the resolved config with redacted secrets, or the schema of all configs.

    Examples:

        hpcdist config ddp_mnist optim.lr=0.01

        hpcdist config --schema

        hpcdist config --json-schema > config.schema.json
    """
    from hpcdist.config.loading import load_config
    from hpcdist.config.shipped import shipped_configs
    from hpcdist.config.written import to_yaml

    if as_json:
        import json

        from hpcdist.config.json_schema import json_schema

        print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif schema:
        from hpcdist.config.schema import describe

        for path, kind, default, documentation in describe():
            print(f"{path}: {kind} = {default!r}\n    {documentation}")
    elif config is None:
        raise UserMistake(f"which config? Shipped ones are {', '.join(shipped_configs())}; `--schema` lists all keys")
    else:
        print(to_yaml(load_config(config, overrides or [])), end="")


@app.command()
def sync(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN …]", help="Which runs; all by default.")] = None,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Ship to MLflow what the runs' journals still hold, and close runs whose supervisor or job has died.

    Only runs of your own are shipped, and only while group and others may not write to their folders.

    Examples:

        hpcdist sync

        hpcdist sync ddp-2026
    """
    from hpcdist.config.loading import load_run_config
    from hpcdist.files.ownership import require_trusted
    from hpcdist.run.lease import holder
    from hpcdist.run.lookup import list_runs, resolve_run
    from hpcdist.run.secret_file import kept
    from hpcdist.run.status import job_of
    from hpcdist.tracking.shipper import sync as ship
    from hpcdist.tracking.uri import choose_uri, is_server

    chosen = [resolve_run(name, runs_dir) for name in runs or []]
    if not runs:
        listing = list_runs(runs_dir)
        chosen = listing.runs
        if listing.note:
            print(listing.note)
    code = 0
    for found in chosen:
        try:
            require_trusted(found.path, "sync")
            config = load_run_config(found.config, [], {**kept(found), **os.environ}, require_secrets=False)
            uri = choose_uri(os.environ, config.tracking.uri, Path(config.runs_dir))
            # A job ships to a server alone; to a database those do who stand beside it.
            ships_itself = job_of(found) is None or is_server(uri)
            if ships_itself and (busy := holder(found)) is not None:
                print(f"{found.name}: process {busy['pid']} on {busy['host']} ships it already")
                continue
            report = ship(found, uri)
            print(f"{found.name}: {report}")
        except (HpcdistError, OSError) as error:
            code = max(code, error.exit_code if isinstance(error, HpcdistError) else 2)
            print(f"{found.name}: {error}", file=sys.stderr)
    return code


@app.command()
def ui(
    uri: Annotated[str | None, typer.Option(help="MLflow store; the runs' own sqlite database by default.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on, on this machine alone.")] = 5000,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Open MLflow's UI on the configured store, for yourself alone.

    The server listens on 127.0.0.1 and refuses every request without the token of this start. The printed links contain
    it; scripts read it from the printed file.

    Examples:

        hpcdist ui

        hpcdist ui --port 5001 --runs-dir /shared/me/runs
    """
    from hpcdist.cli.render import training_links
    from hpcdist.run.runs_dir import require_own
    from hpcdist.tracking import ui as server
    from hpcdist.tracking.uri import choose_uri, sqlite_path

    where = uri or choose_uri(os.environ, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    if where.startswith("http"):
        print(f"the UI of that server is at {where}")
        return
    if (database := sqlite_path(where)) is not None:
        require_own(database, "the database")
    server.require_app()
    server.require_port(port)
    token, file = server.make_token(port, os.environ)
    address = f"http://{server.HOST}:{port}"
    print(f"all experiments: {address}/?token={token}")
    for link in training_links(runs_dir, where, f"{address}/?token={token}"):
        print(link)
    print(f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {shlex.quote(str(file))})", flush=True)
    os.environ |= server.variables(where, file)
    os.umask(0o077)  # a new database and uploaded artifacts are the user's alone
    command = server.command(port)
    os.execv(command[0], command)
