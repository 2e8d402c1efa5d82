"""What was seen of one rank that stands still."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hpcdist.supervisor.hang.flight_records import Calls
from hpcdist.supervisor.hang.frames import Frame, Place, place_of
from hpcdist.supervisor.hang.processes import CANNOT_RUN, STATES, Facts


@dataclass(frozen=True, kw_only=True)
class Look:
    """One rank: its process, its main thread's stack, and what else was found out.

    Attributes:
        frames: the main thread's, innermost call first; empty where no stack was to be had.
        source: who has printed the stacks, `py-spy` or `faulthandler`.
        problem: why py-spy has not, where it was tried.
        text: the stacks of all threads, and with py-spy of all processes below the rank.
        calls: the last collectives by the flight recorders, in the order of their calls.
        facts: of the process.
        cpu_s, over_s: processor time that it used over so many seconds.
    """

    rank: int
    host: str
    pid: int
    frames: tuple[Frame, ...] = ()
    source: str = ""
    problem: str = ""
    text: str = ""
    calls: tuple[Calls, ...] = ()
    facts: Facts
    cpu_s: float
    over_s: float

    @property
    def place(self) -> Place | None:
        return place_of(self.frames)

    @property
    def is_stopped(self) -> bool:
        """Whether the process cannot run at all, whatever its code does."""
        return self.facts.state in CANNOT_RUN

    def state_text(self) -> str:
        """`state S (sleeping), in futex_wait_queue, 12 threads, 0.02 s of CPU in 1.1 s`."""
        state = f"state {self.facts.state} ({STATES.get(self.facts.state, 'see proc(5)')})"
        where = f", in {self.facts.wchan}" if self.facts.wchan else ""
        return f"{state}{where}, {self.facts.threads} threads, {self.cpu_s:.2f} s of CPU in {self.over_s:.1f} s"

    def whole_text(self) -> str:
        """All of it, for the rank's own file."""
        lines = [f"rank {self.rank} on {self.host}, process {self.pid}: {self.state_text()}"]
        if self.facts.half_closed:
            lines.append(f"TCP connections that the other side has closed: {', '.join(self.facts.half_closed)}")
        lines += [f"flight recorder, {call.text()}" for call in self.calls]
        if self.problem:
            lines.append(self.problem)
        lines.append(f"stacks by {self.source}:" if self.text else "no stack was to be had")
        return "\n".join(lines) + "\n\n" + self.text

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Look:
        parts = {
            "frames": tuple(Frame(*frame) for frame in value["frames"]),
            "calls": tuple(
                Calls(**{**call, "pending": tuple((int(at), str(name)) for at, name in call["pending"])})
                for call in value["calls"]
            ),
            "facts": Facts(**{**value["facts"], "half_closed": tuple(value["facts"]["half_closed"])}),
        }
        return cls(**{**value, **parts})
