"""What a trainer gets: where it stands, how to log, save, restore and stop. Documented for users in the README."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it at run time
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.checkpoint_folder import load_file, shard_name
from hpcdist.checkpoint.rng_state import rng_state, set_rng_state
from hpcdist.checkpoint.saver import AsyncSaver, BackgroundWriter
from hpcdist.checkpoint.shards import Shard, ShardExchange
from hpcdist.checkpoint.state_dict import clean_state_dict
from hpcdist.checkpoint.store import CheckpointStore
from hpcdist.config.schema import Config
from hpcdist.errors import CheckpointError
from hpcdist.files import retry
from hpcdist.rank.network.process_group import Groups
from hpcdist.rank.roles import Roles
from hpcdist.rank.stop_agreement import StopAgreement
from hpcdist.rank.telemetry.heartbeat import Heartbeat
from hpcdist.rank.telemetry.step_timing import NodeTimes, StepTimer, clock_of
from hpcdist.rank.telemetry.timed_ddp import TimedDDP
from hpcdist.rank.topology import Topology
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.tracking.journal import JournalWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `Context.restore` found; tensors are on the host."""

    step: int
    model: dict[str, torch.Tensor]
    trainer: dict[str, Any]
    local: dict[str, Any] | None  #: None when the run has another number of ranks than the one that saved
    folder: Path  #: of the checkpoint; `shard` reads what ranks own of it
    world_size: int  #: of the run that saved it

    def shard(self, rank: int) -> dict[str, Any] | None:
        """What a rank of the run that saved had given as its `Shard`: `model`, `rows`, `trainer`."""
        path = self.folder / shard_name(rank)
        return load_file(path) if retry.exists(path) else None


