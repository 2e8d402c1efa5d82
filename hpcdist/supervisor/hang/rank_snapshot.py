"""Snapshot of one hung rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdist.supervisor.hang.flight_records import Calls
from hpcdist.supervisor.hang.frames import Frame, Location, location_of
from hpcdist.supervisor.hang.processes import CANNOT_RUN, STATES, ProcessState


@dataclass(frozen=True, kw_only=True)
class RankSnapshot:
    """State of a rank: its process, its stack and its last collectives.

    Attributes:
        frames: stack of the main thread, innermost call first; empty if none could be read.
        source: program that printed the stacks, `py-spy` or `faulthandler`.
        problem: why py-spy failed, if it was tried.
        text: stacks of all threads; with py-spy also of all child processes.
        calls: the last collectives in the flight recorders, in the order of their calls.
        pending_s: time since the call of the oldest unfinished collective; 0 without one.
        process: state of the process.
        cpu_s, over_s: CPU time that the process used during `over_s` seconds.
    """

    rank: int
    host: str
    pid: int
    frames: tuple[Frame, ...] = ()
    source: str = ""
    problem: str = ""
    text: str = ""
    calls: tuple[Calls, ...] = ()
    pending_s: float = 0.0
    process: ProcessState
    cpu_s: float
    over_s: float

    @property
    def location(self) -> Location | None:
        """The location of the stack; None if it has no frames."""
        return location_of(self.frames)

    @property
    def is_stopped(self) -> bool:
        """Whether the process cannot run, whatever its code does."""
        return self.process.state in CANNOT_RUN

    def state_text(self) -> str:
        """Return such as `state S (sleeping), in futex_wait_queue, 12 threads, 0.02 s of CPU in 1.1 s`."""
        _, description = STATES.get(self.process.state, ("", "see proc(5)"))
        state = f"state {self.process.state} ({description})"
        wchan = f", in {self.process.wchan}" if self.process.wchan else ""
        return f"{state}{wchan}, {self.process.threads} threads, {self.cpu_s:.2f} s of CPU in {self.over_s:.1f} s"

    def whole_text(self) -> str:
        """Return the text of the rank's stacks file."""
        lines = [f"rank {self.rank} on {self.host}, process {self.pid}: {self.state_text()}"]
        if self.process.half_closed:
            lines.append(f"TCP connections closed by the peer: {', '.join(self.process.half_closed)}")
        lines += [f"flight recorder, {call.text()}" for call in self.calls]
        if self.problem:
            lines.append(self.problem)
        lines.append(f"stacks by {self.source}:" if self.text else "no stack could be read")
        return "\n".join(lines) + "\n\n" + self.text

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RankSnapshot:
        """Return the snapshot from the JSON of `dataclasses.asdict`."""
        parts = {
            "frames": tuple(Frame(*frame) for frame in value["frames"]),
            "calls": tuple(
                Calls(**{**call, "pending": tuple((int(at), str(name)) for at, name in call["pending"])})
                for call in value["calls"]
            ),
            "process": ProcessState(**{**value["process"], "half_closed": tuple(value["process"]["half_closed"])}),
        }
        return cls(**{**value, **parts})
