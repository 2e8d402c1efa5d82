"""Readers of dataset files. Each raises DataError with the path of a file that it cannot read.

torchvision's and scikit-learn's readers are not used: their imports take 1.7 s and 1.9 s of CPU time in every rank,
reading MNIST takes 0.1 s, and torchvision reads no .gz files, which Debian's package has.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import pickle
import warnings
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpcdist.data.download import CIFAR10_MD5, digits_path
from hpcdist.errors import DataError

#: Limit of the number of dimensions; images have two to four.
_MAX_DIMS = 8
#: Limit of the unpacked size; the largest file, the training images of MNIST, has 47 MB.
MAX_BYTES = 64 << 20


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytearray:
    """Return the content of `path`, unpacked if its name ends in .gz, at most `max_bytes`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return bytearray(file.read(max_bytes))
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise DataError(f"{path} cannot be read ({error}): download it again or check its permissions") from error


def read_idx(path: Path) -> Tensor:
    """Return the array of an IDX file of unsigned bytes, plain or .gz, as a uint8 tensor.

    Format: two zero bytes, type (8 = unsigned byte), number of dimensions, each dimension as a big-endian
    uint32, then the values (http://yann.lecun.com/exdb/mnist/).
    """
    raw = read_bytes(path)
    num_dims = raw[3] if len(raw) >= 4 else 0
    offset = 4 + 4 * num_dims
    if raw[:3] != b"\x00\x00\x08" or not 0 < num_dims <= _MAX_DIMS or len(raw) < offset:
        raise DataError(f"{path} is not an IDX file of unsigned bytes: download it again")
    shape = [int.from_bytes(raw[begin : begin + 4], "big") for begin in range(4, offset, 4)]
    expected = offset + math.prod(shape)
    if len(raw) != expected or expected == offset:
        raise DataError(f"{path} is truncated or damaged: {expected} bytes expected, {len(raw)} found")
    return torch.frombuffer(raw, dtype=torch.uint8, offset=offset).reshape(shape)


def read_idx_pair(images_path: Path, labels_path: Path, *, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 [N, 1, H, W] and labels int64 [N] of an MNIST-like pair of IDX files."""
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"{images_path} of shape {list(images.shape)} and {labels_path} of shape {list(labels.shape)} "
            "do not match: expected [N, H, W] and [N]"
        )
    if int(labels.max()) >= num_classes:
        raise DataError(f"{labels_path} has label {int(labels.max())}, but there are {num_classes} classes")
    return images.unsqueeze(1), labels.long()


def read_cifar10_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Return images uint8 [N, 3, 32, 32] and labels int64 [N] of one file of CIFAR-10's Python version, a pickle."""
    raw = read_bytes(path)
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != CIFAR10_MD5[path.name]:
        raise DataError(f"{path} is truncated or damaged (its MD5 sum is not CIFAR-10's): download it again")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about dtypes that Python 2 has pickled
        # The checksum, taken of the same bytes, admits no other pickle.
        content = pickle.loads(raw, encoding="bytes")  # noqa: S301
    images = torch.from_numpy(np.ascontiguousarray(content[b"data"]))
    return images.reshape(-1, 3, 32, 32), torch.tensor(content[b"labels"])


def read_digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits: uint8 [1797, 1, 8, 8] with values 0 … 16, labels int64 [1797]."""
    path = digits_path()
    if not path.is_file():  # the path may differ in other versions of scikit-learn
        from sklearn.datasets import load_digits

        values, targets = load_digits(return_X_y=True)
        return torch.tensor(values).to(torch.uint8).reshape(-1, 1, 8, 8), torch.tensor(targets).long()
    try:
        table = torch.tensor([[int(v) for v in line.split(b",")] for line in read_bytes(path).split()])
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): reinstall scikit-learn") from error
    return table[:, :64].to(torch.uint8).reshape(-1, 1, 8, 8), table[:, 64].contiguous()
