"""Hidden commands that processes of hpcdist start: one rank, a background supervisor, a supervisor in a Slurm job."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from hpcdist.cli.options import ConfigName, Overrides, exit_code
from hpcdist.cli.run import resolve_start, supervise_here

app = typer.Typer()


@app.command(hidden=True)
def worker(run_dir: Path) -> None:
    """Run one rank of a run folder; its rank and the world size come from the environment."""
    from hpcdist.rank.worker import main as work

    work([str(run_dir)])


@app.command(hidden=True)
def supervise(run_dir: Path) -> int:
    """Supervise a run folder in the foreground; `--detach` starts this command in the background."""
    from hpcdist.config.loading import load_run_config
    from hpcdist.host.files import require_trusted
    from hpcdist.run.folder import RunDir
    from hpcdist.run.records import kept

    found = RunDir.open(run_dir)
    require_trusted(found.path, "supervise")
    config = load_run_config(found.config, [], {**os.environ, **kept(found)})
    return supervise_here(found, config, *resolve_start(config), follow=True)


@app.command("in-job", hidden=True)
def in_job(config: ConfigName, overrides: Overrides = None) -> int:
    """Supervise a run in the Slurm job of this process; `slurm/run.sbatch` starts this command."""
    from hpcdist.config.loading import load_config
    from hpcdist.host import log_files
    from hpcdist.run.records import load_origin
    from hpcdist.slurm.job.batch_step import run_in_job

    log_files.configure()
    state = run_in_job(
        load_config(config, overrides or []), os.environ, Path.cwd(), load_origin(config, overrides or [])
    )
    # The job of a cancelled run did not fail.
    return exit_code(state) if state.status == "failed" else 0
