"""`hpcdist run` and `hpcdist resume`: start a run on this machine, or continue one from its newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.options import (
    RUNS,
    Begin,
    ConfigName,
    Dependency,
    DryRun,
    ExperimentKey,
    Follow,
    Force,
    OptionalRunName,
    Overrides,
    RunsDir,
    RunsDirKey,
    ScriptCommand,
    SweepAxes,
    TrackingUriKey,
    Wait,
    console,
    exit_code,
    flag,
    named,
    option,
    with_options,
    with_script,
)
from hpcdist.cli.submit import check_submission, enqueue, submission_flags
from hpcdist.errors import ConfigError, UserMistake
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from hpcdist.cli.render import RunView
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir
    from hpcdist.run.records import Origin
    from hpcdist.run.snapshot import CodeState
    from hpcdist.supervisor.plan import Plan


# `hpcdist run`: start a run on this machine.

app = typer.Typer()
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--new",
        envvar="HPCDIST_RESUME",
        help="Continue the unfinished run of this config, if there is one. Default in hpcdist's images.",
    ),
]


@app.command(cls=ScriptCommand)
def run(
    config: ConfigName,
    overrides: Overrides = None,
    sweep: SweepAxes = None,
    dry_run: DryRun = False,
    follow: Follow = True,
    resume: Resume = None,
    engine: Annotated[str | None, option("--in", "ENGINE", "Run in a container of docker or podman.")] = None,
    image: Annotated[str, option("--image", "IMAGE", "Image for --in.")] = "hpcdist",
    experiment: ExperimentKey = None,
    runs_dir: RunsDirKey = None,
    tracking_uri: TrackingUriKey = None,
) -> int:
    """Start a run on this machine.

    Instead of CONFIG, or after it, give a script `train.py` or a module `-m package.module`. Options of hpcdist and
    KEY=VALUE precede it; all words after it belong to the script.

    Examples:

        hpcdist run ddp_digits

        hpcdist run mnist.yaml data.root=~/data optim.lr=0.01 launch.num_ranks=4

        hpcdist run launch.num_ranks=4 train.py --lr 0.1

        hpcdist run ddp_mnist --detach

        hpcdist run ddp_digits --sweep optim.lr=0.1,0.01 --sweep seed=1,2,3

        hpcdist run ddp_mnist --in docker
    """
    from hpcdist.config.loading import load_config
    from hpcdist.run import create
    from hpcdist.run.lookup import find_unfinished
    from hpcdist.run.records import load_origin

    config, overrides = with_script(config, overrides)
    words = with_options(overrides, experiment=experiment, runs_dir=runs_dir, tracking_uri=tracking_uri)
    if sweep:
        from hpcdist.cli import sweep as sweeps

        if engine is not None:
            raise UserMistake("--sweep and --in exclude each other: start the cells in containers one by one")
        sweeps.check_options(sweep, None, detach=not follow)
        return sweeps.run_sweep(sweeps.read_sweep(config, words, sweep), dry_run=dry_run)
    unnamed = load_config(config, words)
    create.check_trainer(unnamed, Path.cwd(), own_python=engine is not None)
    if engine is not None:
        from hpcdist.cli.run_in_container import run_in_container

        if not follow:
            raise UserMistake("--detach and --in exclude each other: the container runs in the foreground")
        return run_in_container(config, words, unnamed, engine=engine, image=image, resume=resume, dry_run=dry_run)
    found = find_unfinished(unnamed) if resume and not dry_run else None
    named = create.with_name(unnamed) if found is None else replace(unnamed, name=found.name)
    return run_here(named, found, load_origin(config, words), follow=follow, dry_run=dry_run)


def run_here(
    config: Config,
    found: RunDir | None = None,
    origin: Origin | None = None,
    *,
    follow: bool,
    dry_run: bool = False,
    restore: Callable[[RunDir], CodeState] | None = None,
) -> int:
    """Print the plan of a run on this machine and, unless it is a dry run, start it. Returns the exit code.

    Args:
        config: The config, with the name of the run.
        found: An unfinished run of this config to continue.
        origin: The config of the command line, which the run folder records.
        restore: Writes the code of another run into the folder.
    """
    from hpcdist.config.schema import new_run_problems
    from hpcdist.run import create

    plan, uri = resolve_start(config)
    if found is None and (problems := new_run_problems(config, plan.num_ranks)):
        raise ConfigError(problems)

    def show() -> None:
        _show_start(config, plan, uri, found, verbose=dry_run)

    if dry_run:
        show()
        return 0
    made = found or create.create_run(config, Path.cwd(), origin=origin, restore=restore)
    return supervise_here(made, config, plan, uri, follow=follow, show=show)


def _show_start(config: Config, plan: Plan, uri: str, found: RunDir | None, *, verbose: bool) -> None:
    from hpcdist.cli.render import show_plan
    from hpcdist.host.machine import image_facts

    show_plan(console(), config, plan, config.folder, uri, verbose=verbose)
    if plan.device == "cpu" and config.launch.device == "auto":
        in_image = " (docker: --gpus all, podman: --device nvidia.com/gpu=all)" if image_facts(os.environ) else ""
        say(f"no GPU is visible{in_image}: training on CPUs")
    if found is not None and not verbose:
        say(f"continuing run {found.name}, which has the same config; `--new` starts another run")


def resolve_start(config: Config) -> tuple[Plan, str]:
    """Return the plan of a run on this machine, and its tracking URI. Raises UserMistake if the run cannot start here.

    Prints a note if the run has fewer ranks than requested.
    """
    from hpcdist.environments.rank_environment import require_torch
    from hpcdist.host.machine import require_compiler
    from hpcdist.supervisor.plan import Machine, make_plan, note_on_fewer_ranks
    from hpcdist.tracking.uri import resolve_uri

    require_torch(config, os.environ, on_slurm=False)
    plan, uri = make_plan(config, Machine.inspect(os.environ)), resolve_uri(config, os.environ)
    if config.model.compile and not config.trainer.script:
        require_compiler(plan.device, {**os.environ, **config.launch.env})
    if note := note_on_fewer_ranks(config, plan):
        say(note)
    return plan, uri


def supervise_here(
    run: RunDir,
    config: Config,
    plan: Plan,
    tracking_uri: str,
    *,
    follow: bool,
    show: Callable[[], None] = lambda: None,
) -> int:
    """Supervise a run in this process, or without `follow` in a background process. Returns the exit code.

    Args:
        show: prints the plan, while the parent of the ranks imports torch.
    """
    from hpcdist.host import log_files
    from hpcdist.supervisor import local

    if not follow:
        show()
        pid = local.detach(run, os.environ)
        say(f"{run.name} runs in the background (process {pid}): `hpcdist follow {run.name}` shows its progress")
        return 0
    log_files.configure()

    def view() -> RunView:
        from hpcdist.cli.render import RunView  # imports take as long as the rest of the start

        show()
        return RunView(console())

    state = local.supervise_locally(run, config, plan, view, os.environ, tracking_uri=tracking_uri)
    from hpcdist.cli.render import show_end

    show_end(console(), run, state, config)
    return exit_code(state)


# `hpcdist resume`: continue a run from its newest checkpoint.


@app.command()
def resume(
    run: OptionalRunName = None,
    overrides: Overrides = None,
    with_current_code: Annotated[
        bool, flag("--with-current-code", "Use the current code, not the snapshot of the first start.")
    ] = False,
    follow: Follow = True,
    wait: Wait = False,
    dependency: Dependency = None,
    begin: Begin = None,
    force: Force = False,
    runs_dir: RunsDir = RUNS,
    tracking_uri: TrackingUriKey = None,
) -> int:
    """Continue a run from its newest valid checkpoint, in the same MLflow run.

    A run of Slurm is submitted again. Changed keys are kept once a step has completed with them.

    Examples:

        hpcdist resume

        hpcdist resume runs/digits/first stop.max_epochs=20 --with-current-code
    """
    from hpcdist.config.loading import load_run_config
    from hpcdist.config.written import with_params
    from hpcdist.host.files import require_trusted
    from hpcdist.run import create, records, snapshot
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.records import kept, reached_step, resume_point

    if run is not None and "=" in run and not os.path.exists(run):  # a first override, and no run
        overrides, run = [run, *(overrides or [])], None
    words = with_options(overrides, tracking_uri=tracking_uri)
    found = resolve_run(named(run, runs_dir), runs_dir)
    require_trusted(found.path, "resume")
    config = load_run_config(found.config, words, {**kept(found), **os.environ})
    _check_resumable(found, words)
    on_slurm = found.slurm.exists()
    if not on_slurm and (dependency or begin):
        raise UserMistake(f"--dependency and --begin need Slurm, and run {found.name} was not submitted to Slurm")
    flags = submission_flags(config, dependency, begin)
    code = [str(Path.cwd())] if with_current_code else snapshot.import_path(snapshot.code_state(found), found)
    if code:
        config = with_params(config, Path(code[0]), f"resume {found.name}")
    records.check(found, config)
    if with_current_code:
        create.check_code(config, Path.cwd())
    elif found.read_state().status == "failed":
        _note_changed_code(found)
    if on_slurm:
        check_submission(config, flags, None, force=force)
    start = None if on_slurm else resolve_start(config)
    _change(found, config, with_current_code=with_current_code)
    if (last := found.read_state().attempt) and (on_slurm or not follow):  # else the supervisor prints it
        say(resume_point(found, reached_step(found.attempt(last)), is_script=bool(config.trainer.script)))
    if start is None:
        return enqueue(found, config, flags, follow=follow, wait=wait)
    return supervise_here(found, config, *start, follow=follow)


def _change(run: RunDir, config: Config, *, with_current_code: bool) -> None:
    from hpcdist.run import records, snapshot
    from hpcdist.run.lease import hold

    with hold(run):
        records.change_config(run, config)
        if with_current_code:
            launcher = "slurm" if run.slurm.exists() else "local"
            snapshot.write_environment(run, snapshot.take(config, run, Path.cwd()), launcher=launcher)


def _check_resumable(run: RunDir, overrides: Sequence[str]) -> None:
    from hpcdist.run.slurm_job import job_of
    from hpcdist.run.status import status_of

    if job_of(run) is not None and not (now := status_of(run)).final:
        raise UserMistake(f"run {run.name} is {now.name} and cannot be resumed: `hpcdist follow {run.name}`")
    if run.read_state().status == "finished" and not overrides:
        raise UserMistake(f"run {run.name} is finished: to train longer, add an override such as stop.max_epochs=20")


def _note_changed_code(run: RunDir) -> None:
    from hpcdist.run import snapshot

    if files := snapshot.changed_files(snapshot.code_state(run), run):
        names = ", ".join(files[:5]) + ", …" * (len(files) > 5)
        advice = "this resume runs the copy, --with-current-code runs the new code"
        say(f"changed since the run copied the code: {names}; {advice}")
