"""Save checkpoints: all ranks agree on what each of them writes, copy it, and write it in the background."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hpcdist.checkpoint.saver import AsyncSaver, BackgroundWriter, plain_state
from hpcdist.checkpoint.shard_exchange import ShardExchange
from hpcdist.checkpoint.sharded import Division, Owners, digest_of
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.store import CheckpointStore, Snapshot
from hpcdist.config.topology import Topology
from hpcdist.errors import CheckpointError
from hpcdist.rank.process_group import Groups, call_of_all_ranks


class CheckpointSaves:
    """The saves of a rank. Rank 0 writes the checkpoint; ranks with shards write these.

    Args:
        groups: all ranks.
        before_publish: is called on rank 0 in the background before a checkpoint gets its final name.
    """

    def __init__(
        self, store: CheckpointStore, groups: Groups, topology: Topology, *, before_publish: Callable[[], None]
    ) -> None:
        self._store = store
        self._groups = groups
        self._rank = topology.rank
        self._attempt = topology.attempt
        self._saver = AsyncSaver(store, before_publish=before_publish)
        self._shard_writer = BackgroundWriter(str(store.folder))
        self._exchange = ShardExchange(groups.store, rank=topology.rank, attempt=topology.attempt)
        self._owners = Owners(topology.rank, topology.world_size, groups.all_gather)

    def save(
        self,
        step: int,
        state: Division,
        shard: Shard | None,
        rank_state: dict[str, Any],
        *,
        metrics: Mapping[str, float],
        samples: bytes,
        on_written: Callable[[], None],
    ) -> None:
        """Start the save of a checkpoint. Call it on all ranks; see `Context.save`.

        Args:
            state: of the model and the trainer; that of rank 0 is saved, with the sharded tensors of all ranks.
            rank_state: the state of this rank, which the save keeps.
            on_written: is called on rank 0 once the checkpoint is on disk.
        """
        is_main = self._rank == 0
        is_owner = shard is not None and (bool(shard.model) or shard.trainer is not None)
        is_sharded = shard is not None or bool(state.tensors)
        needs_write = is_sharded and is_main and self._saver.needs_write(step)
        part = shard
        with call_of_all_ranks("ctx.save"):
            numbers = [needs_write, is_owner, digest_of(state.tensors)]
            facts, rank_states = self._groups.gather_later(rank_state, numbers)
            # One decision for all: an earlier save of this step may have failed on rank 0 alone.
            needs_write = bool(facts[0][0])
            owners = [rank for rank, (_, owns, _) in enumerate(facts) if owns]
            _require_equal_sharding([digest for _, _, digest in facts])
            if state.tensors:
                if shard is not None:
                    raise CheckpointError(
                        "ctx.save: model or optimizer have sharded tensors (DTensor): leave out shard="
                    )
                boxes, owners = self._owners.choose(state.tensors)
                part = Shard.of(state.tensors, boxes)
                is_owner = self._rank in owners
        staging = self._store.staging(step, self._attempt)
        start_shard = None
        if part is not None and is_owner and needs_write:
            write = partial(self._exchange.write, boxes=part.boxes, step=step, staging=staging)
            start_shard = self._shard_writer.copied(part.state, write)
        if is_main:
            snapshot = _snapshot_of(step, state, rank_states, metrics, samples)
            if owners:
                pending = self._exchange.pending(step, owners, staging)
                snapshot = replace(snapshot, collect_shards=pending.collect, drop_shards=pending.drop)
            self._saver.save(snapshot, on_written=on_written)
        if start_shard is not None:
            start_shard()
        if shard is not None:
            # A rank that continues may change another rank's shard or model (by RPC) before it is copied.
            self._shard_writer.wait_for_copy()
            self._saver.wait_for_copy()
            self._groups.barrier()

    def check(self) -> None:
        """Raise CheckpointError if a save in the background has already failed; does not wait."""
        self._saver.check()
        self._shard_writer.check()

    def wait(self) -> None:
        """Wait for the save in progress. Raises CheckpointError if it fails."""
        self._shard_writer.wait()
        self._saver.wait()

    def close(self) -> None:
        """Wait for the save in progress, and stop the threads. Raises CheckpointError if the save fails."""
        self._shard_writer.close()
        self._saver.close()


def _snapshot_of(
    step: int,
    state: Division,
    collect_rank_states: Callable[[], list[dict[str, Any]]],
    metrics: Mapping[str, float],
    samples: bytes,
) -> Snapshot:
    """Return the checkpoint of rank 0, without the shards of other ranks; see `CheckpointSaves.save`."""
    sharded = {key: [list(whole.shape), whole.dtype] for key, whole in state.wholes.items()}
    return Snapshot(
        step=step,
        model=state.model,
        trainer=state.trainer,
        rank_states=[],
        collect_rank_states=collect_rank_states,
        metrics={name: float(value) for name, value in metrics.items()},
        samples=samples,
        sharded=plain_state(sharded, "sharded"),
    )


def _require_equal_sharding(digests: Sequence[int]) -> None:
    """Raise CheckpointError if the ranks pass different sharded tensors; a digest is 0 without any."""
    if len(set(digests)) == 1:
        return
    without = ", ".join(str(rank) for rank, digest in enumerate(digests) if not digest)
    if without:
        raise CheckpointError(
            f"ctx.save: model or optimizer are sharded over ranks (DTensor), but rank {without} passes no"
            " shard: pass them on every rank, which saves its own part"
        )
    others = ", ".join(str(rank) for rank, digest in enumerate(digests) if digest != digests[0])
    raise CheckpointError(
        f"ctx.save: the sharded tensors (DTensor) of rank {others} have other names or shapes than those of rank 0:"
        " pass the same model and optimizer on every rank"
    )
