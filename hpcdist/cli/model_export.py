"""`hpcdist export`: write the model of a checkpoint to a file that other programs load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from hpcdist.cli.options import RUNS, OptionalRunName, RunsDir, named, option
from hpcdist.errors import UserMistake
from hpcdist.logs import say
from hpcdist.machine.installation import install_command

app = typer.Typer()

FORMATS = ("safetensors", "onnx", "torch")


@app.command("export")
def export(
    run: OptionalRunName = None,
    *,
    file_format: Annotated[
        str, option("--format", "FORMAT", "safetensors or torch (weights), or onnx (the model with its weights).")
    ],
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            "CHECKPOINT",
            "best (by checkpoint.monitor), final (the newest), or a step; by default the best, or the final one if no"
            " checkpoint has the metric.",
        ),
    ] = None,
    output: Annotated[
        Path | None, option("--output", "PATH", "File to write; by default RUN-step-N with the format's ending.")
    ] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Write the model of a checkpoint to a file that is loaded without hpcdist.

    The weights of all ranks are merged. safetensors and torch write them by name, for the model's own code. onnx also
    writes the model's program, which a finished run has; it runs without torch.

    Examples:

        hpcdist export --format safetensors

        hpcdist export first --format onnx --checkpoint final --output digits.onnx
    """
    from hpcdist.config.monitor import monitor_of
    from hpcdist.config.written import plain_tree
    from hpcdist.files.ownership import require_trusted
    from hpcdist.run.lookup import resolve_run

    if file_format not in FORMATS:
        raise UserMistake(f"--format {file_format}: expected {', '.join(FORMATS)}")
    found = resolve_run(named(run, runs_dir), runs_dir)
    if file_format == "onnx":  # loading a program may execute code
        require_trusted(found.path, "export")
    monitor = monitor_of(plain_tree(found.config))

    try:
        from hpcdist.checkpoint import conversion
    except ModuleNotFoundError as error:
        raise UserMistake(f"export needs {error.name}: run {install_command('train', 'export')}") from error

    kind = cast(conversion.Format, file_format)
    conversion.require_packages(kind)
    chosen = conversion.find_checkpoint(found, checkpoint, monitor)
    if checkpoint is None and monitor.metric not in chosen.metrics:
        reason = f"no checkpoint has {monitor.metric}" if monitor.metric else "checkpoint.monitor is empty"
        say(f"the final checkpoint, step {chosen.step}: {reason}", error=True)
    target = output or Path(f"{found.name}-step-{chosen.step}{conversion.SUFFIXES[kind]}")
    for path in conversion.write_model(found, chosen, kind, target.expanduser()):
        say(f"{path}: {path.stat().st_size:,} bytes, step {chosen.step} of {found.name}")
