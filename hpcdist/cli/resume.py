"""`hpcdist resume`: continue a run from its newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.cli.options import (
    RUNS,
    Begin,
    Dependency,
    Follow,
    Force,
    OptionalRunName,
    Overrides,
    RunsDir,
    TrackingUriKey,
    Wait,
    flag,
    named,
    with_options,
)
from hpcdist.cli.run import resolve_start, supervise_here
from hpcdist.cli.submit import check_submission, enqueue, submission_flags
from hpcdist.errors import UserMistake
from hpcdist.logs import say

app = typer.Typer()


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
    from hpcdist.config.trainer_params import with_params
    from hpcdist.files.ownership import require_trusted
    from hpcdist.run import create, pending_config, snapshot
    from hpcdist.run.attempt_times import reached_step
    from hpcdist.run.lease import hold
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.saved_checkpoints import resume_point
    from hpcdist.run.secret_file import kept
    from hpcdist.run.slurm_job import job_of
    from hpcdist.run.status import status_of

    if run is not None and "=" in run and not os.path.exists(run):  # a first override, and no run
        overrides, run = [run, *(overrides or [])], None
    words = with_options(overrides, tracking_uri=tracking_uri)
    found = resolve_run(named(run, runs_dir), runs_dir)
    require_trusted(found.path, "resume")
    config = load_run_config(found.effective_config, words, {**kept(found), **os.environ})
    if job_of(found) is not None and not (now := status_of(found)).final:
        raise UserMistake(f"run {found.name} is {now.name} and cannot be resumed: `hpcdist follow {found.name}`")
    if found.read_state().status == "finished" and not words:
        raise UserMistake(f"run {found.name} is finished: to train longer, add an override such as stop.max_epochs=20")
    on_slurm = found.slurm.exists()
    if not on_slurm and (dependency or begin):
        raise UserMistake(f"--dependency and --begin need Slurm, and run {found.name} was not submitted to Slurm")
    flags = submission_flags(config, dependency, begin)
    code = [str(Path.cwd())] if with_current_code else snapshot.import_path(snapshot.code_state(found), found)
    if code:
        config = with_params(config, Path(code[0]), f"resume {found.name}")
    pending_config.check(found, config)
    failed = not with_current_code and found.read_state().status == "failed"
    if failed and (files := snapshot.changed_files(snapshot.code_state(found), found)):
        names = ", ".join(files[:5]) + ", …" * (len(files) > 5)
        advice = "this resume runs the copy, --with-current-code runs the new code"
        say(f"changed since the run copied the code: {names}; {advice}")
    if with_current_code:
        create.check_code(config, Path.cwd())
    if on_slurm:
        check_submission(config, flags, None, force=force)
    start = None if on_slurm else resolve_start(config)
    with hold(found):
        pending_config.propose(found, config)
        if with_current_code:
            launcher = "slurm" if on_slurm else "local"
            snapshot.write_environment(found, snapshot.take(config, found, Path.cwd()), launcher=launcher)
    if (last := found.read_state().attempt) and (on_slurm or not follow):  # else the supervisor prints it
        say(resume_point(found, reached_step(found.attempt(last)), is_script=bool(config.trainer.script)))
    if start is None:
        return enqueue(found, config, flags, follow=follow, wait=wait)
    return supervise_here(found, config, *start, follow=follow)
