"""`hpcdist bench`: measure what this machine or cluster can do, and compare it with what it could."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.launch import send, start_here
from hpcdist.cli.options import RUNS, Detach, Overrides, RunName, RunsDir, console
from hpcdist.errors import UserMistake

if TYPE_CHECKING:
    from hpcdist.bench.results import Results
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir

app = typer.Typer(name="bench", help="Measure communication, here or on a cluster.", no_args_is_help=True)
CONFIG = "bench_comm"
LAST = "last"
Compare = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Say what is slower than in an earlier run; `last` is the newest one like it."),
]


@app.command()
def comm(
    overrides: Overrides = None,
    on_slurm: Annotated[bool, typer.Option("--submit", help="Send it to Slurm.")] = False,
    cluster: Annotated[
        str | None, typer.Option(help="Send it to Slurm, with this profile of the site: a path, or a shipped one.")
    ] = None,
    compare: Compare = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, or the batch script, and stop.")] = False,
    detach: Detach = False,
) -> int:
    """Check and measure communication between ranks, pair by pair and together, and say where the bottleneck is.

    It is a run like all others (`hpcdist run bench_comm`); its keys are those of the section `comm`.

    Examples:

        hpcdist bench comm

        hpcdist bench comm --cluster mysite cluster.nodes=4 comm.max_bytes=64M

        hpcdist bench comm --cluster mysite cluster.nodes=4 --compare last
    """
    from hpcdist.bench.results import ARTIFACT
    from hpcdist.config.loading import load_config
    from hpcdist.run import create

    on_slurm = on_slurm or cluster is not None
    config = create.with_name(load_config(CONFIG, overrides or [], cluster=cluster))
    if compare and detach:
        raise UserMistake(
            "--compare and --detach exclude each other: `hpcdist bench show RUN --compare OTHER` compares later"
        )
    if compare and compare != LAST:
        _require_like(compare, config, on_slurm=on_slurm)
    if on_slurm:
        code = send(config, {}, follow=not detach, dry_run=dry_run)
    else:
        code = start_here(config, detach=detach, dry_run=dry_run)
    run = _folder(config)
    if detach and not dry_run:
        print(f"once it is over, `hpcdist bench show {run.name}` has its report")
    if dry_run or detach or not (run.artifacts / ARTIFACT).is_file():
        return code
    _print(run, compare, Path(config.runs_dir))
    return code


@app.command()
def show(
    run: RunName,
    compare: Compare = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="All points, one a line.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All results.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Print the report of a benchmark that has run.

    Examples:

        hpcdist bench show comm-2026

        hpcdist bench show comm-2026 --compare last

        hpcdist bench show comm-2026 --csv > comm.csv
    """
    from hpcdist.bench import report
    from hpcdist.bench.results import read_results
    from hpcdist.run.lookup import resolve_run

    found = resolve_run(run, runs_dir)
    if as_csv + as_json + (compare is not None) > 1:
        raise UserMistake("--csv, --json and --compare exclude each other")
    if as_csv or as_json:
        results = read_results(found.artifacts)
        sys.stdout.write(report.as_csv(results) if as_csv else results.to_json())
    else:
        _print(found, compare, runs_dir)


def _print(run: RunDir, compare: str | None, runs_dir: Path) -> None:
    """The report, and how it compares with an earlier run. Raises UserMistake where it cannot be compared."""
    from hpcdist.bench import compare as comparing
    from hpcdist.bench import report
    from hpcdist.bench.results import read_results
    from hpcdist.run.lookup import resolve_run

    results = read_results(run.artifacts)
    terminal = console()
    report.show(terminal, report.report(results, terminal.width))
    if not compare:
        return
    earlier = _newest_like(run, results) if compare == LAST else resolve_run(compare, runs_dir)
    if earlier is None:
        print(f"compared with nothing: {run.name} is the first run of its kind in {run.path.parent}")
        return
    before = read_results(earlier.artifacts)
    _refuse(earlier, comparing.differences(comparing.facts(results), comparing.facts(before)))
    report.show(terminal, report.compared(results, before, earlier.name, terminal.width))


def _folder(config: Config) -> RunDir:
    from hpcdist.run.folder import RunDir

    return RunDir(Path(config.runs_dir) / config.experiment / config.name)


def _require_like(name: str, config: Config, *, on_slurm: bool) -> None:
    """Raise UserMistake now where the run to come cannot be compared with an earlier one, as far as that is known."""
    from hpcdist.bench import compare
    from hpcdist.bench.results import read_results
    from hpcdist.run.lookup import resolve_run
    from hpcdist.slurm.job_components import components
    from hpcdist.supervisor.plan import Machine, make_plan

    earlier = resolve_run(name, Path(config.runs_dir))
    before = compare.facts(read_results(earlier.artifacts))
    if on_slurm:
        parts = components(config)
        expected = {
            "number of ranks": str(sum(part.num_ranks for part in parts)),
            "number of nodes": str(sum(part.nodes for part in parts)),
        }
        if config.cluster.partition:
            expected["partition"] = config.cluster.partition
        if config.launch.backend != "auto":
            expected["backend"] = config.launch.backend
    else:
        plan = make_plan(config, Machine.inspect(os.environ))
        expected = {
            "partition": "none",
            "number of nodes": "1",
            "number of ranks": str(plan.num_ranks),
            "backend": plan.backend,
            "device": plan.device,
        }
    _refuse(earlier, compare.differences(expected, before))


def _refuse(earlier: RunDir, differences: str) -> None:
    if differences:
        raise UserMistake(f"cannot be compared with {earlier.name}: {differences}")


def _newest_like(run: RunDir, results: Results) -> RunDir | None:
    """The newest finished benchmark of the same experiment that can be compared with this one."""
    from hpcdist.bench import compare
    from hpcdist.bench.results import read_results
    from hpcdist.errors import RunFolderError
    from hpcdist.run.lookup import find_runs

    found = []
    created = run.read_state().created
    for other in find_runs(run.path.parent.parent):
        try:
            state = other.read_state()
            if other.experiment != run.experiment or state.status != "finished" or state.created >= created:
                continue
            before = read_results(other.artifacts)
        except (RunFolderError, OSError):  # a run of another trainer, or a damaged one
            continue
        if before.complete and not compare.differences(compare.facts(results), compare.facts(before)):
            found.append((state.created, other))
    return max(found, key=lambda item: item[0])[1] if found else None
