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
from hpcdist.cli.options import INTERRUPTED
from hpcdist.errors import NO_PROCESS, HpcdistError, path_and_fix, shortened
from hpcdist.host.log_files import say

#: Exit code after an unexpected exception (EX_SOFTWARE of sysexits.h).
DEFECT = 70
#: Characters of an unexpected exception's text in a message; the file has the whole text.
_MAX_REASON = 200

#: Commands with a log as output, in which an unexpected traceback stays.
_LOGGED_COMMANDS = ("supervise", "in-job")
#: Panel of the help → modules of this package → their commands.
PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "Start runs": {"run": ("run", "submit", "resume", "config", "supervise", "in-job")},
    "Watch runs": {"runs": ("runs", "status", "logs", "follow", "stop", "cancel", "save", "profile")},
    "Review": {
        "review": ("ui", "report", "sync", "compare", "cost", "export"),
        "generate": ("generate",),
        "rerun": ("rerun",),
    },
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
                for registered in module.app.registered_commands:
                    registered.rich_help_panel = panel
            _set_help(module.app)
            app.add_typer(module.app, rich_help_panel=panel)
    return app


def _set_help(app: typer.Typer) -> None:
    """Set the help of the commands: their docstrings, with each paragraph on one line, which the terminal wraps.

    Each example keeps its own line. Some versions of Typer join the lines of all paragraphs that do not begin with \\b,
    others of none.
    """
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        for index, text in enumerate(paragraphs):
            if text.startswith("Examples:\n"):
                paragraphs[index] = f"\b\n{text}"
            else:
                paragraphs[index] = text.replace("\n", " ")
        command.help = "\n\n".join(paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _set_help(group.typer_instance)


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
    traceback; commands that write a log keep the traceback there.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # File names may have bytes that are no text, and the encoding of the terminal may lack characters.
            stream.reconfigure(errors="backslashreplace")
    is_completion = "_HPCDIST_COMPLETE" in os.environ  # set by a shell that asks Typer for values
    command = ""
    if len(sys.argv) > 1 and not is_completion:
        command = sys.argv[1]
    try:
        # Options such as --help, completion and the message about an unknown command need all commands.
        only = command if _is_command(command) else ""
        app = make_app(only)
        code = app(standalone_mode=False, prog_name="hpcdist")
    except Exception as error:
        if is_completion:  # a message would garble the prompt of the shell
            sys.exit(1)
        if isinstance(error, (typer.Abort, EOFError)):
            sys.exit(INTERRUPTED)
        if command in _LOGGED_COMMANDS and not isinstance(error, HpcdistError | OSError):
            raise
        code, message = _explained(error)
        if message:
            say(message, error=True)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(code or 0)


def _is_command(name: str) -> bool:
    return any(name in commands for modules in PANELS.values() for commands in modules.values())


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an exception that ended a command.

    The message is empty if there is nothing to add to what Typer has printed.
    """
    if isinstance(error, HpcdistError):
        return error.exit_code, f"hpcdist: {error}"
    if isinstance(error, OSError):  # such as a full disk or a folder without permission
        path, fix = path_and_fix(error)
        parts = [error.strerror or str(error), path, fix]
        return 2, f"hpcdist: {': '.join(filter(None, parts))}"
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return 2, f"hpcdist: {error}: {NO_PROCESS}"
    # Typer's class of usage errors is private.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _explained_usage(error)
    return DEFECT, f"hpcdist: {_report(error)}"


def _explained_usage(usage: Any) -> tuple[int, str]:
    """Return the exit code and the message of Typer's usage error; no message for a group without a command."""
    kind = type(usage).__name__  # the classes are private
    if kind == "NoArgsIsHelpError":
        usage.show()
        return 2, ""
    message = " ".join(usage.format_message().split()).rstrip(".")
    context = getattr(usage, "ctx", None)
    command = "hpcdist"
    if context is not None:
        command = context.command_path
        takes_keys = any(param.name == "overrides" for param in context.command.params)
        if takes_keys and kind == "NoSuchOption":
            message += ": config keys are written key=value, as in optim.lr=0.1"
    return int(usage.exit_code), f"hpcdist: {message} (see `{command} --help`)"


def _report(error: Exception) -> str:
    """Write the traceback of an unexpected exception to a file. Returns the message for the user."""
    reason = shortened(" ".join(str(error).split()), _MAX_REASON)
    name = f"{type(error).__name__}: {reason}"
    text = f"{traceback.format_exc()}\nhpcdist {__version__}, Python {sys.version}\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="hpcdist-", suffix=".traceback", delete=False, errors="backslashreplace"
        ) as file:
            file.write(text)
    except OSError:
        return f"internal error ({name}):\n{text}"
    return f"internal error ({name}): please report it with {file.name}"
