"""Readers of dataset files. Each raises DataError with the path of a file that it cannot read.

torchvision's and scikit-learn's readers are not used: their imports take 0.9 s and 0.7 s in every rank, and
torchvision's neither read .gz files, nor limit the unpacked size, nor name the damaged file.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import math
import pickle
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist.errors import DataError

#: Limit of the number of dimensions; images have two to four.
_MAX_DIMS = 8
#: Limit of the unpacked size; the largest file of CIFAR-10 and scikit-learn has 31 MB.
MAX_BYTES = 64 << 20


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytearray:
    """Return the content of `path`, unpacked if its name ends in .gz, at most `max_bytes`."""
    return _read(path, lambda file: file.read(max_bytes))


def _read(path: Path, read: Callable[[io.BufferedIOBase], bytes]) -> bytearray:
    """Return the result of `read` for the file, unpacked if its name ends in .gz."""
    try:
        # A file may unpack to a thousand times its size: `read` limits the unpacked size.
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return bytearray(read(file))
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise DataError(f"{path} cannot be read ({error}): download it again or check its permissions") from error


def read_idx(path: Path) -> Tensor:
    """Return the array of an IDX file of unsigned bytes, plain or .gz, as a uint8 tensor.

    Format: two zero bytes, type (8 = unsigned byte), number of dimensions, each dimension as a big-endian
    uint32, then the values (http://yann.lecun.com/exdb/mnist/).
    """
    head = _read(path, lambda file: file.read(4 + 4 * _MAX_DIMS))
    num_dims = head[3] if len(head) >= 4 else 0
    offset = 4 + 4 * num_dims
    if bytes(head[:3]) != b"\x00\x00\x08" or not 0 < num_dims <= _MAX_DIMS or len(head) < offset:
        raise DataError(f"{path} is not an IDX file of unsigned bytes: download it again")
    shape = [int.from_bytes(head[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_dims)]
    expected = offset + math.prod(shape)
    # Checked before the allocation: deflate compresses at most 1,032 bytes into one.
    possible = path.stat().st_size * (1032 if path.suffix == ".gz" else 1)
    raw = read_bytes(path, max_bytes=expected + 1) if expected <= possible else bytearray()
    if len(raw) != expected or expected == offset:
        found = (
            f"{len(raw)}{' or more' * (len(raw) > expected)}"
            if raw
            else f"{'at most ' * (path.suffix == '.gz')}{possible}"
        )
        raise DataError(f"{path} is truncated or damaged: {expected} bytes expected, {found} found")
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


CIFAR10_MD5: Mapping[str, str] = {  # as in torchvision.datasets.CIFAR10
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}


def read_cifar10_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Return images uint8 [N, 3, 32, 32] and labels int64 [N] of one file of CIFAR-10's Python version.

    The file is a pickle; _CifarUnpickler loads no class or function that could run code.
    """
    raw = read_bytes(path)
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != CIFAR10_MD5[path.name]:
        raise DataError(f"{path} is truncated or damaged (its MD5 sum is not CIFAR-10's): download it again")
    content = _CifarUnpickler(io.BytesIO(raw), encoding="bytes").load()
    array, labels = content[b"data"], content[b"labels"]
    pixels = torch.frombuffer(bytearray(array.raw), dtype=torch.uint8)
    rows = pixels.reshape(array.shape[::-1]).t() if array.is_fortran else pixels.reshape(array.shape)
    return rows.reshape(-1, 3, 32, 32).contiguous(), torch.tensor(labels)


class _PickledArray:
    """Replaces a NumPy array in CIFAR's pickles."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, _, self.is_fortran, self.raw = state


class _PickledDtype:
    def __init__(self, *args: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


class _CifarUnpickler(pickle.Unpickler):
    """Accepts only the three names in CIFAR's files, so that a crafted file fails.

    It does not use NumPy, which warns about dtypes that Python 2 has pickled.
    """

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("numpy.core.multiarray", "_reconstruct"): lambda *args: _PickledArray(),
            ("numpy", "ndarray"): _PickledArray,
            ("numpy", "dtype"): _PickledDtype,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a CIFAR-10 file")
        return known[module, name]


def digits_path() -> Path:
    """Return the path of scikit-learn's digits without importing scikit-learn."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits is part of scikit-learn, which is not installed: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


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
