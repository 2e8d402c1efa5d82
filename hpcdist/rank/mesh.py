"""The device mesh of a trainer: all ranks in named dimensions, such as `replicate`, `shard` and `tensor`."""

import math
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpcdist.errors import TrainerError, shown

#: Size of a dimension that gets all remaining ranks.
REST = -1


def mesh_sizes(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the sizes of all dimensions, with the number of remaining ranks in place of -1.

    Raises TrainerError unless the product of the sizes is the number of ranks.
    """
    if not sizes:
        raise TrainerError("ctx.mesh: pass the sizes of the dimensions by their names, such as ctx.mesh(shard=-1)")
    for name, size in sizes.items():
        if type(size) is not int or (size < 1 and size != REST):
            raise TrainerError(f"ctx.mesh: {name}={shown(size)}: expected a number of ranks, or -1 for all others")
    rests = [name for name, size in sizes.items() if size == REST]
    given = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if len(rests) > 1:
        raise TrainerError(f"ctx.mesh: {given}: only one dimension can have -1, which means all other ranks")
    product = math.prod(size for size in sizes.values() if size != REST)
    if rests and world_size % product:
        raise TrainerError(
            f"ctx.mesh: {given}: the other sizes have the product {product}, which does not divide the number of ranks,"
            f" {world_size}: set a size that does"
        )
    if not rests and product != world_size:
        raise TrainerError(
            f"ctx.mesh: {given}: the product of the sizes is {product}, but the run has {world_size} ranks: set a size"
            " to -1, which means all other ranks"
        )
    rest = world_size // product
    return {name: rest if size == REST else size for name, size in sizes.items()}


def make_mesh(sizes: Mapping[str, int], world_size: int, device: torch.device, timeout: timedelta) -> DeviceMesh:
    """Return the mesh of all ranks. Its groups have a time limit. Call it on every rank."""
    complete = mesh_sizes(sizes, world_size)
    mesh = init_device_mesh(device.type, tuple(complete.values()), mesh_dim_names=tuple(complete))
    for group in mesh.get_all_groups():
        group.set_timeout(timeout)
    return mesh
