"""`hpcdist submit`: submit a run to Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.options import (
    Begin,
    Cluster,
    ConfigName,
    Dependency,
    DryRun,
    ExperimentKey,
    Follow,
    Force,
    Overrides,
    RunsDirKey,
    ScriptCommand,
    SweepAxes,
    TrackingUriKey,
    Wait,
    flag,
    option,
    with_options,
    with_script,
)
from hpcdist.errors import UserMistake
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.records import Origin
    from hpcdist.run.snapshot import CodeState

app = typer.Typer()


@app.command(cls=ScriptCommand)
def submit(
    config: ConfigName,
    overrides: Overrides = None,
    cluster: Cluster = None,
    sweep: SweepAxes = None,
    dry_run: DryRun = False,
    test: Annotated[bool, flag("--test", "Ask Slurm for the expected start; submit nothing.")] = False,
    follow: Follow = False,
    wait: Wait = False,
    dependency: Dependency = None,
    begin: Begin = None,
    force: Force = False,
    array_parallelism: Annotated[
        int | None, option("--array-parallelism", "N", "Cells of a sweep that run at a time.", min=1)
    ] = None,
    experiment: ExperimentKey = None,
    runs_dir: RunsDirKey = None,
    tracking_uri: TrackingUriKey = None,
) -> int:
    """Submit a run to Slurm, or a sweep as one job array.

    As for `hpcdist run`, a script and its arguments may take the place of CONFIG.

    Examples:

        hpcdist submit ddp_mnist --cluster devcluster --follow

        hpcdist submit mnist.yaml --cluster ~/site.yaml cluster.nodes=4 --dry-run

        hpcdist submit --cluster ~/site.yaml cluster.nodes=4 train.py --lr 0.1

        hpcdist submit mnist.yaml --cluster ~/site.yaml --dependency afterok:first --begin 20:00

        hpcdist submit mnist.yaml --cluster ~/site.yaml --sweep optim.lr=0.1,0.01 --sweep seed=1,2
    """
    from hpcdist.cli import sweep as sweeps
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.records import load_origin

    config, overrides = with_script(config, overrides)
    words = with_options(overrides, experiment=experiment, runs_dir=runs_dir, tracking_uri=tracking_uri)
    sweeps.check_options(sweep, array_parallelism, detach=False)
    if sweep:
        cells = sweeps.read_sweep(config, words, sweep, cluster)
        flags = submission_flags(cells.cells[0].config, dependency, begin)

        def check(one: Config) -> None:
            check_submission(one, flags, Path.cwd(), force=force)

        return sweeps.submit_sweep(
            cells, flags, check, parallelism=array_parallelism, dry_run=dry_run, test=test, follow=follow or wait
        )
    loaded = create.with_name(load_config(config, words, cluster=cluster))
    flags = submission_flags(loaded, dependency, begin)
    origin = load_origin(config, words, cluster)
    return submit_run(loaded, flags, origin, follow=follow, wait=wait, dry_run=dry_run, test=test, force=force)


def submit_run(
    config: Config,
    flags: dict[str, str],
    origin: Origin | None = None,
    *,
    follow: bool,
    wait: bool = False,
    dry_run: bool = False,
    test: bool = False,
    force: bool = False,
    restore: Callable[[RunDir], CodeState] | None = None,
) -> int:
    """Check a submission to Slurm and, unless it is a dry run or a test, submit it. Returns the exit code.

    Args:
        config: The config, with the name of the run.
        flags: Flags of sbatch for this submission alone.
        origin: The config of the command line, which the run folder records.
        restore: Writes the code of another run into the folder.
    """
    from hpcdist.run import create
    from hpcdist.run.folder import RunDir
    from hpcdist.slurm.components import rank_table_lines
    from hpcdist.slurm.job import submit as job_submit
    from hpcdist.slurm.job import submit_checks
    from hpcdist.slurm.job.submit import commented, render

    config, note = job_submit.resolve_het(config)
    components = [*filter(None, [note]), *rank_table_lines(config)]
    if dry_run:
        submit_checks.check_config(config, Path.cwd())
        script, step = render(config, RunDir(config.folder), flags)
        say(f"{script}\n# then, in the batch step:\n{commented(step)}\n#\n" + "\n".join(map(commented, components)))
        return 0
    check_submission(config, flags, Path.cwd() if restore is None else None, force=force)
    say("\n".join(components))
    if test:
        return 0
    run = create.create_run(config, Path.cwd(), launcher="slurm", origin=origin, restore=restore)
    return enqueue(run, config, flags, follow=follow, wait=wait)


def check_submission(config: Config, flags: dict[str, str], cwd: Path | None, *, force: bool) -> None:
    """Check a submission and print warnings and the expected start. Raises UserMistake for errors."""
    from hpcdist.data.download import missing
    from hpcdist.slurm.job.submit_checks import check_submission

    warnings, estimate = check_submission(config, flags, cwd, missing_data=missing(config.data), force=force)
    say("\n".join([*(f"note: {warning}" for warning in warnings), estimate]))


def submission_flags(config: Config, dependency: str | None, begin: str | None) -> dict[str, str]:
    """Return the flags of sbatch that apply to one submission and not to later starts of the run."""
    resolved = None
    if dependency:
        from hpcdist.slurm.job.submit import resolve

        resolved = resolve(dependency, Path(config.runs_dir))
    chosen = {name: value for name, value in (("dependency", resolved), ("begin", begin)) if value}
    for name, value in chosen.items():
        if not value.isprintable():
            raise UserMistake(f"--{name} must be one line without control characters, got {value[:60]!r}")
    return chosen


def enqueue(run: RunDir, config: Config, flags: dict[str, str], *, follow: bool, wait: bool = False) -> int:
    """Submit a run folder to Slurm and create its MLflow run; with `follow` or `wait`, stay until the run ends."""
    from hpcdist.run import records
    from hpcdist.slurm.job import submit as job_submit

    try:
        job_id = job_submit.submit(config, run, flags)
    except UserMistake:  # Slurm has rejected the job
        records.restore_config(run)
        raise
    say(f"{run.name} is job {job_id}: `hpcdist follow {run.name}` shows its state and progress")
    # The job does not wait for these imports.
    from hpcdist.cli.run_views import follow_to_end
    from hpcdist.supervisor import children

    if follow or wait:
        return follow_to_end(run, config, progress=not wait)
    say(children.ship_now(run, config, os.environ))
    return 0
