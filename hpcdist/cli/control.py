"""Commands to a running run that continues: `hpcdist save` and `hpcdist profile`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.options import RUNS, RunName, RunsDir, option
from hpcdist.logs import say

if TYPE_CHECKING:
    from pathlib import Path

    from hpcdist.run.folder import RunDir
    from hpcdist.run.live_command import LiveCommand

app = typer.Typer()
POLL_S = 0.5


@app.command()
def save(run: RunName, runs_dir: RunsDir = RUNS) -> int:
    """Save a checkpoint of a running run, which continues, and wait until it is on disk.

    Example:  hpcdist save ddp-2026
    """
    from hpcdist.run.lease import user_name
    from hpcdist.run.live_command import LiveCommand

    return _send(_own_run(run, runs_dir, "save"), LiveCommand(action="save", by=user_name()))


@app.command()
def profile(
    run: RunName,
    steps: Annotated[int, option("--steps", "N", "Training steps to profile.")] = 10,
    ranks: Annotated[str, option("--ranks", "RANKS", "Ranks to profile, separated by commas.")] = "0",
    runs_dir: RunsDir = RUNS,
) -> int:
    """Profile some steps of a running run with torch.profiler, and wait for the traces.

    The run continues; its steps take longer during the profile. The traces, one for each rank, are artifacts of the
    run. Open them at https://ui.perfetto.dev.

    Examples:

        hpcdist profile ddp-2026

        hpcdist profile ddp-2026 --steps 10 --ranks 0,3
    """
    from hpcdist.run.command_sender import parse_ranks, profile_command

    command = profile_command(steps, parse_ranks(ranks, "--ranks"))
    return _send(_own_run(run, runs_dir, "profile"), command)


def _own_run(name: str, runs_dir: Path, action: str) -> RunDir:
    from hpcdist.files.ownership import require_mine
    from hpcdist.run.lookup import resolve_run

    found = resolve_run(name, runs_dir)
    require_mine(found.path, action)
    return found


def _send(run: RunDir, command: LiveCommand) -> int:
    """Send a command, wait for its results and print them. Returns the exit code."""
    from hpcdist.run.command_sender import send_command
    from hpcdist.run.lease import holder
    from hpcdist.run.live_command import outcome_of

    attempt, number = send_command(run, command)
    while True:
        state = run.read_state()
        is_over = state.attempt != attempt.number or state.status != "running" or holder(run) is None
        found = outcome_of(attempt, number, command.ranks, is_over=is_over, folder=str(run.path))
        if found is not None:
            break
        time.sleep(POLL_S)  # the ranks may be on other hosts
    lines, all_obeyed = found
    say("\n".join(lines))
    return 0 if all_obeyed else 1
