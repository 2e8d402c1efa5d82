"""The command line: parse, call, print. Nothing heavy is imported before a command needs it.

The commands themselves are in `commands/` and `cli/devcluster.py`.
"""

from __future__ import annotations

import io
import sys
import tempfile
import traceback
from typing import NoReturn

import typer

from hpcdist import __version__
from hpcdist.cli import bench, doctor, image, run, runs, watch
from hpcdist.cli.devcluster import app as devcluster_app
from hpcdist.errors import HpcdistError, shortened

app = typer.Typer(
    name="hpcdist",
    help="One YAML file, one command: distributed PyTorch here or on a cluster, reviewed in MLflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
#: Exit code after an exception that no code expects (EX_SOFTWARE of sysexits.h).
DEFECT = 70
#: Commands whose standard error is a log, where the traceback belongs.
_LOGGED = ("supervise", "worker", "in-job")
COMMANDS = (run, runs, watch, doctor, bench, image)
for commands in (*(module.app for module in COMMANDS), devcluster_app):
    app.add_typer(commands)


def main() -> NoReturn:
    """Run the command line.

    A mistake of the user ends with one message and exit code 2, a defect with one line that names a file with the
    traceback, and exit code DEFECT.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files need not be text, nor need the terminal's encoding have all characters.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False)
    except HpcdistError as error:
        print(f"hpcdist: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # A full disk or a folder without permission: the user's to mend, and the path says where.
        print(f"hpcdist: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        sys.exit(2)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except Exception as error:
        # click's own usage errors carry their exit code and know how to show themselves.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            sys.exit(error.exit_code)
        if sys.argv[1:] and sys.argv[1] in _LOGGED:
            raise
        print(f"hpcdist: {_report(error)}", file=sys.stderr)
        sys.exit(DEFECT)
    sys.exit(code or 0)


def _report(error: Exception) -> str:
    """Keep the traceback of an exception that no code expects; returns the sentence for the user."""
    name = f"{type(error).__name__}: {shortened(' '.join(str(error).split()), 200)}"
    text = f"{traceback.format_exc()}\nhpcdist {__version__}, Python {sys.version}\n"
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="hpcdist-", suffix=".traceback", delete=False, errors="backslashreplace"
        ) as file:
            file.write(text)
    except OSError:
        return f"a defect of hpcdist ({name}):\n{text}"
    return f"a defect of hpcdist ({name}): please report it with {file.name}"
