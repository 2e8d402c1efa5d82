"""Tables on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def print_table(
    console: Console, head: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = "", num_whole: int = 0
) -> None:
    """Print a table with columns of numbers aligned at the right.

    Args:
        num_whole: number of columns, from the first one, with cells that are never folded.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    table = Table(title=Text(title) if title else None, title_justify="left")
    for index, name in enumerate(head):
        are_numbers = all(not row[index] or re.match(r"[<\d]", row[index].plain) for row in cells)
        justify: Literal["left", "right"] = "right" if are_numbers else "left"
        # Folded and not cut: cells of a sweep differ at the end of their names.
        table.add_column(Text(name), overflow="fold", no_wrap=index < num_whole, justify=justify)
    for row in cells:
        table.add_row(*row)
    console.print(table)


def print_without_lines(console: Console, rows: Sequence[Sequence[str | Text]]) -> None:
    """Print a table for a narrow terminal: a first cell that is too wide is alone in its line.

    The second column is aligned at the left, the others at the right.
    """
    from rich.text import Text

    second_width, *other_widths = (max(len(row[index]) for row in rows) for index in range(1, len(rows[0])))
    width_of_others = sum(width + 2 for width in (second_width, *other_widths))
    longest_name = max(len(row[0]) for row in rows)
    name_width = min(longest_name, max(0, console.width - width_of_others))
    for name, second, *others in rows:
        first = str(name).ljust(name_width)
        if len(name) > name_width:
            first = f"{name}\n{' ' * name_width}"
        style = second.style if isinstance(second, Text) else ""
        cells = [Text(first), Text(str(second).ljust(second_width), style)]
        for other, width in zip(others, other_widths, strict=True):
            cells.append(Text(str(other).rjust(width)))
        console.print(Text("  ").join(cells), soft_wrap=True)
