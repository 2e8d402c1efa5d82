"""`hpcdist bench`: measure communication between ranks."""

from typing import TYPE_CHECKING

import typer

from hpcdist.cli import options
from hpcdist.cli.options import console
from hpcdist.cli.run import run_here, submit_run
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from hpcdist.trainers.comm.results import Results

app = typer.Typer(name="bench", help="Measure communication between ranks, here or on a cluster.", no_args_is_help=True)


@app.command()
def comm(
    overrides: options.Overrides = None,
    cluster: options.Cluster = None,
    dry_run: options.DryRun = False,
    follow: options.Follow = True,
) -> int:
    """Measure each communication operation between ranks.

    The benchmark is an ordinary run of the config `bench_comm`; its keys are in the section `comm`.

    Examples:
        hpcdist bench comm
        hpcdist bench comm --cluster mysite cluster.nodes=4 comm.max_bytes=64M
    """
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.folder import RunDir
    from hpcdist.trainers.comm.results import ARTIFACT, read_results

    config = create.with_name(load_config("bench_comm", overrides or [], cluster=cluster))
    if cluster is not None:
        code = submit_run(config, {}, follow=follow, dry_run=dry_run)
    else:
        code = run_here(config, follow=follow, dry_run=dry_run)
    run = RunDir(config.folder)
    if not follow and not dry_run:
        say(f"report after the end of the run: hpcdist bench show {run.name}")
    if follow and not dry_run and (run.artifacts / ARTIFACT).is_file():
        _print(read_results(run.artifacts))
    return code


@app.command()
def show(run: options.RunName, as_json: options.Json = False) -> None:
    """Print the report of a benchmark run.

    Examples:
        hpcdist bench show comm-2026
        hpcdist bench show comm-2026 --json > comm.json
    """
    from hpcdist.run.lookup import resolve_run
    from hpcdist.trainers.comm.results import read_results

    results = read_results(resolve_run(run, options.runs_dir()).artifacts)
    if as_json:
        say(results.to_json(), end="")
    else:
        _print(results)


def _print(results: "Results") -> None:
    from hpcdist.trainers.comm.results import report, show

    terminal = console()
    show(terminal, report(results, terminal.width))
