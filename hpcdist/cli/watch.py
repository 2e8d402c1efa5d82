"""Commands that stay with a run, or say what became of it."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.options import RUNS, RunName, RunsDir, console, exit_code
from hpcdist.errors import UserMistake

if TYPE_CHECKING:
    from hpcdist.config.schema import Config
    from hpcdist.run.folder import RunDir

app = typer.Typer()


@app.command()
def follow(
    run: RunName,
    wait: Annotated[bool, typer.Option("--wait", help="Show changes of state alone.")] = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Show a run's state and progress until it is over. Ctrl-C leaves the run running.

    Examples:

        hpcdist follow ddp-2026

        hpcdist follow ddp-2026 --wait && evaluate.sh
    """
    from hpcdist.config.loading import load_run_config
    from hpcdist.files.ownership import is_mine
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.secret_file import kept
    from hpcdist.run.status import status_of

    found = resolve_run(run, runs_dir)
    mine = is_mine(found.path)
    now = status_of(found)
    if now.name == "created":
        raise UserMistake(f"run {found.name} was never started: `hpcdist resume {found.name}` starts it")
    # Secrets of the caller have no place in somebody else's config.
    env = {**kept(found), **os.environ} if mine else {}
    config = load_run_config(found.effective_config, [], env, require_secrets=False)
    return see_through(found, config, progress=not wait)


@app.command()
def explain(run: RunName, runs_dir: RunsDir = RUNS) -> None:
    """Say why a run failed or waits: the cause, what shows it, and what to do.

    Example:  hpcdist explain ddp-2026
    """
    from hpcdist.config.redaction import redact_text
    from hpcdist.diagnostics.explain import explain
    from hpcdist.run.lookup import resolve_run

    for line in explain(resolve_run(run, runs_dir)):
        console().print(redact_text(line), markup=False, highlight=False, soft_wrap=True)


def see_through(run: RunDir, config: Config, *, progress: bool) -> int:
    """Stay with a run until it is over, and ship it where nobody else does; returns the command's exit code.

    A run of somebody else is only shown.
    """
    from hpcdist.cli.follow import follow
    from hpcdist.cli.render import show_end
    from hpcdist.files.ownership import is_mine
    from hpcdist.run.slurm_job import job_of
    from hpcdist.supervisor import shipper_process

    ships = job_of(run) is not None and is_mine(run.path)
    shipping = shipper_process.shipping_from_here(run, config, os.environ) if ships else nullcontext()
    try:
        with shipping:
            state = follow(console(), run, progress=progress)
    except KeyboardInterrupt:
        print(f"{run.name} goes on without you: `hpcdist follow {run.name}` shows it again, `hpcdist stop` ends it")
        return 130
    show_end(console(), run, state, config)
    return exit_code(state)
