"""Agreement of all ranks on the step at which they save and stop, or obey another command.

A rank must not save alone, because others may be one step ahead or behind.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpcdist.rank.stop_signals import StopFlag
from hpcdist.run.attempt import Attempt, Request
from hpcdist.run.live_command import CommandFiles

log = logging.getLogger(__name__)
#: Target interval between two agreements in seconds: a longer one delays a stop, a shorter one costs step time.
AGREEMENT_INTERVAL_S = 0.1
REQUEST_INTERVAL_S = 1.0


class StopAgreement:
    """Gives all ranks the same answer to `should_stop` at the same step boundary.

    A round is one all-reduce of four floats on a CPU group. It starts at one boundary and its result is read at the
    next, so that it overlaps with the step. It also carries the step's duration, from which all ranks derive the same
    number of boundaries to skip until the next round, and the numbers of the newest commands.

    Args:
        group: a gloo group of all ranks, on which all ranks start collectives in the same order; None if the world size
            is 1.
        flag: the signal flag of this rank.
        request: file whose existence requests a stop.
        watch_request: whether this rank checks for the file, at most once a second; one rank is sufficient.
        commands: the command files, for the rank that checks for the request; None for others.

    Attributes:
        agreed: whether the ranks stop.
        newest_save: number of the newest command `save` that all ranks know; 0 before the first one.
        newest_profile: number of the newest command `profile` that all ranks know.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        flag: StopFlag,
        request: Path,
        *,
        watch_request: bool,
        commands: CommandFiles | None = None,
    ) -> None:
        self._group = group
        self.flag = flag
        self._request = request
        self.watches_request = watch_request
        self._commands = commands
        self._next_check = 0.0
        self._is_unreachable = False
        self._message = torch.zeros(4)
        #: Numbers of the newest commands that this rank has found, by action.
        self._found = {"save": 0, "profile": 0}
        self._work: dist.Work | None = None
        self._skip = 0
        self._boundaries = 0
        self._round_began = time.monotonic()
        self.agreed = False
        self.newest_save = self.newest_profile = 0

    def agree_in(self, group: dist.ProcessGroup | None) -> None:
        """Use another group from the next boundary on; None if this rank decides alone."""
        self.close()
        self._group = group

    def at_boundary(self) -> bool:
        """Return whether to stop now. Call it once for each step on every rank; it stays True once it is True.

        Raises RuntimeError if another rank has died; then no agreement is possible, and nothing may be saved.
        """
        if self.agreed:
            return True
        self._boundaries += 1
        if self._work is not None:
            self._work.wait()
            self._work = None
            wanted, step_s, save, profile = self._message.tolist()
            self.agreed = wanted > 0
            self.newest_save, self.newest_profile = int(save), int(profile)
            self._skip_for(step_s)
        elif self._skip > 0:
            self._skip -= 1
        else:
            self._begin_round()
        return self.agreed

    def _begin_round(self) -> None:
        now = time.monotonic()
        step_s = (now - self._round_began) / self._boundaries
        self._round_began, self._boundaries = now, 0
        wanted = self._wanted(now)
        if self._group is None:
            self.agreed = wanted
            self.newest_save, self.newest_profile = self._found["save"], self._found["profile"]
            self._skip_for(step_s)
            return
        self._message = torch.tensor([float(wanted), step_s, self._found["save"], self._found["profile"]])
        self._work = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _skip_for(self, step_s: float) -> None:
        self._skip = min(int(AGREEMENT_INTERVAL_S / max(step_s, 1e-6)), 10_000)

    def _wanted(self, now: float) -> bool:
        if self.flag.is_set:
            return True
        if not self.watches_request or now < self._next_check:
            return False
        self._next_check = now + REQUEST_INTERVAL_S
        try:
            found = self._request.exists()
            # One command a second, so that each number is part of a round.
            if self._commands is not None and (command := self._commands.poll()) is not None:
                self._found[command[1].action] = command[0]
        except OSError as error:
            if not self._is_unreachable:
                log.warning("%s: %s; the next check for a stop request is in a second", self._request, error.strerror)
            self._is_unreachable = True
            return False
        self._is_unreachable = False
        return found

    def close(self) -> None:
        """Finish the round in progress, so that no other rank waits for this one."""
        if self._work is not None:
            self._work.wait()
            self._work = None


def stops_after(step: int, stop: StopAgreement, pause_at_step: int | None, attempt: Attempt) -> bool:
    """Return whether the ranks stop after a step: by agreement, or because the config says so.

    Call it instead of `at_boundary`. All ranks know `pause_at_step`, so they need no agreement on it. The rank that
    watches for requests writes one, so that the end counts as a requested stop, after which nothing is started again.

    Args:
        pause_at_step: `stop.pause_at_step`.
        attempt: receives the request.
    """
    if stop.at_boundary():
        return True
    if pause_at_step is None or step < pause_at_step:
        return False
    if stop.watches_request and not attempt.request.exists():
        attempt.send_request(Request(cause="config", by=f"stop.pause_at_step={pause_at_step}"))
    stop.agreed = True
    return True
