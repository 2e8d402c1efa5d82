"""Copies of a state in reused host buffers."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum

import numpy as np
import pytest
import torch
from torch import nn

from hpcdist.checkpoint.saver import HostBuffers
from hpcdist.errors import CheckpointError


def test_copy_has_equal_values_and_plain_containers() -> None:
    class Kind(IntEnum):
        A = 3

    state = {
        "tensors": [
            torch.arange(3),
            torch.tensor(1.5),
            torch.zeros(0, 4),
            torch.ones(2, dtype=torch.bfloat16),
        ],
        "tuple": (1, 2.5, "x", None, True, b"y"),
        "ordered": OrderedDict(a=1),
        "milestones": Counter([30, 30, 60]),
        "default": defaultdict(list, a=[1]),
        "set": {1, 2},
        "numbers": (np.float64(0.5), Kind.A),
        ("beta", 1): torch.Size([2]),
    }
    host, events = HostBuffers().copy(state)

    assert events == []
    for copied, original in zip(host["tensors"], state["tensors"], strict=True):
        assert torch.equal(copied, original)
        assert copied.dtype == original.dtype
        assert original.numel() == 0 or copied.data_ptr() != original.data_ptr()
    assert host["tuple"] == state["tuple"]
    assert [type(host[key]) for key in ("ordered", "milestones", "default", "set")] == [
        OrderedDict,
        Counter,
        dict,
        set,
    ]
    assert host["milestones"] == state["milestones"]
    assert [type(number) for number in host["numbers"]] == [float, int]
    assert host["numbers"] == (0.5, 3)
    assert host[("beta", 1)] == torch.Size([2])


def test_later_changes_of_containers_are_not_in_the_copy() -> None:
    state = {"milestones": [1, 2], "inner": {"a": 1}}
    host, _ = HostBuffers().copy(state)
    state["milestones"].append(3)
    state["inner"]["a"] = 2
    assert host == {"milestones": [1, 2], "inner": {"a": 1}}


def test_buffers_are_reused_except_for_changed_tensors() -> None:
    buffers = HostBuffers()
    first, _ = buffers.copy({"a": torch.zeros(100), "b": torch.zeros(7), "gone": torch.zeros(3)})
    pointers = {key: tensor.data_ptr() for key, tensor in first.items()}
    second, _ = buffers.copy({"b": torch.ones(8), "a": torch.ones(100), "new": torch.ones(2, dtype=torch.int8)})

    assert second["a"].data_ptr() == pointers["a"]
    assert second["b"].shape == (8,)
    assert all(bool((tensor == 1).all()) for tensor in second.values())
    assert len({tensor.data_ptr() for tensor in second.values()}) == 3
    assert set(buffers._buffers) == {("a",), ("b",), ("new",)}


def test_tensor_with_other_dtype_or_strides_gets_a_new_buffer() -> None:
    buffers = HostBuffers()
    square = torch.randn(4, 4)
    buffers.copy({"w": square})
    for other in (square.double(), square.t(), square.to(torch.int32)):
        host, _ = buffers.copy({"w": other})
        assert host["w"].dtype == other.dtype
        assert host["w"].stride() == other.stride()
        assert torch.equal(host["w"], other)


def test_buffers_of_removed_tensors_are_freed() -> None:
    buffers = HostBuffers()
    buffers.copy({"a": torch.zeros(2), "gone": torch.zeros(2)})
    buffers.copy({"a": torch.zeros(2)})
    assert set(buffers._buffers) == {("a",)}


def test_unchanged_state_allocates_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = HostBuffers()
    state = {"a": torch.zeros(4), "b": [torch.zeros(2, 2)]}
    buffers.copy(state)
    monkeypatch.setattr("hpcdist.checkpoint.saver._allocate", pytest.fail)
    buffers.copy(state)


def test_buffers_of_any_sizes_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdist.checkpoint.saver._SLAB_BYTES", 1000)
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
    state = {
        f"{dtype} {size}": torch.randint(0, 2, (size,), generator=generator).to(dtype)
        for dtype in dtypes
        for size in (1, 3, 17, 65, 300)
    }
    host, _ = HostBuffers().copy(state)
    assert all(torch.equal(host[key], tensor) for key, tensor in state.items())
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in host.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_tied_tensors_share_a_buffer_and_views_are_copied_without_their_storage() -> None:
    embedding = torch.randn(10, 4)
    big = torch.randn(1000, 1000)
    state = {
        "tied": [embedding, nn.Parameter(embedding).detach(), embedding[:]],
        "column": big[:, 3],
        "expanded": torch.ones(3, 1).expand(3, 50),
    }
    host, _ = HostBuffers().copy(state)
    assert len({tensor.data_ptr() for tensor in host["tied"]}) == 1
    assert torch.equal(host["column"], big[:, 3])
    assert host["column"].untyped_storage().nbytes() == 4000
    assert torch.equal(host["expanded"], state["expanded"])


def test_memory_format_is_kept_and_gradients_are_not_required() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    host, _ = HostBuffers().copy({"w": weight})
    assert host["w"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(host["w"], weight)
    assert not host["w"].requires_grad


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"trainer": {"best": np.zeros(2)}},
            r"trainer\['best'\] is a numpy.ndarray, which a checkpoint cannot contain",
        ),
        ({"trainer": [0, lambda: 0]}, r"trainer\[1\] is a builtins.function"),
        ({"trainer": {"s": {(1, 2)}}}, r"trainer\['s'\] is a builtins.set"),
        (
            {"trainer": {frozenset(): 1}},
            r"trainer has the key frozenset\(\), but keys in a checkpoint are strings or numbers",
        ),
        (
            {"model": {"w": torch.eye(2).to_sparse()}},
            r"model\['w'\] is a Tensor of layout torch.sparse_coo on cpu",
        ),
        ({"model": {"w": torch.empty(2, device="meta")}}, r"model\['w'\] is a Tensor .* on meta"),
        ({"model": {"w": nn.UninitializedParameter()}}, r"model\['w'\] is a UninitializedParameter"),
    ],
)
def test_value_that_could_not_be_loaded_is_refused_with_its_path(state: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        HostBuffers().copy(state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_copy_is_pinned_and_queued_without_waiting() -> None:
    buffers = HostBuffers()
    state = {
        "w": torch.randn(1 << 22, device="cuda"),
        "step": torch.tensor(1.0, device="cuda"),
        "cpu": torch.ones(3),
    }
    buffers.copy(state)
    expected = state["w"].cpu()
    torch.cuda.set_sync_debug_mode("error")
    try:
        host, events = buffers.copy(state)
        state["w"].zero_()  # queued behind the copy
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(events) == 1
    events[0].synchronize()
    assert torch.equal(host["w"], expected)
    assert host["step"].item() == 1.0
    assert host["w"].is_pinned()
    assert not host["cpu"].is_pinned()
