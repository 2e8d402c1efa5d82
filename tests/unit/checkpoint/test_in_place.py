"""A checkpoint with tensors in shards, loaded into plain objects of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcdist.checkpoint.in_place import StoredState
from hpcdist.checkpoint.initial_weights import fitted, load_into, wanted_shapes
from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard, load_weights
from hpcdist.checkpoint.store import CheckpointStore, Snapshot, load_file, save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.errors import CheckpointError, TrainerError
from hpcdist.run.weight_files import WeightOrigin


def in_one_shard(model: nn.Module, folder: Path) -> StoredState:
    """Return the stored state of a model whose parameters are in the shard of a rank."""
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    boxes: dict[Any, Box] = {name: Box((0,) * value.dim(), tuple(value.shape)) for name, value in parameters.items()}
    save_file(Shard(model=parameters, boxes=boxes).content(), folder / shard_name(0))
    stored = {name: None if name in boxes else value for name, value in model.state_dict().items()}
    save_file(stored, folder / "model.pt")
    sharded: dict[Any, Any] = {name: [list(value.shape), value.dtype] for name, value in parameters.items()}
    return StoredState(stored, {}, sharded, [folder / shard_name(0)])


def test_restore_takes_the_state_of_a_model_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each tensor: that would be quadratic."""
    saved, model = (nn.Sequential(*(nn.Linear(2, 2) for _ in range(20))) for _ in range(2))
    stored = in_one_shard(saved, tmp_path)
    num_calls = 0
    state_dict = nn.Sequential.state_dict

    def counted(self: nn.Module, *args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return state_dict(self, *args, **options)

    monkeypatch.setattr(nn.Sequential, "state_dict", counted)
    stored.load(model, {})
    assert num_calls < 10
    assert all(torch.equal(value, saved.state_dict()[name]) for name, value in model.state_dict().items())


class WithExtraState(nn.Linear):
    """Has extra state of a type that is no tensor, or that is one."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 3)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def assert_extra_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert bool((found == expected).all()) if isinstance(found, torch.Tensor) else found == expected


@pytest.mark.parametrize("extra", [None, {"scale": 2.0}, torch.arange(3)], ids=["None", "dict", "tensor"])
def test_extra_state_of_modules_is_restored_and_left_out(tmp_path: Path, extra: Any) -> None:
    saved, model = (nn.Sequential(WithExtraState(each)) for each in (extra, "none yet"))
    in_one_shard(saved, tmp_path).load(model, {})
    assert_extra_equal(model[0].extra, extra)
    assert torch.equal(model.state_dict()["0.weight"], saved.state_dict()["0.weight"])
    weights = StoredWeights(load_file(tmp_path / "model.pt"), [tmp_path / shard_name(0)])
    assert set(weights) - {"0._extra_state"} == {"0.weight", "0.bias"}
    assert ("0._extra_state" in weights) == isinstance(extra, torch.Tensor)
    if not isinstance(extra, torch.Tensor):
        other = nn.Sequential(WithExtraState(extra))
        load_into(other, fitted(weights, wanted_shapes(other), [], WeightOrigin(source="run", found="run")))
        assert torch.equal(other.state_dict()["0.weight"], saved.state_dict()["0.weight"])


def test_weights_of_a_folder_have_the_extra_state(tmp_path: Path) -> None:
    saved = WithExtraState({"scale": 2.0})
    folder = CheckpointStore(tmp_path).add(Snapshot(step=1, model=saved.state_dict(), trainer={}, rank_states=[]))
    saved.extra = None
    saved.load_state_dict(load_weights(folder))
    assert saved.extra == {"scale": 2.0}


def test_plain_model_that_does_not_fit_is_named(tmp_path: Path) -> None:
    stored = StoredState(nn.Linear(2, 3).state_dict(), {}, {}, [])
    with pytest.raises(
        CheckpointError, match=r"^weight has the shape \[4, 2\], but \[3, 2\] in the checkpoint: load it"
    ):
        stored.load(nn.Linear(2, 4), {})
    with pytest.raises(CheckpointError, match=r"^model has 0.weight, 0.bias, which the checkpoint lacks: load it into"):
        stored.load(nn.Sequential(nn.Linear(2, 3)), {})


@pytest.mark.parametrize("is_sharded", [True, False])
def test_checkpoint_cannot_be_restored_without_memory(tmp_path: Path, is_sharded: bool) -> None:
    """The copy to a model on the device meta has no effect."""
    saved = nn.Linear(2, 3)
    stored = in_one_shard(saved, tmp_path) if is_sharded else StoredState(saved.state_dict(), {}, {}, [])
    message = r"^restore of the checkpoint: weight is on the device meta, .*: call to_empty\(device=ctx.device\) on the"
    with pytest.raises(TrainerError, match=message):
        stored.load(nn.Linear(2, 3, device="meta"), {})


def test_tensor_without_values_may_be_in_no_shard(tmp_path: Path) -> None:
    empty: dict[Any, Any] = {"weight": [[0, 3], torch.float32]}
    model = nn.Embedding(0, 3)
    stored = StoredState({"weight": None}, {}, empty, [])
    stored.load(model, {})
    assert stored.whole_model()["weight"].shape == (0, 3)
