"""Commands that do not end the attempt, on one rank: `save` and `profile`."""

import gc
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from hpcdist.host import retry
from hpcdist.rank.stopping import StopAgreement
from hpcdist.run.checkpoint_files import folder_name
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.rank_requests import CommandResult, LiveCommand, read_command, write_result

log = logging.getLogger(__name__)
#: Interval of attempts to read a command file, in seconds.
READ_INTERVAL_S = 1.0
ENDED_BEFORE = "the ranks ended before the profile began"
#: torch has one profiler for a process: another one would cancel the first, and its export would crash the process.
PROFILES_ITSELF = "the training code uses torch.profiler itself"
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
        # Commands of both kinds are numbered in one sequence, from 1.
        self._last_save = 0  #: number of the last `save` command that was obeyed
        self._last_profile = 0  #: number of the last `profile` command that was read
        #: Profiles of this rank that have not ended, with their numbers; the first one is in progress or comes next.
        self._waiting: deque[tuple[int, LiveCommand]] = deque()
        self._profiler: profile | None = None  #: of the profile in progress
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
        if self.rank == 0:  # the others report nothing
            numbers = range(self._last_save + 1, self.stop.newest_save + 1)
        self._last_save = self.stop.newest_save
        return partial(self._report_saves, numbers, result)

    def _report_saves(self, numbers: range, result: CommandResult) -> None:
        """Report the result to the commands with these numbers that are saves; others among them are profiles."""
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
                if self._num_steps > 0:
                    _require_recording()
                self._profiler.step()
            except RuntimeError as error:
                self._give_up(error)
            else:
                _, command = self._waiting[0]
                if self._num_steps == command.num_steps:
                    self._end()
        while self._profiler is None and self._waiting:
            self._begin(step)

    def close(self) -> None:
        """End a profile in progress with fewer steps; the next attempt does not continue it."""
        if self._profiler is not None:
            try:
                if self._num_steps >= 0:
                    _require_recording()
                self._end()
            except RuntimeError as error:
                self._give_up(error)
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
        self._num_steps = -1  # the unrecorded step makes it 0
        # The CPU stands for types of GPUs without a profiler, such as MPS.
        device_activity = getattr(ProfilerActivity, self.device.type.upper(), ProfilerActivity.CPU)
        activities = {ProfilerActivity.CPU, device_activity}
        profiler = _Profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1))
        try:
            if _is_recording() or _code_warms_up():
                raise RuntimeError(PROFILES_ITSELF)
            profiler.start()
        except RuntimeError as error:
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


def _is_recording() -> bool:
    """Return whether a profiler of torch records in this process; False while it warms up."""
    return torch._C._autograd._profiler_enabled()


class _Profile(profile):
    """A profile of this module, which `_code_warms_up` does not take for one of the training code."""


def _code_warms_up() -> bool:
    """Return whether a profiler of the training code warms up.

    torch does not show it, and if two profilers record, the next step of the training code raises an error. A profiler
    that was stopped while it warmed up counts as long as the code refers to it.
    """
    gc.collect()
    for value in gc.get_objects():
        is_profile = issubclass(type(value), profile) and not isinstance(value, _Profile)
        if is_profile and value.current_action is ProfilerAction.WARMUP:
            return True
    return False


def _require_recording() -> None:
    """Raise RuntimeError if the profile does not record: code that profiles itself has ended it."""
    if not _is_recording():
        raise RuntimeError(PROFILES_ITSELF)
