"""Agreement of all ranks on the step at which they save, stop or obey another command, and the profile of some steps.

A rank must not save alone, because others may be one step ahead or behind.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from hpcdist.host import retry
from hpcdist.rank.process_group import call_of_all_ranks
from hpcdist.rank.processes import StopFlag
from hpcdist.run.checkpoint_files import folder_name
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.rank_requests import CommandResult, LiveCommand, RequestReader, read_command, write_result

log = logging.getLogger(__name__)
#: Target interval between two agreements in seconds: a longer one delays a stop, a shorter one costs step time.
AGREEMENT_INTERVAL_S = 0.1
#: Largest number of step boundaries between two agreements, if a step takes no measurable time.
MAX_SKIPPED_BOUNDARIES = 10_000
#: Shortest duration of a step that is expected, in seconds: the clock may measure none.
_CLOCK_STEP_S = 1e-6
#: Interval of the checks for a request to stop, in seconds: each one reads a file.
REQUEST_INTERVAL_S = 1.0


@dataclass(eq=False)
class StopAgreement:
    """Gives all ranks the same answer to `should_stop` at the same step boundary.

    A round is one all-reduce of four floats on a CPU group. It starts at one boundary and its result is read at the
    next, so that it overlaps with the step. It also carries the step's duration, from which all ranks derive the same
    number of boundaries to skip until the next round, and the numbers of the newest commands.
    """

    #: A gloo group of all ranks, on which all start collectives in the same order; None if one rank decides.
    group: dist.ProcessGroup | None
    flag: StopFlag
    #: Reads requests at most once a second, on one rank; None on the others.
    requests: RequestReader | None

    def __post_init__(self) -> None:
        self._next_check = 0.0
        self._is_unreachable = False
        self._message = torch.zeros(4)
        self._work: dist.Work | None = None
        self._skip = 0  # boundaries until the next round
        self._boundaries = 0  # since the last round began
        self._round_began = time.monotonic()
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
        self._boundaries += 1
        if self._work is not None:
            self.close()
            self._obey(*self._message.tolist())
        elif self._skip > 0:
            self._skip -= 1
        else:
            now = time.monotonic()
            step_s = (now - self._round_began) / self._boundaries
            self._round_began = now
            self._boundaries = 0
            wanted = float(self.flag.is_raised or self._is_requested(now))
            message = [wanted, step_s, 0, 0]
            if self.requests is not None:
                message[2:] = self.requests.newest.values()
            if self.group is None:
                self._obey(*message)
            else:
                self._message = torch.tensor(message)
                self._work = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        return self.agreed

    def _obey(self, wanted: float, step_s: float, save: float, profile: float) -> None:
        """Apply the result of a round: the maximum of each value over the ranks."""
        self.agreed = wanted > 0
        self.newest_save = int(save)
        self.newest_profile = int(profile)
        num_boundaries = int(AGREEMENT_INTERVAL_S / max(step_s, _CLOCK_STEP_S))
        self._skip = min(num_boundaries, MAX_SKIPPED_BOUNDARIES)

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
        # The round usually ends during the step; no thread is started then.
        waiting = nullcontext() if self._work.is_completed() else call_of_all_ranks("should_stop")
        with waiting:
            self._work.wait()
        self._work = None


#: Interval of attempts to read a command file, in seconds.
READ_INTERVAL_S = 1.0
ENDED_BEFORE = "the ranks ended before the profile began"
#: Maximum number of characters of an error in a result.
_MAX_ERROR = 300


@dataclass(eq=False)
class LiveCommands:
    """Obeys commands that do not end the attempt on one rank: `save` and `profile` (`run/rank_requests.py`).

    `StopAgreement` tells all ranks the numbers of the newest commands at the same step boundary.
    """

    run: RunDir
    attempt: Attempt
    rank: int
    stop: StopAgreement
    device: torch.device

    def __post_init__(self) -> None:
        # Saves and profiles have numbers of one sequence.
        self._last_save = 0  #: number of the last `save` command that was obeyed
        self._last_profile = 0  #: number of the last `profile` command that was read
        self._waiting: deque[tuple[int, LiveCommand]] = deque()
        self._profiler: profile | None = None
        self._first_step = 0  #: of the profile
        self._num_steps = 0  #: steps that the profile has recorded so far
        self._next_read = 0.0

    @property
    def save_is_due(self) -> bool:
        """Whether there is a command `save` that was not obeyed."""
        return self.stop.newest_save > self._last_save

    def begin_save(self, step: int, path: Path | None = None, *, refused: str = "") -> Callable[[], None]:
        """Note that a checkpoint of this step is being saved, or why it is `refused`.

        Returns a function that reports this to the new commands `save`; call it once the checkpoint is on disk.
        """
        saved = path or self.run.checkpoints / folder_name(step)
        result = CommandResult(step=step, path=str(saved.relative_to(self.run.path)))
        if refused:
            result = CommandResult(error=refused)
        numbers = range(0)
        if self.rank == 0:
            numbers = range(self._last_save + 1, self.stop.newest_save + 1)
        self._last_save = self.stop.newest_save
        return partial(self._report_saves, numbers, result)

    def _report_saves(self, numbers: range, result: CommandResult) -> None:
        for number in numbers:
            try:
                command = read_command(self.attempt, number)
            except OSError as error:
                log.warning("%s: %s", self.attempt.command(number), error.strerror)
                continue
            if command is not None and command.action == "save":
                self._report(number, result)

    @property
    def profile_is_due(self) -> bool:
        """Whether `step_done` has something to do."""
        return self._profiler is not None or self.stop.newest_profile > self._last_profile

    def step_done(self, step: int) -> None:
        """Begin, continue or end a profile after a step. Call it after each step while `profile_is_due`."""
        now = time.monotonic()
        if self.stop.newest_profile > self._last_profile and now >= self._next_read:
            self._next_read = now + READ_INTERVAL_S
            self._read_profiles()
        if self._profiler is not None:
            self._num_steps += 1
            try:
                self._profiler.step()
            except RuntimeError as error:
                self._give_up(error)
            else:
                _, command = self._waiting[0]
                if self._num_steps == command.num_steps:
                    self._end()
        if self._profiler is None and self._waiting:
            self._begin(step)

    def close(self) -> None:
        """End a profile in progress with fewer steps; the next attempt does not continue it."""
        if self._profiler is not None:
            self._end()
        for number, _ in self._waiting:
            self._report(number, CommandResult(error=ENDED_BEFORE))
        self._waiting.clear()

    def _read_profiles(self) -> None:
        """Read all commands up to the newest profile: a node may see several at once."""
        for number in range(self._last_profile + 1, self.stop.newest_profile + 1):
            try:
                command = read_command(self.attempt, number, within_s=0)
            except OSError as error:
                log.warning("%s: %s; trying again", self.attempt.command(number), error.strerror)
                return
            if command is None:
                return  # the file system does not show it on this node yet
            self._last_profile = number
            if command.action == "profile" and self.rank in command.ranks:
                self._waiting.append((number, command))

    def _begin(self, step: int) -> None:
        """Start the profiler, which is ready after one step that it does not record."""
        _, command = self._waiting[0]
        num_steps = command.num_steps
        self._first_step = step + 2
        self._num_steps = -1
        # Some types of GPUs, such as MPS, have no profiler.
        device_activity = getattr(ProfilerActivity, self.device.type.upper(), ProfilerActivity.CPU)
        activities = {ProfilerActivity.CPU, device_activity}
        profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1))
        try:
            profiler.start()
        except RuntimeError as error:  # such as a profiler that the script has started
            self._give_up(error)
            return
        self._profiler = profiler
        log.info("profiling %d steps from step %d on", num_steps, self._first_step)

    def _end(self) -> None:
        """Write the trace for Perfetto: the operators of all threads, and on a GPU its kernels."""
        assert self._profiler is not None
        name = f"rank-{self.rank:05d}.pt.trace.json.gz"
        path = self.run.artifacts / "profiles" / f"step-{self._first_step:08d}" / name
        hidden = path.with_name(f".{name}")
        began = time.perf_counter()
        result = CommandResult(error=ENDED_BEFORE)
        try:
            self._profiler.stop()
            if self._num_steps > 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._profiler.export_chrome_trace(str(hidden))
                os.replace(hidden, path)
                written_s = time.perf_counter() - began
                name_in_run = str(path.relative_to(self.run.path))
                result = CommandResult(step=self._first_step, num_steps=self._num_steps, path=name_in_run)
                log.info("profiled %d steps, written in %.1f s: %s", self._num_steps, written_s, name_in_run)
        except (OSError, RuntimeError) as error:
            retry.discard(hidden)
            self._give_up(error)
        else:
            self._finish(result)

    def _give_up(self, error: OSError | RuntimeError) -> None:
        text = getattr(error, "strerror", None) or str(error)
        log.warning("the profile cannot be made: %s", text)
        line = " ".join(text.split())
        self._finish(CommandResult(error=line[:_MAX_ERROR]))

    def _finish(self, result: CommandResult) -> None:
        """Report the result of the profile in progress, which is the first one that waits."""
        self._profiler = None
        number, _ = self._waiting.popleft()
        self._report(number, result)

    def _report(self, number: int, result: CommandResult) -> None:
        try:
            write_result(self.attempt, number, self.rank, result)
        except OSError as error:
            log.warning("%s: %s", self.attempt.command_result(number, self.rank), error.strerror)
