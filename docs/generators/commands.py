"""Generator of the command-line reference."""

from __future__ import annotations

from typing import Any

import typer.main
from typer.cli import get_docs_for_click

from hpcdist.cli.app import make_app


def commands() -> str:
    """Return a section per command with its help text, arguments and options, as `typer utils docs` prints them."""
    group: Any = typer.main.get_command(make_app())
    group.commands = {name: command for name, command in group.commands.items() if not command.hidden}
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="hpcdist")
    sections = text[text.index("## ") :]  # the page has a title of its own
    return sections.replace("\b\n", "").replace("* `--help`: Show this message and exit.\n", "")
