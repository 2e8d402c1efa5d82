"""The trainer `lm` on meshes of ranks against one plain process: the same weights, windows and optimizer."""

from dataclasses import dataclass, replace

import pytest
import torch
from spawn import Rank, spawn_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hpcdist.config.training_schema import OptimConfig
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.trainers.lm import Recomputed, parallel
from hpcdist.trainers.lm.model import Decoder
from hpcdist.trainers.lm.parallel import MESH_DIMENSIONS, data_index, parallelize
from hpcdist.trainers.lm.sizes import LmModelConfig
from hpcdist.trainers.lm.train import Pass, next_token_loss, parameter_groups, passes_of, train_step

SIZES = LmModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48)
VARIANTS = {
    "llama": SIZES,
    "tied": replace(SIZES, tie_embeddings=True),
    "qwen": replace(SIZES, num_kv_heads=4, qkv_bias=True, qk_norm=True),
}
#: The limit of the trainer, which these small models do not reach.
MAX_KEPT_BYTES = parallel.MAX_KEPT_BYTES
#: No multiple of the ranks that share it.
VOCAB_SIZE = 67
#: Windows of a step, no multiple of all numbers of ranks, and their length.
BATCH_SIZE, LENGTH = 8, 16
#: Largest difference of a loss from that of one plain process, by the type of the computations.
TOLERANCE = {"float64": 1e-11, "float32": 2e-4, "bf16": 2e-2}
OPTIM = OptimConfig(name="adamw", lr=3e-3, weight_decay=0.1)
#: Sizes of `replicate`, `shard` and `tensor`.
MESHES = {
    1: [(1, 1, 1)],
    2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)],
    3: [(1, 3, 1)],
    4: [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)],
}


@dataclass(frozen=True)
class Case:
    """One training of a few steps."""

    variant: str = "llama"
    dtype: str = "float64"
    num_steps: int = 20
    most: int | None = None  #: windows of a pass
    recomputed: Recomputed = "none"
    max_kept_bytes: int = 0  #: gathered weights that a forward pass may keep: none, as in a large model
    max_norm: float | None = 1.0
    optim: OptimConfig = OPTIM


def new_model(case: Case) -> Decoder:
    with torch.device("meta"):
        model = Decoder(VARIANTS[case.variant], VOCAB_SIZE)
    if case.dtype == "float64":
        model.double()
    return model


def batch_of(step: int) -> Tensor:
    # Each batch comes again, so that the loss falls.
    return torch.randint(VOCAB_SIZE, (BATCH_SIZE, LENGTH + 1), generator=torch.Generator().manual_seed(step % 2))