class Context:
    """One rank's view of the run. The worker makes it; `train(ctx, cfg)` receives it.

    Attributes:
        topology: rank, world size, local rank, hosts.
        roles: who plays which role (`ctx.roles.count("observer")`, `ctx.roles.name_of(rank)`, `ctx.roles.require(…)`).
        device: this rank's device.
        run: the run folder.
        config: the whole config (also the second argument of `train`).
        timer: where this rank's steps go. `wrap` and `should_stop` tell it all that it needs; `timer.waiting()` is for
            waits of a trainer's own.
    """

    def __init__(
        self,
        *,
        config: Config,
        run: RunDir,
        attempt: Attempt,
        topology: Topology,
        device: torch.device,
        groups: Groups,
        stop: StopAgreement,
        journal: JournalWriter,
        heartbeat: Heartbeat,
    ) -> None:
        self.config = config
        self.run = run
        self.attempt = attempt
        self.topology = topology
        self.roles = Roles.of(config.roles, topology.world_size)
        self.device = device
        self._groups = groups
        self._stop = stop
        self._journal = journal
        self._heartbeat = heartbeat
        self.timer = StepTimer(clock_of(device))
        self._times = NodeTimes(self.timer, topology, config.tracking.log_every_steps)
        heartbeat.timing = self.timer.report
        self._store = CheckpointStore(
            run.checkpoints,
            keep_last=config.checkpoint.keep_last,
            best_metric=config.checkpoint.monitor,
            monitor_mode=config.checkpoint.monitor_mode,
        )
        self._saver = AsyncSaver(self._store, before_publish=self._before_publish)
        self._shard_writer = BackgroundWriter(str(run.checkpoints))
        self._shards = ShardExchange(groups.store, rank=topology.rank, attempt=attempt.number)
        self._saved_step = -1
        #: One sentence for people: why the trainer ended. Set it at the end of `train`.
        self.end_reason = ""

    @property
    def rank(self) -> int:
        return self.topology.rank

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def role(self) -> str:
        """What this rank does: a key of the config's `roles`, or `trainer` where it has none."""
        return self.roles.of_rank(self.rank)[0]

    @property
    def role_index(self) -> int:
        """0 to the role's count - 1."""
        return self.roles.of_rank(self.rank)[1]

    @property
    def rpc_name(self) -> str:
        """`role:index`, this rank's name in RPC."""
        return self.roles.name_of(self.rank)

    def ranks_of(self, role: str) -> range:
        """The ranks that play a role, in the order of their index. Raises ConfigError where nobody plays it."""
        return self.roles.ranks_of(role)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs and writes."""
        return self.topology.rank == 0

    @property
    def store(self) -> Store:
        """The ranks' common key-value store; choose a prefix of your own."""
        return self._groups.store

    @property
    def stop_agreed(self) -> bool:
        """Whether the ranks have agreed to stop before the end."""
        return self._stop.agreed

    # --- progress and stopping

    def should_stop(self, step: int, total_steps: int | None = None) -> bool:
        """Whether to save and return now. Call it on every rank after every step, `step` being how many are done.

        All ranks get the same answer at the same step. It also is the sign of life that keeps the run from being
        taken for hung, and what the progress display shows.

        Raises CheckpointError when a save has failed since the last call: steps that cannot be kept are not made.
        """
        self._saver.check()
        self._shard_writer.check()
        self._heartbeat.step = step
        self._heartbeat.total_steps = total_steps
        self._heartbeat.beat()
        stop = self._stop.at_boundary()
        self.timer.step_done()
        if times := self._times.due(step):
            self._journal.log(times, step)
        return stop

    def agree_among(self, ranks: Sequence[int]) -> None:
        """Leave `should_stop` to these ranks, since the others have no steps of their own. Call it on every rank."""
        self._times.leave_to(ranks)
        group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
        if self.rank in ranks:
            assert group is None or isinstance(group, dist.ProcessGroup)
            self._stop.agree_in(group)

    @property
    def stop_signalled(self) -> bool:
        """Whether a stop signal has reached this rank. What follows from it is for the agreement to say."""
        return self._stop.signalled

    def ask_stop(self) -> None:
        """Want a stop, as a signal to this rank does."""
        self._stop.ask()

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint is due after `step` steps: `checkpoint.every_steps`, or an agreed stop."""
        every = self.config.checkpoint.every_steps
        return self._saved_step != step and (self._stop.agreed or (every is not None and step % every == 0))

    def alive(self) -> None:
        """A sign of life from work without steps, such as a long evaluation."""
        self._heartbeat.beat()
        self.timer.skip()

    # --- metrics

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics of a step; on rank 0 only, elsewhere it does nothing. Costs a few microseconds.

        Values must be numbers of the host: `float(tensor)` waits for the device, so do it seldom.
        """
        if self.is_main:
            self._journal.log(metrics, step)
            self._heartbeat.note_metrics(metrics)
            self._heartbeat.step = max(self._heartbeat.step, step)

    def artifact(self, name: str) -> Path:
        """Where to write a file (`returns.png`, `samples/step-100.txt`) that is to be an artifact of the MLflow run.

        Write it on one rank, whole: it is uploaded as soon as it is there, and again when it has changed.
        """
        path = self.run.artifacts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over all ranks, in double precision, on every rank."""
        if self._groups.control is None:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.timer.waiting():
            dist.all_reduce(tensor, group=self._groups.control)
        return [float(value) for value in tensor.tolist()]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self._groups.control is not None:
            with self.timer.waiting():
                dist.barrier(group=self._groups.control)

    # --- model and random numbers

    def wrap(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """The module on this rank's device, its gradients averaged over all ranks (`.module` is yours).

        `options` go to DistributedDataParallel, such as `static_graph=True` for a model without branches.
        """
        return TimedDDP(
            module.to(self.device),
            self.timer,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **options,
        )

    def seed_per_rank(self) -> None:
        """From here on each rank draws other random numbers (dropout). Before, all ranks draw the same."""
        seed_everything(self.config.seed + 1 + self.rank)

    # --- checkpoints

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None,
        trainer: Mapping[str, Any],
        local: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Save a checkpoint after `step` steps; call it on every rank.

        The training thread copies to the host and goes on; a thread writes. Random number states of all ranks are
        saved by themselves.

        Args:
            model: wrapped or not; it is saved under its own names. Rank 0's counts; None where it has none.
            trainer: what else the next start needs, equal on all ranks: optimizer, position.
            local: what this rank alone needs; small, since it travels to rank 0.
            metrics: what is known of this checkpoint; `checkpoint.monitor` is looked up here.
            shard: what this rank owns of a model that lies on several; then every rank gives one, empty or not.

        Raises CheckpointError when this save cannot begin or an earlier one has failed.
        """
        mine = {"rng": rng_state(self.device), "local": local and _to_cpu(local)}
        is_owner = shard is not None and not shard.is_empty
        states = self._gather_at_main((mine, is_owner))
        is_new, self._saved_step = step != self._saved_step, step
        staging = self._store.staging(step, self.attempt.number)
        if is_owner and is_new:
            assert shard is not None
            self._shard_writer.submit(shard.content(), lambda host: self._shards.write(host, step, staging))
        if self.is_main:
            owners = [rank for rank, (_, owns) in enumerate(states) if owns]
            self._saver.save(
                step,
                model={} if model is None else clean_state_dict(model),
                trainer=dict(trainer),
                rank_states=[state for state, _ in states],
                metrics=dict(metrics or {}),
                collect_shards=(lambda into: self._shards.collect(step, owners, staging, into)) if owners else None,
            )
        if shard is not None:
            self.barrier()  # nobody goes on, and changes what others own, before it is copied
        self.timer.skip()

    def _before_publish(self) -> None:
        """Make durable what must not be older than a checkpoint, and leave the run to a newer attempt.

        A supervisor that was stalled may have been replaced while its ranks went on (`run/lease.py`).
        """
        self._journal.flush(durable=True)
        if retry.exists(self.run.attempt(self.attempt.number + 1).path):
            raise CheckpointError(
                f"attempt {self.attempt.number + 1} of run {self.run.name} has begun: attempt {self.attempt.number}"
                " saves nothing more"
            )

    def _gather_at_main(self, mine: Any) -> list[Any]:
        """What every rank has given, by rank; empty but on rank 0."""
        if self._groups.control is None:
            return [mine]
        found: list[Any] = [None] * self.world_size
        dist.gather_object(mine, found if self.is_main else None, dst=0, group=self._groups.control)
        return found if self.is_main else []

    def restore(self) -> Restored | None:
        """The newest valid checkpoint, or None at a first start. Call it on every rank, last before the loop.

        Sets the random number generators as they were; loading model and optimizer is yours to do.
        """
        choice: list[str | None] = [None]
        if self.is_main:
            self._store.remove_leftovers()
            found = self._store.latest()
            choice = [str(found.path) if found is not None else None]
        if self._groups.control is not None:
            dist.broadcast_object_list(choice, src=0, group=self._groups.control)
        if choice[0] is None:
            return None
        # Rank 0 has just verified it; every rank reading all of it twice would be a load on the file system.
        checkpoint = self._store.load(choice[0], verify=False)
        self._saved_step = checkpoint.step
        self._heartbeat.step = checkpoint.step
        local = None
        if checkpoint.world_size == self.world_size:
            mine = checkpoint.rank_states[self.rank]
            local = mine["local"]
            set_rng_state(mine["rng"], self.device)
        else:
            log.warning(
                "checkpoint of %d ranks resumed on %d: the order of samples is another one from here on",
                checkpoint.world_size,
                self.world_size,
            )
            seed_everything(self.config.seed + 1 + self.rank + checkpoint.step)
        log.info("resumed at step %d from %s", checkpoint.step, choice[0])
        return Restored(
            step=checkpoint.step,
            model=checkpoint.model,
            trainer=checkpoint.trainer,
            local=local,
            folder=Path(choice[0]),
            world_size=checkpoint.world_size,
        )

    def export_model(self, module: nn.Module, example: torch.Tensor) -> None:
        """Leave the final model in MLflow's format, for `mlflow.pytorch.load_model`. Rank 0 writes.

        Args:
            module: the bare model (`wrapped.module`).
            example: one input batch, from which the model's signature is taken.
        """
        if self.is_main:
            from hpcdist.checkpoint.export import export_model

            export_model(module, example, self.run)

    def close(self) -> None:
        """Wait until everything is on disk. Raises CheckpointError when it cannot be."""
        self._stop.close()
        self._shard_writer.close()
        self._saver.close()
        self._journal.flush(durable=True)
        self._heartbeat.close()
        if self._stop.agreed and self._saved_step < self._heartbeat.step and not self.config.trainer.script:
            raise CheckpointError(
                f"the trainer stopped at step {self._heartbeat.step} without saving it:"
                " call ctx.save(…) when ctx.should_stop(…) says so"
            )


def _to_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def seed_everything(seed: int) -> None:
    """Seed torch (CPU and GPUs), Python's random and NumPy where it is loaded already."""
    import random
    import sys

    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
