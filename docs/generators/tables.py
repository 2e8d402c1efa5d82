"""Markdown tables, and the folders that the generators read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hpcdist"


def cell(text: object) -> str:
    """Escape a text for a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;").replace("{{", "{ {")


def code(text: object) -> str:
    """Return a text as inline code for a cell of a table."""
    plain = " ".join(str(text).split()).replace("|", "\\|")
    return f"`` {plain} ``" if "`" in plain else f"`{plain}`"


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of escaped cells."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def folded(title: str, text: str) -> str:
    """Return a block that shows its title until the reader opens it."""
    return f'??? note "{title}"\n\n{indent(text, " " * 4)}'
