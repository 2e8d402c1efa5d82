"""Standard output of the commands, and their exit codes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcdist.errors import terminal_text

if TYPE_CHECKING:
    from rich.console import Console

    from hpcdist.run.folder import State


def console() -> Console:
    """Return standard output as a console that prints text without control characters.

    Without a terminal it is wide enough for names of runs.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            # Text and style are separate here: the sequences of rich itself are not touched.
            for part in super().render(renderable, options):
                yield part if part.control else Segment(terminal_text(part.text), part.style)

    found = Clean()
    return found if found.is_terminal else Clean(width=160)


def wrapped(console: Console, text: str, indent: int) -> str:
    """Return text with indented further lines where it is wider than a terminal; unchanged elsewhere.

    Words, such as paths, stay whole.
    """
    if not console.is_terminal:
        return text
    wrapper = textwrap.TextWrapper(
        max(console.width, 2 * indent), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def exit_code(state: State) -> int:
    """Return the exit code of a command that ends with a run in this state."""
    if state.status == "failed":
        return 2 if state.rejected else 1
    return 130 if state.status == "cancelled" else 0
