"""The command line: parse, call, print. Heavy modules are imported by the commands that need them."""

import importlib
import inspect
import io
import os
import sys
import tempfile
import traceback
from typing import Annotated, Any, NoReturn

import typer

from hpcdist import __version__
from hpcdist.errors import NO_PROCESS, HpcdistError, path_and_fix, shortened
from hpcdist.host.log_files import say

#: Exit code after an unexpected exception (EX_SOFTWARE of sysexits.h).
DEFECT = 70

#: Panel of the help → modules of this package → their commands.
PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "Start runs": {"run": ("run", "submit", "resume", "config", "supervise", "in-job")},
    "Watch runs": {"runs": ("runs", "status", "logs", "follow", "stop", "cancel", "save", "profile")},
    "Review": {"review": ("ui", "report", "sync", "compare", "cost", "export"), "rerun": ("rerun",)},
    "Diagnose": {"doctor": ("explain", "doctor"), "bench": ("bench",)},
    "Images": {"image": ("image",)},
    "Development": {"devcluster": ("devcluster",)},
}


def make_app(command: str = "") -> typer.Typer:
    """Return the command line with all commands, or only with those of the module that has `command`.

    A command starts a third faster without the modules, the options and the help of all others.
    """
    app = typer.Typer(
        name="hpcdist",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(hpcdist)
    for panel, modules in PANELS.items():
        for name, commands in modules.items():
            if command and command not in commands:
                continue
            module = importlib.import_module(f"hpcdist.cli.{name}")
            if name not in ("bench", "image", "devcluster"):  # groups with a help of their own
                for one in module.app.registered_commands:
                    one.rich_help_panel = panel
            _keep_examples(module.app)
            app.add_typer(module.app, rich_help_panel=panel)
    return app


def _keep_examples(app: typer.Typer) -> None:
    """Make the help show each example on its own line: Click joins the lines of paragraphs that do not begin so."""
    for one in app.registered_commands:
        one.help = (inspect.getdoc(one.callback) or "").replace("Examples:\n", "\b\nExamples:\n")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _keep_examples(group.typer_instance)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"hpcdist {__version__}")
        raise typer.Exit


def hpcdist(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Distributed PyTorch runs from one YAML file, on this machine or on Slurm, reviewed in MLflow.

    Runs are found by their names in the folder HPCDIST_RUNS_DIR, by default `runs`, or by the paths of their folders.
    """


def main() -> NoReturn:
    """Run the command line.

    A user error, or one of the system such as a full disk, ends with a message and exit code 2, another expected error
    with exit code 1. An unexpected exception ends with exit code DEFECT and one line that names a file with the
    traceback; commands whose output is a log keep the traceback there.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may be no text, and the encoding of the terminal may lack characters.
            stream.reconfigure(errors="backslashreplace")
    # All commands for options, completion and mistakes.
    first = sys.argv[1] if len(sys.argv) > 1 and "_HPCDIST_COMPLETE" not in os.environ else ""
    known = [command for modules in PANELS.values() for commands in modules.values() for command in commands]
    try:
        code = make_app(first if first in known else "")(standalone_mode=False, prog_name="hpcdist")
    except Exception as error:
        if "_HPCDIST_COMPLETE" in os.environ:  # the shell asks for completions: a message would garble the prompt
            sys.exit(1)
        if isinstance(error, (typer.Abort, EOFError)):
            sys.exit(130)
        if first in ("supervise", "in-job") and not isinstance(error, HpcdistError | OSError):
            raise
        code, message = _explained(error)
        if message:
            say(message, error=True)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code or 0)


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an exception that ended a command."""
    if isinstance(error, HpcdistError):
        return error.exit_code, f"hpcdist: {error}"
    if isinstance(error, OSError):  # such as a full disk or a folder without permission
        return 2, f"hpcdist: {': '.join(filter(None, [error.strerror or str(error), *path_and_fix(error)]))}"
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return 2, f"hpcdist: {error}: {NO_PROCESS}"
    # Typer's usage errors; their class is private, and so is that of the help without arguments.
    usage: Any = error
    if hasattr(usage, "format_message") and hasattr(usage, "exit_code"):
        if type(usage).__name__ == "NoArgsIsHelpError":
            usage.show()
            return 2, ""
        context = getattr(usage, "ctx", None)
        command = context.command_path if context is not None else "hpcdist"
        message = " ".join(usage.format_message().split()).rstrip(".")
        takes_keys = context is not None and any(param.name == "overrides" for param in context.command.params)
        if takes_keys and type(usage).__name__ == "NoSuchOption":
            message += ": config keys are written key=value, as in optim.lr=0.1"
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
