"""The cache of torch.compile beyond a process: when it is copied, by whom, and what happens if that fails."""

import importlib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdist.host import compiled_archive
from hpcdist.host.compiler import CACHE_VARIABLE
from hpcdist.rank import compile_cache
from hpcdist.rank.compile_cache import TRITON_VARIABLE, kept, machine_kind, save_soon

#: Stands for the module that torch.compile imports.
COMPILER = "compiler_of_this_test"


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A shared folder and the local folders of two nodes of one kind."""
    (tmp_path / f"{COMPILER}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(compile_cache, "_COMPILES", COMPILER)
    monkeypatch.setattr(compile_cache, "machine_kind", lambda: "kind")
    monkeypatch.setattr(compile_cache, "_PAUSE_S", 0.01)
    for variable in (CACHE_VARIABLE, TRITON_VARIABLE):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    finders = list(sys.meta_path)
    yield SimpleNamespace(store=tmp_path / "store", first=tmp_path / "first", second=tmp_path / "second")
    sys.modules.pop(COMPILER, None)
    assert sys.meta_path == finders


def compile_file(name: str) -> None:
    """Write a file into the cache, as torch.compile does."""
    sys.modules.pop(COMPILER, None)
    importlib.import_module(COMPILER)
    Path(os.environ[CACHE_VARIABLE], name).write_text(name)


def test_import_of_the_compiler_passes_over_no_finder(nodes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Other(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            asked.append(fullname)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [Other(), *sys.meta_path])
        with kept(nodes.store, nodes.first):
            compile_file("a.py")
    assert COMPILER in asked


def test_another_node_gets_what_a_process_has_compiled(nodes: SimpleNamespace) -> None:
    with kept(nodes.store, nodes.first):
        compile_file("a.py")
    sys.modules.pop(COMPILER)
    del os.environ[TRITON_VARIABLE]
    with kept(nodes.store, nodes.second):
        assert not (nodes.second / "kind/a.py").exists()
        importlib.import_module(COMPILER)
        assert (nodes.second / "kind/a.py").read_text() == "a.py"
        assert os.environ[TRITON_VARIABLE] == f"{nodes.second}/kind/triton"


def test_process_that_does_not_compile_touches_nothing(nodes: SimpleNamespace) -> None:
    with kept(nodes.store, nodes.first):
        pass
    assert not nodes.store.exists()
    assert not nodes.first.exists()
    assert CACHE_VARIABLE not in os.environ


def test_children_find_the_cache_before_they_compile(nodes: SimpleNamespace) -> None:
    with kept(nodes.store, nodes.first, now=True):
        Path(os.environ[CACHE_VARIABLE], "child.py").touch()
    assert compiled_archive.unpack(nodes.store / "kind.zip", nodes.second) == 1


def test_processes_of_a_node_save_in_turn(nodes: SimpleNamespace) -> None:
    with kept(nodes.store, nodes.first, now=True):
        with kept(nodes.store, nodes.first, now=True):
            compile_file("a.py")
        assert compiled_archive.unpack(nodes.store / "kind.zip", nodes.second) == 1
        compile_file("b.py")
    assert compiled_archive.unpack(nodes.store / "kind.zip", nodes.second) == 1


def test_two_shared_folders_are_filled_from_one_local_folder(nodes: SimpleNamespace) -> None:
    with kept(nodes.store, nodes.first, now=True), kept(nodes.second, nodes.first, now=True):
        compile_file("a.py")
    assert (nodes.store / "kind.zip").exists()
    assert (nodes.second / "kind.zip").exists()


def test_files_are_saved_while_the_process_runs(nodes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_EVERY_S", 0.01)
    saved = threading.Event()

    def pack(folder: Path, archive: Path, *, is_damaged: bool) -> None:
        compiled_archive.pack(folder, archive, is_damaged=is_damaged)
        saved.set()

    monkeypatch.setattr(compile_cache, "pack", pack)

    def fail() -> None:
        with kept(nodes.store, nodes.first):
            compile_file("a.py")
            assert saved.wait(30)
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        fail()
    assert compiled_archive.unpack(nodes.store / "kind.zip", nodes.second) == 1


def test_files_are_saved_at_a_call(nodes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as after the first step: a process that is then killed has saved them."""
    saved = threading.Event()

    def pack(folder: Path, archive: Path, *, is_damaged: bool) -> None:
        compiled_archive.pack(folder, archive, is_damaged=is_damaged)
        saved.set()

    monkeypatch.setattr(compile_cache, "pack", pack)
    save_soon()  # no process compiles: without an effect
    with kept(nodes.store, nodes.first):
        save_soon()  # nor has this one
        compile_file("a.py")
        save_soon()
        assert saved.wait(30)
        assert compiled_archive.unpack(nodes.store / "kind.zip", nodes.second) == 1


def test_failed_rank_does_not_wait_for_a_last_save(nodes: SimpleNamespace) -> None:
    def fail() -> None:
        with kept(nodes.store, nodes.first):
            compile_file("a.py")
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        fail()
    assert not (nodes.store / "kind.zip").exists()


@pytest.mark.parametrize("broken", ["shared", "damaged", "full"])
def test_errors_are_logged_once_and_end_nothing(
    nodes: SimpleNamespace, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes.store.mkdir(mode=0o700)
    if broken == "shared":  # another user could add code to it
        nodes.store.chmod(0o777)
    elif broken == "damaged":
        (nodes.store / "kind.zip").write_text("no archive")
    else:

        def pack(folder: Path, archive: Path, *, is_damaged: bool) -> None:
            raise OSError(28, "No space left on device", str(archive))

        monkeypatch.setattr(compile_cache, "pack", pack)
        monkeypatch.setattr(compile_cache, "_EVERY_S", 0.001)
    with caplog.at_level(logging.WARNING), kept(nodes.store, nodes.first):
        importlib.import_module(COMPILER)
        if broken != "shared":
            compile_file("a.py")
    (record,) = caplog.records
    assert "is not kept for later starts (launch.cache_dir)" in record.getMessage()


def test_machines_of_a_kind_can_execute_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/cpuinfo": "model name : A\nflags : avx2\ncpu MHz : 1\n\nmodel name : A\n"}
    monkeypatch.setattr(compile_cache, "text_of", lambda path: texts[str(path)])
    monkeypatch.setattr(compile_cache, "versions", lambda: {"torch": "2.15.0+cu132", "driver": "580.1"})
    gpus = [SimpleNamespace(name="NVIDIA H200")]
    monkeypatch.setattr(compile_cache, "gpus", lambda: gpus)
    kind = machine_kind()
    assert kind.startswith("torch-2.15.0+cu132_NVIDIA-H200_")
    texts["/proc/cpuinfo"] = texts["/proc/cpuinfo"].replace("MHz : 1", "MHz : 2")
    gpus *= 8
    assert machine_kind() == kind
    texts["/proc/cpuinfo"] = texts["/proc/cpuinfo"].replace("avx2", "avx512")
    other_processor = machine_kind()
    monkeypatch.setattr(compile_cache, "versions", lambda: {"torch": "2.15.0+cu132", "driver": "590.1"})
    other_driver = machine_kind()
    gpus.clear()
    without_gpu = machine_kind()
    assert "_cpu_" in without_gpu
    assert len({kind, other_processor, other_driver, without_gpu}) == 4
