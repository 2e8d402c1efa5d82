import fcntl
import socket
import threading
from pathlib import Path
from typing import Literal

import pytest

from hpcdist.config.training_schema import DataConfig
from hpcdist.data import download
from hpcdist.data.download import CIFAR10_MD5, FOLDERS, IDX_FILES, LOCK_NAME, find, missing, prepare
from hpcdist.errors import DataError
from hpcdist.host import locks


def write_files(name: str, root: Path) -> None:
    """Write the files of a download by torchvision, which keeps the packed files as well."""
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True)
    names = CIFAR10_MD5 if name == "cifar10" else [file for pair in IDX_FILES.values() for file in pair]
    for file in names:
        (folder / file).write_text("new")
        (folder / f"{file}.gz").write_text("packed")


def test_datasets_that_are_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image_folder was not found in .*: put it there or point data\.root"):
        prepare(DataConfig(name="image_folder", root=str(tmp_path)))
    (tmp_path / "train").mkdir()
    for data in (
        DataConfig(name="image_folder", root=str(tmp_path)),
        *(DataConfig(name=name, root=str(tmp_path / "none")) for name in ("digits", "synthetic")),
    ):
        prepare(data)
        assert missing(data) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_download_has_the_layout_of_torchvision(
    name: Literal["mnist", "fashion_mnist", "cifar10"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_fetch", write_files)
    root = tmp_path / "new" / "root"
    assert missing(DataConfig(name=name, root=str(root))) == (
        f"{name} was not found in {root} ({FOLDERS[name]} is missing or incomplete)"
    )
    assert not root.exists()
    # An interrupted download has left a file and its temporary folder.
    folder = root / FOLDERS[name]
    folder.mkdir(parents=True)
    (folder / (IDX_FILES["train"][0] if name != "cifar10" else "test_batch")).write_text("old")
    (root / ".hpcdist-download-stale").mkdir()
    prepare(DataConfig(name=name, root=str(root)))
    assert find(name, root) == folder
    assert {path.read_text() for path in folder.iterdir()} == {"new"}
    assert sorted(path.name for path in root.iterdir()) == sorted([LOCK_NAME, FOLDERS[name].split("/")[0]])
    assert not list(root.rglob("*.gz"))


def test_download_and_wait_for_another_one_send_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_beaten = threading.Event()

    def fetch(name: str, folder: Path) -> None:
        assert has_beaten.wait(timeout=60)
        write_files(name, folder)

    monkeypatch.setattr(download, "_fetch", fetch)
    monkeypatch.setattr(download, "_ALIVE_S", 0.01)
    mnist = DataConfig(name="mnist", root=str(tmp_path))
    prepare(mnist, has_beaten.set)
    assert missing(mnist) == ""
    cifar10 = DataConfig(name="cifar10", root=str(tmp_path))
    with (tmp_path / LOCK_NAME).open("w") as file:  # another process downloads

        def end_of_the_other() -> None:
            write_files("cifar10", tmp_path)
            fcntl.flock(file, fcntl.LOCK_UN)

        fcntl.flock(file, fcntl.LOCK_EX)
        prepare(cifar10, end_of_the_other)
    assert missing(cifar10) == ""


def test_download_without_network_or_folder_raises_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        assert socket.getdefaulttimeout() == download.SOCKET_TIMEOUT_S
        raise OSError("Network is unreachable")

    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(DataError, match=r"could not be downloaded \(.*Network is unreachable"):
        prepare(DataConfig(name="cifar10", root=str(tmp_path)))
    assert socket.getdefaulttimeout() is None
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]

    def lose_connection(name: str, folder: Path) -> None:
        write_files(name, folder)
        raise RuntimeError("Error downloading x:\nTried a mirror, got:\n<no route>")

    monkeypatch.setattr(download, "_fetch", lose_connection)
    with pytest.raises(DataError, match=r"downloaded \(Error downloading x: Tried a mirror, got: <no route>\): put it"):
        prepare(DataConfig(name="mnist", root=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    with pytest.raises(DataError, match=r"could not be downloaded \(.*Not a directory"):
        prepare(DataConfig(name="mnist", root=str(tmp_path / LOCK_NAME / "root")))


def test_concurrent_process_waits_and_does_not_download_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()

    def set_event(message: str, *args: object) -> None:
        if (message % args).startswith("waiting for another process that downloads into"):
            waiting.set()

    fetched: list[str] = []
    monkeypatch.setattr(download, "_fetch", lambda name, folder: fetched.append(name))
    monkeypatch.setattr(locks.log, "info", set_event)
    second = threading.Thread(target=prepare, args=(DataConfig(name="mnist", root=str(tmp_path)),))
    with (tmp_path / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        second.start()
        assert waiting.wait(timeout=30)
        assert second.is_alive()
        write_files("mnist", tmp_path)
    second.join(timeout=30)
    assert not second.is_alive()
    assert fetched == []
