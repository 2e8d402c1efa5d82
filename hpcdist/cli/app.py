"""The command line: parse, call, print. Heavy modules are imported by the commands that need them."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import traceback
from typing import Annotated, Any, NoReturn

import typer

from hpcdist import __version__
from hpcdist.cli import (
    bench,
    config,
    control,
    cost,
    devcluster,
    diagnose,
    image,
    internal,
    model_export,
    rerun,
    resume,
    review,
    run,
    run_comparison,
    runs,
    server,
    submit,
)
from hpcdist.errors import HpcdistError, shortened

#: Exit code after an unexpected exception (EX_SOFTWARE of sysexits.h).
DEFECT = 70
#: The standard error of these commands is a log file, which receives the traceback.
_LOGGED = ("supervise", "worker", "in-job")

app = typer.Typer(
    name="hpcdist",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: Panel of the help → modules with its commands.
PANELS: dict[str, tuple[Any, ...]] = {
    "Start runs": (run, submit, resume, config),
    "Watch runs": (runs, control),
    "Review": (review, run_comparison, rerun, cost, model_export, server),
    "Diagnose": (diagnose, bench),
    "Images": (image,),
    "Development": (devcluster,),
}


def _add_commands() -> None:
    for panel, modules in PANELS.items():
        for module in modules:
            if module not in (bench, image, devcluster, server):  # these are groups, with a help of their own
                for command in module.app.registered_commands:
                    command.rich_help_panel = panel
            app.add_typer(module.app, rich_help_panel=panel)
    app.add_typer(internal.app)


_add_commands()


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hpcdist {__version__}")
        raise typer.Exit


@app.callback()
def hpcdist(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Distributed PyTorch runs from one YAML file, on this machine or on Slurm, reviewed in MLflow."""


def main() -> NoReturn:
    """Run the command line.

    A user error ends with a message and exit code 2; an unexpected exception with one line that names a file with the
    traceback, and exit code DEFECT.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may be no text, and the encoding of the terminal may lack characters.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False, prog_name="hpcdist")
    except Exception as error:
        if "_HPCDIST_COMPLETE" in os.environ:  # the shell asks for completions: a message would garble the prompt
            sys.exit(1)
        if isinstance(error, (typer.Abort, EOFError)):
            sys.exit(130)
        if sys.argv[1:] and sys.argv[1] in _LOGGED and not isinstance(error, HpcdistError | OSError):
            raise
        code, message = _explained(error)
        if message:
            print(message, file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code or 0)


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an exception that ended a command."""
    if isinstance(error, HpcdistError):
        return error.exit_code, f"hpcdist: {error}"
    if isinstance(error, OSError):  # such as a full disk or a folder without permission
        path = f": {error.filename}" if error.filename else ""
        return 2, f"hpcdist: {error.strerror or error}{path}"
    # Typer's usage errors; their class is private, and so is that of the help without arguments.
    usage: Any = error
    if hasattr(usage, "format_message") and hasattr(usage, "exit_code"):
        if type(usage).__name__ == "NoArgsIsHelpError":
            usage.show()
            return 2, ""
        context = getattr(usage, "ctx", None)
        command = context.command_path if context is not None else "hpcdist"
        message = " ".join(usage.format_message().split()).rstrip(".")
        return int(usage.exit_code), f"hpcdist: {message} (see `{command} --help`)"
    return DEFECT, f"hpcdist: {_report(error)}"


def _report(error: Exception) -> str:
    """Write the traceback of an unexpected exception to a file. Returns the message for the user."""
    name = f"{type(error).__name__}: {shortened(' '.join(str(error).split()), 200)}"
    text = f"{traceback.format_exc()}\nhpcdist {__version__}, Python {sys.version}\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="hpcdist-", suffix=".traceback", delete=False, errors="backslashreplace"
        ) as file:
            file.write(text)
    except OSError:
        return f"internal error ({name}):\n{text}"
    return f"internal error ({name}): please report it with {file.name}"
