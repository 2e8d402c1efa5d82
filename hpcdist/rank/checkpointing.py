"""One rank's part in saving and restoring the checkpoints of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcdist.checkpoint.saver import AsyncSaver, BackgroundWriter
from hpcdist.checkpoint.state import MaybeSharded, Shard, ShardExchange, clean_state_dict, rng_state, set_rng_state
from hpcdist.checkpoint.store import CheckpointStore, load_file, shard_name
from hpcdist.config.schema import Config
from hpcdist.config.topology import Roles, Topology
from hpcdist.errors import CheckpointError
from hpcdist.host import retry
from hpcdist.rank.elastic import SavedDivision
from hpcdist.rank.process_group import Groups, seed_everything
from hpcdist.run.folder import Attempt, RunDir
from hpcdist.tracking.journal import JournalWriter

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that `Context.restore` returns, in host memory.

    Attributes:
        step: number of steps done when the checkpoint was saved.
        model: state dict of the bare model, as passed to `Context.save` on rank 0.
        trainer: the `trainer` argument of `Context.save`.
        local: the `local` argument of `Context.save` on the rank that had the same role and index; None if the number
            of ranks of this role has changed since.
        local_by_rank: the `local` arguments of all ranks that saved the checkpoint.
        folder: the checkpoint folder.
        world_size: number of ranks of the run when it saved the checkpoint.
    """

    step: int
    model: dict[str, torch.Tensor]
    trainer: dict[str, Any]
    local: dict[str, Any] | None
    local_by_rank: list[dict[str, Any] | None]
    folder: Path
    world_size: int

    def shard(self, rank: int) -> dict[str, Any] | None:
        """Return the `Shard` that a rank saved: a dict with the keys `model`, `rows` and `trainer`; None without one.

        Args:
            rank: a rank of the run that saved the checkpoint, 0 to `self.world_size` - 1.
        """
        path = self.folder / shard_name(rank)
        return load_file(path) if retry.exists(path) else None


@dataclass(kw_only=True, eq=False)
class RankCheckpoints:
    config: Config
    run: RunDir
    attempt: Attempt
    topology: Topology
    device: torch.device
    groups: Groups
    journal: JournalWriter
    #: Step of the checkpoint that was saved or restored last; -1 before the first one.
    saved_step: int = -1
    #: Division of the training set of an elastic run, which a checkpoint holds; None before it is known.
    division: SavedDivision | None = None

    def __post_init__(self) -> None:
        checkpoint = self.config.checkpoint
        self.store = CheckpointStore(
            self.run.checkpoints,
            keep_last=checkpoint.keep_last,
            best_metric=checkpoint.monitor,
            monitor_mode=checkpoint.monitor_mode,
        )
        self.saver = AsyncSaver(self.store, before_publish=self._before_publish)
        self._roles = Roles.of(self.config.roles, self.topology.world_size)
        self._name = self._roles.name_of(self.topology.rank)
        self._shard_writer = BackgroundWriter(str(self.run.checkpoints))
        self._shards = ShardExchange(self.groups.store, rank=self.topology.rank, attempt=self.attempt.number)

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None,
        trainer: Mapping[str, Any],
        local: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        shard: Shard | None,
        on_written: Callable[[], None],
    ) -> None:
        """Save a checkpoint; see `Context.save`. `on_written` is called on rank 0 once it is on disk."""
        is_owner = shard is not None and not shard.is_empty
        rank_state = {
            "rng": rng_state(self.device),
            "local": local
            and {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in local.items()},
            "role": self._name,
            **(asdict(self.division) if self.division is not None else {}),
        }
        state = MaybeSharded(({} if model is None else clean_state_dict(model), dict(trainer)))
        gathered = self.groups.gather((rank_state, is_owner, state.is_sharded))
        if len({is_sharded for *_, is_sharded in gathered}) > 1:
            without = ", ".join(str(rank) for rank, (*_, is_sharded) in enumerate(gathered) if not is_sharded)
            raise CheckpointError(
                f"ctx.save: model or optimizer are sharded over ranks (DTensor), but rank {without} passes no shard:"
                " pass them on every rank, so that they can be saved whole"
            )
        whole = state.gather(keep=self.topology.rank == 0)
        is_new, self.saved_step = step != self.saved_step, step
        staging = self.store.staging(step, self.attempt.number)
        if shard is not None and is_owner and is_new:
            self._shard_writer.submit(shard.content(), lambda host: self._shards.write(host, step, staging))
        if self.topology.rank == 0:
            owners = [rank for rank, (_, owns, _) in enumerate(gathered) if owns]
            self.saver.save(
                step,
                model=whole[0],
                trainer=whole[1],
                rank_states=[state for state, *_ in gathered],
                metrics=dict(metrics or {}),
                collect_shards=(lambda into: self._shards.collect(step, owners, staging, into)) if owners else None,
                on_written=on_written,
            )

    def _before_publish(self) -> None:
        """Make the journal durable, and refuse the checkpoint if a newer attempt has begun.

        A supervisor that was suspended may have been replaced while its ranks continued (`run/lease.py`).
        """
        self.journal.flush(durable=True)
        if retry.exists(self.run.attempt(self.attempt.number + 1).path):
            raise CheckpointError(
                f"attempt {self.attempt.number + 1} of run {self.run.name} has begun:"
                f" attempt {self.attempt.number} must not save checkpoints any more"
            )

    def restore(self) -> Restored | None:
        path = ""
        if self.topology.rank == 0:
            self.store.remove_leftovers()
            newest = self.store.latest()
            path = str(newest.path) if newest is not None else ""
        if not (path := self.groups.broadcast(path)):
            return None
        # Rank 0 has just verified the hashes; each rank reading all files twice would load the file system.
        checkpoint = self.store.load(Path(path), verify=False)
        self.saved_step = checkpoint.step
        local = None
        self.division = SavedDivision.of(checkpoint.rank_states[0])
        is_elastic = self.config.data.global_batch_size is not None and self.division is not None
        names = [str(state["role"]) for state in checkpoint.rank_states]
        role = self._name.partition(":")[0]
        if sum(name.partition(":")[0] == role for name in names) == self._roles.count(role):
            rank_state = checkpoint.rank_states[names.index(self._name)]
            local = rank_state["local"]
            set_rng_state(rank_state["rng"], self.device)
        elif is_elastic:
            # After a step the state is equal on all ranks, see `rank/elastic.py`.
            set_rng_state(checkpoint.rank_states[0]["rng"], self.device)
        else:
            seed_everything(self.config.seed + 1 + self.topology.rank + checkpoint.step)
        before, now = len(checkpoint.rank_states), self.topology.world_size
        if before != now and (self.config.roles or is_elastic):  # trainers with roles report its effect themselves
            log.info("%d ranks instead of %d continue the run", now, before)
        elif before != now:
            text = "the checkpoint was saved by %d ranks and is resumed by %d: the sample order differs from here on"
            log.warning(text, before, now)
        log.info("resumed at step %d from %s", checkpoint.step, path)
        return Restored(
            step=checkpoint.step,
            model=checkpoint.model,
            trainer=checkpoint.trainer,
            local=local,
            folder=Path(path),
            world_size=before,
            local_by_rank=[state["local"] for state in checkpoint.rank_states],
        )

    def check(self) -> None:
        """Raise CheckpointError if a save in the background has failed; does not wait."""
        self.saver.check()
        self._shard_writer.check()

    def close(self) -> None:
        self._shard_writer.close()
        self.saver.close()
