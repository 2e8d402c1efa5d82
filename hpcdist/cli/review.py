"""Commands for the review of runs: `ui`, `report`, `sync`, `cost`, `compare`, `export`."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpcdist.cli import options
from hpcdist.cli.options import argument, console, named, option, print_table
from hpcdist.errors import HpcdistError, RunFolderError, TrackingError, UserMistake, duration
from hpcdist.host.files import short_path
from hpcdist.host.image_identity import install_command
from hpcdist.host.log_files import say
from hpcdist.host.ownership import is_mine, require_safe

if TYPE_CHECKING:
    from hpcdist.review.comparison import ComparedValue
    from hpcdist.review.ledger import Ledger
    from hpcdist.run.folder import RunDir
    from hpcdist.run.sweeps import SweepDir

app = typer.Typer()


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
) -> None:
    """Upload what MLflow lacks, start its UI on the runs' database, for this user only, and print the link to open.

    The link leads to the experiment of the newest run. The server listens on 127.0.0.1 and requires a token, which is
    new at each start and part of the link. If the store is an MLflow server, nothing is started.

    Examples:
        hpcdist ui
        HPCDIST_RUNS_DIR=/shared/me/runs hpcdist ui --port 5001
    """
    from hpcdist.run.lookup import find_runs
    from hpcdist.tracking import ui as server
    from hpcdist.tracking.uri import choose_uri, link_to_newest, sqlite_path, web_address

    runs_dir = options.runs_dir()
    store = choose_uri(os.environ, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    if (database := sqlite_path(store)) is not None:
        require_safe(database)
    is_server = store.startswith("http")
    if not is_server:
        server.require_app()
        listener = server.listen(port)
    runs = find_runs(runs_dir)
    _upload(runs, quick=True)
    if is_server:
        say(f"review in MLflow: {link_to_newest(runs, store, f'{web_address(store)}/')}")
        return
    token, file = server.make_token(port, os.environ)
    address = f"http://{server.HOST}:{port}"
    say(f"scripts: MLFLOW_TRACKING_URI={address} MLFLOW_TRACKING_TOKEN=$(cat {shlex.quote(str(file))})")
    say("MLflow is starting, and prints its link then; Ctrl-C ends it")
    os.environ |= server.variables(store, file, link_to_newest(runs, store, f"{address}/?token={token}"))
    os.umask(0o077)  # a new database and uploaded artifacts are private to the user
    command = server.command(port)
    os.dup2(listener.fileno(), 0)  # its standard input
    listener.close()
    os.execv(command[0], command)


@app.command()
def report(run: options.OptionalRunName = None) -> None:
    """Write the report of a run or sweep, one HTML page, as of now, and print its path.

    Example:  hpcdist report digits/first
    """
    from hpcdist.review.report import write_report
    from hpcdist.run.lookup import resolve
    from hpcdist.tracking.series import read_series

    found = resolve(named(run), options.runs_dir())
    if is_mine(found.path):
        write_report(found, read_series)
    elif not found.report.is_file():
        raise UserMistake(f"{found.report} does not exist, and only the owner of the {found.kind} can write it")
    say(short_path(found.report))


@app.command()
def sync(
    runs: options.RunNames = None,
) -> int:
    """Upload records that MLflow does not have yet, and close runs of dead supervisors or jobs.

    Only runs of the calling user are uploaded, and only from folders that no other user can write to.

    Examples:
        hpcdist sync
        hpcdist sync ddp-2026
    """
    from hpcdist.run.lookup import list_runs, resolve_run

    runs_dir = options.runs_dir()
    own, note = list_runs(runs_dir)
    chosen = [resolve_run(name, runs_dir) for name in runs] if runs else own
    if note and not runs:
        say(note)
    code, counts = _upload(chosen, verbose=bool(runs))
    if not runs:
        results = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "nothing to upload"
        say(f"{counts.total()} run{'s' * (counts.total() != 1)}: {results}")
    return code


def _upload(runs: Sequence["RunDir"], *, verbose: bool = False, quick: bool = False) -> tuple[int, Counter[str]]:
    """Upload the records that MLflow does not have, and print a line for each run that has some.

    Args:
        quick: send no request for complete runs, and none after the store has failed once.
    """
    from hpcdist.tracking.sent_points import is_complete
    from hpcdist.tracking.sync_runs import sync_run

    code, counts = 0, Counter[str]()
    for run in runs:
        try:
            if quick and is_complete(run):
                continue
            report = sync_run(run, os.environ)
        except (HpcdistError, OSError) as error:
            code = max(code, getattr(error, "exit_code", 2))
            counts["failed"] += 1
            say(f"{run.name}: {error}", error=True)
            if quick and isinstance(error, TrackingError):
                break
            continue
        counts[report.kind] += 1
        if verbose or report.kind != "unchanged":
            say(f"{run.name}: {report}")
    return code, counts


@app.command()
def compare(
    runs: Annotated[
        list[str], argument("RUN", "Names of two or more runs, or their folders, or the name of a sweep.", options.runs)
    ],
    as_json: options.Json = False,
) -> None:
    """Show whether runs are better than the first one, and what differs in config, code, environment and outcome.

    The verdict on the best value is better, worse, within noise, or too few seeds; equal rows are left out. The last
    lines name the first step at which a logged value differs. Metrics of time, speed and hardware are left out.

    Of a sweep over seeds, it compares the settings with the best one; of any other sweep the cells.

    Examples:
        hpcdist compare ddp-2026a ddp-2026b
        hpcdist compare tune
    """
    from hpcdist.run.lookup import resolve, resolve_run
    from hpcdist.run.sweeps import REPETITION, SweepDir

    runs_dir = options.runs_dir()
    sweep = resolve(runs[0], runs_dir) if len(runs) == 1 else None
    if isinstance(sweep, SweepDir) and REPETITION in sweep.read()["keys"]:
        _compare_settings(sweep, as_json=as_json)
        return
    if isinstance(sweep, SweepDir):
        runs = [str(cell.path) for cell in sweep.cells() if os.path.lexists(cell.config)]
        if not runs:
            raise UserMistake(f"no cell of sweep {sweep.name} has started yet")
    chosen = {run.path.resolve(): run for run in (resolve_run(name, runs_dir) for name in runs)}
    if len(chosen) < 2:
        raise UserMistake(f"only {next(iter(chosen.values())).name} is given: name a second run to compare it with")
    compare_runs([*chosen.values()], as_json=as_json)


def compare_runs(runs: Sequence["RunDir"], *, as_json: bool = False) -> bool:
    """Print the comparison of two or more runs. Returns whether all have logged the same values as the first one."""
    from hpcdist.review.comparison import compare, compare_results, compare_values
    from hpcdist.review.facts import read_facts
    from hpcdist.tracking.series import read_series, read_values

    for name_of in (lambda run: run.name, lambda run: f"{run.experiment}/{run.name}", lambda run: str(run.path)):
        named = {name_of(run): run for run in runs}
        if len(named) == len(runs):
            break
    series = {label: read_series(run) for label, run in named.items()}
    facts = {label: read_facts(run) for label, run in named.items()}
    found, results = compare(facts, series), compare_results(facts, series)
    first = read_values(runs[0])
    values = {label: compare_values(first, read_values(run)) for label, run in named.items() if run is not runs[0]}
    are_equal = all(one.is_equal for one in values.values())
    if as_json:
        document = {
            "runs": list(named),
            "results": [asdict(one) for one in results],
            "differences": found,
            "values": {label: {"equal": one.is_equal, "text": one.sentence} for label, one in values.items()},
        }
        say(json.dumps(document, indent=2))
        return are_equal
    if results:
        _print_results("results", "run", next(iter(named)), results)
    for title, rows in found.items():
        print_table(console(), ["", *named], [(name, *values) for name, values in rows.items()], title=title)
    for label, one in values.items():
        say(f"{label}: {one.sentence}")
    return are_equal


def _compare_settings(sweep: "SweepDir", *, as_json: bool) -> None:
    from hpcdist.review.comparison import compare_settings
    from hpcdist.review.sweep_facts import read_sweep_facts

    facts = read_sweep_facts(sweep, sweep.read_state())
    settings = compare_settings(facts)
    best = settings[0].run if settings and facts.monitor_mode else None
    if as_json:
        say(json.dumps({"sweep": sweep.name, "best": best, "results": list(map(asdict, settings))}, indent=2))
    elif not settings:
        say(f"no cell of sweep {sweep.name} has a value yet")
    else:
        _print_results(sweep.name, "setting", settings[0].run, settings)
        if best is None:
            say(
                f"no setting can be called the best: it is unknown whether higher or lower {facts.monitor} is better"
                " (checkpoint.monitor, checkpoint.monitor_mode)"
            )


def _print_results(title: str, kind: str, base: str, results: Sequence["ComparedValue"]) -> None:
    from hpcdist.review.uncertainty import LEGEND
    from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND

    head = ("", kind, "value", f"Δ to {base}", "95 % interval", "verdict")
    print_table(console(), head, [one.row for one in results], title=title)
    for method in dict.fromkeys(one.method for one in results if one.method):
        say(f"{', '.join(one.run for one in results if one.method == method)}: {method}")
    if any(one.interval for one in results):
        say(VERDICT_LEGEND)
    if any("±" in one.text for one in results):
        say(LEGEND)


@app.command()
def cost(
    names: Annotated[
        list[str] | None,
        argument("RUN|EXPERIMENT", "Names of runs, sweeps or experiments; by default the newest run.", options.runs),
    ] = None,
) -> None:
    """Show the allocated GPU-hours, or core-hours of runs without GPUs: of one run by cause, of several run by run.

    Examples:
        hpcdist cost
        hpcdist cost digits
        hpcdist cost first second
    """
    from hpcdist.review.ledger import read_ledger
    from hpcdist.run.lookup import list_runs, resolve
    from hpcdist.run.status import update_job_starts
    from hpcdist.run.sweeps import SweepDir

    runs_dir = options.runs_dir()
    own, note = list_runs(runs_dir)
    runs: dict[Path, RunDir] = {}
    notes: list[str] = []
    for name in names or [named(None)]:
        of_experiment = [run for run in own if run.experiment == name]
        if of_experiment:
            notes = [note] if note else []
            chosen = of_experiment
        else:
            other = resolve(name, runs_dir)
            cells = other.cells() if isinstance(other, SweepDir) else [other]
            chosen = [run for run in cells if run is other or run.config.is_file()]
        runs |= {run.path.resolve(): run for run in chosen}
    ledgers: dict[str, Ledger] = {}
    problems: list[str] = []
    for run in runs.values():
        with suppress(HpcdistError, OSError):  # a folder of another user, or a damaged one
            update_job_starts(run)
        title = f"{run.experiment}/{run.name}"
        if title in ledgers:  # of another folder of runs
            title = str(run.path)
        try:
            ledgers[title] = read_ledger(run)
        except (RunFolderError, OSError) as error:
            problems.append(f"run {run.name} is left out: {error}")
    found = {title: one for title, one in ledgers.items() if one.entries}
    if problems and not found:
        raise RunFolderError(problems[0])
    if len(found) == 1:
        _print_causes(*found.popitem())
    elif found:
        _print_costs(found)
    else:
        say("no runs with a ledger")
    if without := [title.rpartition("/")[2] for title in ledgers if not ledgers[title].entries]:
        left_out = ", ".join(without[:3]) + ", …" * (len(without) > 3)
        why = "such as runs that have not started"
        notes.append(f"{len(without)} runs without a ledger are left out, {why}: {left_out}")
    for line in (*notes, *problems):
        say(line, error=True)


def _print_causes(title: str, one: "Ledger") -> None:
    from hpcdist.review.ledger import SHORT_RUN, hours_text, percent

    say(title)
    print_table(console(), ("cause", f"{one.unit}-hours", "share"), [row[:3] for row in one.rows()])
    words = [f"goodput: {percent(one.goodput)}", f"in the queue: {hours_text(one.queue_s)} h"]
    words += [f"energy: {one.energy_text}"] if one.energy_text else []
    words += [f"{name}: {text}" for name, text in one.costs.items()]
    say(", ".join(words))
    if one.is_short:
        say(f"{SHORT_RUN} ({duration(one.running_s)}): its start and end dominate the shares")


def _print_costs(found: Mapping[str, "Ledger"]) -> None:
    from hpcdist.review.ledger import amount, cost_of, hours_text, percent

    rows = []
    columns = [name for name in ("price", "CO₂") if any(name in one.costs for one in found.values())]
    for title, one in found.items():
        others = sorted((seconds, cause) for cause, seconds in one.seconds.items() if cause != "compute")
        losses = ", ".join(f"{cause} {percent(seconds / one.allocated_s)}" for seconds, cause in others[:-3:-1])
        energy = "" if one.energy_kwh is None else amount(one.energy_kwh)
        hours = hours_text(one.allocated_s), one.goodput_text, losses, hours_text(one.queue_s)
        rows.append([title, one.unit, *hours, energy, *(one.costs.get(name, "") for name in columns)])
    print_table(console(), ("run", "unit", "hours", "goodput", "largest losses", "queue", "kWh", *columns), rows)
    say(f"together: {cost_of(found.values())}")


@app.command("export")
def export(
    run: options.OptionalRunName = None,
    *,
    file_format: Annotated[
        Literal["safetensors", "torch"] | None,
        option("--format", "FORMAT", "safetensors or torch; by default that of the ending of --output."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            "CHECKPOINT",
            "best (by checkpoint.monitor), final (the newest), or a step; by default the best, or the final one if no"
            " checkpoint has the metric.",
        ),
    ] = None,
    output: Annotated[
        Path | None, option("--output", "PATH", "File to write; by default RUN-step-N with the format's ending.")
    ] = None,
) -> None:
    """Write the weights of a checkpoint to a file that is loaded without hpcdist.

    The weights of all ranks are merged, under the names of the model's own code.

    Examples:
        hpcdist export --format safetensors
        hpcdist export first --checkpoint final --output digits.pt
    """
    from hpcdist.config.written import read_stored
    from hpcdist.run.lookup import resolve_run

    found = resolve_run(named(run), options.runs_dir())
    monitored = read_stored(found.config).config.checkpoint

    try:
        from hpcdist.checkpoint import export as checkpoint_export
    except ModuleNotFoundError as error:
        raise UserMistake(f"export needs {error.name}: run {install_command('train', 'export')}") from error

    chosen_format = checkpoint_export.format_of(file_format, output)
    checkpoint_export.require_package(chosen_format)
    chosen = checkpoint_export.find_checkpoint(found, checkpoint, monitored)
    if checkpoint is None and monitored.monitor not in chosen.metrics:
        reason = f"no checkpoint has {monitored.monitor}" if monitored.monitor else "checkpoint.monitor is empty"
        say(f"the final checkpoint, step {chosen.step}: {reason}", error=True)
    name = f"{found.name}-step-{chosen.step}{checkpoint_export.SUFFIXES[chosen_format]}"
    path = (output or Path(name)).expanduser()
    checkpoint_export.write_model(found, chosen, chosen_format, path)
    say(f"{path}: {path.stat().st_size:,} bytes, step {chosen.step} of {found.name}")
