from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hpcdist.data import images as data_images
from hpcdist.data.images import read_cifar10_batch, read_digits, read_idx, read_idx_pair
from hpcdist.errors import DataError


def idx_bytes(values: torch.Tensor) -> bytes:
    shape = list(values.shape)
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(values.flatten().tolist())


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_idx_returns_the_array_of_plain_and_packed_files(tmp_path: Path, suffix: str) -> None:
    values = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    path = tmp_path / f"x-idx3-ubyte{suffix}"
    path.write_bytes(gzip.compress(idx_bytes(values)) if suffix else idx_bytes(values))
    assert torch.equal(read_idx(path), values)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_error_of_a_truncated_idx_file_names_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x-idx3-ubyte{suffix}"
    whole = idx_bytes(torch.zeros(2, 3, 4, dtype=torch.uint8))
    path.write_bytes(gzip.compress(whole)[:-9] if suffix else whole[:-1])
    message = "cannot be read" if suffix else "is truncated or damaged: 40 bytes expected, 39 found"
    with pytest.raises(DataError, match=rf"{path} {message}"):
        read_idx(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00\x00", b"<html>404", b"\x00\x00\x0d\x01\x00\x00\x00\x01xxxx", b"\x00\x00\x08\x03\x00"],
)
def test_other_files_are_not_idx_files(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} is not an IDX file of unsigned bytes"):
        read_idx(path)


def test_idx_file_that_does_not_match_its_header_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">III", 2, 3, 4) + bytes(100))
    with pytest.raises(DataError, match="is truncated or damaged: 40 bytes expected, 116 found"):
        read_idx(path)
    path.write_bytes(bytes([0, 0, 8, 4]) + b"\xff" * 16)
    with pytest.raises(DataError, match=r"is truncated or damaged: 3402823\d+ bytes expected, 20 found"):
        read_idx(path)
    path.write_bytes(bytes([0, 0, 8, 255]) + b"\xff" * 1020)
    with pytest.raises(DataError, match="is not an IDX file"):
        read_idx(path)


def test_unpacked_size_of_a_gz_file_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress(bytes(100_000_000)))
    assert len(data_images.read_bytes(path, max_bytes=1000)) == 1000
    assert len(data_images.read_bytes(path)) == data_images.MAX_BYTES


def test_idx_file_without_values_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(idx_bytes(torch.zeros(0, dtype=torch.uint8)))
    with pytest.raises(DataError, match="is truncated or damaged"):
        read_idx(path)


def test_gz_file_in_another_format_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(b"<html>404")
    with pytest.raises(DataError, match=rf"{path} cannot be read"):
        read_idx(path)


def test_folder_in_place_of_a_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path} cannot be read \(.*Is a directory"):
        read_idx(tmp_path)


def write_pair(folder: Path, images: torch.Tensor, labels: torch.Tensor) -> tuple[Path, Path]:
    folder.joinpath("images").write_bytes(idx_bytes(images))
    folder.joinpath("labels").write_bytes(idx_bytes(labels))
    return folder / "images", folder / "labels"


def test_read_idx_pair_returns_images_and_labels(tmp_path: Path) -> None:
    images = torch.arange(18, dtype=torch.uint8).reshape(2, 3, 3)
    paths = write_pair(tmp_path, images, torch.tensor([9, 0], dtype=torch.uint8))
    read_images, labels = read_idx_pair(*paths, num_classes=10)
    assert torch.equal(read_images, images[:, None])
    assert labels.dtype == torch.int64
    assert labels.tolist() == [9, 0]


def test_idx_pair_of_different_lengths_raises_data_error(tmp_path: Path) -> None:
    paths = write_pair(tmp_path, torch.zeros(2, 3, 3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(DataError, match=r"images of shape \[2, 3, 3\] and .*labels of shape \[3\] do not match"):
        read_idx_pair(*paths, num_classes=10)


def test_idx_label_out_of_range_raises_data_error(tmp_path: Path) -> None:
    paths = write_pair(tmp_path, torch.zeros(1, 3, 3, dtype=torch.uint8), torch.tensor([10], dtype=torch.uint8))
    with pytest.raises(DataError, match="labels has label 10, but there are 10 classes"):
        read_idx_pair(*paths, num_classes=10)


@pytest.mark.skipif("HPCDIST_DATA_DIR" not in os.environ, reason="needs MNIST under HPCDIST_DATA_DIR")
@pytest.mark.parametrize("train", [True, False])
def test_mnist_equals_the_one_of_torchvision(train: bool) -> None:
    from torchvision.datasets import MNIST

    root = Path(os.environ["HPCDIST_DATA_DIR"])
    expected = MNIST(root, train=train, download=False)
    prefix = root / "MNIST" / "raw" / ("train" if train else "t10k")
    images, labels = read_idx_pair(
        Path(f"{prefix}-images-idx3-ubyte"), Path(f"{prefix}-labels-idx1-ubyte"), num_classes=10
    )
    assert torch.equal(images[:, 0], expected.data)
    assert torch.equal(labels, expected.targets)


def test_digits_equal_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    images, labels = read_digits()
    values, targets = load_digits(return_X_y=True)
    assert torch.equal(images.flatten(1), torch.tensor(values).to(torch.uint8))
    assert torch.equal(labels, torch.tensor(targets))


def test_digits_are_loaded_by_scikit_learn_if_their_file_has_moved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = read_digits()
    monkeypatch.setattr(data_images, "digits_path", lambda: tmp_path / "nowhere")
    images, labels = read_digits()
    assert torch.equal(images, expected[0])
    assert torch.equal(labels, expected[1])


def test_damaged_digits_raise_data_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "digits.csv"
    path.write_text("0,1,x\n")
    monkeypatch.setattr(data_images, "digits_path", lambda: path)
    with pytest.raises(DataError, match=rf"{path} is damaged .*: reinstall scikit-learn"):
        read_digits()


def test_digits_without_scikit_learn_raise_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="digits is part of scikit-learn, which is not installed"):
        read_digits()


def cifar_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> Path:
    path = tmp_path / "test_batch"
    path.write_bytes(content)
    monkeypatch.setattr(data_images, "CIFAR10_MD5", {"test_batch": hashlib.md5(content).hexdigest()})
    return path


@pytest.mark.parametrize("is_fortran", [False, True])
def test_read_cifar10_batch_returns_images_and_labels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_fortran: bool,
    cifar_pickle: Callable[[torch.Tensor, list[int]], bytes],
) -> None:
    rows = torch.randint(0, 256, (3, 3072), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    content = cifar_pickle(rows, [3, 9, 0])
    if is_fortran:  # the flag precedes the pixels, which are then in column order
        content = cifar_pickle(rows.t().reshape(3, 3072), [3, 9, 0]).replace(b"tb\x89T", b"tb\x88T")
    images, labels = read_cifar10_batch(cifar_file(tmp_path, monkeypatch, content))
    assert torch.equal(images, rows.reshape(3, 3, 32, 32))
    assert labels.tolist() == [3, 9, 0]


def test_cifar10_checksums_equal_those_of_torchvision() -> None:
    from torchvision.datasets import CIFAR10

    assert dict(data_images.CIFAR10_MD5) == dict(CIFAR10.train_list + CIFAR10.test_list)


def test_crafted_cifar10_file_is_not_unpickled(tmp_path: Path) -> None:
    class Crafted:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(Crafted()))
    with pytest.raises(DataError, match=rf"{path} is truncated or damaged \(its MD5 sum is not CIFAR-10's\)"):
        read_cifar10_batch(path)
    assert not (tmp_path / "executed").exists()
