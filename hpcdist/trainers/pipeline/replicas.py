"""The copies of a stage in the replicas of the model: after each step they agree on gradients and statistics."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hpcdist.trainers.pipeline.mesh import StageMesh


class StageCopies:
    """The ranks with copies of this rank's stage. The replicas compute different micro-batches of a step.

    The gradients of a step are the sum over the replicas. The running statistics become those of a single replica that
    has computed all micro-batches in order: an exponential average is linear in its start value, so that the parts of
    the replicas add up. Both are summed by one all-reduce of a vector.
    """

    def __init__(self, stage: nn.Module, mesh: StageMesh, group: dist.ProcessGroup) -> None:
        self._group = group
        self._replica = mesh.replica
        self._parameters = list(stage.parameters())
        norms = [module for module in stage.modules() if isinstance(module, _BatchNorm)]
        self._counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._statistics = []
        self._kept: list[float] = []  #: the share of each statistic's value that a micro-batch keeps
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            assert norm.momentum is not None
            self._statistics += [norm.running_mean, norm.running_var]
            self._kept += [1 - norm.momentum] * 2
        self._before = [statistic.clone() for statistic in self._statistics]
        parts = [*self._parameters, *self._statistics]
        self._sum = torch.zeros(sum(part.numel() for part in parts), device=parts[0].device)
        views = []
        for piece, part in zip(self._sum.split([part.numel() for part in parts]), parts, strict=True):
            views.append(piece.as_strided(part.shape, part.stride()))
        self._gradient_sums = views[: len(self._parameters)]
        self._statistic_sums = views[len(self._parameters) :]

    @torch.no_grad()
    def begin_step(self) -> None:
        """Note the running statistics, which are equal in all replicas."""
        torch._foreach_copy_(self._before, self._statistics)

    @torch.no_grad()
    def end_step(self, shares: list[range]) -> None:
        """Sum up gradients and statistics.

        Args:
            shares: the micro-batches that each replica has computed.
        """
        own = shares[self._replica]
        num_micro_batches = shares[-1].stop
        gradients: list[Tensor] = []
        for parameter in self._parameters:
            assert parameter.grad is not None, "each parameter of a ResNet has a gradient"
            gradients.append(parameter.grad)
        torch._foreach_copy_(self._gradient_sums, gradients)
        own_parts = []
        for statistic, before, kept in zip(self._statistics, self._before, self._kept, strict=True):
            # What this replica has added, as the micro-batches of the following replicas would leave it.
            added = statistic - before * kept ** len(own)
            own_parts.append(added * kept ** (num_micro_batches - own.stop))
        torch._foreach_copy_(self._statistic_sums, own_parts)
        dist.all_reduce(self._sum, group=self._group)
        for parameter, gradient in zip(self._parameters, self._gradient_sums, strict=True):
            parameter.grad = gradient
        for statistic, before, kept, added in zip(
            self._statistics, self._before, self._kept, self._statistic_sums, strict=True
        ):
            statistic.copy_(before * kept**num_micro_batches + added)
        for count in self._counts:
            count += num_micro_batches - len(own)


def stage_copies(stage: nn.Module, mesh: StageMesh, timeout: timedelta) -> StageCopies | None:
    """Return the copies of this rank's stage; None with a single replica. Call it on every rank."""
    if mesh.num_replicas == 1:
        return None
    copies = None
    for index in range(mesh.num_stages):
        # Every rank takes part in the creation of every group.
        group = dist.new_group([*mesh.ranks_of_stage(index)], timeout)
        if isinstance(group, dist.ProcessGroup):
            copies = StageCopies(stage, mesh, group)
    return copies
