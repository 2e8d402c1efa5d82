"""Arguments that several commands share, and where they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from hpcdist.run.folder import State

RunsDir = Annotated[
    Path, typer.Option("--runs-dir", envvar="HPCDIST_RUNS_DIR", help="Folder that holds the runs.", show_default=True)
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, name, or a unique prefix of its name.")]
ConfigName = Annotated[str, typer.Argument(metavar="CONFIG", help="Path of a YAML file, or a shipped config's name.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value …]", help="Overrides of the config.")]
SweepAxes = Annotated[
    list[str] | None,
    typer.Option("--sweep", metavar="key=v1,v2", help="Values to try; several of these span a grid of runs."),
]
Detach = Annotated[bool, typer.Option("--detach/--follow", help="Leave it running in the background.")]
RUNS = Path("runs")


def console() -> Console:
    """Standard output, as wide as it needs to be."""
    from rich.console import Console

    found = Console()
    # A log has no width; 80 columns would cut names that someone searches it for.
    return found if found.is_terminal else Console(width=160)


def exit_code(state: State) -> int:
    """What a command ends with that has seen a run to its end."""
    if state.status == "failed":
        return 2 if state.rejected else 1
    return 130 if state.status == "cancelled" else 0
