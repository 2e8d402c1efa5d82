"""A decoder on a mesh {replicate, shard, tensor}: tensor parallelism, then FSDP2 of each layer and of the rest.

The mesh always has all three dimensions. One of size 1 exchanges nothing.
Source of the order (tensor parallelism, activation checkpointing, compilation, FSDP2) and of the plan of a layer:
https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpcdist.trainers.lm import Recomputed
from hpcdist.trainers.lm.model import Block, Decoder

#: Dimensions of the mesh, the outermost first: the ranks of a tensor-parallel group are neighbours, on one node.
MESH_DIMENSIONS = ("replicate", "shard", "tensor")
#: Gathered weights of at most this size on a rank, in bytes, are kept from the forward pass to the backward pass: to
#: gather them again would take a tenth of the time of a step on CPUs, and the memory is small.
MAX_KEPT_BYTES = 256 << 20
aten = torch.ops.aten
#: Selective activation checkpointing keeps the results of these operations: computing them again costs the most.
SAVED_OPERATIONS = {
    aten.mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def parallelize(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    in_bf16: bool = False,
    recomputed: Recomputed = "none",
    is_compiled: bool = False,
) -> None:
    """Distribute a model over a mesh of MESH_DIMENSIONS, in place.

    Args:
        model: on the meta device; `to_empty` and `init_weights` follow.
        recomputed: see `lm.activation_checkpointing`.
        is_compiled: compile each layer.
        in_bf16: compute in bfloat16. Weights, sums of gradients and the state of the optimizer keep their type.
    """
    if mesh["tensor"].size() > 1:
        _split_layers(model, mesh["tensor"])
        model.tie()  # `parallelize_module` has replaced both tables, which unties them without a warning
    for block in model.model.layers:
        assert isinstance(block, Block)
        _change_forward(block, recomputed, is_compiled=is_compiled)
    _shard(model, mesh, in_bf16=in_bf16)


def data_index(mesh: DeviceMesh) -> tuple[int, int]:
    """Return which part of the windows of a step this rank computes, and the number of parts."""
    replica, shard, _ = mesh.get_coordinate() or (0, 0, 0)
    num_shards = mesh["shard"].size()
    return replica * num_shards + shard, mesh["replicate"].size() * num_shards


def _split_layers(model: Decoder, mesh: DeviceMesh) -> None:
    """Divide heads, MLPs and vocabulary among the ranks of `mesh`, and the activations between them by position."""
    by_position = Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_position),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=by_position, output_layouts=Replicate()),
        },
    )
    gather_for_attention = PrepareModuleInput(
        input_layouts=(by_position, None, None, None), desired_input_layouts=(Replicate(), None, None, None)
    )
    gather_for_mlp = PrepareModuleInput(input_layouts=(by_position,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": gather_for_attention,
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=by_position),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": gather_for_mlp,
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=by_position),
    }
    if model.config.qk_norm:
        # Of [B, T, heads, head_size], with the heads of this rank: the gradients are summed over all heads.
        plan["self_attn.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["self_attn.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    for block in model.model.layers:
        parallelize_module(block, mesh, plan)


def _change_forward(block: Block, recomputed: Recomputed, *, is_compiled: bool) -> None:
    """Replace a layer's forward function by one that recomputes activations, and is compiled, as configured.

    FSDP2 acts before and after the function. The names of the weights do not change.
    """
    forward: Callable[..., Tensor] = block.forward
    if recomputed != "none":
        options: dict[str, Any] = {}
        if recomputed == "selective":
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keeps)
        forward = functools.partial(checkpoint, forward, use_reentrant=False, **options)
    if is_compiled:
        forward = torch.compile(forward)
    if forward is not block.forward:
        setattr(block, "forward", forward)  # noqa: B010 (mypy refuses the assignment to a method)


def _keeps(_context: object, operation: object, *_args: Any, **_options: Any) -> CheckpointPolicy:
    if operation in SAVED_OPERATIONS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _shard(model: Decoder, mesh: DeviceMesh, *, in_bf16: bool) -> None:
    """Apply FSDP2 to each layer and to the rest: over `shard`, with copies over `replicate` (HSDP)."""
    data_mesh = mesh["shard"]
    if mesh["replicate"].size() > 1:
        data_mesh = mesh["replicate", "shard"]
    policy = MixedPrecisionPolicy()
    if in_bf16:
        # Tables of rotary positions, which are inputs, keep their precision.
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    # With one shard a rank has all weights anyway: freeing them after the forward pass would only copy them twice.
    frees_after_forward = mesh["shard"].size() > 1 and _gathered_bytes(model, in_bf16=in_bf16) > MAX_KEPT_BYTES
    for block in model.model.layers:
        fully_shard(block, mesh=data_mesh, mp_policy=policy, reshard_after_forward=frees_after_forward)
    fully_shard(model, mesh=data_mesh, mp_policy=policy)


def _gathered_bytes(model: Decoder, *, in_bf16: bool) -> int:
    """Return the size of all weights that a rank computes with, a part of them with tensor parallelism."""
    total = 0
    for weight in model.parameters():
        local: Tensor = weight
        if isinstance(weight, DTensor):
            local = weight.to_local()
        size = local.element_size()
        if in_bf16:
            size = torch.bfloat16.itemsize
        total += local.numel() * size
    return total


def exchange_replicas(model: Decoder, *, is_last: bool) -> None:
    """Let the next backward pass sum gradients over the replicas: once, in the last of the passes of a step.

    Each pass sums them over the shards, so that no rank holds the gradients of all weights.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_all_reduce(is_last)


def free_gathered(model: Decoder) -> None:
    """Free the weights that a forward pass without a backward pass has gathered.

    Until then they are in the place of the sharded ones, in `parameters()` too, where a checkpoint would find them.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def clip_gradients(model: Decoder, max_norm: float | None) -> Tensor:
    """Limit the norm of all gradients, and return the norm before, [] on the device of the gradients.

    torch's norm fails if weights are on several meshes. Here all are on one: the plan of tensor parallelism includes
    the norms.
    """
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()  # before the clipping: its arithmetic takes longer with a DTensor
    if max_norm is not None:
        nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm
