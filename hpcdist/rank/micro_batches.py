"""Elastic data parallelism: a global batch is divided into logical micro-batches.

Their gradients are summed in a fixed order on any number of ranks.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config, largest_world_size
from hpcdist.config.training_schema import division_problems
from hpcdist.errors import ConfigError
from hpcdist.rank.process_group import seed_everything


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """Which samples belong to which micro-batch, and which micro-batches to this rank.

    The order of the samples is a function of (seed, epoch), and their division one of the global batch and the number
    of micro-batches. Only `share` depends on the number of ranks. The last global batch of an epoch is smaller if the
    training set is no multiple of it: its last micro-batch may be smaller, and further ones are left out. The last
    micro-batch takes one sample more instead of leaving a single one, on which batch normalisation cannot train.
    """

    num_samples: int
    global_batch_size: int
    num_micro_batches: int
    seed: int
    rank: int
    world_size: int

    @property
    def micro_batch_size(self) -> int:
        """Number of samples of a micro-batch, except possibly of the last one of an epoch."""
        return self.global_batch_size // self.num_micro_batches

    @property
    def steps_per_epoch(self) -> int:
        """Number of global batches of an epoch."""
        return math.ceil(self._num_in_epoch / self.num_micro_batches)

    @property
    def _num_in_epoch(self) -> int:
        """Number of micro-batches with samples in an epoch."""
        size = self.micro_batch_size
        leaves_one = size > 1 and self.num_samples > 1 and self.num_samples % size == 1
        if leaves_one:
            return self.num_samples // size  # the last micro-batch takes the sample that is left
        return math.ceil(self.num_samples / size)

    def _begin(self, step_in_epoch: int, number: int) -> int:
        """Return the place of a micro-batch's first sample in the order of the epoch."""
        num_before = step_in_epoch * self.num_micro_batches + number
        if num_before >= self._num_in_epoch:
            return self.num_samples
        return num_before * self.micro_batch_size

    def batch_size(self, step_in_epoch: int) -> int:
        """Return the number of samples of a global batch, which is smaller in the last step of an epoch."""
        return self._begin(step_in_epoch + 1, 0) - self._begin(step_in_epoch, 0)

    def num_filled(self, step_in_epoch: int) -> int:
        """Return the number of micro-batches of a step that have samples."""
        return min(self.num_micro_batches, self._num_in_epoch - step_in_epoch * self.num_micro_batches)

    def share(self, step_in_epoch: int, rank: int | None = None) -> range:
        """Return the numbers of the micro-batches of a rank, by default of this one; empty if none has samples.

        Shares are contiguous, and their sizes differ by at most one before empty micro-batches are left out.
        """
        if rank is None:
            rank = self.rank
        end = self.num_filled(step_in_epoch)
        share = share_of(rank, self.world_size, self.num_micro_batches)
        return range(min(share.start, end), min(share.stop, end))

    def order(self, epoch: int) -> Tensor:
        """Return the order of all samples in an epoch, int64 [num_samples]. Do not change it: it is kept."""
        return _order(self.num_samples, self.seed + epoch)

    def samples(self, order: Tensor, step_in_epoch: int, number: int) -> Tensor:
        """Return the samples of a micro-batch, int64 [n], in the order of its epoch."""
        return order[self._begin(step_in_epoch, number) : self._begin(step_in_epoch, number + 1)]

    def rank_indices(self, epoch: int, first_step: int = 0) -> list[Tensor]:
        """Return the indices of the samples of each micro-batch of this rank from a step of the epoch on, int64 [n]."""
        order = self.order(epoch)
        return [
            self.samples(order, step, number)
            for step in range(first_step, self.steps_per_epoch)
            for number in self.share(step)
        ]