def plain_losses(case: Case) -> list[float]:
    """Return the losses of a loop of torch's own functions with the whole batch."""
    model = new_model(case)
    model.to_empty(device="cpu")
    model.init_weights(0)
    optimizer = build_optimizer(parameter_groups(model, case.optim), case.optim)
    losses = []
    for step in range(case.num_steps):
        batch = batch_of(step)
        loss = next_token_loss(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        if case.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mesh_losses(here: Rank, sizes: tuple[int, int, int], case: Case) -> list[float]:
    """Return the losses of the trainer's own functions."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=MESH_DIMENSIONS)
    model = new_model(case)
    parallel.MAX_KEPT_BYTES = case.max_kept_bytes
    parallelize(model, mesh, in_bf16=case.dtype == "bf16", recomputed=case.recomputed)
    model.to_empty(device="cpu")
    model.init_weights(0)
    optimizer = build_optimizer(parameter_groups(model, case.optim), case.optim)
    meshes = {weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)}
    assert len(meshes) == 1, "torch clips gradients of one mesh only"
    index, num_parts = data_index(mesh)
    losses = []
    for step in range(case.num_steps):
        passes = []
        for own in passes_of(index, num_parts, range(BATCH_SIZE), case.most):
            windows = batch_of(step)[list(own or [0])]
            passes.append(Pass(windows, len(own), len(own) * num_parts / BATCH_SIZE))
        loss_sum, num_windows, _ = train_step(model, optimizer, passes, next_token_loss, case.max_norm)
        sums = torch.stack([loss_sum, torch.tensor(num_windows, dtype=torch.float64)])
        torch.distributed.all_reduce(sums)
        losses.append(float(sums[0] / sums[1]))
    return losses


def run_cases(here: Rank, cases: list[tuple[tuple[int, int, int], Case]]) -> list[list[float]]:
    return [mesh_losses(here, sizes, case) for sizes, case in cases]


def check(num_ranks: int, cases: list[tuple[tuple[int, int, int], Case]]) -> None:
    """Compare each case on its mesh with the plain loop. All ranks must agree on each loss."""
    by_rank = spawn_ranks(run_cases, num_ranks, cases=cases)
    assert all(losses == by_rank[0] for losses in by_rank)
    for (sizes, case), losses in zip(cases, by_rank[0], strict=True):
        plain = case
        if case.dtype == "bf16":
            plain = replace(case, dtype="float32")
        expected = plain_losses(plain)
        largest = max(abs(left - right) for left, right in zip(losses, expected, strict=True))
        assert largest <= TOLERANCE[case.dtype], (sizes, case, largest)
        assert expected[-1] < expected[0]


def test_ranks_of_a_batch_have_equal_numbers_of_passes() -> None:
    by_rank = [passes_of(index, 3, range(10, 18), 2) for index in range(3)]

    assert by_rank == [
        [range(10, 11), range(11, 12)],
        [range(12, 13), range(13, 15)],
        [range(15, 16), range(16, 18)],
    ]
    assert passes_of(1, 2, range(1), None) == [range(1)]
    assert passes_of(0, 2, range(1), None) == [range(0)]
    assert passes_of(0, 1, range(8), None) == [range(8)]


@pytest.mark.processes
def test_two_ranks_train_like_one_on_every_mesh() -> None:
    check(
        2,
        [
            ((1, 2, 1), Case(variant="tied", num_steps=3, most=3)),
            ((1, 2, 1), Case(variant="tied", num_steps=3, most=3, max_kept_bytes=MAX_KEPT_BYTES)),
            ((2, 1, 1), Case(num_steps=3, most=3, recomputed="selective")),
            ((1, 1, 2), Case(variant="qwen", num_steps=3, recomputed="full")),
            ((1, 1, 2), Case(variant="tied", num_steps=3, max_norm=None)),
            ((1, 2, 1), Case(num_steps=3, optim=OptimConfig(name="sgd", lr=0.1, weight_decay=0.1))),
        ],
    )


def gathers_of_a_step(here: Rank, max_kept_bytes: int, in_bf16: bool) -> int:
    """Return how often a step gathers a layer, or the rest of the weights."""
    parallel.MAX_KEPT_BYTES = max_kept_bytes
    mesh = init_device_mesh("cpu", (1, here.world_size, 1), mesh_dim_names=MESH_DIMENSIONS)
    model = new_model(Case(dtype="float32"))
    parallelize(model, mesh, in_bf16=in_bf16)
    model.to_empty(device="cpu")
    model.init_weights(0)
    batch = batch_of(0)
    with CommDebugMode() as collectives:
        next_token_loss(model(batch[:, :-1]), batch[:, 1:]).backward()
    return int(collectives.get_comm_counts()[torch.ops.c10d._allgather_base_])


@pytest.mark.processes
def test_small_model_is_gathered_once_in_a_step() -> None:
    num_bytes = 4 * SIZES.num_parameters(VOCAB_SIZE)
    kept = SIZES.num_layers + 1
    freed = 2 * SIZES.num_layers + 1  # the embedding, the first part, is kept in any case
    for max_kept_bytes, in_bf16, expected in (
        (num_bytes, False, kept),
        (num_bytes - 1, False, freed),
        (num_bytes // 2, True, kept),
        (num_bytes // 2 - 1, True, freed),
    ):
        by_rank = spawn_ranks(gathers_of_a_step, 2, max_kept_bytes=max_kept_bytes, in_bf16=in_bf16)
        assert by_rank == [expected, expected]


@pytest.mark.processes
def test_one_rank_trains_bit_equal_to_a_plain_loop() -> None:
    case = Case(dtype="float32", num_steps=3)
    ((losses,),) = spawn_ranks(run_cases, 1, cases=[((1, 1, 1), case)])
    assert losses == plain_losses(case)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", MESHES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_mesh_trains_like_one_process(num_ranks: int, dtype: str) -> None:
    cases = []
    for sizes in MESHES[num_ranks]:
        cases += [(sizes, Case(variant, dtype)) for variant in VARIANTS]
        cases += [
            (sizes, Case("llama", dtype, most=3, max_kept_bytes=MAX_KEPT_BYTES)),
            (sizes, Case("tied", dtype, recomputed="selective", most=1)),
        ]
    check(num_ranks, cases)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_trains_bit_equal_in_each_variant(variant: str) -> None:
    case = Case(variant, "float32")
    ((losses,),) = spawn_ranks(run_cases, 1, cases=[((1, 1, 1), case)])
    assert losses == plain_losses(case)
