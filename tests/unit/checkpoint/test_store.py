"""The checkpoint folder of a run: valid checkpoints, pruning, full disks and crafted files."""

import errno
import hashlib
import io
import json
import logging
import math
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcdist.checkpoint import store as checkpoint_store
from hpcdist.checkpoint.store import CheckpointStore, Snapshot, _HashingFile, load_file, save_file
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.errors import CheckpointError


def snapshot(step: int, size: int = 10, **metrics: float) -> Snapshot:
    return Snapshot(
        step=step,
        model={"w": torch.full((size,), float(step))},
        trainer={"position": step},
        rank_states=[{"rng": torch.tensor([step])}, {"rng": torch.tensor([-step])}],
        metrics=metrics,
    )


def names(store: CheckpointStore) -> list[str]:
    return sorted(entry.name for entry in store.folder.iterdir())


def steps(store: CheckpointStore) -> list[int]:
    return [int(name.removeprefix("step-")) for name in names(store)]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


# --- writing and reading


def test_written_checkpoint_is_read_back(store: CheckpointStore) -> None:
    published: list[list[str]] = []
    path = store.add(snapshot(12, accuracy=0.5), before_publish=lambda: published.append(names(store)))

    assert path == store.folder / "step-00000012"
    assert len(published) == 1
    assert published[0][0].startswith(".tmp-step-00000012-")
    assert names(store) == ["step-00000012"]

    manifest = json.loads((path / "manifest.json").read_text())
    assert set(manifest) == {"format", "format_version", "step", "created", "write_s", "world_size", "metrics", "files"}
    assert (manifest["step"], manifest["world_size"], manifest["metrics"]) == (12, 2, {"accuracy": 0.5})
    assert 0 < manifest["write_s"] < 60
    store.annotate(12, {"accuracy": 0.5})
    assert json.loads((path / "manifest.json").read_text()) == manifest
    for name, record in manifest["files"].items():
        content = (path / name).read_bytes()
        assert record == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    loaded = store.load(path)
    assert (loaded.step, loaded.metrics) == (12, {"accuracy": 0.5})
    assert torch.equal(loaded.model["w"], torch.full((10,), 12.0))
    assert loaded.trainer == {"position": 12}
    assert [state["rng"].item() for state in loaded.rank_states] == [12, -12]


def test_steps_of_nine_digits_are_in_order(store: CheckpointStore) -> None:
    for step in (99_999_999, 100_000_000, 5):
        store.add(snapshot(step))
    assert CheckpointStore(store.folder).newest_step() == store.newest_step() == 100_000_000


def test_metrics_that_are_not_finite_become_null_and_nan(store: CheckpointStore) -> None:
    path = store.add(snapshot(1, loss=math.nan, accuracy=math.inf))
    assert '"loss": null' in (path / "manifest.json").read_text()
    assert all(math.isnan(value) for value in store.load(path).metrics.values())


def test_second_write_of_a_step_replaces_an_invalid_checkpoint(store: CheckpointStore) -> None:
    store.add(snapshot(1))
    path = store.add(snapshot(3))
    store.add(snapshot(3, size=99))
    assert len(store.load(path).model["w"]) == 10, "a valid one is kept"
    (path / "model.pt").write_bytes(b"")
    store.latest()
    store.add(snapshot(3))
    assert store.load(path).step == 3
    assert steps(store) == [1, 3]
    store.add(snapshot(4))
    store.prune()
    assert steps(store) == [3, 4]


def test_short_write_is_completed() -> None:
    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    raw = Slow()
    file = _HashingFile(raw)  # type: ignore[arg-type]
    content = bytes(range(100))
    assert file.write(content) == 100
    assert raw.getvalue() == content
    assert (file.size_bytes, file.digest.digest()) == (100, hashlib.sha256(content).digest())


def test_disk_begins_with_each_piece_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, *values: ranges.append(values))
    monkeypatch.setattr(checkpoint_store, "WRITEBACK_BYTES", 1000)
    values = torch.arange(1300, dtype=torch.uint8)
    path = tmp_path / "shard.pt"
    record = save_file({"values": values, "more": values.clone()}, path)

    ends = [begin + size for begin, size, _ in ranges]
    assert [begin for begin, _, _ in ranges] == [0, *ends[:-1]]
    assert all(size >= 1000 and advice == os.POSIX_FADV_DONTNEED for _, size, advice in ranges)
    assert record.size_bytes - ends[-1] < 1000
    assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(load_file(path)["more"], values)


def test_file_is_written_where_the_hint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(checkpoint_store, "WRITEBACK_BYTES", 1000)
    save_file({"values": torch.zeros(1000)}, tmp_path / "shard.pt")
    assert load_file(tmp_path / "shard.pt")["values"].numel() == 1000


# --- invalid checkpoints


