"""A checkpoint with tensors in shards, loaded into plain objects of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcdist.checkpoint.in_place import StoredState
from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.store import save_file, shard_name


def in_one_shard(model: nn.Module, folder: Path) -> StoredState:
    """Return the stored state of a model whose parameters are in the shard of a rank."""
    parameters = {name: value.detach().clone() for name, value in model.named_parameters()}
    boxes: dict[Any, Box] = {name: Box((0,) * value.dim(), tuple(value.shape)) for name, value in parameters.items()}
    save_file(Shard(model=parameters, boxes=boxes).content(), folder / shard_name(0))
    stored = {name: None if name in boxes else value for name, value in model.state_dict().items()}
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
