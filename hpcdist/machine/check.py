"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "note", "warning", "failure"]
#: Ordered by severity.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "failure")


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check, reported by `doctor`, `image check` and the preflight.

    Attributes:
        name: subject in one or two words: `disk`, `clock`, `network`.
        level: `ok`; `note` for information; `warning` for a loss of time or a possible error; `failure` if a run would
            fail.
        text: one sentence with the values found.
        fix: action of the user, empty if none is needed.
        node: the node concerned, empty for this machine or all nodes.
    """

    name: str
    level: Level
    text: str
    fix: str = ""
    node: str = ""

    def sentence(self) -> str:
        """Return one line such as `n3: disk: 0 MB are free in /runs; remove old runs`."""
        where = f"{self.node}: " if self.node else ""
        return f"{where}{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def _check(level: Level, name: str, text: str, fix: str = "", *, node: str = "") -> Check:
    return Check(name=name, level=level, text=text, fix=fix, node=node)


ok = partial(_check, "ok")
note = partial(_check, "note")
warning = partial(_check, "warning")
failure = partial(_check, "failure")