def truncate(folder: Path, name: str = "model.pt", num_bytes: int = 1) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size - num_bytes)


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "trainer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "trainer.pt").write_bytes(content)


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def change_manifest(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


DAMAGE = [
    (truncate, r"model.pt has \d+ bytes, but \d+ according to its manifest"),
    (flip_a_byte, r"trainer.pt has changed since it was written \(its SHA-256 differs\)"),
    (remove_manifest, r"manifest.json cannot be read \(No such file or directory\)"),
    (lambda folder: change_manifest(folder, files={}), r"manifest.json is broken \(KeyError: 'model.pt'\)"),
    (lambda folder: change_manifest(folder, format_version=9), r"format_version is 9, but this hpcdist reads only 1"),
    (lambda folder: change_manifest(folder, step=4), r"manifest.json is that of step 4"),
    (
        lambda folder: change_manifest(folder, step=math.inf),
        r"is broken \(OverflowError: cannot convert float infinity",
    ),
    (lambda folder: (folder / "model.pt").unlink(), r"model.pt cannot be read \(No such file or directory\)"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_invalid_checkpoint_is_skipped_with_the_reason(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, damage: Any, message: str
) -> None:
    store.add(snapshot(1))
    newest = store.add(snapshot(2))
    damage(newest)

    with caplog.at_level(logging.WARNING):
        found = store.latest()
    assert found is not None
    assert (found.step, store.newest_step()) == (1, 1)
    (reason,) = [text for text in caplog.messages if text.startswith(f"skipping checkpoint {newest}: ")]
    assert re.search(message, reason)
    assert "\n" not in reason


def test_leftover_temporary_folders_are_removed(store: CheckpointStore) -> None:
    path = store.add(snapshot(1))
    path.rename(store.folder / ".tmp-step-00000001-0123abcd")
    (store.folder / "notes").mkdir()
    assert store.latest() is None
    store.remove_leftovers()
    assert names(store) == ["notes"]


def test_folders_that_cannot_be_used_are_errors(store: CheckpointStore, tmp_path: Path) -> None:
    store.folder.mkdir()
    (store.folder / ".tmp-step-00000001-0").write_text("a file where a folder was")
    leftover = r"incomplete checkpoint .*\.tmp-step-00000001-0 cannot be removed: Not a dir"
    with pytest.raises(CheckpointError, match=leftover):
        store.remove_leftovers()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint folder .*file cannot be read: Not a directory"):
        CheckpointStore(tmp_path / "file").latest()
    message = (
        r"checkpoint of step 1 could not be written to .*file/checkpoints: Not a directory "
        r"\([\d,]+ MB free\); older checkpoints are unchanged"
    )
    with pytest.raises(CheckpointError, match=message):
        CheckpointStore(tmp_path / "file" / "checkpoints").add(snapshot(1))


# --- crafted files


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def replace_content(folder: Path, name: str, content: Any) -> None:
    """Replace a file together with its record in the manifest, as an attacker with write access can."""
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        torch.save(content, folder / name)
    raw = (folder / name).read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["model.pt", "trainer.pt"])
def test_crafted_pickle_is_refused_and_not_executed(store: CheckpointStore, tmp_path: Path, name: str) -> None:
    path = store.add(snapshot(1))
    marker = tmp_path / "executed"
    replace_content(path, name, {"w": Payload(marker)})
    assert store.latest() is not None  # the hashes are valid
    with pytest.raises(
        CheckpointError,
        match=rf"{name} was not loaded, because it does not contain plain data only: GLOBAL posix.mkdir$",
    ):
        store.load(path)
    assert not marker.exists()
    with open(path / name, "rb") as file:
        torch.load(file, weights_only=False)
    assert marker.exists()  # the payload works


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pt", [1], r"model.pt contains a list, not a dict"),
        ("trainer.pt", {"trainer": 1, "rank_states": 2}, r"trainer.pt does not contain `trainer` and `rank_states`"),
    ],
)
def test_content_of_another_structure_is_refused(store: CheckpointStore, name: str, content: Any, message: str) -> None:
    path = store.add(snapshot(1))
    replace_content(path, name, content)
    with pytest.raises(CheckpointError, match=message):
        store.load(path)


# --- pruning


@pytest.mark.parametrize(("mode", "kept"), [("max", [2, 5, 6]), ("min", [3, 5, 6])])
def test_prune_keeps_the_newest_and_the_best_checkpoints(tmp_path: Path, mode: Any, kept: list[int]) -> None:
    store = CheckpointStore(tmp_path, CheckpointConfig(monitor="score", monitor_mode=mode))
    for step, score in [(1, 0.9), (2, 0.9), (3, 0.1), (4, math.nan), (6, 0.5)]:
        store.add(snapshot(step, score=score))
    store.add(snapshot(5, other=7.0))
    store.prune()
    assert steps(store) == kept


@pytest.mark.parametrize("restored", [True, False])
def test_prune_neither_counts_nor_removes_invalid_checkpoints(tmp_path: Path, restored: bool) -> None:
    writer = CheckpointStore(tmp_path)
    for step in (1, 2, 3, 8, 9):
        writer.add(snapshot(step))
    flip_a_byte(tmp_path / "step-00000008")
    remove_manifest(tmp_path / "step-00000009")

    store = CheckpointStore(tmp_path)
    if restored:
        store.latest()
        store.add(snapshot(4))
    store.prune()
    assert steps(store) == ([3, 4, 8, 9] if restored else [2, 3, 8, 9])


def test_checkpoint_that_cannot_be_removed_is_an_error(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        store.add(snapshot(step))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"old checkpoint .*step-00000001 cannot be removed: Permission denied"):
        store.prune()


# --- write errors


def test_save_beyond_the_file_size_limit_keeps_valid_checkpoints(store: CheckpointStore) -> None:
    store.add(snapshot(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 could not be written .*File too large"):
            store.add(snapshot(2, size=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.add(snapshot(3))
    assert steps(store) == [1, 3]


def test_error_of_torch_leaves_no_files(store: CheckpointStore) -> None:
    twice = torch.zeros(4)
    model = {"a": twice, "b": twice.view(torch.int32)}  # torch.save refuses one memory under two dtypes
    bad = Snapshot(step=1, model=model, trainer=None, rank_states=[], metrics={})
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        store.add(bad)
    assert names(store) == []
