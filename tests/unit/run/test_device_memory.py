"""What held the memory of a full GPU: the reduction of torch's snapshot, and its sentences."""

import json
from pathlib import Path
from typing import Any

import pytest

from hpcdist.errors import RunFolderError
from hpcdist.run.device_memory import DeviceMemory

MIB = 2**20
GIB = 2**30
TORCH = "/v/lib/python3.12/site-packages/torch/nn/modules/module.py"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


def block(size: int, *frames: dict[str, Any], state: str = "active_allocated") -> dict[str, Any]:
    return {"address": 1, "size": size, "requested_size": size, "state": state, "frames": list(frames)}


def segment(*blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    """Return a segment of torch 2.15, without the keys that are not read."""
    return {"device": device, "total_size": sum(block["size"] for block in blocks), "blocks": list(blocks)}


def reduced(*segments: dict[str, Any], free_bytes: int = 0) -> DeviceMemory:
    return DeviceMemory.of_snapshot({"segments": list(segments), "device_traces": []}, 0, free_bytes, 16 * GIB)


WEIGHTS = (frame(TORCH, 9, "convert"), frame("/me/train.py", 10, "build"), frame("/me/train.py", 90, "<module>"))
ACTIVATIONS = (frame("/v/lib/python3.12/site-packages/peft/layer.py", 7, "forward"), frame("/me/train.py", 31, "step"))
FULL = (
    segment(block(2 * GIB, *WEIGHTS), block(GIB, *WEIGHTS), block(512 * MIB, state="inactive")),
    segment(*(block(GIB, *ACTIVATIONS) for _ in range(8))),
    segment(block(MIB, state="active_pending_free"), block(9 * GIB, *WEIGHTS), device=1),
)


def test_live_blocks_are_grouped_by_the_users_line() -> None:
    memory = reduced(*FULL, segment(block(256 * MIB)), free_bytes=GIB)
    assert memory.lines == (
        "11.2 GiB allocated, 11.8 GiB reserved by torch, 3.2 GiB used outside of it, of 16.0 GiB of GPU 0",
        "8.0 GiB in 8 blocks of at most 1.0 GiB: step (train.py:31), in forward (peft/layer.py:7)",
        "3.0 GiB in 2 blocks of at most 2.0 GiB: build (train.py:10)",
        "256 MiB: no line of Python, as in a backward pass",
    )


def test_five_lines_of_code_are_kept() -> None:
    lines = [block(line * MIB, frame("/me/train.py", line, "f")) for line in range(1, 9)]
    memory = reduced(segment(*lines))
    assert [holder.place for holder in memory.holders] == [f"f (train.py:{line})" for line in (8, 7, 6, 5, 4)]
    assert memory.allocated_bytes == 36 * MIB, "the sum of all"
    assert len(memory.lines) == 6


def test_snapshot_without_history_says_so() -> None:
    memory = reduced(segment(block(2 * GIB), block(GIB)))
    unknown = "by unknown lines of code, since torch's history of allocations was off"
    assert memory.lines[1:] == (f"3.0 GiB in 2 blocks of at most 2.0 GiB: {unknown}",)


def test_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    memory = reduced(*FULL)
    record = json.loads(json.dumps(memory.record()))
    assert DeviceMemory.of_record(record, tmp_path) == memory
    for holders, problem in ((["x"], "holders has 'x'"), ([{"place": 3}], "place cannot be '3'")):
        with pytest.raises(RunFolderError, match=f"is damaged: {problem}"):
            DeviceMemory.of_record({**record, "holders": holders}, tmp_path)
