"""The command line: parse, call, print. Nothing heavy is imported before a command needs it.

The commands themselves are in `commands/` and `devcluster/commands.py`.
"""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

from hpcdist.commands import benching, doctoring, image, launching, managing, watching
from hpcdist.devcluster.commands import app as devcluster_app
from hpcdist.errors import HpcdistError

app = typer.Typer(
    name="hpcdist",
    help="One YAML file, one command: distributed PyTorch here or on a cluster, reviewed in MLflow.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
COMMANDS = (launching, managing, watching, doctoring, benching, image)
for commands in (*(module.app for module in COMMANDS), devcluster_app):
    app.add_typer(commands)


def main() -> NoReturn:
    """Run the command line. A mistake of the user ends with one message and exit code 2, never a traceback."""
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
        raise
    sys.exit(code or 0)
