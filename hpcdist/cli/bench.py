"""`hpcdist bench`: measure communication between ranks, and compare with an earlier measurement."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli import options
from hpcdist.cli.options import console, flag, option, with_options
from hpcdist.cli.run import run_here, submit_run
from hpcdist.errors import UserMistake
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from hpcdist.run.folder import RunDir
    from hpcdist.trainers.comm.results import Results

app = typer.Typer(name="bench", help="Measure communication between ranks, here or on a cluster.", no_args_is_help=True)
CONFIG = "bench_comm"
LAST = "last"
Compare = Annotated[
    str | None,
    option(
        "--compare",
        "RUN",
        "Report operations slower than in this run; `last` is the newest comparable one.",
        options.runs_or_last,
    ),
]


@app.command()
def comm(
    overrides: options.Overrides = None,
    on_slurm: Annotated[bool, flag("--submit", "Submit to Slurm; implied by --cluster.")] = False,
    cluster: options.Cluster = None,
    compare: Compare = None,
    dry_run: options.DryRun = False,
    follow: options.Follow = True,
    experiment: options.ExperimentKey = None,
    runs_dir: options.RunsDirKey = None,
    tracking_uri: options.TrackingUriKey = None,
) -> int:
    """Measure communication between ranks, in pairs and together, and locate the bottleneck.

    The benchmark is an ordinary run of the config `bench_comm`; its keys are in the section `comm`.

    Examples:
        hpcdist bench comm
        hpcdist bench comm --cluster mysite cluster.nodes=4 comm.max_bytes=64M
        hpcdist bench comm --cluster mysite cluster.nodes=4 --compare last
    """
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.folder import RunDir
    from hpcdist.run.lookup import resolve_run
    from hpcdist.trainers.comm.results import ARTIFACT, read_results

    on_slurm = on_slurm or cluster is not None
    words = with_options(overrides, experiment=experiment, runs_dir=runs_dir, tracking_uri=tracking_uri)
    config = create.with_name(load_config(CONFIG, words, cluster=cluster))
    if compare and not follow:
        raise UserMistake(
            "--compare and --detach exclude each other: use `hpcdist bench show RUN --compare OTHER` later"
        )
    if compare and compare != LAST:
        read_results(resolve_run(compare, Path(config.runs_dir)).artifacts)  # an error before the start
    if on_slurm:
        code = submit_run(config, {}, follow=follow, dry_run=dry_run)
    else:
        code = run_here(config, follow=follow, dry_run=dry_run)
    run = RunDir(config.folder)
    if not follow and not dry_run:
        say(f"report after the end of the run: hpcdist bench show {run.name}")
    if dry_run or not follow or not (run.artifacts / ARTIFACT).is_file():
        return code
    _print(run, compare, Path(config.runs_dir))
    return code


@app.command()
def show(
    run: options.RunName,
    compare: Compare = None,
    as_json: options.Json = False,
    runs_dir: options.RunsDir = options.RUNS,
) -> None:
    """Print the report of a benchmark run.

    Examples:
        hpcdist bench show comm-2026
        hpcdist bench show comm-2026 --compare last
        hpcdist bench show comm-2026 --json > comm.json
    """
    from hpcdist.run.lookup import resolve_run
    from hpcdist.trainers.comm.results import read_results

    found = resolve_run(run, runs_dir)
    if as_json and compare:
        raise UserMistake("--json and --compare exclude each other")
    if as_json:
        say(read_results(found.artifacts).to_json(), end="")
    else:
        _print(found, compare, runs_dir)


def _print(run: RunDir, compare: str | None, runs_dir: Path) -> None:
    """Print the report and a comparison with an earlier run. Raises UserMistake if they are not comparable."""
    from hpcdist.run.lookup import resolve_run
    from hpcdist.trainers.comm.results import comparison, differences, read_results, report, show

    results = read_results(run.artifacts)
    terminal = console()
    show(terminal, report(results, terminal.width))
    if not compare:
        return
    earlier = _newest_comparable(run, results) if compare == LAST else resolve_run(compare, runs_dir)
    if earlier is None:
        say(f"no comparison: {run.path.parent} has no earlier run comparable with {run.name}")
        return
    before = read_results(earlier.artifacts)
    if different := differences(results, before):
        raise UserMistake(f"not comparable with run {earlier.name}: {different}")
    show(terminal, comparison(results, before, earlier.name, terminal.width))


def _newest_comparable(run: RunDir, results: Results) -> RunDir | None:
    """Return the newest finished benchmark of the same experiment that is comparable with this one."""
    from hpcdist.errors import RunFolderError
    from hpcdist.run.lookup import find_runs
    from hpcdist.trainers.comm.results import differences, read_results

    found = []
    created = run.read_state().created
    for other in find_runs(run.path.parent.parent):
        try:
            state = other.read_state()
            if other.experiment != run.experiment or state.status != "finished" or state.created >= created:
                continue
            before = read_results(other.artifacts)
        except (RunFolderError, OSError):  # a run of another trainer, or a damaged run
            continue
        if before.complete and not differences(results, before):
            found.append((state.created, other))
    return max(found, key=lambda item: item[0])[1] if found else None
