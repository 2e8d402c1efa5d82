"""One thing that was looked at, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "failure"]
#: From harmless to fatal.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "failure")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What a look at one thing has shown; `doctor` and the preflight show these to people.

    Attributes:
        name: what was looked at, one or two words: `disk`, `clock`, `network`.
        level: `ok`; `note` for what is good to know; `warning` for what costs time or may go wrong; `failure` where a
            run would fail.
        text: one sentence with the values found.
        fix: what to do about it, empty where nothing is to be done.
        node: where it was found, empty where that is plain.
    """

    name: str
    level: Level
    text: str
    fix: str = ""
    node: str = ""

    def sentence(self) -> str:
        """`n3: disk: 0 MB are free in /runs; remove old runs`."""
        where = f"{self.node}: " if self.node else ""
        return f"{where}{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")
