"""The result of one check of a machine or a run."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "note", "warning", "failure"]
#: Ordered by severity.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "failure")


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check: its severity, the finding, and how to fix a problem."""

    name: str
    level: Level  #: `warning` for a loss of time or a possible error; `failure` if a run would fail
    text: str  #: one sentence with the values found
    fix: str = ""
    node: str = ""  #: empty for this machine or all nodes

    def sentence(self) -> str:
        """Return the result in one line: `n1: disk: 20 MB are free in /runs; remove old runs`."""
        sentence = f"{self.name}: {self.text}"
        if self.node:
            sentence = f"{self.node}: {sentence}"
        if self.fix:
            sentence += f"; {self.fix}"
        return sentence


def _check(level: Level, name: str, text: str, fix: str = "", *, node: str = "") -> Check:
    return Check(name=name, level=level, text=text, fix=fix, node=node)


ok = partial(_check, "ok")
note = partial(_check, "note")
warning = partial(_check, "warning")
failure = partial(_check, "failure")
