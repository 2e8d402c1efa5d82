"""`hpcdist.log`, `should_stop` and the others of `hpcdist` for a script that has no `Context`.

    step = load_newest(hpcdist.checkpoint_dir())
    while not hpcdist.should_stop(step) and step < 1000:
        loss = train_step()
        step += 1
        hpcdist.log({"train/loss": loss}, step)
        if hpcdist.should_save(step):
            save(hpcdist.checkpoint_dir(), step)
    save(hpcdist.checkpoint_dir(), step)

They work in `trainer.script` runs and in trainers, on all ranks. Outside of a run they do nothing, so that the script
also runs without hpcdist's launcher. This module imports torch only when the ranks must agree on a stop.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdist.config.launch_schema import NVIDIA
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.errors import TrainerError
from hpcdist.host.gpu_info import visible_devices
from hpcdist.rank import compile_cache
from hpcdist.rank.processes import COLLECTIVE_MARGIN_S, StopFlag
from hpcdist.rank.telemetry import Heartbeat, TimeAccount
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.rank_requests import RequestReader
from hpcdist.run.reached_steps import reached_before
from hpcdist.run.training_record import TrainingNotes
from hpcdist.tracking import rank_records
from hpcdist.tracking.rank_records import RankRecords

if TYPE_CHECKING:
    from hpcdist.rank.context import Context
    from hpcdist.rank.live_commands import LiveCommands
    from hpcdist.rank.stopping import StopAgreement

#: Folder of checkpoints outside of a run, in the current folder.
LOCAL_CHECKPOINTS = "checkpoints"
#: Result of a command `save` to a script that does not ask for one.
NO_SAVE = "not saved, since the script does not call hpcdist.should_save(step) after hpcdist.should_stop(step)"


def log(metrics: Mapping[str, float], step: int) -> None:
    """Record metrics of a step. Only rank 0 records; other ranks only note the step, for messages about them.

    The call takes microseconds and never waits for MLflow. Of several values at one step, also of a step that a restart
    repeats, the first one of a trainer counts, and the last one of a script. Outside of a run nothing is recorded.

    Raises UserMistake if a value is not a number.
    """
    records = rank_records.current()
    if records is not None and records.is_main:
        records.log(metrics, step)
    elif records is not None:
        records.on_metrics({}, step)


def should_stop(step: int, total_steps: int | None = None) -> bool:
    """Report progress, and return whether to save a checkpoint and end the script with exit status 0.

    Call it on every rank once for each step, from the main thread. All ranks receive the same answer at the same step:
    True after `hpcdist stop`, a preemption or a time limit. Outside of a run the answer is False.

    Several ranks need an initialised process group of torch.distributed, in which they agree. From the first call on,
    SIGTERM and SIGUSR2 no longer end the script; handlers that the script has installed before are still called.

    Args:
        step: number of steps done.
        total_steps: number of steps of the whole training, for the progress display; None if unknown.

    Raises TrainerError if there are several ranks and no process group, and RuntimeError if another rank has died.
    """
    return _rank is not None and _rank.should_stop(step, total_steps)


def should_save(step: int) -> bool:
    """Return whether to save a checkpoint after this step.

    Call it after `should_stop`. The answer is True before a stop, every `checkpoint.every_steps` steps, and after
    `hpcdist save`, which reports the save when the script calls `should_stop` or `should_save` with the next step. It
    is the same on all ranks that ask. Outside of a run it is False.

    Args:
        step: number of steps done.
    """
    return _rank is not None and _rank.should_save(step)


def agree_among(ranks: Sequence[int]) -> None:
    """Let only `ranks` call `should_stop`, because the others, such as parameter servers, do not count steps.

    Call it on every rank, before the first step. SIGTERM no longer ends the other ranks: they end as the script says,
    for example in `rpc.shutdown()`. Outside of a run it has no effect.

    Args:
        ranks: they include rank 0, because its metrics and steps are recorded: put their role first in `roles`.

    Raises TrainerError if rank 0 is not among them.
    """
    if isinstance(_rank, RunningScript):
        _rank.agree_among(ranks)
    elif _rank is not None:
        _rank.roles.agree_among(ranks)


def checkpoint_dir() -> Path:
    """Return a folder for the script's checkpoints, which outlives attempts. It exists.

    The script decides which files it writes there and on which rank. Outside of a run it is `checkpoints` in the
    current folder.
    """
    records = rank_records.current()
    path = Path(LOCAL_CHECKPOINTS).absolute() if records is None else records.run.checkpoints
    path.mkdir(parents=True, exist_ok=True)
    return path


@dataclass(eq=False)
class RunningScript:
    """The script of this rank: its heartbeat, and the agreement of the ranks on a stop."""

    config: Config
    run: RunDir
    attempt: Attempt
    topology: Topology

    def __post_init__(self) -> None:
        self._asks_to_save = False  #: whether the script calls `should_save`
        #: Step of the checkpoint that the script is saving because of a command, and the function that reports it.
        self._saving: tuple[int, Callable[[], None]] | None = None
        self._ranks: Sequence[int] = range(self.topology.world_size)
        self._heartbeat: Heartbeat | None = None
        #: Time before the first reported step, of repeated steps, and of new ones.
        self._account = TimeAccount()
        #: The first step with metrics, until the script logs another one; None if it calls `should_stop` before.
        self._first_logged: int | None = None
        #: Metrics at step 0, until the script logs a later step.
        self._logged_at_zero: set[str] = set()
        #: The step with which the script begins to call `should_stop`, until it logs; None if it logs before.
        self._first_asked: int | None = None
        self._notes = TrainingNotes(self.attempt, is_main=self.topology.rank == 0)
        if self.topology.rank == 0 and self.config.launch.gpu_type == NVIDIA:
            self._notes.set_devices(visible_devices(os.environ))
        self._stop: StopAgreement | None = None
        self._commands: LiveCommands | None = None
        self._group: Any = None
        self._flag = StopFlag()

    def last_step(self) -> int | None:
        """Return the newest step that the script has reported; None if it has reported none."""
        if self._heartbeat is None:
            return None
        return int(self._heartbeat.step)

    @property
    def total_steps(self) -> int | None:
        """The number of steps of the whole training; None if the script has not reported it."""
        if self._heartbeat is None:
            return None
        return self._heartbeat.total_steps

    @property
    def stop_agreed(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._stop is not None and self._stop.agreed

    def note(self, metrics: Mapping[str, float], step: int | None) -> None:
        """Write metrics to the heartbeat, and the step to which they belong, which then counts as done."""
        heartbeat = self._beating()
        heartbeat.note_logged(metrics, step)
        if step:  # MLflow's client logs step 0 where a script passes none
            self._count_logged(metrics, step)
        elif step == 0 and not heartbeat.step:  # a step after others is a value without one
            self._logged_at_zero.update(metrics)
        heartbeat.beat()

    def _count_logged(self, metrics: Mapping[str, float], step: int) -> None:
        """Count a step, above 0, for which the script has logged metrics; note with which step the attempt has begun.

        A script may log every hundredth step, and count from 0 or 1. Otherwise the first attempt counts from 1.
        """
        counts_from_zero = not self._logged_at_zero.isdisjoint(metrics)
        self._logged_at_zero.clear()
        if not self._account.phases:
            self._first_logged = step
        self._count(step, first_step=0 if self.attempt.number == 1 else None)
        if counts_from_zero:
            self._notes.set_first_step(0, counts_from_zero=True)
            self._first_logged = None
        elif step == self._first_asked:  # it asked before this step was done
            self._notes.set_first_step(step, counts_from_zero=True)
        elif self._first_logged is not None and step == self._first_logged + 1:
            self._notes.set_first_step(self._first_logged - 1, counts_from_zero=False)
        if step != self._first_logged:
            self._first_logged = None
        self._first_asked = None

    def _count(self, step: int, first_step: int | None) -> None:
        """Book the time until a reported step; before the first one, note at which step the attempt has begun."""
        if not self._account.phases:
            self._account.reached = reached_before(self.attempt)
            self._notes.begin(first_step)
            compile_cache.save_soon()
        self._account.step_done(step, time.perf_counter())

    def agree_among(self, ranks: Sequence[int]) -> None:
        """See `hpcdist.agree_among`, the function of this module."""
        if 0 not in ranks:
            raise TrainerError(
                "hpcdist.agree_among: rank 0 must count steps: put the role that does so first in `roles`"
            )
        self._ranks = ranks
        if self.topology.rank not in ranks:
            self._flag.install()

    def should_stop(self, step: int, total_steps: int | None = None) -> bool:
        """See `hpcdist.should_stop`, the function of this module."""
        if self.topology.rank not in self._ranks:
            raise TrainerError(f"hpcdist.should_stop: rank {self.topology.rank} is not in the ranks of agree_among")
        heartbeat = self._beating()
        heartbeat.step = step
        heartbeat.total_steps = total_steps
        if not self._account.phases:
            self._first_asked = step
        # A script that asks after each step first asks with 1.
        self._count(step, first_step=0 if step == 1 else step)
        heartbeat.beat()
        self._report_saved(step)
        if self.stop_agreed:
            return True
        save_was_due = self._commands is not None and self._commands.save_is_due
        stop = self._agree_in_group().at_boundary()
        if self._commands is not None and self._commands.profile_is_due:
            self._commands.step_done(step)
        if self._commands is not None and save_was_due and not self._asks_to_save:
            # The command was due at the step before, and the script could have asked at the end of that step.
            report_refusal = self._commands.begin_save(step, refused=NO_SAVE)
            report_refusal()
        return stop

    def should_save(self, step: int) -> bool:
        """See `hpcdist.should_save`, the function of this module."""
        self._asks_to_save = True
        self._report_saved(step)
        if self._commands is not None and self._commands.save_is_due:
            self._saving = step, self._commands.begin_save(step, self.run.checkpoints)
        every = self.config.checkpoint.every_steps
        is_regular = every is not None and step > 0 and step % every == 0
        is_due = self.stop_agreed or is_regular or (self._saving is not None and self._saving[0] == step)
        if is_due:
            compile_cache.save_soon()
        return is_due

    def _report_saved(self, step: int | None = None) -> None:
        """Report that a commanded checkpoint is on disk, since the script has returned from saving that step."""
        if self._saving is None:
            return
        saved_step, report_saved = self._saving
        if saved_step != step:
            report_saved()
            self._saving = None

    def _beating(self) -> Heartbeat:
        """Return the heartbeat, which begins at the first step: without steps only the output shows a hung script."""
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self.attempt,
                self.topology.rank,
                self.topology.world_size,
                self.config.launch.hang_s,
                self.config.stop.nan_losses,
            )
            self._heartbeat.account = self._account
            self._heartbeat.last_value_counts = True
        return self._heartbeat

    def _agree_in_group(self) -> "StopAgreement":
        """Return the agreement, in a gloo group of the ranks that count steps: it does not wait for a GPU."""
        import torch.distributed as dist

        from hpcdist.rank.device import initialized_device
        from hpcdist.rank.live_commands import LiveCommands
        from hpcdist.rank.network_interface import interface_env
        from hpcdist.rank.process_group import call_of_all_ranks
        from hpcdist.rank.stopping import StopAgreement

        is_alone = len(self._ranks) == 1
        if not is_alone and not dist.is_initialized():
            raise TrainerError(
                f"hpcdist.should_stop: {len(self._ranks)} ranks need a process group to agree on a stop: call"
                " torch.distributed.init_process_group before the first step"
            )
        if self._stop is None:
            self._flag.install()
            requests = None
            if self.topology.rank == 0:
                requests = RequestReader(self.attempt)
            self._stop = StopAgreement(None, self._flag, requests)
            device = initialized_device()
            self._commands = LiveCommands(self.run, self.attempt, self.topology.rank, self._stop, device)
        if not is_alone and dist.group.WORLD is not self._group:
            # At the first step, or after the script has initialised its process group again.
            if self.topology.launcher == "slurm":
                os.environ.update(interface_env(self.topology.master_addr, os.environ))
            # The script's process group may consist of these ranks alone.
            ranks = None
            if len(self._ranks) < dist.get_world_size():
                ranks = list(self._ranks)
            timeout = timedelta(seconds=self.config.launch.hang_s + COLLECTIVE_MARGIN_S)
            with call_of_all_ranks("hpcdist.should_stop"):
                group: Any = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=ranks is not None)
            self._stop.agree_in(group)
            self._group = dist.group.WORLD
        return self._stop

    def close(self, *, failed: bool = False) -> None:
        """Report the last save unless the script has failed, end a profile in progress, write the last heartbeat."""
        if not failed:
            self._report_saved()
        if self._commands is not None:
            self._commands.close()
        self._account.is_closed = not failed
        if self._heartbeat is not None:
            self._heartbeat.close()


_rank: "Context | RunningScript | None" = None


def enter(rank: "Context | RunningScript") -> None:
    """Let the functions of this module ask `rank`; the worker calls it."""
    global _rank
    _rank = rank


@contextmanager
def entered_script(
    config: Config, attempt: Attempt, topology: Topology, records: RankRecords
) -> Iterator[RunningScript]:
    """Make this process the script of a rank while the block runs; the worker calls it."""
    script = RunningScript(config, records.run, attempt, topology)
    enter(script)
    records.on_metrics = script.note
    failed = True
    try:
        yield script
        failed = False
    finally:
        script.close(failed=failed)
