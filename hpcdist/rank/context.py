"""`Context`: the API of trainers for batches, logging, checkpoints, stopping and collectives."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint.in_place import Stateful, StoredState
from hpcdist.checkpoint.initial_weights import initial_weights, load_into
from hpcdist.checkpoint.saver import plain_state
from hpcdist.checkpoint.sharded import divide, map_leaves, nearest_first, read_shard
from hpcdist.checkpoint.state import Shard, clean_state_dict, rng_state, set_rng_state
from hpcdist.checkpoint.store import (
    CheckpointStore,
    read_manifest,
    shard_name,
)
from hpcdist.config.roles import Roles
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.errors import CheckpointError, TrainerError
from hpcdist.host import retry
from hpcdist.rank import compile_cache
from hpcdist.rank.checkpoint_saves import CheckpointSaves
from hpcdist.rank.checkpoint_search import CheckpointSearch
from hpcdist.rank.elastic_loop import Elastic
from hpcdist.rank.live_commands import LiveCommands
from hpcdist.rank.loop_state import LoopState, states_of
from hpcdist.rank.mesh import make_mesh
from hpcdist.rank.micro_batches import (
    SavedDivision,
    sum_over_ranks,
)
from hpcdist.rank.process_group import Groups, TimedGroups, call_of_all_ranks, gloo_group, seed_everything
from hpcdist.rank.processes import COLLECTIVE_MARGIN_S
from hpcdist.rank.rank_roles import RankRoles
from hpcdist.rank.report_data import ReportData
from hpcdist.rank.step_loop import Steps
from hpcdist.rank.step_timing import NodeTimes, StepTimer, TimedDDP, clock_of
from hpcdist.rank.stopping import StopAgreement
from hpcdist.rank.telemetry import Heartbeat
from hpcdist.run.fitted_batch import read_fitted
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.run.reached_steps import reached_before
from hpcdist.run.training_record import TrainingNotes
from hpcdist.tracking.rank_records import RankRecords

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that `Context.restore` returns.

    Attributes:
        step: number of steps done when the checkpoint was saved.
        local: the `local` argument of `Context.save` on the rank that had the same role and index; None if the number
            of ranks of this role has changed since.
        local_by_rank: the `local` arguments of all ranks that saved the checkpoint.
        folder: the checkpoint folder.
        world_size: number of ranks of the run when it saved the checkpoint.
    """

    step: int
    stored: StoredState
    local: dict[str, Any] | None
    local_by_rank: list[dict[str, Any] | None]
    folder: Path
    world_size: int

    @cached_property
    def model(self) -> dict[str, torch.Tensor]:
        """State dict of the bare model, as passed to `Context.save` on rank 0, in host memory.

        Sharded tensors (DTensor) are whole in it, so each rank needs memory for all of them; `Context.restore(model=…)`
        needs it only for the part of the rank.
        """
        return self.stored.whole_model()

    @cached_property
    def trainer(self) -> dict[str, Any]:
        """The `trainer` argument of `Context.save` and its further objects, in host memory; sharded tensors whole."""
        return self.stored.whole_trainer()

    def shard(self, rank: int) -> dict[str, Any] | None:
        """Return the `Shard` that a rank saved: a dict with the keys `model`, `boxes` and `trainer`; None without one.

        Args:
            rank: a rank of the run that saved the checkpoint, 0 to `self.world_size` - 1.
        """
        path = self.folder / shard_name(rank)
        if not retry.exists(path):
            return None
        return read_shard(path)


