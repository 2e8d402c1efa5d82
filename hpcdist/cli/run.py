"""Commands that start runs: here, in the background, on Slurm, anew or from where they stopped."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.launch import ask_slurm, check_plan, queue, send, start_here, submission_flags, supervise_here
from hpcdist.cli.options import RUNS, ConfigName, Detach, Overrides, RunName, RunsDir, SweepAxes, exit_code
from hpcdist.errors import UserMistake

if TYPE_CHECKING:
    from hpcdist.config.schema import Config

app = typer.Typer()
Dependency = Annotated[
    str | None, typer.Option(metavar="KIND:RUN", help="Wait for other runs or jobs, as sbatch takes it: afterok:first.")
]
Begin = Annotated[
    str | None, typer.Option(metavar="TIME", help="Do not start before, as sbatch takes it: now+2hours, 20:00.")
]
Force = Annotated[bool, typer.Option("--force", help="Submit also what hpcdist, not Slurm, holds for wrong.")]


@app.command()
def run(
    config: ConfigName,
    overrides: Overrides = None,
    sweep: SweepAxes = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    detach: Detach = False,
    again: Annotated[
        bool | None,
        typer.Option(
            "--again/--new",
            envvar="HPCDIST_RESUME",
            help="Go on with this config's unfinished run, where there is one; images of hpcdist do so by default.",
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option("--in", help="Run in a container: docker or podman.")] = None,
    image: Annotated[str, typer.Option("--image", help="The image for --in.")] = "hpcdist",
) -> int:
    """Start a run on this machine.

    Examples:

        hpcdist run ddp_digits

        hpcdist run configs/ddp_mnist.yaml data.root=~/data optim.lr=0.01 launch.num_ranks=4

        hpcdist run ddp_mnist --detach

        hpcdist run ddp_digits --sweep optim.lr=0.1,0.01 --sweep seed=1,2,3

        hpcdist run ddp_mnist --in docker
    """
    from hpcdist.config.loading import load_config
    from hpcdist.run.find_by_config import unfinished
    from hpcdist.supervisor import start

    if sweep:
        from hpcdist.cli import sweep as sweeping

        if engine is not None:
            raise UserMistake("--sweep and --in exclude each other: start the cells in containers one by one")
        sweeping.check_options(sweep, None, detach=detach)
        return sweeping.run_sweep(sweeping.read_sweep(config, overrides or [], sweep), dry_run=dry_run)
    unnamed = load_config(config, overrides or [])
    start.check_trainer(unnamed, Path.cwd())
    if engine is not None:
        from hpcdist.cli.run_in_container import run_boxed

        if detach:
            raise UserMistake("--detach and --in exclude each other: the container shows its run in the foreground")
        return run_boxed(config, overrides or [], unnamed, engine=engine, image=image, again=again, dry_run=dry_run)
    found = unfinished(unnamed) if again and not dry_run else None
    loaded = start.with_name(unnamed) if found is None else replace(unnamed, name=found.name)
    return start_here(loaded, found, detach=detach, dry_run=dry_run)


@app.command()
def submit(
    config: ConfigName,
    overrides: Overrides = None,
    cluster: Annotated[str | None, typer.Option(help="Profile of the site: a path, or one that is shipped.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and the srun line.")] = False,
    test: Annotated[bool, typer.Option("--test", help="Ask Slurm when it would start; submit nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show queue state, then progress, until the end.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show changes of state alone, until the end.")] = False,
    dependency: Dependency = None,
    begin: Begin = None,
    force: Annotated[
        bool, typer.Option("--force", help="Submit also what hpcdist, not Slurm, holds for wrong.")
    ] = False,
    sweep: SweepAxes = None,
    array_parallelism: Annotated[
        int | None, typer.Option(min=1, help="At most so many cells of a sweep run at a time.")
    ] = None,
) -> int:
    """Send a run to Slurm, or a sweep as one job array.

    Examples:

        hpcdist submit ddp_mnist --cluster devcluster --follow

        hpcdist submit mnist.yaml --cluster ~/mysite.yaml cluster.nodes=4 --dry-run

        hpcdist submit mnist.yaml --cluster mysite --dependency afterok:first --begin 20:00

        hpcdist submit mnist.yaml --cluster ~/mysite.yaml --sweep optim.lr=0.1,0.01 --sweep seed=1,2,3
    """
    from hpcdist.cli import sweep as sweeping
    from hpcdist.config.loading import load_config
    from hpcdist.supervisor import start

    sweeping.check_options(sweep, array_parallelism, detach=False)
    if sweep:
        cells = sweeping.read_sweep(config, overrides or [], sweep, cluster)
        flags = submission_flags(cells.cells[0].config, dependency, begin)

        def ask(one: Config) -> None:
            ask_slurm(one, flags, Path.cwd(), force=force)

        return sweeping.submit_sweep(
            cells, flags, ask, parallelism=array_parallelism, dry_run=dry_run, test=test, follow=follow or wait
        )
    loaded = start.with_name(load_config(config, overrides or [], cluster=cluster))
    flags = submission_flags(loaded, dependency, begin)
    return send(loaded, flags, follow=follow, wait=wait, dry_run=dry_run, test=test, force=force)


@app.command()
def resume(
    run: RunName,
    overrides: Overrides = None,
    with_current_code: Annotated[
        bool, typer.Option("--with-current-code", help="Take the code as it is now, not as it was at the start.")
    ] = False,
    detach: Detach = False,
    dependency: Dependency = None,
    begin: Begin = None,
    force: Force = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Go on from the newest valid checkpoint, in the same MLflow run.

    Changed keys become the run's own once a step was completed with them; if the run fails before, the old ones stay.

    Examples:

        hpcdist resume ddp-2026

        hpcdist resume runs/digits/first stop.max_epochs=20 --with-current-code
    """
    from hpcdist.config.loading import load_run_config
    from hpcdist.files.ownership import require_trusted
    from hpcdist.run import snapshot
    from hpcdist.run.lease import hold
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.secret_file import kept
    from hpcdist.run.status import look_now, stand
    from hpcdist.supervisor import pending_config

    found = resolve_run(run, runs_dir)
    require_trusted(found.path, "resume")
    config = load_run_config(found.effective_config, overrides or [], {**kept(found), **os.environ})
    if (job := look_now(found)) is not None and not (now := stand(found, job)).over:
        raise UserMistake(f"run {found.name} is {now.name}: `hpcdist follow {found.name}` shows it, nothing to resume")
    if found.read_state().status == "finished" and not overrides:
        raise UserMistake(f"run {found.name} is finished: to train on, say how far, such as stop.max_epochs=20")
    on_slurm = found.slurm.exists()
    if not on_slurm and (dependency or begin):
        raise UserMistake(f"run {found.name} is not on Slurm: --dependency and --begin are Slurm's")
    flags = submission_flags(config, dependency, begin)
    pending_config.check(found, config)
    if on_slurm:
        ask_slurm(config, flags, None, force=force)
    else:
        check_plan(config)
    with hold(found):
        pending_config.propose(found, config)
        if with_current_code:
            snapshot.write_environment(found, snapshot.take(config, found, Path.cwd()), launcher="local")
    if on_slurm:
        return queue(found, config, flags, follow=not detach)
    return supervise_here(found, config, detach=detach)


