"""`hpcdist.log`, `hpcdist.should_stop` and `hpcdist.checkpoint_dir`: hpcdist in a script that has no `Context`.

    step = load_newest(hpcdist.checkpoint_dir())
    while step < 1000:
        loss = train_step()
        step += 1
        hpcdist.log({"train/loss": loss}, step)
        if hpcdist.should_stop(step):
            save(hpcdist.checkpoint_dir(), step)
            break

They work in `trainer.script` runs and in trainers, on all ranks. Outside of a run they do nothing, so that the script
also runs without hpcdist's launcher. This module imports torch only when the ranks must agree on a stop.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpcdist.errors import TrainerError
from hpcdist.rank.live_commands import CommandFiles, LiveCommands
from hpcdist.rank.stop_signals import STOP_SIGNALS, StopFlag
from hpcdist.rank.telemetry.heartbeat import Heartbeat
from hpcdist.rank.topology import Topology
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir
from hpcdist.tracking import rank_records
from hpcdist.tracking.rank_records import RankRecords

if TYPE_CHECKING:
    import torch

    from hpcdist.rank.context import Context
    from hpcdist.rank.stop_agreement import StopAgreement

logger = logging.getLogger(__name__)

#: Folder of checkpoints outside of a run, in the current folder.
LOCAL_CHECKPOINTS = "checkpoints"


def log(metrics: Mapping[str, float], step: int) -> None:
    """Record metrics of a step. Only rank 0 records; on other ranks the call has no effect.

    The call takes microseconds and never waits for MLflow. Steps that a restart repeats keep their first value. Outside
    of a run nothing is recorded.

    Raises UserMistake if a value is not a number.
    """
    records = rank_records.current()
    if records is not None and records.is_main:
        records.log(metrics, step)


def should_stop(step: int, total_steps: int | None = None) -> bool:
    """Report progress, and return whether to save a checkpoint and end the script with exit status 0.

    Call it on every rank after every step, from the main thread. All ranks receive the same answer at the same step:
    True after `hpcdist stop`, a preemption or a time limit. Outside of a run the answer is False.

    Several ranks need an initialised process group of torch.distributed, in which they agree. From the first call on,
    SIGTERM and SIGUSR2 no longer end the script; handlers that the script has installed before are still called.

    Args:
        step: number of steps done.
        total_steps: number of steps of the whole training, for the progress display; None if unknown.

    Raises TrainerError if there are several ranks and no process group, and RuntimeError if another rank has died.
    """
    if _trainer is not None:
        return _trainer.should_stop(step, total_steps)
    return _script.should_stop(step, total_steps) if _script is not None else False


def checkpoint_dir() -> Path:
    """Return a folder for the script's checkpoints, which outlives attempts. It exists.

    The script decides which files it writes there and on which rank. Outside of a run it is `checkpoints` in the
    current folder.
    """
    records = rank_records.current()
    path = records.run.checkpoints if records is not None else Path(LOCAL_CHECKPOINTS).absolute()
    path.mkdir(parents=True, exist_ok=True)
    return path


class RunningScript:
    """The script of this rank: its heartbeat, and the agreement of the ranks on a stop."""

    def __init__(
        self,
        run: RunDir,
        attempt: Attempt,
        topology: Topology,
        hang_timeout_s: float,
        pause_at_step: int | None = None,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._pause_at_step = pause_at_step
        self._topology = topology
        self._hang_timeout_s = hang_timeout_s
        self._heartbeat: Heartbeat | None = None
        self._stop: StopAgreement | None = None
        self._commands: LiveCommands | None = None
        self._group: Any = None
        self._flag = StopFlag()

    def last_step(self) -> int | None:
        """Return the newest step that the script has reported; None if it has reported none."""
        return self._heartbeat.step if self._heartbeat is not None else None

    @property
    def stop_agreed(self) -> bool:
        """Whether the ranks have agreed to stop."""
        return self._stop is not None and self._stop.agreed

    def note(self, metrics: Mapping[str, float], step: int) -> None:
        """Write metrics of a step to the heartbeat."""
        heartbeat = self._beating()
        heartbeat.note_logged(metrics, step)
        heartbeat.beat()

    def should_stop(self, step: int, total_steps: int | None) -> bool:
        """See the function `should_stop`."""
        heartbeat = self._beating()
        heartbeat.step, heartbeat.total_steps = step, total_steps
        heartbeat.beat()
        if self.stop_agreed:
            return True
        from hpcdist.rank.stop_agreement import stops_after  # which imports torch

        stop = stops_after(step, self._agreement(), self._pause_at_step, self._attempt)
        if self._commands is not None and self._commands.profile_is_due:
            self._commands.step_done(step)
        return stop

    def _beating(self) -> Heartbeat:
        # Begun at the first step: a script that reports none is watched by its output alone.
        if self._heartbeat is None:
            rank, num_ranks = self._topology.rank, self._topology.world_size
            self._heartbeat = Heartbeat(self._attempt, rank, num_ranks, self._hang_timeout_s)
        return self._heartbeat

    def _agreement(self) -> StopAgreement:
        from hpcdist.rank.stop_agreement import StopAgreement

        group = self._default_group()
        if self._stop is None:
            _install(self._flag)
            self._stop = StopAgreement(
                None,
                self._flag,
                self._attempt.request,
                watch_request=self._topology.rank == 0,
                commands=CommandFiles(self._attempt) if self._topology.rank == 0 else None,
            )
            self._commands = LiveCommands(self._run, self._attempt, self._topology.rank, self._stop, _device())
            self._stop.agree_in(self._control_group())
        elif group is not self._group:
            self._stop.agree_in(self._control_group())  # the script has initialised its process group again
        self._group = group
        return self._stop

    def _default_group(self) -> Any:
        """Return the script's process group, or None if there is one rank. Raises TrainerError if there is none."""
        if self._topology.world_size == 1:
            return None
        import torch.distributed as dist

        if not dist.is_initialized():
            raise TrainerError(
                f"hpcdist.should_stop: {self._topology.world_size} ranks need a process group to agree on a stop: call"
                " torch.distributed.init_process_group before the first step"
            )
        return dist.group.WORLD

    def _control_group(self) -> Any:
        """Return a gloo group of all ranks, so that the agreement does not wait for a GPU."""
        if self._topology.world_size == 1:
            return None
        import torch.distributed as dist

        if self._topology.launcher == "slurm":
            from hpcdist.rank.network.network_interface import interface_env

            os.environ.update(interface_env(self._topology.master_addr, os.environ))
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=self._hang_timeout_s + 60))

    def close(self) -> None:
        """End a profile in progress, and write the last heartbeat."""
        if self._commands is not None:
            self._commands.close()
        if self._heartbeat is not None:
            self._heartbeat.close()


