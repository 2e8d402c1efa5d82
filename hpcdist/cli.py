"""The command line: parse, call, print. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from hpcdist.devcluster.commands import app as devcluster_app
from hpcdist.errors import HpcdistError, UserMistake

if TYPE_CHECKING:
    from rich.console import Console

    from hpcdist.rundir import Attempt, RunDir, State
    from hpcdist.schema import Config

app = typer.Typer(
    name="hpcdist",
    help="One YAML file, one command: distributed PyTorch here or on a cluster, reviewed in MLflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(devcluster_app)

RunsDir = Annotated[
    Path, typer.Option("--runs-dir", envvar="HPCDIST_RUNS_DIR", help="Folder that holds the runs.", show_default=True)
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, name, or a unique prefix of its name.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value …]", help="Overrides of the config.")]
Detach = Annotated[bool, typer.Option("--detach/--follow", help="Leave it running in the background.")]
RUNS = Path("runs")


def main() -> NoReturn:
    """Run the command line. A mistake of the user ends with one message and exit code 2, never a traceback."""
    try:
        code = app(standalone_mode=False)
    except HpcdistError as error:
        print(f"hpcdist: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # A full disk or a folder without permission: the user's to mend, and the path says where.
        print(f"hpcdist: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        sys.exit(1)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        # click's own usage errors carry their exit code and know how to show themselves.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            sys.exit(error.exit_code)
        raise
    sys.exit(code or 0)


@app.command()
def run(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Path of a YAML file, or a shipped config's name.")],
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    detach: Detach = False,
) -> int:
    """Start a run on this machine.

    Examples:

        hpcdist run ddp_digits

        hpcdist run configs/ddp_mnist.yaml data.root=~/data optim.lr=0.01 launch.ranks=4

        hpcdist run ddp_mnist --detach
    """
    from hpcdist.config import load_config
    from hpcdist.launch import start
    from hpcdist.launch.plan import Machine, make_plan
    from hpcdist.tracking.uri import choose_uri
    from hpcdist.view import show_plan

    loaded = start.with_name(load_config(config, overrides or []))
    start.check_trainer(loaded, Path.cwd())
    plan = make_plan(loaded, Machine.inspect(os.environ))
    uri = choose_uri(os.environ, loaded.tracking.uri, Path(loaded.runs_dir))
    path = Path(loaded.runs_dir) / loaded.experiment / loaded.name
    show_plan(_console(), loaded, plan, path, uri, verbose=dry_run)
    if dry_run:
        return 0
    return _begin(start.create_run(loaded, Path.cwd()), loaded, detach=detach)


@app.command()
def submit(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="Path of a YAML file, or a shipped config's name.")],
    overrides: Overrides = None,
    cluster: Annotated[str | None, typer.Option(help="Profile of the site: a path, or one that is shipped.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and the srun line.")] = False,
    test: Annotated[bool, typer.Option("--test", help="Ask Slurm when it would start; submit nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show queue state, then progress, until the end.")] = False,
) -> int:
    """Send a run to Slurm.

    Examples:

        hpcdist submit ddp_mnist --cluster devcluster --follow

        hpcdist submit mnist.yaml --cluster ~/mysite.yaml cluster.nodes=4 --dry-run
    """
    from hpcdist.config import load_config
    from hpcdist.launch import slurm, start
    from hpcdist.rundir import RunDir
    from hpcdist.view import follow_job

    loaded = start.with_name(load_config(config, overrides or [], cluster=cluster))
    start.check_trainer(loaded, Path.cwd())
    if dry_run:
        script, step = slurm.render(loaded, RunDir(Path(loaded.runs_dir) / loaded.experiment / loaded.name))
        print(f"{script}\n# then, in the batch step:\n# {step}")
        return 0
    print(slurm.check(loaded))
    if test:
        return 0
    found = start.create_run(loaded, Path.cwd(), launcher="slurm")
    job_id = slurm.submit(loaded, found)
    print(f"{found.name} is job {job_id}: `hpcdist status {found.name}` and `hpcdist logs -f {found.name}` follow it")
    start.ship_now(found, loaded, os.environ)
    return _exit_code(follow_job(_console(), found, loaded)) if follow else 0


@app.command()
def resume(
    run: RunName,
    overrides: Overrides = None,
    with_current_code: Annotated[
        bool, typer.Option("--with-current-code", help="Take the code as it is now, not as it was at the start.")
    ] = False,
    detach: Detach = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Go on from the newest valid checkpoint, in the same MLflow run.

    Examples:

        hpcdist resume ddp-2026

        hpcdist resume runs/digits/first stop.epochs=20 --with-current-code
    """
    from hpcdist.config import load_run_config, to_yaml
    from hpcdist.launch import snapshot
    from hpcdist.lease import hold
    from hpcdist.rundir import resolve_run, write_atomic

    found = resolve_run(run, runs_dir)
    config = load_run_config(found.config, overrides or [], os.environ)
    if found.read_state().status == "finished" and not overrides:
        raise UserMistake(f"run {found.name} is finished: to train on, say how far, such as stop.epochs=20")
    with hold(found):
        write_atomic(found.config, to_yaml(config), durable=True)
        if with_current_code:
            snapshot.write_environment(found, snapshot.take(config, found, Path.cwd()), launcher="local")
    return _begin(found, config, detach=detach)


@app.command()
def runs(runs_dir: RunsDir = RUNS) -> None:
    """List all runs.

    Example:  hpcdist runs
    """
    from hpcdist.rundir import find_runs
    from hpcdist.view import show_runs

    show_runs(_console(), list(find_runs(runs_dir)), runs_dir)


