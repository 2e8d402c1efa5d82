"""Agreement of all ranks on the step at which they save, stop or obey another command.

A rank must not save alone, because others may be one step ahead or behind.
"""

import logging
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcdist.rank.process_group import call_of_all_ranks
from hpcdist.rank.processes import StopFlag
from hpcdist.run.rank_requests import RequestReader

log = logging.getLogger(__name__)
#: Target interval between two agreements in seconds: a longer one delays a stop, a shorter one costs step time.
AGREEMENT_INTERVAL_S = 0.1
#: Largest number of step boundaries between two agreements: slow steps may follow fast ones, and a stop then waits for
#: as many of them.
MAX_SKIPPED_BOUNDARIES = 30
#: Duration of a step for which the clock has measured none, in seconds.
_CLOCK_STEP_S = 1e-6
#: Interval of the checks for a request to stop, in seconds: each one reads a file.
REQUEST_INTERVAL_S = 1.0


@dataclass(eq=False)
class StopAgreement:
    """Gives all ranks the same answer to `should_stop` at the same step boundary.

    A round is one all-reduce of four floats on a CPU group, the maximum over the ranks: whether to stop, the duration
    of the longest step since the last round, and the numbers of the newest commands `save` and `profile`. It starts at
    one boundary and its result is read at the next, so that it overlaps with the step. From the duration of a step all
    ranks derive the same number of boundaries to skip until the next round. A rank that decides alone asks its clock.
    """

    #: A gloo group of all ranks, on which all start collectives in the same order; None if one rank decides.
    group: dist.ProcessGroup | None
    flag: StopFlag
    #: Reads requests at most once a second, on one rank; None on the others.
    requests: RequestReader | None

    def __post_init__(self) -> None:
        self._next_check = 0.0
        self._is_unreachable = False
        self._message = torch.zeros(4)  #: of the round in progress
        self._work: dist.Work | None = None  #: the round in progress
        self._num_to_skip = 0  #: boundaries until the next round of a group
        self._last_boundary: float | None = None  #: its time
        self._longest_step_s: float | None = None  #: since the last round began; None before a step is measured
        self._round_began = -math.inf
        self.agreed = False  #: whether the ranks stop
        #: Numbers of the newest commands `save` and `profile` that all ranks know; 0 before the first one.
        self.newest_save = 0
        self.newest_profile = 0

    def agree_in(self, group: dist.ProcessGroup | None) -> None:
        """Use another group from the next boundary on; None if this rank decides alone."""
        self.close()
        self.group = group

    def at_boundary(self) -> bool:
        """Return whether to stop now. Call it once after each step on every rank; it stays True once it is True.

        Raises RuntimeError if another rank has died; then no agreement is possible, and nothing may be saved.
        """
        if self.agreed:
            return True
        now = time.monotonic()
        if self._last_boundary is not None:
            self._longest_step_s = max(self._longest_step_s or 0.0, now - self._last_boundary)
        self._last_boundary = now
        if self._work is not None:
            self.close()
            wanted, step_s, save, profile = self._message.tolist()
            self._obey(wanted, save, profile)
            num_steps = int(AGREEMENT_INTERVAL_S / max(step_s, _CLOCK_STEP_S))
            self._num_to_skip = min(num_steps, MAX_SKIPPED_BOUNDARIES)
        elif self._num_to_skip > 0:
            self._num_to_skip -= 1
        elif self.group is not None or now - self._round_began >= AGREEMENT_INTERVAL_S:
            self._begin_round(now)
        return self.agreed

    def _begin_round(self, now: float) -> None:
        """Start a round with what this rank knows. A rank that decides alone obeys it at once."""
        step_s = self._longest_step_s
        if step_s is None:
            step_s = AGREEMENT_INTERVAL_S  # the next round follows soon, with a measured step
        self._longest_step_s = None
        self._round_began = now
        wanted = float(self.flag.is_raised or self._is_requested(now))
        save = 0
        profile = 0
        if self.requests is not None:
            save = self.requests.newest["save"]
            profile = self.requests.newest["profile"]
        if self.group is None:
            self._obey(wanted, save, profile)
            return
        self._message = torch.tensor((wanted, step_s, float(save), float(profile)))
        self._work = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def _obey(self, wanted: float, save: float, profile: float) -> None:
        """Apply the result of a round: the maximum of each value over the ranks."""
        self.agreed = wanted > 0
        self.newest_save = int(save)
        self.newest_profile = int(profile)

    def _is_requested(self, now: float) -> bool:
        """Return whether a stop is requested; False between two checks, and if the file system is unreachable."""
        if self.requests is None or now < self._next_check:
            return False
        self._next_check = now + REQUEST_INTERVAL_S
        try:
            is_requested = self.requests.poll()
        except OSError as error:
            if not self._is_unreachable:
                place = self.requests.attempt.path
                log.warning("%s: %s; the next check for requests is in a second", place, error.strerror)
            self._is_unreachable = True
            return False
        self._is_unreachable = False
        return is_requested

    def close(self) -> None:
        """Finish the round in progress, so that no other rank waits for this one."""
        if self._work is None:
            return
        if self._work.is_completed():  # as usual, since the step has taken longer
            self._work.wait()
        else:
            # Warns if another rank does not make the call.
            with call_of_all_ranks("should_stop"):
                self._work.wait()
        self._work = None
