"""Windows of token files, and the order of an epoch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdist.data.windows import TokenWindows, feistel_permutation, permutation, token_type
from hpcdist.errors import DataError
from hpcdist.rank.micro_batches import BatchDivision


def write_tokens(path: Path, num_tokens: int, dtype: str = "uint16") -> Path:
    np.save(path, np.arange(num_tokens, dtype=dtype))
    return path


@settings(max_examples=40, deadline=None)
@given(num_items=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_the_network_is_a_bijection_of_any_size(num_items: int, seed: int, epoch: int) -> None:
    items = feistel_permutation(num_items, seed=seed, epoch=epoch)(np.arange(num_items))
    assert np.array_equal(np.sort(items), np.arange(num_items))


@pytest.mark.parametrize("num_items", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1_234_567, (1 << 21) + 1])
def test_a_large_epoch_has_each_window_once(num_items: int) -> None:
    items = permutation(num_items, seed=3, epoch=2)(np.arange(num_items))
    assert np.array_equal(np.bincount(items, minlength=num_items), np.ones(num_items))


@settings(max_examples=30, deadline=None)
@given(positions=st.lists(st.integers(0, 10**9 - 1), min_size=1, max_size=50, unique=True))
def test_positions_are_independent_of_each_other(positions: list[int]) -> None:
    """A resume reads any part of the order, and no two positions have the same window."""
    items_at = permutation(10**9, seed=1, epoch=5)
    items = items_at(np.array(positions))
    assert len(set(items.tolist())) == len(positions)
    assert min(items) >= 0
    assert max(items) < 10**9
    assert [int(items_at(np.array([position]))[0]) for position in positions] == items.tolist()


def test_the_order_of_an_epoch_never_changes() -> None:
    """A checkpoint of an earlier version continues with the windows that are left."""
    assert feistel_permutation(10**9, seed=7, epoch=3)(np.arange(4)).tolist() == [
        599104535,
        319544285,
        114307542,
        53020909,
    ]
    assert permutation(10, seed=7, epoch=3)(np.arange(10)).tolist() == [7, 4, 6, 1, 3, 5, 9, 8, 2, 0]


def test_small_orders_are_those_of_elastic_runs() -> None:
    division = BatchDivision(num_samples=100, global_batch_size=10, num_micro_batches=2, seed=5, rank=0, world_size=1)
    order = permutation(100, seed=5, epoch=2)(np.arange(100))
    assert torch.equal(torch.from_numpy(order), division.order(2))


def test_orders_look_random() -> None:
    num_items = 1_000_003
    items = feistel_permutation(num_items, seed=0, epoch=0)(np.arange(num_items))
    following = feistel_permutation(num_items, seed=0, epoch=1)(np.arange(num_items))
    other_seed = feistel_permutation(num_items, seed=1, epoch=0)(np.arange(num_items))
    largest = 5 / num_items**0.5  # five standard deviations of the correlation of independent numbers
    assert abs(np.corrcoef(items[1:], items[:-1])[0, 1]) < largest
    assert abs(np.corrcoef(items, np.arange(num_items))[0, 1]) < largest
    assert abs(np.corrcoef(items, following)[0, 1]) < largest
    assert abs(np.corrcoef(items, other_seed)[0, 1]) < largest
    # Positions and items in 64 x 64 bins: chi-square with 63 x 63 degrees of freedom, standard deviation 89.
    counts, _, _ = np.histogram2d(np.arange(num_items), items, bins=64)
    expected = num_items / 64**2
    assert abs(((counts - expected) ** 2 / expected).sum() - 63**2) < 5 * 89


def test_windows_overlap_by_one_token(tmp_path: Path) -> None:
    windows = TokenWindows(write_tokens(tmp_path / "t.npy", 14), 4, seed=0)
    assert (windows.num_windows, windows.num_tokens) == (3, 14)
    assert windows.read_items(np.array([0, 2])).tolist() == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12]]


@pytest.mark.parametrize(("num_tokens", "num_windows"), [(0, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_incomplete_windows_are_left_out(num_tokens: int, num_windows: int, tmp_path: Path) -> None:
    assert TokenWindows(write_tokens(tmp_path / "t.npy", num_tokens), 4, seed=0).num_windows == num_windows


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_an_epoch_reads_each_window_once(dtype: str, tmp_path: Path) -> None:
    windows = TokenWindows(write_tokens(tmp_path / "t.npy", 1001, dtype), 10, seed=4)
    first = windows.read(0, np.arange(100))
    second = windows.read(1, np.arange(100))
    assert first.dtype == torch.int64
    assert first.shape == (100, 11)
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(0, 1000, 10))
    assert not torch.equal(first, second)
    assert torch.equal(windows.read(1, np.arange(30, 40)), second[30:40])


def test_the_type_of_a_file_follows_the_vocabulary() -> None:
    assert token_type(65_536) == np.uint16
    assert token_type(65_537) == np.uint32
    with pytest.raises(ValueError, match="a vocabulary of 4294967297 tokens is larger than 4294967295"):
        token_type(2**32 + 1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.npy"
    with pytest.raises(DataError, match=r"t\.npy cannot be read as a file of tokens"):
        TokenWindows(path, 4, seed=0)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"t\.npy cannot be read as a file of tokens"):
        TokenWindows(path, 4, seed=0)
    write_tokens(path, 100)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"t\.npy cannot be read as a file of tokens"):
        TokenWindows(path, 4, seed=0)
    np.save(path, np.zeros((2, 3)))
    with pytest.raises(DataError, match=r"is not a file of tokens: it has float64 \[2, 3\], expected uint16 or uint32"):
        TokenWindows(path, 4, seed=0)
    np.save(path, np.array([{}], dtype=object))
    with pytest.raises(DataError, match="cannot be read as a file of tokens"):
        TokenWindows(path, 4, seed=0)