@app.command()
def status(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """Show how a run stands: state, attempts, each rank's last step, newest checkpoint.

    Example:  hpcdist status ddp-2026
    """
    from hpcdist.rundir import resolve_run
    from hpcdist.view import show_status

    show_status(_console(), resolve_run(run, runs_dir))


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
    from hpcdist.rundir import resolve_run
    from hpcdist.view import stream_log

    for text in stream_log(resolve_run(run, runs_dir), rank, attempt, follow=follow):
        sys.stdout.write(text)
        sys.stdout.flush()


@app.command()
def stop(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """Ask a run to save, then stop. `hpcdist resume` goes on from there.

    Example:  hpcdist stop ddp-2026
    """
    from hpcdist.rundir import resolve_run

    found = resolve_run(run, runs_dir)
    _running_attempt(found).ask("stop", by=_user(), reason=f"`hpcdist stop` by {_user()}")
    print(f"asked {found.name} to save and stop; `hpcdist status {found.name}` shows how far it is")


@app.command()
def cancel(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """End a run at once; what came after its newest checkpoint is lost.

    Example:  hpcdist cancel ddp-2026
    """
    from hpcdist.rundir import resolve_run

    found = resolve_run(run, runs_dir)
    _running_attempt(found).ask("cancel", by=_user(), reason=f"`hpcdist cancel` by {_user()}")
    print(f"asked {found.name} to end at once")


@app.command("config")
def show_config(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A YAML file or shipped config.")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Every key with type, default and meaning.")] = False,
) -> None:
    """Print the resolved config, secrets redacted; or the schema of all configs.

    Examples:

        hpcdist config ddp_mnist optim.lr=0.01

        hpcdist config --schema
    """
    from hpcdist.config import load_config, shipped_configs, to_yaml

    if schema:
        from hpcdist.schema import describe

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
    """Ship to MLflow what the runs' journals still hold, and close runs whose supervisor has died.

    Examples:

        hpcdist sync

        hpcdist sync ddp-2026
    """
    from hpcdist.config import load_run_config
    from hpcdist.lease import holder
    from hpcdist.rundir import find_runs, resolve_run
    from hpcdist.tracking.shipper import sync as ship
    from hpcdist.tracking.uri import choose_uri

    chosen = [resolve_run(name, runs_dir) for name in runs or []] or list(find_runs(runs_dir))
    failed = 0
    for found in chosen:
        if (busy := holder(found)) is not None:
            print(f"{found.name}: process {busy['pid']} on {busy['host']} ships it already")
            continue
        try:
            config = load_run_config(found.config, [], os.environ, require_secrets=False)
            report = ship(found, choose_uri(os.environ, config.tracking.uri, Path(config.runs_dir)))
            print(f"{found.name}: {report}")
        except HpcdistError as error:
            failed += 1
            print(f"{found.name}: {error}", file=sys.stderr)
    return 1 if failed else 0


@app.command()
def ui(
    uri: Annotated[str | None, typer.Option(help="MLflow store; the runs' own sqlite database by default.")] = None,
    port: Annotated[int, typer.Option(help="Port to listen on, on this machine alone.")] = 5000,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Open MLflow's UI on the configured store.

    Examples:

        hpcdist ui

        hpcdist ui --port 5001 --runs-dir /shared/me/runs
    """
    from hpcdist.tracking.uri import choose_uri
    from hpcdist.view import training_links

    where = uri or choose_uri(os.environ, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    if where.startswith("http"):
        print(f"the UI of that server is at {where}")
        return
    for link in training_links(runs_dir, where, port):
        print(link)
    # Helper processes and workers that a look at one's own runs does not need, and no word to anyone else.
    os.environ |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = ["-m", "mlflow", "ui", "--backend-store-uri", where, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    os.execv(sys.executable, [sys.executable, *command])


@app.command(hidden=True)
def worker(run_dir: Path) -> None:
    """Run one rank of a run folder; place and size of the group come from the environment."""
    from hpcdist.runtime.worker import main as work

    work([str(run_dir)])


@app.command(hidden=True)
def supervise(run_dir: Path) -> int:
    """Supervise a run folder in the foreground; what `--detach` leaves behind."""
    from hpcdist.config import load_run_config
    from hpcdist.rundir import RunDir

    found = RunDir.open(run_dir)
    return _begin(found, load_run_config(found.config, [], os.environ), detach=False)


def _begin(run: RunDir, config: Config, *, detach: bool) -> int:
    """Supervise a run here or leave it to the background; returns the exit code of the command."""
    from hpcdist import logs
    from hpcdist.launch import start
    from hpcdist.launch.plan import Machine, make_plan
    from hpcdist.view import RunView, show_end

    if detach:
        pid = start.detach(run, config, os.environ)
        print(f"{run.name} runs in the background (process {pid}): `hpcdist logs -f {run.name}` follows it")
        return 0
    logs.configure()
    plan = make_plan(config, Machine.inspect(os.environ))
    console = _console()
    with RunView(console) as view:
        state = start.supervise(run, config, plan, view, os.environ)
    show_end(console, run, state, config)
    return _exit_code(state)


def _exit_code(state: State) -> int:
    if state.status == "failed":
        return 2 if state.rejected else 1
    return 130 if state.status == "cancelled" else 0


def _running_attempt(run: RunDir) -> Attempt:
    """The attempt to leave a request in. Raises UserMistake when nobody is there to read it."""
    from hpcdist.lease import holder

    state = run.read_state()
    if holder(run) is None or state.attempt == 0:
        raise UserMistake(f"run {run.name} is not running: nobody holds it, and its last state is {state.status!r}")
    return run.attempt(state.attempt)


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # A log has no width; 80 columns would cut names that someone searches it for.
    return console if console.is_terminal else Console(width=160)


def _user() -> str:
    import getpass

    return getpass.getuser()