@functools.lru_cache(maxsize=2)  # a loader with workers reads the beginning of the next epoch
def _order(num_samples: int, seed: int) -> Tensor:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class SavedDivision:
    """The division with which a checkpoint was saved: it determines the samples of each step."""

    num_micro_batches: int
    global_batch_size: int
    num_samples: tuple[int, ...]  #: of all training sets of the trainer

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self | None:
        """Return the division in the state of a rank; None if the run was not elastic."""
        if "num_micro_batches" not in state:
            return None
        return cls(**{field.name: state[field.name] for field in fields(cls)})

    def problems(self, config: Config, num_samples: int, fitted: int | None = None) -> list[str]:
        """Return the differences of a config and a training set from this division.

        Args:
            fitted: the number of micro-batches that `launch.fit_batch` has found. Halves of the same micro-batches
                contain the same samples in the same order.
        """
        problems = []
        micro_batches = config.elastic.micro_batches or self.num_micro_batches
        if fitted is not None and fitted % self.num_micro_batches == 0:
            micro_batches = self.num_micro_batches
        for key, value, saved in (
            ("data.global_batch_size", config.data.global_batch_size, self.global_batch_size),
            ("elastic.micro_batches", micro_batches, self.num_micro_batches),
        ):
            if value != saved:
                problems.append(
                    f"{key}={value}, but the checkpoint was saved with {saved}: set that, or start a new run"
                )
        if num_samples not in self.num_samples:
            saved_sizes = " and ".join(map(str, self.num_samples))
            problems.append(
                f"the training set has {num_samples} samples, but the checkpoint was saved with"
                f" {saved_sizes}: use the same data, or start a new run"
            )
        return problems


