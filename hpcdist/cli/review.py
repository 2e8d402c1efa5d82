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
from hpcdist.cli.options import argument, console, named, option
from hpcdist.cli.tables import print_table
from hpcdist.errors import HpcdistError, RunFolderError, TrackingError, UserMistake, duration, plural
from hpcdist.host.files import short_path
from hpcdist.host.image_identity import install_command
from hpcdist.host.log_files import say
from hpcdist.host.ownership import is_mine, require_safe

if TYPE_CHECKING:
    from hpcdist.checkpoint.store import Manifest
    from hpcdist.review.comparison import ComparedValue
    from hpcdist.review.ledger import Ledger
    from hpcdist.run.folder import RunDir
    from hpcdist.run.sweeps import SweepDir

app = typer.Typer()
#: Runs without a ledger that `cost` names; a whole experiment may have none.
_MAX_LEFT_OUT = 3


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
) -> None:
    """Upload new records, start MLflow's UI for this user only, and print the link to open.

    The link leads to the experiment of the newest run. The server listens on 127.0.0.1 and requires a token, which is
    new at each start and part of the link. While it is open, it uploads new records of Slurm runs about once a minute.
    If the store is an MLflow server, nothing is started.

    Examples:
        hpcdist ui
        HPCDIST_RUNS_DIR=/shared/me/runs hpcdist ui --port 5001
    """
    from hpcdist.run.lookup import find_runs
    from hpcdist.tracking import ui as server
    from hpcdist.tracking.uri import choose_uri, link_to_newest, sqlite_path, web_address

    runs_dir = options.runs_dir()
    store = choose_uri(os.environ, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    database = sqlite_path(store)
    if database is not None:
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
    say("MLflow is starting, and will print its link; Ctrl-C ends it")
    if database is not None and not (database.is_file() and database.stat().st_size):
        # The server would create the tables while the upload of a submission does so, and fail.
        from hpcdist.tracking.mlflow_client import open_client

        open_client(store)
    env = dict(os.environ)
    os.environ |= server.variables(store, file, link_to_newest(runs, store, f"{address}/?token={token}"))
    os.umask(0o077)  # a new database and uploaded artifacts are private to the user
    server.start_uploads(runs_dir, env)
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
    from hpcdist.tracking.series import read_last_values, read_series

    folder = resolve(named(run), options.runs_dir())
    if is_mine(folder.path):
        write_report(folder, read_series, read_last_values)
    elif not folder.report.is_file():
        raise UserMistake(f"{folder.report} does not exist, and only the owner of the {folder.kind} can write it")
    say(short_path(folder.report))


@app.command()
def sync(
    runs: options.RunNames = None,
) -> int:
    """Upload records that MLflow does not have yet, and close runs of dead supervisors or jobs.

    Only runs of the calling user are uploaded, and only from folders that no other user can write to. A run that
    another process uploads is skipped; if you name an ended run, it waits for that process and uploads the rest.

    Examples:
        hpcdist sync
        hpcdist sync ddp-2026
    """
    from hpcdist.run.lookup import list_runs, resolve_run

    runs_dir = options.runs_dir()
    all_runs, note = list_runs(runs_dir)
    if runs:
        code, _ = _upload([resolve_run(name, runs_dir) for name in runs], verbose=True)
        return code
    if note:
        say(note)
    code, counts = _upload(all_runs)
    results = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "nothing to upload"
    say(f"{plural(counts.total(), 'run')}: {results}")
    return code


def _upload(runs: Sequence["RunDir"], *, verbose: bool = False, quick: bool = False) -> tuple[int, Counter[str]]:
    """Upload the records that MLflow does not have, and print a line for each run that has some.

    Returns the exit code, and the number of runs with each kind of result.

    Args:
        verbose: the user has named the runs: print a line for each, and wait for other uploads of ended runs.
        quick: send no request for complete runs, and none after the store has failed once.
    """
    from hpcdist.tracking.sent_points import is_complete
    from hpcdist.tracking.sync_runs import sync_run

    code, counts = 0, Counter[str]()
    for run in runs:
        try:
            if quick and is_complete(run):
                continue
            report = sync_run(run, os.environ, complete=verbose)
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
    """Show whether runs are better than the first one, and the differences in config, code, environment and outcome.

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
    names = runs
    if len(runs) == 1:
        sweep = resolve(runs[0], runs_dir)
        if isinstance(sweep, SweepDir):
            if REPETITION in sweep.read()["keys"]:
                _compare_settings(sweep, as_json=as_json)
                return
            names = [str(cell.path) for cell in sweep.cells() if os.path.lexists(cell.config)]
            if not names:
                raise UserMistake(f"no cell of sweep {sweep.name} has started yet")
    # A run that is named twice is compared once.
    chosen: dict[Path, RunDir] = {}
    for name in names:
        run = resolve_run(name, runs_dir)
        chosen[run.path.resolve()] = run
    if len(chosen) == 1:
        [only_run] = chosen.values()
        raise UserMistake(f"only {only_run.name} is given: name a second run to compare it with")
    compare_runs([*chosen.values()], as_json=as_json)


def compare_runs(runs: Sequence["RunDir"], *, as_json: bool = False) -> bool:
    """Print the comparison of two or more runs. Returns whether all have logged the same values as the first one."""
    from hpcdist.review.comparison import compare, compare_results, compare_values
    from hpcdist.review.facts import read_facts
    from hpcdist.tracking.series import read_series, read_values

    labelled = _labelled(runs)
    series = {label: read_series(run) for label, run in labelled.items()}
    facts = {label: read_facts(run) for label, run in labelled.items()}
    differences = compare(facts, series)
    results = compare_results(facts, series)
    first_label, *other_labels = labelled
    first_values = read_values(labelled[first_label])
    comparisons = {label: compare_values(first_values, read_values(labelled[label])) for label in other_labels}
    are_equal = all(comparison.is_equal for comparison in comparisons.values())
    if as_json:
        values = {}
        for label, comparison in comparisons.items():
            values[label] = {"equal": comparison.is_equal, "text": comparison.sentence}
        document = {
            "runs": list(labelled),
            "results": [asdict(result) for result in results],
            "differences": differences,
            "values": values,
        }
        say(json.dumps(document, indent=2))
        return are_equal
    if results:
        _print_results("results", "run", first_label, results)
    for title, rows in differences.items():
        print_table(console(), ["", *labelled], [(name, *cells) for name, cells in rows.items()], title=title)
    for label, comparison in comparisons.items():
        say(f"{label}: {comparison.sentence}")
    return are_equal


def _labelled(runs: Sequence["RunDir"]) -> dict[str, "RunDir"]:
    """Return runs by the shortest labels that differ: their names, experiments and names, or folders."""
    by_name = {run.name: run for run in runs}
    if len(by_name) == len(runs):
        return by_name
    by_experiment = {f"{run.experiment}/{run.name}": run for run in runs}
    if len(by_experiment) == len(runs):
        return by_experiment
    return {str(run.path): run for run in runs}


def _compare_settings(sweep: "SweepDir", *, as_json: bool) -> None:
    """Print the comparison of the settings of a sweep over seeds with the best one, which is the first."""
    from hpcdist.review.comparison import compare_settings
    from hpcdist.review.sweep_facts import read_sweep_facts
    from hpcdist.tracking.series import read_last_values

    facts = read_sweep_facts(sweep, sweep.read_state(), read_last_values)
    settings = compare_settings(facts)
    best = settings[0].run if settings and facts.monitor_mode else None
    if as_json:
        results = [asdict(setting) for setting in settings]
        say(json.dumps({"sweep": sweep.name, "best": best, "results": results}, indent=2))
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
    """Print a table of results, and below it their methods and a legend.

    Args:
        kind: title of the column of names: `run` or `setting`.
        base: the run or setting that the others are compared with.
    """
    from hpcdist.review.uncertainty import LEGEND
    from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND

    head = ("", kind, "value", f"Δ to {base}", "95 % interval", "verdict")
    print_table(console(), head, [result.row for result in results], title=title)
    runs_by_method: dict[str, list[str]] = {}
    for result in results:
        if result.method:
            runs_by_method.setdefault(result.method, []).append(result.run)
    for method, runs in runs_by_method.items():
        say(f"{', '.join(runs)}: {method}")
    if any(result.interval for result in results):
        say(VERDICT_LEGEND)
    if any("±" in result.text for result in results):
        say(LEGEND)


@app.command()
def cost(
    names: Annotated[
        list[str] | None,
        argument("RUN|EXPERIMENT", "Names of runs, sweeps or experiments; by default the newest run.", options.runs),
    ] = None,
) -> None:
    """Show the allocated GPU-hours by cause (core-hours for runs without GPUs); for several runs, also run by run.

    Examples:
        hpcdist cost
        hpcdist cost digits
        hpcdist cost first second
    """
    runs, notes = _runs_of(names)
    ledgers, problems = _read_ledgers(runs)
    charged = {title: ledger for title, ledger in ledgers.items() if ledger.entries}
    if problems and not charged:
        raise RunFolderError(problems[0])
    if len(charged) == 1:
        [(title, ledger)] = charged.items()
        _print_causes(title, ledger)
    elif charged:
        _print_costs(charged)
    else:
        say("no runs with a ledger")
    left_out = [title.rpartition("/")[2] for title in ledgers if title not in charged]
    if left_out:
        some = ", ".join(left_out[:_MAX_LEFT_OUT])
        if len(left_out) > _MAX_LEFT_OUT:
            some += ", …"
        why = "such as runs that have not started"
        notes.append(f"{len(left_out)} runs without a ledger are left out, {why}: {some}")
    for line in (*notes, *problems):
        say(line, error=True)


def _runs_of(names: Sequence[str] | None) -> tuple[list["RunDir"], list[str]]:
    """Return the runs of experiments, sweeps and runs, by default the newest run, and notes on the search."""
    from hpcdist.run.lookup import list_runs, resolve
    from hpcdist.run.sweeps import SweepDir

    runs_dir = options.runs_dir()
    all_runs, note = list_runs(runs_dir)
    chosen: dict[Path, RunDir] = {}
    notes: list[str] = []
    for name in names or [named(None)]:
        runs = [run for run in all_runs if run.experiment == name]
        if runs:
            notes = [note] if note else []
        else:
            folder = resolve(name, runs_dir)
            if isinstance(folder, SweepDir):
                runs = [cell for cell in folder.cells() if cell.config.is_file()]
            else:
                runs = [folder]
        for run in runs:
            chosen[run.path.resolve()] = run
    return list(chosen.values()), notes


def _read_ledgers(runs: Sequence["RunDir"]) -> tuple[dict[str, "Ledger"], list[str]]:
    """Return the ledgers of runs with their titles, and problems of runs that cannot be read."""
    from hpcdist.review.ledger import read_ledger
    from hpcdist.run.status import update_job_starts

    ledgers: dict[str, Ledger] = {}
    problems: list[str] = []
    for run in runs:
        with suppress(HpcdistError, OSError):  # a folder of another user, or a damaged one
            update_job_starts(run)
        title = f"{run.experiment}/{run.name}"
        if title in ledgers:  # of another folder of runs
            title = str(run.path)
        try:
            ledgers[title] = read_ledger(run)
        except (RunFolderError, OSError) as error:
            problems.append(f"run {run.name} is left out: {error}")
    return ledgers, problems


def _print_causes(title: str, ledger: "Ledger") -> None:
    """Print the cost of one run, or of several runs together, by cause."""
    from hpcdist.review.ledger import SHORT_RUN, hours_text, percent

    say(title)
    print_table(console(), ("cause", f"{ledger.unit}-hours", "share"), [row[:3] for row in ledger.rows()])
    totals = [f"goodput: {percent(ledger.goodput)}", f"in the queue: {hours_text(ledger.queue_s)} h"]
    if ledger.energy_text:
        totals.append(f"energy: {ledger.energy_text}")
    for name, text in ledger.costs.items():
        totals.append(f"{name}: {text}")
    say(", ".join(totals))
    if ledger.is_short:
        say(f"{SHORT_RUN} ({duration(ledger.running_s)}): its start and end dominate the shares")


def _print_costs(ledgers: Mapping[str, "Ledger"]) -> None:
    """Print the costs of several runs, one line for each, and their sum by cause."""
    from hpcdist.review.ledger import amount, cost_of, hours_text, together

    optional = ("price", "CO₂")
    shown = [name for name in optional if any(name in ledger.costs for ledger in ledgers.values())]
    rows = []
    for title, ledger in ledgers.items():
        row = [
            title,
            ledger.unit,
            hours_text(ledger.allocated_s),
            ledger.goodput_text,
            _largest_losses(ledger),
            hours_text(ledger.queue_s),
            "" if ledger.energy_kwh is None else amount(ledger.energy_kwh),
        ]
        row += [ledger.costs.get(name, "") for name in shown]
        rows.append(row)
    print_table(console(), ("run", "unit", "hours", "goodput", "largest losses", "queue", "kWh", *shown), rows)
    summary = f"together: {cost_of(ledgers.values())}"
    whole = together(ledgers.values())
    if whole.entries:
        _print_causes(summary, whole)
    else:  # GPU-hours and core-hours cannot be added
        say(summary)


def _largest_losses(ledger: "Ledger") -> str:
    """Return the two largest causes of cost besides computation, with their shares."""
    from hpcdist.review.ledger import percent

    losses = [(seconds, cause) for cause, seconds in ledger.seconds.items() if cause != "compute"]
    losses.sort(reverse=True)
    return ", ".join(f"{cause} {percent(seconds / ledger.allocated_s)}" for seconds, cause in losses[:2])


@app.command("export")
def export(
    run: options.OptionalRunName = None,
    *,
    file_format: Annotated[
        Literal["safetensors", "torch", "dcp", "huggingface"] | None,
        option(
            "--format",
            "FORMAT",
            "safetensors, torch, dcp or huggingface; by default that of the ending of --output.",
        ),
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
        Path | None,
        option(
            "--output",
            "PATH",
            "File to write, or a folder with dcp and huggingface, and with safetensors if the name does not end in"
            " .safetensors; by default RUN-step-N with the format's ending.",
        ),
    ] = None,
) -> None:
    """Write the weights of a checkpoint to a file that loads without hpcdist.

    The weights of all ranks are merged, under the names of the model's own code. A folder of safetensors has Hugging
    Face's layout; huggingface adds what transformers needs to load a language model, and dcp is for
    torch.distributed.checkpoint.load.

    Examples:
        hpcdist export --format safetensors
        hpcdist export first --checkpoint final --output digits.pt
        hpcdist export smol --format huggingface --output smol-tuned
    """
    from hpcdist.config.written import read_stored
    from hpcdist.run.lookup import resolve_run

    name = named(run)
    _refuse_weights(name)
    folder = resolve_run(name, options.runs_dir())
    stored = read_stored(folder.config)
    try:
        from hpcdist.checkpoint import export as exporter
    except ModuleNotFoundError as error:
        raise UserMistake(f"export needs {error.name}: run {install_command('train', 'export')}") from error
    chosen_format = exporter.format_of(file_format, output)
    exporter.require_package(chosen_format)
    manifest = exporter.find_checkpoint(folder, checkpoint, stored.config.checkpoint)
    if checkpoint is None:
        _say_if_not_best(manifest, stored.config.checkpoint.monitor)
    if output is None:
        output = Path(f"{folder.name}-step-{manifest.step}{exporter.SUFFIXES[chosen_format]}")
    path = output.expanduser()
    exporter.write_model(folder, manifest, chosen_format, path, stored)
    say(f"{path}: {_size_of(path):,} bytes, step {manifest.step} of {folder.name}")


def _say_if_not_best(manifest: "Manifest", monitor: str) -> None:
    """Print why a checkpoint, which the user has not named, is the final one instead of the best.

    Args:
        monitor: name of the metric that orders checkpoints; empty without one.
    """
    if monitor in manifest.metrics:
        return
    reason = "checkpoint.monitor is empty"
    if monitor:
        reason = f"no checkpoint has {monitor}"
    say(f"the final checkpoint, step {manifest.step}: {reason}", error=True)


def _refuse_weights(name: str) -> None:
    """Raise UserMistake for the name of a file of weights, which is no run."""
    from hpcdist.config.training_schema import WEIGHT_SUFFIXES

    if name.endswith(WEIGHT_SUFFIXES) and Path(name).is_file():
        raise UserMistake(
            f"{name} is a file of weights, not a run, and other programs load it as it is: a run starts from it with"
            f" model.init_from={name}"
        )


def _size_of(path: Path) -> int:
    """Return the bytes of a file, or of the files of a folder."""
    files = [path, *path.rglob("*")]
    return sum(file.stat().st_size for file in files if file.is_file())