@app.command(hidden=True)
def worker(run_dir: Path) -> None:
    """Run one rank of a run folder; place and size of the group come from the environment."""
    from hpcdist.rank.worker import main as work

    work([str(run_dir)])


@app.command(hidden=True)
def supervise(run_dir: Path) -> int:
    """Supervise a run folder in the foreground; what `--detach` leaves behind."""
    from hpcdist.config.loading import load_run_config
    from hpcdist.files.ownership import require_trusted
    from hpcdist.run.folder import RunDir
    from hpcdist.run.secret_file import kept

    found = RunDir.open(run_dir)
    require_trusted(found.path, "supervise")
    config = load_run_config(found.effective_config, [], {**os.environ, **kept(found)})
    return supervise_here(found, config, detach=False)


@app.command("in-job", hidden=True)
def in_job(config: ConfigName, overrides: Overrides = None) -> int:
    """Supervise a run in the Slurm job around this process; what `slurm/run.sbatch` calls."""
    from hpcdist import logs
    from hpcdist.config.loading import load_config
    from hpcdist.slurm.job.in_job import run_in_job

    logs.configure()
    state = run_in_job(load_config(config, overrides or []), os.environ, Path.cwd())
    # A run that someone has ended is no failed job.
    return exit_code(state) if state.status == "failed" else 0
