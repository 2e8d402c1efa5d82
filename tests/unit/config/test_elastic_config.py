"""Keys of elastic runs: which combinations are mistakes, and their messages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpcdist.config.launch_schema import ClusterConfig, LaunchConfig
from hpcdist.config.schema import (
    Config,
    DataConfig,
    ElasticConfig,
    ModelConfig,
    OptimConfig,
    TrainerConfig,
    cross_check,
    division_problems,
    largest_world_size,
    new_run_problems,
)


def of(batch_size: int | None, **sections: Any) -> Config:
    return Config(data=DataConfig(global_batch_size=batch_size), **sections)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (of(None, elastic=ElasticConfig(exact=True)), "elastic.exact needs data.global_batch_size: set it"),
        (of(None, elastic=ElasticConfig(micro_batches=4)), "elastic.micro_batches needs data.global_batch_size"),
        (
            of(8, trainer=TrainerConfig(script=["train.py"])),
            "data.global_batch_size is not for scripts, which divide their batches themselves: remove it",
        ),
        (of(8, trainer=TrainerConfig(target="comm")), "data.global_batch_size is not for trainer comm: remove it"),
        (
            of(8, optim=OptimConfig(grad_accum_steps=2)),
            "optim.grad_accum_steps=2 and data.global_batch_size exclude each other: set elastic.micro_batches instead",
        ),
        (of(8, trainer=TrainerConfig(target="mine:train"), roles={"a": 1, "b": 1}), "roles and data.global_batch_size"),
        (of(8, model=ModelConfig(sync_batch_norm=True)), "set model.sync_batch_norm=false"),
        (
            of(8, elastic=ElasticConfig(micro_batches=2), launch=LaunchConfig(num_ranks=4)),
            "elastic.micro_batches=2 is less than the 4 ranks of the config: raise it, or use fewer ranks",
        ),
        (
            of(100, elastic=ElasticConfig(micro_batches=8), cluster=ClusterConfig(nodes=4, tasks_per_node=2)),
            "data.global_batch_size=100 cannot be divided into 8 equal micro-batches: use 96, or set",
        ),
        (
            of(None, elastic=ElasticConfig(min_ranks=3), launch=LaunchConfig(num_ranks=2)),
            "launch.num_ranks=2 is less than elastic.min_ranks=3: change one of them",
        ),
        (
            of(None, elastic=ElasticConfig(min_ranks=8), cluster=ClusterConfig(nodes=4, min_nodes=2, tasks_per_node=3)),
            "cluster.min_nodes=2 allows 6 ranks, fewer than elastic.min_ranks=8: change one of them",
        ),
    ],
)
def test_mistakes(config: Config, problem: str) -> None:
    (found,) = cross_check(config)
    assert problem in found


def test_elastic_run_of_ddp_and_of_an_own_trainer() -> None:
    elastic = ElasticConfig(micro_batches=8, exact=True, min_ranks=2)
    for target in ("ddp", "mine:train"):
        assert cross_check(of(64, elastic=elastic, trainer=TrainerConfig(target=target))) == []


def test_new_run_without_a_number_of_micro_batches_needs_a_global_batch_that_its_ranks_can_divide() -> None:
    three = of(256, launch=LaunchConfig(num_ranks=3))
    (problem,) = new_run_problems(three)
    assert problem.startswith(
        "data.global_batch_size=256 cannot be divided into 3 equal micro-batches: use 255, or set"
    )
    assert new_run_problems(of(256)) == []
    assert len(new_run_problems(of(256), num_ranks=3)) == 1
    assert new_run_problems(of(None, launch=LaunchConfig(num_ranks=3))) == []
    assert new_run_problems(dataclasses.replace(three, elastic=ElasticConfig(micro_batches=8))) == []


def test_run_without_a_number_of_micro_batches_may_continue_on_any_number_of_ranks() -> None:
    """Its checkpoint has the number of the first start, which 256 samples need not have with 3 ranks."""
    assert cross_check(of(256, launch=LaunchConfig(num_ranks=3))) == []


def test_numbers_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"^min_ranks must be >= 1, got 0\nmicro_batches must be >= 1, got -1$"):
        ElasticConfig(min_ranks=0, micro_batches=-1)
    with pytest.raises(ValueError, match="global_batch_size must be >= 1, got 0"):
        DataConfig(global_batch_size=0)


def test_largest_world_size_is_that_of_any_machine() -> None:
    assert largest_world_size(Config()) == 1
    assert largest_world_size(Config(launch=LaunchConfig(num_ranks=6))) == 6
    cluster = ClusterConfig(nodes=4, min_nodes=2, tasks_per_node=2)
    assert largest_world_size(Config(launch=LaunchConfig(num_ranks=6), cluster=cluster)) == 8


def test_suggested_batch_size_can_be_divided() -> None:
    assert division_problems(64, 8) == []
    for size, suggestion in ((1, 3), (4, 3), (5, 6)):
        assert f"use {suggestion}," in division_problems(size, 3)[0]
