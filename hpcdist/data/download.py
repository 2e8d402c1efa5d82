"""Find a dataset on disk, or download it with torchvision.

torchvision downloads in place and without a lock. Here one process at a time downloads into a temporary folder, so
that no rank reads a partial dataset. Finding a dataset works without torch, as on a login node.
"""

import http.client
import importlib.util
import logging
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from hpcdist.config.training_schema import DataConfig
from hpcdist.errors import DataError
from hpcdist.host.locks import long_lock

log = logging.getLogger(__name__)

LOCK_NAME = ".hpcdist-download.lock"
TEMP_PREFIX = ".hpcdist-download-"
SOCKET_TIMEOUT_S = 30.0  # urllib has no default: with a firewall that drops packets it would hang
#: Interval of the heartbeats during a download.
_ALIVE_S = 1.0

IDX_FILES = {  # split -> images, labels; .gz files are accepted as well
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
CIFAR10_MD5 = {  # as in torchvision.datasets.CIFAR10
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
# Below data.root, as in torchvision.
FOLDERS = {
    "mnist": "MNIST/raw",
    "fashion_mnist": "FashionMNIST/raw",
    "cifar10": "cifar-10-batches-py",
    "image_folder": "train",
}

_FIX = "put it there or point data.root (or HPCDIST_DATA_DIR) at it"


def idx_file(folder: Path, name: str) -> Path | None:
    """Return the path of the IDX file `name` in `folder`, plain or .gz, or None."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def find(name: str, root: Path) -> Path | None:
    """Return the folder of the dataset, or None unless it has all files."""
    folder = root / FOLDERS[name]
    if name == "image_folder":
        is_complete = folder.is_dir()
    elif name == "cifar10":
        is_complete = all((folder / file).is_file() for file in CIFAR10_MD5)
    else:
        is_complete = all(idx_file(folder, file) for files in IDX_FILES.values() for file in files)
    if not is_complete:
        return None
    return folder


def find_or_raise(name: str, root: Path) -> Path:
    """Return the folder of the dataset. Raises DataError unless it has all files."""
    folder = find(name, root)
    if folder is None:
        raise DataError(f"{_not_found(name, root)}: {_FIX}")
    return folder


def digits_path() -> Path:
    """Return the path of scikit-learn's digits without importing scikit-learn."""
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits is part of scikit-learn, which is not installed: pip install scikit-learn")
    return Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"


def missing(data: DataConfig) -> str:
    """Return a message if the dataset is not on disk, else an empty string."""
    if data.name not in FOLDERS:  # it needs no files below data.root
        return ""
    root = Path(data.root).expanduser()
    if find(data.name, root):
        return ""
    return _not_found(data.name, root)


def _not_found(name: str, root: Path) -> str:
    return f"{name} was not found in {root} ({FOLDERS[name]} is missing or incomplete)"


def prepare(data: DataConfig, alive: Callable[[], None] = lambda: None) -> None:
    """Download the dataset if it is not on disk.

    Call it on one rank of each node while the others wait. Concurrent processes take turns. `alive` is called every
    second of a download, or of a wait for that of another process.
    Raises DataError if the dataset is missing and cannot be downloaded.
    """
    if data.name == "synthetic":
        return
    if data.name == "digits":
        digits_path()
        return
    root = Path(data.root).expanduser()
    if data.name == "image_folder":
        find_or_raise(data.name, root)  # the user's own images cannot be downloaded
        return
    if find(data.name, root):
        return
    try:
        root.mkdir(parents=True, exist_ok=True)
        waiting = f"waiting for another process that downloads into {root}"
        # `shared`: other users of the group may use the lock's file, too; the lock is exclusive.
        with long_lock(root / LOCK_NAME, waiting=waiting, shared=True, alive=alive):
            if not find(data.name, root):  # another process may have downloaded it meanwhile
                _download(data.name, root, alive)
    # torchvision raises RuntimeError if no mirror answers or a checksum is wrong. EOFError and zlib.error come from an
    # incomplete or damaged .gz file, HTTPException from a broken answer of the server.
    except (OSError, RuntimeError, EOFError, zlib.error, http.client.HTTPException) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{_not_found(data.name, root)} and could not be downloaded ({reason}): {_FIX}") from error


def _download(name: str, root: Path, alive: Callable[[], None]) -> None:
    """Download into a temporary folder, then move each file to its place. The caller holds the lock."""
    for stale in root.glob(f"{TEMP_PREFIX}*/"):  # of processes that were killed: the lock excludes running ones
        shutil.rmtree(stale, ignore_errors=True)  # perhaps another user's
    log.info("downloading %s into %s", name, root)
    target = root / FOLDERS[name]
    with tempfile.TemporaryDirectory(prefix=TEMP_PREFIX, dir=root) as temp:
        # torchvision reports no progress. The time limit of its reads from the network ends a download that hangs.
        with ThreadPoolExecutor(1, thread_name_prefix="download") as pool:
            fetched = pool.submit(_fetch, name, Path(temp))
            while not wait([fetched], _ALIVE_S).done:
                alive()
        fetched.result()
        target.mkdir(parents=True, exist_ok=True)
        for file in sorted((Path(temp) / FOLDERS[name]).iterdir()):
            if file.suffix != ".gz":  # torchvision also keeps the compressed file, which is not needed
                os.replace(file, target / file.name)


def _fetch(name: str, folder: Path) -> None:
    """Download with torchvision, which knows the mirrors and checksums."""
    from torchvision import datasets

    classes = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}
    dataset = getattr(datasets, classes[name])
    previous_timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(SOCKET_TIMEOUT_S)
    try:
        dataset(folder, train=False, download=True)
    finally:
        socket.setdefaulttimeout(previous_timeout_s)
