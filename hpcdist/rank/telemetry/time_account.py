"""The time account of a rank: each second from the start of the process to its end is booked to one cause.

The causes are those of the ledger of a run (`review/ledger.py`), which sums the accounts of all ranks. The heartbeat
contains the account, so it costs no further file operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hpcdist.review.causes import CAUSES, Cause

#: Maximum number of phases of an attempt that are recorded with begin and end, for the timeline of a run.
MAX_PHASES = 1000
#: Causes of a rank between phases: before its first step, in its first step, and afterwards.
_BEFORE_STEPS: tuple[Cause, ...] = ("start", "compile")


class TimeAccount:
    """Books the time of one rank. At any moment one cause is current.

    A rank begins with `start`. Its first step is `compile`, because it includes compilation, kernel selection and the
    allocation of memory. Afterwards its time is `compute`, except for phases (`phase`) and for parts of steps that are
    known only after the step (`move`). Steps that an earlier attempt had done count as `redone` instead of `compute`,
    `data` and `communication`.

    Args:
        now: clock, in seconds.
    """

    def __init__(self, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.began = time.time()
        self._first = self._since = now()
        self._cause: Cause = "start"
        self._seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        #: Number of the last step that an earlier attempt had done.
        self.reached = 0
        #: Whether the rank has done its work; its remaining time is then `idle`, otherwise `down`.
        self.is_closed = False
        #: Phases that have ended: cause, begin and end in seconds since the epoch.
        self.phases: list[tuple[Cause, float, float]] = []

    # --- events

    def training_begins(self, now: float | None = None) -> None:
        """Record the begin of the first step."""
        if self._cause == "start":
            self._switch("compile", self._now() if now is None else now)

    def step_done(self, step: int, now: float) -> None:
        """Record the end of a step; `step` is the number of steps done."""
        before = self._cause
        if before in _BEFORE_STEPS or (before == "redone") != (step < self.reached):
            self._switch("redone" if step < self.reached else "compute", now)
        else:
            self._seconds[before] += now - self._since
            self._since = now

    def move(self, data_s: float, communication_s: float) -> None:
        """Book seconds of past `compute` as `data` and `communication`."""
        booked = self._seconds
        left = booked["compute"] - data_s - communication_s
        if left < 0:  # parts of a step that are measured on a device may be longer than the step on the host
            scale = booked["compute"] / (data_s + communication_s)
            left, data_s, communication_s = 0.0, data_s * scale, communication_s * scale
        booked["compute"] = left
        booked["data"] += data_s
        booked["communication"] += communication_s

    @contextmanager
    def phase(self, cause: Cause) -> Iterator[None]:
        """Book the time inside the block to a cause. A phase inside another phase belongs to the outer one."""
        if self._cause in ("checkpoint", "evaluation", "communication") or (
            cause == "communication" and self._cause != "compute"
        ):
            yield
            return
        before = self._cause
        self._switch(cause, self._now())
        try:
            yield
        finally:
            self._switch(before, self._now())

    def wait_for_work(self) -> None:
        """Record that this rank has no steps of its own: its time is `idle`, except for `work`."""
        self._switch("idle", self._now())

    def work(self, seconds: float) -> None:
        """Book seconds of a rank without steps as `compute`."""
        if self._cause == "idle":
            now = self._now()
            self._switch("idle", now)
            seconds = min(seconds, self._seconds["idle"])
            self._seconds["idle"] -= seconds
            self._seconds["compute"] += seconds

    @property
    def is_redoing(self) -> bool:
        """Whether the current step was done by an earlier attempt."""
        return self._cause == "redone"

    def _switch(self, cause: Cause, now: float) -> None:
        before, since = self._cause, self._since
        self._seconds[before] += now - since
        self._since, self._cause = now, cause
        if before in ("start", "compile", "checkpoint", "evaluation") and before != cause:
            self._note_phase(before, since, now)

    def _note_phase(self, cause: Cause, since: float, now: float) -> None:
        if len(self.phases) < MAX_PHASES:
            offset = self.began - self._first
            self.phases.append((cause, offset + since, offset + now))

    # --- for the heartbeat

    def report(self) -> dict[str, Any]:
        """Return the account until now.

        The keys are `began` and `until` (seconds since the epoch), `cause` (the current one), `closed`, and `seconds`
        by cause, which add up to `until` - `began`.
        """
        while True:
            # Another thread may book meanwhile.
            cause, since, seconds = self._cause, self._since, dict(self._seconds)
            if self._since == since and self._cause == cause:
                break
        now = self._now()
        seconds[cause] += max(0.0, now - since)
        return {
            "began": round(self.began, 3),
            "until": round(self.began + now - self._first, 3),
            "cause": cause,
            "closed": self.is_closed,
            "seconds": {name: round(value, 4) for name, value in seconds.items() if value},
        }
