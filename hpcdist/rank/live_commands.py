"""A rank's part in commands that do not end the attempt: `save` and `profile` (`run/live_command.py`).

Rank 0 finds the command files. The agreement on a stop tells all ranks the numbers of the newest commands at the same
step boundary, so that all ranks save at the same step.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.run.live_command import CommandResult, LiveCommand, read_command, write_result
from hpcdist.run.saved_checkpoints import folder_name

if TYPE_CHECKING:
    import torch

    from hpcdist.rank.stop_agreement import StopAgreement
    from hpcdist.rank.telemetry.step_profiler import StepProfiler

log = logging.getLogger(__name__)
#: Folder of the traces among the artifacts of the run.
PROFILES = "profiles"
#: Interval of attempts to read a command file, in seconds.
READ_INTERVAL_S = 1.0
ENDED_BEFORE = "the ranks ended before the profile began"


class LiveCommands:
    """Obeys the commands on one rank.

    Args:
        stop: the agreement, which knows the numbers of the newest commands.
        device: device of this rank.
    """

    def __init__(self, run: RunDir, attempt: Attempt, rank: int, stop: StopAgreement, device: torch.device) -> None:
        self._run = run
        self._attempt = attempt
        self._rank = rank
        self._stop = stop
        self._device = device
        # Saves and profiles have numbers of one sequence.
        self._last_save = 0  #: number of the last `save` command that was obeyed
        self._last_profile = 0  #: number of the last `profile` command that was read
        self._waiting: deque[tuple[int, LiveCommand]] = deque()
        self._profiler: StepProfiler | None = None
        self._first_step = 0
        self._path = Path()
        self._next_read = 0.0

    # --- save

    @property
    def save_is_due(self) -> bool:
        """Whether a `save` command has not been obeyed yet; equal on all ranks."""
        return self._stop.newest_save > self._last_save

    def saving(self, step: int, path: Path | None = None) -> Callable[[], None]:
        """Note that a checkpoint of this step is being saved. Returns a function to call once it is on disk.

        Args:
            path: the checkpoint; by default that of the step in the folder of checkpoints.
        """
        saved = path or self._run.checkpoints / folder_name(step)
        numbers = self._new_saves()
        result = CommandResult(step=step, path=str(saved.relative_to(self._run.path)))
        return partial(self._report_saves, numbers, result)

    def refuse_save(self, error: str) -> None:
        """Report that this run cannot obey the new commands `save`."""
        self._report_saves(self._new_saves(), CommandResult(error=error))

    def _new_saves(self) -> range:
        """Return the numbers of the commands since the last save, and count them as obeyed."""
        numbers = range(self._last_save + 1, self._stop.newest_save + 1)
        self._last_save = self._stop.newest_save
        return numbers

    def _report_saves(self, numbers: range, result: CommandResult) -> None:
        for number in numbers if self._rank == 0 else ():
            try:
                command = read_command(self._attempt, number)
            except OSError as error:
                log.warning("%s: %s", self._attempt.command(number), error.strerror)
                continue
            if command is not None and command.action == "save":
                self._report(number, result)

    # --- profile

    @property
    def profile_is_due(self) -> bool:
        """Whether `step_done` has something to do."""
        return self._profiler is not None or self._stop.newest_profile > self._last_profile

    def step_done(self, step: int) -> None:
        """Begin, continue or end a profile after a step."""
        if self._stop.newest_profile > self._last_profile:
            self._read_profiles()
        if self._profiler is not None:
            try:
                if self._profiler.step_done():
                    self._end()
            except (OSError, RuntimeError) as error:
                self._give_up(error)
        if self._profiler is None and self._waiting:
            self._begin(step)

    def close(self) -> None:
        """End a profile in progress with fewer steps; the next attempt does not continue it."""
        if self._profiler is not None:
            try:
                self._profiler.stop()
                self._end()
            except (OSError, RuntimeError) as error:
                self._give_up(error)
        for number, _ in self._waiting:
            self._report(number, CommandResult(error=ENDED_BEFORE))
        self._waiting.clear()

    def _read_profiles(self) -> None:
        """Read all commands up to the newest profile: a node may see several at once."""
        now = time.monotonic()
        if now < self._next_read:
            return
        self._next_read = now + READ_INTERVAL_S
        for number in range(self._last_profile + 1, self._stop.newest_profile + 1):
            try:
                command = read_command(self._attempt, number, within_s=0)
            except OSError as error:
                log.warning("%s: %s; trying again", self._attempt.command(number), error.strerror)
                return
            if command is None:
                return  # the file system does not show it on this node yet
            self._last_profile = number
            if command.action == "profile" and self._rank in command.ranks:
                self._waiting.append((number, command))

    def _begin(self, step: int) -> None:
        from hpcdist.rank.telemetry.step_profiler import StepProfiler

        _, command = self._waiting[0]
        self._first_step = step + 2  # `step` is done, and the next one is not recorded
        name = f"rank-{self._rank:05d}.pt.trace.json.gz"
        self._path = self._run.artifacts / PROFILES / f"step-{self._first_step:08d}" / name
        try:
            self._profiler = StepProfiler(self._path, command.num_steps, self._device)
        except (OSError, RuntimeError) as error:  # such as a profiler that the script has started
            self._give_up(error)
            return
        log.info("profiling %d steps from step %d on", command.num_steps, self._first_step)

    def _end(self) -> None:
        assert self._profiler is not None
        number, _ = self._waiting.popleft()
        profiler, self._profiler = self._profiler, None
        if not profiler.num_steps:
            self._report(number, CommandResult(error=ENDED_BEFORE))
            return
        path = str(self._path.relative_to(self._run.path))
        self._report(number, CommandResult(step=self._first_step, num_steps=profiler.num_steps, path=path))
        log.info("profiled %d steps, written in %.1f s: %s", profiler.num_steps, profiler.export_s, path)

    def _give_up(self, error: OSError | RuntimeError) -> None:
        self._profiler = None
        number, _ = self._waiting.popleft()
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        log.warning("the profile cannot be made: %s", text)
        self._report(number, CommandResult(error=" ".join(text.split())[:300]))

    def _report(self, number: int, result: CommandResult) -> None:
        try:
            write_result(self._attempt, number, self._rank, result)
        except OSError as error:
            log.warning("%s: %s", self._attempt.command_result(number, self._rank), error.strerror)
