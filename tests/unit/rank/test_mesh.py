"""Sizes of a device mesh."""

from typing import Any

import pytest

from hpcdist.errors import TrainerError
from hpcdist.rank.mesh import mesh_sizes


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ({"shard": -1}, 1, {"shard": 1}),
        ({"replicate": 2, "shard": -1}, 8, {"replicate": 2, "shard": 4}),
        ({"replicate": -1, "shard": 2, "tensor": 4}, 8, {"replicate": 1, "shard": 2, "tensor": 4}),
        ({"shard": 3, "tensor": 2}, 6, {"shard": 3, "tensor": 2}),
    ],
)
def test_rest_of_the_ranks_fills_one_dimension(sizes: Any, world_size: int, expected: dict[str, int]) -> None:
    assert list(mesh_sizes(sizes, world_size).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, r"pass the sizes of the dimensions by their names, such as ctx\.mesh\(shard=-1\)$"),
        ({"shard": 0}, r"shard=0: expected a number of ranks, or -1 for all others$"),
        ({"shard": -2}, r"shard=-2: expected a number of ranks"),
        ({"shard": 2.0}, r"shard=2\.0: expected a number of ranks"),
        ({"shard": -1, "tensor": -1}, r"shard=-1, tensor=-1: only one dimension can have -1, which means all other"),
        ({"shard": -1, "tensor": 3}, r"shard=-1, tensor=3: .* product 3, which does not divide the number of ranks, 4"),
        ({"shard": 2, "tensor": 3}, r"shard=2, tensor=3: the product of the sizes is 6, but the run has 4 ranks: set"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(sizes: Any, message: str) -> None:
    with pytest.raises(TrainerError, match=rf"^ctx\.mesh: {message}"):
        mesh_sizes(sizes, 4)