class Context:
    """One rank's interface to the run. The worker creates it and passes it to the trainer.

    A trainer is a function `train(ctx, config)` that every rank calls:

        def train(ctx: Context, config: Config) -> None:
            model = ctx.wrap(build_model())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in ctx.steps(config.params["total_steps"], model=model, optimizer=optimizer):
                loss = train_step(model, optimizer)
                ctx.log({"train/loss": loss})

    `restore`, `should_stop`, `should_save` and `save` are for loops that `steps` does not fit.

    Attributes:
        run: the run folder.
        topology: rank, world size, local rank, host names, and number of the attempt, 1 at the first start.
        device: the device of this rank.
        groups: all ranks, for a barrier and for small values in host memory; `ctx.groups.timeout` is for process groups
            of your own.
        roles: the roles of the run and that of this rank; see `RankRoles`.
        elastic: micro-batches of a run with `data.global_batch_size`; see `Elastic`.
        report: datasets, figures, artifacts and per-sample results for reviewers; see `ReportData`.
        timer: the time of this rank, for work that is no step; see `StepTimer`.
        end_reason: why the trainer returned, one sentence for the status of the run. Set it at the end of `train`.
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
        records: RankRecords,
        heartbeat: Heartbeat,
        devices: str = "",
    ) -> None:
        self._config = config
        self._attempt = attempt
        self.run = run
        self.topology = topology
        roles = Roles.of(config.roles, topology.world_size)
        self.roles = RankRoles(roles.counts, topology.rank, stop.flag, self._agree_among)
        self.device = device
        self.timer = StepTimer(clock_of(device), beat=lambda: heartbeat.beat(regular=True))
        self.end_reason = ""
        timeout = timedelta(seconds=config.launch.hang_s + COLLECTIVE_MARGIN_S)
        self.groups = TimedGroups(groups.control, groups.store, self.timer.waiting, timeout)
        self.elastic = Elastic(config, topology.rank, topology.world_size, read_fitted(run))
        self._records = records
        records.on_metrics = heartbeat.note_logged
        self._heartbeat = heartbeat
        self._notes = TrainingNotes(attempt, is_main=self.is_main)
        self._notes.set_devices(devices)
        self.report = ReportData(
            run,
            self._notes,
            groups,
            is_main=self.is_main,
            monitor=config.checkpoint.monitor,
            step=lambda: heartbeat.step,
            waiting=self.timer.waiting,
        )
        self._is_first_step = True
        self._stop = stop
        self._commands = LiveCommands(run, attempt, topology.rank, stop, device)
        self._times = NodeTimes(self.timer, topology, config.tracking.log_every_steps)
        self.timer.account.reached = reached_before(attempt)
        if _promises_heartbeats(config):
            heartbeat.beat(regular=True)
        heartbeat.timing = self.timer.report
        heartbeat.account = self.timer.account
        self._store = CheckpointStore(run.checkpoints, config.checkpoint)
        self._saves = CheckpointSaves(self._store, self.groups, topology, before_publish=self._before_publish)
        self._loop_ranks = groups  #: the ranks that count steps
        self._steps: Steps | None = None
        self._has_restored = False
        self._start_folder: str | None = None  #: see `_newest_checkpoint`; None before the search
        self._has_init = False  #: whether the trainer has asked for the weights of `model.init_from`
        self._restored: Restored | None = None  #: the restored checkpoint, until `steps` has loaded it
        self._rank_states: list[dict[str, Any]] = []  #: states of all ranks in the restored checkpoint
        self._saved_step = -1  #: step of the checkpoint that was saved or restored last

    @property
    def rank(self) -> int:
        """Rank of this process, 0 to `world_size` - 1."""
        return self.topology.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the run."""
        return self.topology.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which logs metrics and writes checkpoints."""
        return self.topology.rank == 0

    def steps(
        self,
        total_steps: int,
        *,
        model: nn.Module | None = None,
        local: Stateful | None = None,
        save: Callable[[int, Mapping[str, float]], None] | None = None,
        **states: Stateful,
    ) -> Steps:
        """Return the steps of the training, to iterate over: `for step in ctx.steps(…)`. Call it on every rank.

            for step in ctx.steps(total_steps, model=model, optimizer=optimizer, scheduler=scheduler):
                loss = train_step(model, optimizer, scheduler)
                ctx.log({"train/loss": loss})

        The newest checkpoint is loaded into the model and the other objects, and `step` is the number of steps done,
        from 0 or from the checkpoint on. After each step the call reports progress, stops if the ranks have agreed to,
        and saves: every `checkpoint.every_steps` steps, before a stop, after `hpcdist save`, and after the last step.
        At the first start, each rank gets a seed of its own.

        The state must be complete at the end of the loop's body. Do not leave the loop by `break`; see `Steps.end`.

        Args:
            total_steps: number of steps of the whole training.
            model: the model, wrapped or bare.
            local: an object with `state_dict` and `load_state_dict` that has another state on each rank. It begins
                anew if the number of ranks has changed.
            save: instead of `model`, for a model that several ranks share: a function that saves a step with the
                metrics of its evaluation by `Context.save`. The trainer has then called `restore` before, and loads
                what it needs itself.
            **states: further objects with `state_dict` and `load_state_dict`, equal on all ranks, such as optimizers,
                schedulers and samplers. A checkpoint holds those of rank 0.

        Raises TrainerError if a resume would not continue the loop exactly, at the call, after the first step, or at
        the first save.
        """
        if self._steps is not None:
            raise TrainerError(
                "ctx.steps: a trainer has one loop: for a second part use steps.until(…) with steps = ctx.steps(…)"
            )
        if (save is None) == (model is None):
            raise TrainerError("ctx.steps: pass either the model, model=…, or a function that saves, save=…")
        check = None
        if model is not None:
            state = LoopState(self, self._loop_ranks, model, states, local)
            self._load_loop(state)
            save = state.save
            check = state.check
        elif not self._has_restored:
            raise TrainerError("ctx.steps: with save=… call ctx.restore() before, and load its result")
        assert save is not None
        self._steps = self._begin_steps(total_steps, save, check)
        return self._steps

    def _begin_steps(
        self,
        total_steps: int,
        save: Callable[[int, Mapping[str, float]], None],
        check: Callable[[], None] | None,
    ) -> Steps:
        """Return the steps from that of the restored checkpoint on, and free the checkpoint."""
        step = self._restored.step if self._restored is not None else 0
        if total_steps < step:
            raise TrainerError(
                f"ctx.steps: total_steps={total_steps}, but the checkpoint has {step} steps: pass {step} or more, or"
                " start a new run"
            )
        self._restored = None
        self._rank_states = []
        return Steps(
            self,
            step=step,
            total_steps=total_steps,
            log_every=self._config.tracking.log_every_steps,
            save=save,
            after_first_step=check,
            save_is_due=lambda: self._stop.agreed or self._commands.save_is_due,
        )

    def _load_loop(self, state: LoopState) -> None:
        """Load the checkpoint, which a trainer may have restored before, into the state of a loop."""
        if not self._has_restored:
            self.restore()
        if self._restored is not None:
            state.load(self._restored)
        # Since its own call of `restore` the trainer may have drawn random numbers.
        self._set_generators(self._rank_states)

    def log(self, metrics: Mapping[str, float | Tensor], step: int | None = None) -> None:
        """Record metrics. Only rank 0 records; other ranks only note the step, for messages about them.

        The call writes to the run's journal and takes microseconds; a separate process sends the journal to MLflow.

        In a loop of `steps` leave out `step`: of a metric that every step logs, every `tracking.log_every_steps`-th
        point is recorded, and the last one; of others, each point. A tensor is read from its device only if it is
        recorded, because reading waits for the device.

        Args:
            metrics: numbers, or tensors of one element.
            step: number of steps done, the x-axis in MLflow. With it, all metrics are recorded.
        """
        if step is None:
            if self._steps is None:
                raise TrainerError("ctx.log: pass the step, ctx.log(metrics, step), except in a loop of ctx.steps")
            metrics = self._steps.due(metrics)
            step = self._steps.number
            if not metrics:
                return
        if self.is_main:
            self._records.log({name: _number(name, value) for name, value in metrics.items()}, step)
        else:
            self._heartbeat.note_logged({}, step)

    def init_from(self, module: nn.Module, skip: Sequence[str] = ()) -> None:
        """Load the weights that `model.init_from` names into a module, unless the run continues from a checkpoint.

        Call it on every rank, before `steps` or `restore`; after `restore`, any rank may call it alone. Without
        `model.init_from`, and with a checkpoint, the call has no effect.

        Args:
            module: the model, wrapped or bare. If it is sharded over ranks (DTensor), each rank reads its own part.
            skip: patterns of weights that the trainer itself initialises, besides those of `model.init_from_skip`.

        Raises ConfigError if a name or shape does not fit; `model.init_from_skip` leaves weights out.
        """
        self._has_init = True
        if self._config.model.init_from and not self._newest_checkpoint():
            model = self._config.model
            model = replace(model, init_from_skip=[*model.init_from_skip, *skip])
            load_into(module, initial_weights(self.run, module, model))

    def export_model(self, module: nn.Module, example: torch.Tensor) -> None:
        """Export the final model for `mlflow.pytorch.load_model`. Only rank 0 writes; the others need not wait for it.

        After an agreed stop the call has no effect, since the training goes on later.

        `module` is the bare model (`wrapped.module`); it is moved to the CPU and set to evaluation mode. `example` is
        one input batch of at least two samples, from which MLflow infers the model's signature.
        """
        if self.is_main and not self._stop.agreed:
            self._heartbeat.doing = "exporting the final model"
            self._heartbeat.beat()
            with self.timer.account.phase("finish"):
                from hpcdist.checkpoint.export import export_model

                export_model(module, example, self.run)

    def should_stop(self, step: int, total_steps: int | None = None) -> bool:
        """Report progress, and return whether the trainer must save a checkpoint and return.

        Call it on every rank after every step. All ranks receive the same answer at the same step: True once they have
        agreed to stop, after a stop signal or `hpcdist stop`. The call also updates the heartbeat: a rank that has
        called it (or `alive`), but not within `launch.hang_timeout_s`, counts as hung unless it visibly computes.

        Args:
            step: number of steps done.
            total_steps: number of steps of the whole training, for the progress display; None if unknown.

        Raises CheckpointError if a save in the background has failed, and RuntimeError if another rank has died.
        """
        self._refuse_in_loop("should_stop", "ctx.steps asks after each step")
        if self._is_first_step:
            self._require_init()
        self._saves.check()
        self._heartbeat.step = step
        self._heartbeat.total_steps = total_steps
        self._heartbeat.beat(regular=True)
        asked = time.perf_counter()
        stop = self._stop.at_boundary()
        self.timer.step_done(step, agreement_s=time.perf_counter() - asked)
        times = self._times.due(step)
        if times:
            self._records.journal.log(times, step)
        is_logged = self._is_first_step or step % self._config.tracking.log_every_steps == 0
        if self.elastic.is_on and self.is_main and is_logged:
            self._records.journal.log({"world_size": self.world_size}, step)
        if self._is_first_step:
            self._is_first_step = False
            compile_cache.save_soon()
        if self._commands.profile_is_due:
            with self.timer.account.phase("idle"):
                self._commands.step_done(step)
            self.timer.began = None  # a step of a profile is slower: it is not counted
        return stop

    def _agree_among(self, ranks: Sequence[int]) -> Groups:
        """See `RankRoles.agree_among`."""
        self._times.leave_to(ranks)
        group = gloo_group(ranks, self.groups.timeout) if len(ranks) > 1 else None
        if self.rank not in ranks:
            self.timer.account.enter("idle")
        else:
            self._stop.agree_in(group)
        self._loop_ranks = Groups(group, self.groups.store)
        return self._loop_ranks

    def wrap(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """Move a module to this rank's device and wrap it in DistributedDataParallel.

        Args:
            module: the model, equal on all ranks. It remains accessible as `.module` of the result.
            **options: arguments of DistributedDataParallel, such as `static_graph=True` for a model without
                data-dependent branches. With `data.global_batch_size`, `static_graph` has no effect, because not every
                backward pass exchanges gradients.
        """
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.report.log_model_size(sum(parameter.numel() for parameter in trained))
        if self.elastic.is_on:
            options["static_graph"] = False  # not every backward pass exchanges gradients
        device_ids = None if self.device.type == "cpu" else [self.device]
        model = TimedDDP(
            module.to(self.device), self.timer, device_ids=device_ids, gradient_as_bucket_view=True, **options
        )
        if self.elastic.is_on:  # `micro_batches` exchanges buffers, and gradients in part
            model.broadcast_buffers = False
            if not self._config.elastic.exact:
                model.register_comm_hook(None, sum_over_ranks)
        return model

    def mesh(self, **sizes: int) -> DeviceMesh:
        """Return torch's mesh of all ranks with named dimensions, for `fully_shard` and `parallelize_module`.

            mesh = ctx.mesh(replicate=2, shard=-1)
            fully_shard(model, mesh=mesh["replicate", "shard"])

        Call it on every rank. The last dimension has neighbouring ranks, which are on one node if they fit. The mesh is
        for this rank's type of device, and its process groups have the time limit `ctx.groups.timeout`.

        Args:
            **sizes: number of ranks in each dimension; -1 for all remaining ranks.

        Raises TrainerError unless the product of the sizes is the number of ranks.
        """
        with call_of_all_ranks("ctx.mesh"):
            return make_mesh(sizes, self.world_size, self.device, self.groups.timeout)

    def should_save(self, step: int) -> bool:
        """Return whether to save now: every `checkpoint.every_steps` steps, before a stop, and after `hpcdist save`."""
        every = self._config.checkpoint.every_steps
        is_regular = every is not None and step > 0 and step % every == 0
        if self._commands.save_is_due:
            return True
        return self._saved_step != step and (self._stop.agreed or is_regular)

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None,
        trainer: Mapping[str, Any] | None = None,
        local: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        shard: Shard | None = None,
        **states: Stateful,
    ) -> None:
        """Save a checkpoint after `step` steps. Call it on every rank.

            ctx.save(step, model=model, optimizer=optimizer)

        The call copies the state to host memory and returns; a background thread writes the files. The states of all
        ranks' random number generators are saved automatically.

        Sharded tensors (DTensor, such as those of FSDP2) of the model and of other state must be passed on every rank:
        each rank copies and writes its own part. Of all else, the state of rank 0 is saved.

        Args:
            step: number of steps done.
            model: the model, wrapped or bare; its state dict is saved under the names of the bare model. None if rank 0
                has no model.
            trainer: further state that all ranks need to resume and that is equal on all ranks.
            local: state that only this rank needs to resume. Keep it small: it is sent to rank 0.
            metrics: metrics of this checkpoint; `checkpoint.monitor` names the one by which the best is kept.
            shard: the part of the model that this rank owns, for a model that is distributed over several ranks without
                DTensors. Then every rank must pass a `Shard`, possibly an empty one.
            **states: objects with `state_dict`, such as the optimizer; their states become a part of `trainer`.

        Raises CheckpointError if the save cannot start, or if an earlier one has failed.
        """
        self._refuse_in_loop("save", "ctx.steps saves; for the metrics of an evaluation call steps.save(metrics)")
        step = int(step)  # a number of NumPy does not fit into the manifest
        with self.timer.account.phase("checkpoint"):
            weights: dict[str, Tensor] = {}
            if model is not None:
                weights = clean_state_dict(model)
            metrics = metrics or {}
            self._saves.save(
                step,
                divide(weights, {**(trainer or {}), **states_of(states)}),
                shard,
                self._rank_state(local),
                metrics=metrics,
                samples=self.report.take_samples(metrics),
                on_written=self._commands.begin_save(step),
            )
            self._saved_step = step
        self._heartbeat.beat()
        compile_cache.save_soon()
        self.timer.skip()

    def _rank_state(self, local: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a copy of the state of this rank for a checkpoint, in host memory."""
        if local:
            local = map_leaves(_copy_on_host, plain_state(local, "local"))
        return {
            "rng": rng_state(self.device),
            "local": local,
            "role": self.roles.name_of(self.rank),
            **self.elastic.saved_state(),
        }

    def _before_publish(self) -> None:
        """Make the journal durable, and refuse the checkpoint if a newer attempt has begun.

        A supervisor that was suspended may have been replaced while its ranks continued (`run/lease.py`).
        """
        self._records.journal.flush(durable=True)
        if retry.exists(self.run.attempt(self._attempt.number + 1).path):
            raise CheckpointError(
                f"attempt {self._attempt.number + 1} of run {self.run.name} has begun:"
                f" attempt {self._attempt.number} must not save checkpoints any more"
            )

    def restore(self, *, model: nn.Module | None = None, **states: Stateful) -> Restored | None:
        """Load the newest valid checkpoint. Call it on every rank, directly before the training loop.

            saved = ctx.restore(model=model, optimizer=optimizer)
            step = saved.step if saved is not None else 0

        The call restores the random number generators; other numbers of ranks than before seed them anew. It also loads
        the objects that are passed; the trainer loads what else it needs from the result, which is None without a
        checkpoint. Of sharded tensors (DTensor), each rank reads its own part, on any mesh and number of ranks.

        Args:
            model: the model, wrapped or bare.
            **states: objects with `state_dict` and `load_state_dict`, under the names in the `trainer` of the
                checkpoint, such as the optimizer. One that the checkpoint does not have stays as it is.

        Raises CheckpointError if the checkpoint cannot be read, or is of another model.
        """
        if self._steps is not None:
            raise TrainerError("ctx.restore: ctx.steps has restored the checkpoint: leave out the call")
        self._has_restored = True
        path = self._newest_checkpoint()
        if not path:
            self._notes.begin(0)
            self._set_generators([])
            return None
        self._restored = self._load_checkpoint(Path(path))
        self._restored.stored.load(model, states)
        return self._restored

    def _require_init(self) -> None:
        """Raise TrainerError if the config names weights, and a new run has made a step without asking for them."""
        source = self._config.model.init_from
        # With roles, rank 0 may have no model.
        if source and not self._has_init and not self._start_folder and not self._config.roles:
            raise TrainerError(
                f"model.init_from={source} has no effect: the trainer does not call ctx.init_from(module) before its"
                " loop: add the call, or leave the key out"
            )

    def _newest_checkpoint(self) -> str:
        """Return the folder of the newest valid checkpoint at the start of this attempt; empty without one.

        The first call is one of all ranks.
        """
        if self._start_folder is not None:
            return self._start_folder
        search = CheckpointSearch(self._store, self.groups, self.rank, self.world_size, self.timer.alive)
        with self._heartbeat.promise_ends():  # the trainer itself may report no steps on this rank
            self._start_folder = search.newest()
        return self._start_folder

    def _load_checkpoint(self, folder: Path) -> Restored:
        """Load a checkpoint of which the ranks have verified the hashes, and restore the state of the context."""
        checkpoint = self._store.load(folder)
        states = checkpoint.rank_states
        self._saved_step = checkpoint.step
        saved_division = SavedDivision.of(states[0])
        self.elastic.restore(saved_division)
        self._rank_states = states
        self._set_generators(states)
        is_elastic = self.elastic.is_on and (saved_division is not None or self.elastic.is_of_trainer)
        self._report_world_size(len(states), is_elastic=is_elastic)
        log.info("resumed at step %d from %s", checkpoint.step, folder)
        self._heartbeat.step = checkpoint.step
        self._notes.begin(checkpoint.step)
        local = None
        rank_state = self._own_state(states)
        if rank_state is not None:
            local = rank_state["local"]
        shards = set(read_manifest(folder).shards)
        owners = nearest_first(len(states), self.rank, self.world_size)
        files = [folder / shard_name(owner) for owner in owners if shard_name(owner) in shards]
        return Restored(
            step=checkpoint.step,
            stored=StoredState(checkpoint.model, checkpoint.trainer, checkpoint.sharded, files),
            local=local,
            folder=folder,
            world_size=len(states),
            local_by_rank=[state["local"] for state in states],
        )

    def _report_world_size(self, before: int, *, is_elastic: bool) -> None:
        """Log that the number of ranks has changed, if so."""
        now = self.world_size
        if before == now:
            return
        if self._config.roles or is_elastic:  # trainers with roles report the effect themselves
            log.info("%d ranks instead of %d continue the run", now, before)
        else:
            text = "the checkpoint was saved by %d ranks and is resumed by %d: the sample order differs from here on"
            log.warning(text, before, now)

    def _own_state(self, rank_states: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the state of the rank with this rank's role and index; None if its role had other numbers of ranks."""
        roles = [str(state["role"]).partition(":")[0] for state in rank_states]
        if roles.count(self.roles.own) != self.roles.count(self.roles.own):
            return None
        return rank_states[roles.index(self.roles.own) + self.roles.own_index]

    def _set_generators(self, rank_states: Sequence[dict[str, Any]]) -> None:
        """Restore the random number generators from a checkpoint, or seed them differently on each rank."""
        rank_state = self._own_state(rank_states)
        if rank_state is not None:
            set_rng_state(rank_state["rng"], self.device)
        elif self.elastic.is_on and rank_states and SavedDivision.of(rank_states[0]) is not None:
            # After a step the generators are equal on all ranks, see `rank/micro_batches.py`.
            set_rng_state(rank_states[0]["rng"], self.device)
        else:
            seed_everything(self._config.seed + 1 + self.rank + max(0, self._saved_step))

    def _refuse_in_loop(self, name: str, instead: str) -> None:
        if self._steps is not None and self._steps.is_open:
            raise TrainerError(f"ctx.{name} in the loop of ctx.steps: leave out the call, {instead}")


def close(ctx: Context) -> Literal["done", "stopped"]:
    """Wait until checkpoints and metrics are on disk, and return how the trainer ended. The worker calls it.

    Raises CheckpointError if a save has failed, or if the trainer stopped without saving its last step.
    """
    if ctx._steps is not None:
        ctx._steps.check_left()
    ctx.timer.close()
    ctx.timer.account.enter("finish")
    ctx._commands.close()
    ctx._stop.close()
    ctx._saves.close()
    ctx._records.journal.flush(durable=True)
    ctx.timer.account.is_closed = True
    ctx._heartbeat.close()
    step = ctx._heartbeat.step
    trainer = find_trainer(ctx._config.trainer.target)
    saves_nothing = ctx._config.trainer.script or (trainer is not None and trainer.is_benchmark)
    if ctx._stop.agreed and ctx._saved_step < step and not saves_nothing:
        raise CheckpointError(
            f"the trainer stopped at step {step} without saving it:"
            " call ctx.save(…) before returning when ctx.should_stop(…) returns True"
        )
    if ctx._stop.agreed:
        return "stopped"
    return "done"


def _promises_heartbeats(config: Config) -> bool:
    """Return whether the trainer is one of hpcdist that reports each step, or calls `alive`, on each rank.

    Without the promise, a rank that hangs before its first step is not found: the others wait in `await_all`.
    """
    trainer = find_trainer(config.trainer.target)
    return trainer is not None and not trainer.is_benchmark


def _copy_on_host(_: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a tensor in host memory, and any other value as it is."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return value


def _number(name: str, value: float | Tensor) -> float:
    """Return the value of a metric, which a tensor's device may still be computing."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise TrainerError(
            f"ctx.log: {name} is a tensor of {value.numel()} elements: pass one number, such as its mean"
        )
    return float(value.detach())
