"""The history of allocations: when it begins, and the report of a rank with a full GPU."""

import importlib.util
import json
import logging
import subprocess
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch

from hpcdist.rank import memory_history
from hpcdist.rank.memory_history import _AfterImport, memory_record, record_when_used
from hpcdist.run.device_memory import DeviceMemory

#: Stands for torch.cuda.
MODULE = "gpus_of_this_test"
MIB = 2**20


def test_history_begins_after_the_import_of_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text("state = 'imported'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(memory_history, "_MODULE", MODULE)
    seen = []
    monkeypatch.setattr(memory_history, "_record_when_initialized", lambda: seen.append(sys.modules[MODULE].state))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    record_when_used()
    assert seen == []
    importlib.import_module("json.tool")  # another module
    try:
        importlib.import_module(MODULE)
        assert seen == ["imported"]
        assert not isinstance(sys.modules[MODULE].__loader__, _AfterImport)
        record_when_used()
        assert seen == ["imported"] * 2, "it is imported already"
    finally:
        del sys.modules[MODULE]


def test_import_in_another_thread_passes_over_no_finder(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = _AfterImport(MODULE, lambda: None)
    found = []

    class Last(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            found.append(fullname)

    class First(MetaPathFinder):
        def find_spec(self, fullname: str, *_: object) -> None:
            if fullname == "other":  # the other thread's import comes to this finder before MODULE is imported
                assert importlib.util.find_spec(MODULE) is None

    monkeypatch.setattr(sys, "meta_path", [finder, First(), Last()])
    assert importlib.util.find_spec("other") is None
    assert found == [MODULE, MODULE, "other"]


def test_missing_module_is_missing_as_without_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [_AfterImport("no_such_module", lambda: None), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        importlib.import_module("no_such_module")


def test_start_of_a_gpu_survives_an_allocator_without_history(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fail)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert memory_record("CUDA out of memory") is None, "the GPU of another type is full, and torch.cuda is not asked"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with caplog.at_level(logging.DEBUG):
        memory_history.begin()
        assert memory_record("CUDA out of memory") is None
    assert caplog.text.count("cudaMallocAsync does not yet support recordHistory") == 2


def test_memory_is_that_of_the_gpu_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [{"size": 8 * MIB, "state": "active_allocated"}]
    segments = [{"device": index, "total_size": 8 * MIB, "blocks": blocks * index} for index in (0, 1)]
    asked = []

    def mem_get_info(index: int) -> tuple[int, int]:
        asked.append(index)
        return MIB, 16 * MIB

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": segments})
    memory = memory_record("CUDA out of memory. Tried to allocate 2 GiB. GPU 1 has a total capacity of 16 GiB of which")
    assert memory is not None
    assert (memory["device"], memory["allocated_bytes"], asked) == ("GPU 1", 8 * MIB, [1])
    memory = memory_record("CUDA out of memory")
    assert memory is not None
    assert (memory["device"], memory["allocated_bytes"], asked) == ("GPU 0", 0, [1, 0])


#: Fills a small part of a GPU. Prints the record of its memory as JSON.
FILLS = """\
import json
from hpcdist.rank.memory_history import memory_record, record_when_used
{begin}
import torch

assert not torch.cuda.is_initialized()
MIB = 2**20


def hold_weights():
    weights = [torch.empty(16 * MIB, dtype=torch.uint8, device="cuda")]
    weights.append(torch.empty(32 * MIB, dtype=torch.uint8, device="cuda"))
    return weights


def hold_activations(held):
    while True:
        held.append(torch.empty(8 * MIB, dtype=torch.uint8, device="cuda"))


_, total_bytes = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction(192 * MIB / total_bytes)
weights = hold_weights()
try:
    hold_activations([])
except torch.OutOfMemoryError as error:
    print(json.dumps(memory_record(str(error))))
"""


@pytest.mark.processes
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_lines_that_filled_a_cuda_device_are_named(tmp_path: Path) -> None:
    def filled(begin: str) -> DeviceMemory:
        file = tmp_path / "fills.py"
        file.write_text(FILLS.format(begin=begin))
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return DeviceMemory.of_record(json.loads(done.stdout), file)

    memory = filled("record_when_used()")
    activations, first, second = sorted(memory.holders, key=lambda holder: holder.place)
    assert activations.place == "hold_activations (fills.py:18)"
    assert activations.largest_bytes == 8 * MIB
    assert activations.num_bytes == 8 * MIB * activations.num_blocks > 64 * MIB
    assert (first.place, second.place) == ("hold_weights (fills.py:11)", "hold_weights (fills.py:12)")
    assert (first.num_bytes, second.num_bytes) == (16 * MIB, 32 * MIB)
    assert memory.allocated_bytes == activations.num_bytes + 48 * MIB <= memory.reserved_bytes <= 192 * MIB
    assert memory.reserved_bytes <= memory.used_bytes < memory.total_bytes

    control = filled("")
    assert [holder.place for holder in control.holders] == [""]
    assert control.lines[1].endswith("by unknown lines of code, since torch's history of allocations was off")
