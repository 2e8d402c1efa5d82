"""Stopping without losing a step: all ranks agree on the boundary to save at.

A rank never saves alone: others may be a step ahead of it or behind.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpcdist.rank.stop_signals import StopFlag

log = logging.getLogger(__name__)
#: Aim for about one agreement in this time: rarer ones delay a stop, more frequent ones cost step time.
AGREE_EVERY_S = 0.1
REQUEST_EVERY_S = 1.0


class StopAgreement:
    """Makes all ranks answer `should stop?` alike at the same step boundary.

    A round is one all-reduce of two floats on a CPU group. It is started at one boundary and read at the next,
    so that it travels while the step computes, and it carries the step's duration, from which all ranks derive
    the same number of boundaries to leave out until the next round.

    Args:
        group: a gloo group of all ranks, used by nothing else that runs at the same time; None in a world of one.
        flag: this rank's signal flag.
        request: file whose existence asks for a stop; looked at by `watch_request` ranks, once a second at most.
        watch_request: whether this rank looks (one is enough: the agreement tells the others).
    """

    def __init__(self, group: dist.ProcessGroup | None, flag: StopFlag, request: Path, *, watch_request: bool) -> None:
        self._group = group
        self._flag = flag
        self._request = request
        self._watch_request = watch_request
        self._next_look = 0.0
        self._is_away = False
        self._message = torch.zeros(2)
        self._work: dist.Work | None = None
        self._skip = 0
        self._boundaries = 0
        self._round_began = time.monotonic()
        self.agreed = False

    @property
    def signalled(self) -> bool:
        """Whether this rank's own flag is set."""
        return self._flag.is_set

    def ask(self) -> None:
        """Set this rank's own flag."""
        self._flag.is_set = True

    def agree_in(self, group: dist.ProcessGroup | None) -> None:
        """Agree in another group from the next boundary on; None where this rank decides alone."""
        self.close()
        self._group = group

    def at_boundary(self) -> bool:
        """Whether to stop now; call it once a step on every rank. True stays True.

        Raises RuntimeError when a peer has died: then nobody can agree, and nothing may be saved.
        """
        if self.agreed:
            return True
        self._boundaries += 1
        if self._work is not None:
            self._work.wait()
            self._work = None
            wanted, step_s = self._message.tolist()
            self.agreed = wanted > 0
            self._skip = min(int(AGREE_EVERY_S / max(step_s, 1e-6)), 10_000)
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
            self._skip = min(int(AGREE_EVERY_S / max(step_s, 1e-6)), 10_000)
            return
        self._message[0], self._message[1] = float(wanted), step_s
        self._work = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _wanted(self, now: float) -> bool:
        if self._flag.is_set:
            return True
        if self._watch_request and now >= self._next_look:
            self._next_look = now + REQUEST_EVERY_S
            return self._is_requested()
        return False

    def _is_requested(self) -> bool:
        try:
            found = self._request.exists()
        except OSError as error:
            if not self._is_away:
                log.warning("%s: %s; stop requests are looked for again in a second", self._request, error.strerror)
            self._is_away = True
            return False
        self._is_away = False
        return found

    def close(self) -> None:
        """Finish a round that is under way, so that no rank leaves another one waiting."""
        if self._work is not None:
            self._work.wait()
            self._work = None