def _device() -> torch.device:
    """Return the kind of device that the script uses."""
    import torch

    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def _install(flag: StopFlag) -> None:
    """Let the stop signals set a flag, and call the handlers that the script has installed."""
    if threading.current_thread() is not threading.main_thread():
        logger.warning("hpcdist.should_stop is not called from the main thread: stop signals end this script")
        return
    for number in STOP_SIGNALS:
        before = signal.getsignal(number)

        def handle(signum: int, frame: FrameType | None, before: Any = before) -> None:
            flag.is_set = True
            if callable(before):
                before(signum, frame)

        signal.signal(number, handle)


_script: RunningScript | None = None
_trainer: Context | None = None


@contextmanager
def entered(
    attempt: Attempt,
    topology: Topology,
    hang_timeout_s: float,
    records: RankRecords,
    *,
    pause_at_step: int | None = None,
) -> Iterator[RunningScript]:
    """Make this process the script of a rank while the block runs; the worker calls it."""
    global _script
    _script = RunningScript(records.run, attempt, topology, hang_timeout_s, pause_at_step)
    records.on_metrics = _script.note
    try:
        yield _script
    finally:
        _script.close()


def enter_trainer(ctx: Context) -> None:
    """Let `should_stop` ask the context of the trainer of this rank; the worker calls it."""
    global _trainer
    _trainer = ctx