def divide(
    config: Config,
    num_samples: int,
    rank: int,
    world_size: int,
    saved: SavedDivision | None = None,
    fitted: int | None = None,
) -> BatchDivision:
    """Return the division of a training set.

    The number of micro-batches is that of the config, else that of `saved`, else the largest number of ranks that the
    config allows; `fitted`, which `launch.fit_batch` has found, if that is larger. Raises ConfigError if the global
    batch cannot be divided so.
    """
    batch_size = config.data.global_batch_size
    if batch_size is None:
        raise ConfigError("data.global_batch_size is not set: micro-batches need it, such as 256")
    if config.elastic.micro_batches:
        number = config.elastic.micro_batches
    elif saved is not None:
        number = saved.num_micro_batches
    else:
        number = max(world_size, largest_world_size(config))
    if fitted is not None:
        number = max(number, fitted)
    problems = division_problems(batch_size, number)
    if world_size > number:
        problems.append(
            f"{world_size} ranks are more than the {number} micro-batches of a global batch (elastic.micro_batches):"
            " use fewer ranks"
        )
    if problems:
        raise ConfigError(*problems)
    return BatchDivision(
        num_samples=num_samples,
        global_batch_size=batch_size,
        num_micro_batches=number,
        seed=config.seed,
        rank=rank,
        world_size=world_size,
    )


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of the random numbers of a micro-batch; `number` -1 is for the time after a step."""
    digest = hashlib.blake2b(f"{seed} {step} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class BufferChanges:
    """Changes of a model's buffers, such as running statistics of batch normalisation, during one step.

    At the start of each micro-batch the buffers are reset to their values at the beginning of the step. After the step
    they have changed by the mean of the changes, weighted by the samples, as if there were one update with the mean
    statistics. A value of type bool changes if any micro-batch has changed it. So the buffers do not depend on which
    rank computed which micro-batch.

    A forward pass may change the buffers in place, or assign tensors of the same shape to them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = {name: buffer for name, buffer in module.named_buffers() if buffer.numel()}
        self._before = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}
        self.size = sum(_real(buffer).numel() for buffer in self._buffers.values())

    @torch.no_grad()
    def take(self, weight: float, dtype: torch.dtype) -> list[Tensor]:
        """Return the weighted changes by the last micro-batch as vectors, and undo them."""
        changes = []
        for name, buffer in self._buffers.items():
            before, after = self._before[name], self._module.get_buffer(name)
            if before.dtype == torch.bool:
                change = after ^ before
            else:
                old, new = _real(before), _real(after)
                if not old.dtype.is_signed:  # a difference below 0 would wrap around
                    old, new = old.to(dtype), new.to(dtype)
                # Not `new - old` alone: an infinite value that has not changed has no difference.
                change = torch.where(new == old, 0, new - old)
            changes.append(change.flatten().to(dtype) * weight)
            buffer.copy_(before)
            if after is not buffer:
                owner, _, attribute = name.rpartition(".")
                setattr(self._module.get_submodule(owner), attribute, buffer)
        return changes

    @torch.no_grad()
    def apply(self, changes: Tensor) -> None:
        """Change the buffers by the sum of all micro-batches' results of `take`, [size]."""
        buffers = [_real(buffer) for buffer in self._buffers.values()]
        parts = torch.split(changes, [buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            change = part.view_as(buffer)
            if buffer.dtype == torch.bool:
                buffer ^= change > 0
            elif buffer.is_floating_point():
                buffer += change.to(buffer.dtype)
            else:
                buffer += change.round().to(buffer.dtype)


def _real(buffer: Tensor) -> Tensor:
    """Return a complex buffer as a view with real and imaginary parts, and any other buffer as it is."""
    if buffer.is_complex():
        return torch.view_as_real(buffer)
    return buffer


# Sums over micro-batches in a fixed order: a binary tree. Its shape depends on the number of micro-batches alone.
#
# Floating-point addition is not associative, so the order determines the rounding. A rank adds the nodes of the tree
# that lie in its own share. The ranks then exchange these partial sums: each rank adds one part of the vector, and all
# ranks gather the parts. With one micro-batch per rank, this transfers as much as a ring all-reduce.


class TreeSum:
    """Adds nodes of the tree from left to right, and keeps the sums of the largest nodes that are complete.

    The left child of a node is the largest complete tree with fewer leaves than the node.
    """

    def __init__(self, num_leaves: int) -> None:
        self.num_leaves = num_leaves
        self.nodes: list[tuple[int, int]] = []  #: begin and end of each
        self.sums: list[Any] = []

    def add(self, begin: int, end: int, vector: Tensor | None = None) -> None:
        """Add the leaves `begin` to `end` - 1, which follow the last node.

        Args:
            vector: the sum of these leaves; it may be changed later. None to find the nodes alone, without sums.
        """
        while self.nodes:
            left, middle = self.nodes[-1]
            size = middle - left
            is_left_child = left % (2 * size) == 0 and end == min(middle + size, self.num_leaves)
            if not is_left_child:
                break
            begin, _ = self.nodes.pop()
            left_sum = self.sums.pop()
            if vector is not None:
                vector = left_sum.add_(vector)
        self.nodes.append((begin, end))
        self.sums.append(vector)


def sum_of_tree(num_leaves: int, shares: Sequence[range], own: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the sum of all leaves on every rank. Call it on every rank, with the leaves of each in `shares`.

    `own` are the `TreeSum.sums` of this rank, [n] each, and `like` is a tensor like them, for a rank without any.
    """
    world_size = len(shares)
    if world_size == 1:
        return own[0]
    trees = [TreeSum(num_leaves) for _ in shares]
    for tree, share in zip(trees, shares, strict=True):
        for leaf in share:
            tree.add(leaf, leaf + 1)
    nodes = [node for tree in trees for node in tree.nodes]
    part = -(-len(like) // world_size)  # the length of each rank's part of the vector, rounded up
    sent = like.new_zeros(world_size, len(own), part)
    for number, vector in enumerate(own):
        num_full = len(vector) // part  # parts; the next one is shorter, and further ones are empty
        full, rest = vector[: num_full * part], vector[num_full * part :]
        sent[:num_full, number] = full.view(num_full, part)
        if num_full < world_size:
            sent[num_full, number, : len(rest)] = rest
    received = like.new_empty(len(nodes), part)
    dist.all_to_all_single(
        received,
        sent.view(-1, part),
        output_split_sizes=[len(tree.nodes) for tree in trees],
        input_split_sizes=[len(own)] * world_size,
    )
    whole_tree = TreeSum(num_leaves)
    for node, vector in zip(nodes, received, strict=True):
        whole_tree.add(*node, vector)
    gathered = like.new_empty(world_size * part)
    dist.all_gather_into_tensor(gathered, whole_tree.sums[0].contiguous())
    return gathered[: len(like)]


@dataclass(frozen=True)
class MicroBatch:
    """One of the equal parts of a global batch.

    Attributes:
        number: its number in the global batch.
        indices: its samples, int64 [n] on the CPU.
        weight: n / samples of the global batch, the factor of the mean loss of the micro-batch.
    """

    number: int
    indices: Tensor
    weight: float


def micro_batches(
    division: BatchDivision, model: DistributedDataParallel, step: int, *, exact: bool
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches of a step; see `Elastic.micro_batches`."""
    epoch, step_in_epoch = divmod(step, division.steps_per_epoch)
    batch_size = division.batch_size(step_in_epoch)
    shares = [division.share(step_in_epoch, rank) for rank in range(division.world_size)]
    share = shares[division.rank]
    parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    # Sums have float32, or float64 for a model in double precision.
    dtype = functools.reduce(torch.promote_types, {parameter.dtype for parameter in parameters}, torch.float32)
    buffers = BufferChanges(model.module)
    changed = torch.zeros(buffers.size, device=parameters[0].device, dtype=dtype)
    tree = TreeSum(division.num_filled(step_in_epoch))
    # DDP adds the gradients during the last backward pass of the step, if every rank has one.
    by_ddp = not exact and len(shares) > 1 and all(shares)
    model.zero_grad(set_to_none=True)
    if not (exact or share):
        # The other ranks do it in their forward passes. It is a collective operation.
        model.reducer._rebuild_buckets()
    for number in share:
        samples = division.samples(division.order(epoch), step_in_epoch, number)
        weight = len(samples) / batch_size
        seed_everything(micro_batch_seed(division.seed, step, number))
        model.require_backward_grad_sync = by_ddp and number == share[-1]
        yield MicroBatch(number, samples, weight)
        model.require_backward_grad_sync = True
        changes = buffers.take(weight, dtype)
        if exact:
            tree.add(number, number + 1, torch.cat([*_flat_gradients(parameters, dtype), *changes]))
            model.zero_grad(set_to_none=True)
        elif changes:
            changed += torch.cat(changes)
    if by_ddp or (len(shares) == 1 and not exact):
        total = changed
    elif exact:
        if tree.sums:
            like = tree.sums[0]
        else:
            like = changed.new_zeros(sum(parameter.numel() for parameter in parameters) + buffers.size)
        total = sum_of_tree(tree.num_leaves, shares, tree.sums, like)
    else:
        total = torch.cat([*_flat_gradients(parameters, dtype), changed])
    if not exact and len(shares) > 1 and len(total):
        dist.all_reduce(total)
    if len(total) > buffers.size:
        sizes = [*(parameter.numel() for parameter in parameters), buffers.size]
        for parameter, flat in zip(parameters, total.split(sizes), strict=False):
            gradient = flat.view(parameter.shape)
            if not parameter.is_contiguous() or parameter.dtype != gradient.dtype:
                gradient = torch.empty_like(parameter).copy_(gradient)
            parameter.grad = gradient
    buffers.apply(total[len(total) - buffers.size :])
    # All ranks draw the same numbers until the next step, and a checkpoint holds the same state of each rank.
    seed_everything(micro_batch_seed(division.seed, step, -1))


def sum_over_ranks(_state, bucket):  # type: ignore[no-untyped-def]  # torch's stubs do not have GradBucket
    """Add a bucket of gradients over the ranks; a communication hook of DDP, which otherwise averages them."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])


def _flat_gradients(parameters: list[nn.Parameter], dtype: torch.dtype) -> list[Tensor]:
    """Return the gradients as vectors; zeros for parameters that have none."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            gradients.append(torch.zeros(parameter.numel(), device=parameter.device, dtype=dtype))
        else:
            gradients.append(parameter.grad.flatten().to(dtype))
    return gradients


class MicroBatchLoader:
    """Reads the samples of this rank's micro-batches; `Elastic.loader` creates it."""

    def __init__(
        self, dataset: Dataset[Any], division: Callable[[], BatchDivision], options: dict[str, Any], *, exact: bool
    ) -> None:
        self._dataset = dataset
        self._division = division  # a checkpoint that is restored later may determine it
        self._options = options
        self._exact = exact
        self._data: Iterator[Any] = iter(())
        self._next_step = -1

    def of_step(self, model: DistributedDataParallel, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield this rank's micro-batches of a step with their data; see `Elastic.loader`."""
        division = self._division()
        if step != self._next_step:
            # For this step and all later ones, so that workers read ahead and live on between epochs.
            samples = _samples_from(division, step)
            # A generator of its own: without it the loader draws a seed from the global one.
            options = {"generator": torch.Generator(), **self._options}
            dataset = _SeededSamples(self._dataset, division.seed)
            self._data = iter(DataLoader(dataset, batch_sampler=samples, **options))
        self._next_step = step + 1
        for micro in micro_batches(division, model, step, exact=self._exact):
            batch = next(self._data)
            # Without workers, reading has seeded the generators of this process.
            seed_everything(micro_batch_seed(division.seed, step, micro.number))
            yield micro, batch


def _samples_from(division: BatchDivision, step: int) -> Iterator[list[tuple[int, int]]]:
    """Yield epoch and index of each sample of this rank's micro-batches, from a step on and without end."""
    first_epoch, first_step = divmod(step, division.steps_per_epoch)
    for epoch in itertools.count(first_epoch):
        for indices in division.rank_indices(epoch, first_step):
            yield [(epoch, index) for index in indices.tolist()]
        first_step = 0


class _SeededSamples(Dataset[Any]):
    """A dataset with random numbers, for example for augmentation, that follow from (seed, epoch, sample)."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        seed_everything(micro_batch_seed(self._seed, -1 - epoch, index))  # no step is negative
        return self._dataset[index]
