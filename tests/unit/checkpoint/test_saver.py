"""Asynchronous saving: the copied state, waiting, errors, and kills at any moment."""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import closing
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from context_scene import SINGLE_RANK, new_run, open_context
from torch import nn

from hpcdist.checkpoint import store as checkpoint_store
from hpcdist.checkpoint.saver import AsyncSaver, HostBuffers, plain_state
from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard, clean_state_dict, load_weights, rng_state
from hpcdist.checkpoint.store import CheckpointStore, Snapshot, read_manifest, verified
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.errors import CheckpointError, HpcdistError
from hpcdist.host import retry
from hpcdist.rank.context import close


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def saver(store: CheckpointStore) -> Iterator[AsyncSaver]:
    with closing(AsyncSaver(store)) as saver:
        yield saver


def save(saver: AsyncSaver, step: int, *, model: Any = None, wait: bool = False, **options: Any) -> None:
    model = {"w": torch.full((5,), float(step))} if model is None else model
    saver.save(Snapshot(step=step, model=model, **{"trainer": {"step": step}, "rank_states": [None], **options}))
    if wait:
        saver.wait()


def value(store: CheckpointStore, step: int) -> float:
    weight: float = store.load(store.folder / f"step-{step:08d}").model["w"][0].item()
    return weight


def test_a_save_copies_the_state_and_waits_for_the_previous_one(
    store: CheckpointStore, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, opened, returned = (threading.Event() for _ in range(3))
    write = checkpoint_store.write_files

    def held(*arguments: Any) -> None:
        reached.set()
        assert opened.wait(30)
        write(*arguments)

    monkeypatch.setattr(checkpoint_store, "write_files", held)
    weight = torch.zeros(1000)
    trainer: dict[str, Any] = {"position": [1, 2], "momentum": torch.zeros(3)}
    save(saver, 1, model={"w": weight}, trainer=trainer, rank_states=[rng_state(torch.device("cpu"))])
    assert reached.wait(30)
    weight.fill_(7)
    trainer["momentum"].fill_(7)
    trainer["position"].append(3)

    def second() -> None:
        save(saver, 2)
        returned.set()

    thread = threading.Thread(target=second)
    thread.start()
    assert not returned.wait(0.1)
    opened.set()
    thread.join(30)
    assert returned.is_set()
    saver.wait()
    loaded = store.load(store.folder / "step-00000001")
    assert torch.equal(loaded.model["w"], torch.zeros(1000))
    assert torch.equal(loaded.trainer["momentum"], torch.zeros(3))
    assert loaded.trainer["position"] == [1, 2]
    assert value(store, 2) == 2.0


def test_tied_weights_are_stored_once_and_loaded_tied(store: CheckpointStore, saver: AsyncSaver) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(1000, 64), "head": nn.Linear(64, 1000, bias=False)})
    model["head"].weight = model["embedding"].weight
    save(saver, 1, model=clean_state_dict(model), wait=True)
    path = store.folder / "step-00000001"
    weights = load_weights(path)
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    assert (path / "model.pt").stat().st_size < 1.1 * 1000 * 64 * 4


def test_load_weights_returns_the_model_and_verifies_hashes(
    store: CheckpointStore, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    save(saver, 1, model=clean_state_dict(model), wait=True)
    path = store.folder / "step-00000001"
    other = nn.Linear(3, 2)
    other.load_state_dict(load_weights(str(path)))
    copy = shutil.copytree(path, path.parent.parent / "best")  # its name among the artifacts of MLflow
    assert load_weights(copy).keys() == other.state_dict().keys()
    assert torch.equal(other.weight, model.weight)

    content = (path / "model.pt").read_bytes()
    (path / "model.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model.pt has changed since it was written"):
        load_weights(path)
    with pytest.raises(CheckpointError, match=r"nowhere: manifest.json cannot be read"):
        load_weights(store.folder / "nowhere")
    with pytest.raises(CheckpointError, match=r"model.pt is a file, not the folder of a checkpoint: load its weights"):
        load_weights(path / "model.pt")
    manifest = read_manifest(path)
    monkeypatch.setattr(checkpoint_store, "read_manifest", lambda _: manifest)  # the file changes after it
    (path / "model.pt").unlink()
    os.mkfifo(path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model.pt cannot be read \(not a regular file\)"):
        verified(path)


# --- refusals and errors


def test_older_step_is_refused_and_same_step_is_not_saved_again(
    store: CheckpointStore, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saver, 5)
    with pytest.raises(CheckpointError, match=r"step 4 is older than the newest checkpoint in .*, step 5: restore"):
        save(saver, 4)
    with monkeypatch.context() as patched:
        patched.setattr(HostBuffers, "copy", pytest.fail)
        save(saver, 5, model={"w": torch.zeros(5)}, wait=True)
    assert value(store, 5) == 5.0
    # also when another process has written it
    with (
        closing(AsyncSaver(CheckpointStore(store.folder))) as other,
        pytest.raises(CheckpointError, match=r"step 4 is older than the newest .*, step 5"),
    ):
        save(other, 4)


def test_negative_step_is_refused(saver: AsyncSaver) -> None:
    with pytest.raises(CheckpointError, match=r"a checkpoint's step must be >= 0, got -1"):
        save(saver, -1)


# --- killed at any moment

KILLED = '''
"""For every n, forks a child that saves steps 1 to 3 and kills itself at its n-th disk operation."""
import json, os, signal, sys
from pathlib import Path
import torch
from hpcdist.checkpoint import store as checkpoint_store
from hpcdist.checkpoint.saver import AsyncSaver
from hpcdist.checkpoint.store import CheckpointStore

def child(folder, fatal, report):
    reached = 0
    def moment():
        nonlocal reached
        reached += 1
        if reached == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
    def audit(event, args):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and "step-" in str(args[0]):
            moment()
    sys.addaudithook(audit)
    write = checkpoint_store._HashingFile.write
    def watched_fsync(descriptor):
        moment()  # without fsync: a killed process loses no data that it has written
    def torn_write(self, data):
        if len(data) < 100:  # one of many zip headers
            return write(self, data)
        half = len(data) // 2
        done = write(self, data[:half])
        moment()
        return done + write(self, data[half:])
    os.fsync, checkpoint_store._HashingFile.write = watched_fsync, torn_write
    saver = AsyncSaver(CheckpointStore(folder))
    for step in range(1, 4):
        model = {"w": torch.full((50,), float(step))}
        saver.save(checkpoint_store.Snapshot(step=step, model=model, trainer=step, rank_states=[]))
        saver.wait()
        os.write(report, bytes([step]))
    saver.close()

root, results = Path(sys.argv[1]), []
for fatal in range(1, 1000):
    folder = root / str(fatal)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(folder, fatal, writing)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        reported = len(pipe.read())  # until the child has ended
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    store = CheckpointStore(folder)
    leftovers = len(list(folder.glob(".tmp-step-*")))
    store.remove_leftovers()
    found = store.latest()
    loaded = store.load(found.path) if found else None
    results.append({
        "status": status, "reported": reported, "found": found.step if found else 0, "leftovers": leftovers,
        "whole": loaded is None or (loaded.trainer == found.step and bool((loaded.model["w"] == found.step).all())),
        "num_valid": len(store.all()), "num_left": len(list(folder.iterdir())) if folder.exists() else 0,
    })
    if status == 0:
        break
print(json.dumps(results))
'''


@pytest.mark.processes
def test_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *killed, finished = json.loads(done.stdout)

    assert (finished["status"], finished["found"], finished["num_left"]) == (0, 3, 2)
    assert len(killed) > 50
    assert sum(result["leftovers"] for result in killed) > 30
    for moment, result in enumerate(killed, start=1):
        assert result["status"] == -9, (moment, result)
        assert result["whole"], (moment, result)
        assert result["num_valid"] == result["num_left"], (moment, result)
        assert result["found"] in (result["reported"], result["reported"] + 1), (moment, result)
        assert result["num_left"] >= min(2, result["reported"]), (moment, result)


def test_metrics_of_a_second_save_are_added_to_the_saved_step(tmp_path: Path) -> None:
    with closing(AsyncSaver(CheckpointStore(tmp_path))) as saver:
        save(saver, 5, metrics={"loss": 2.0})
        save(saver, 5, model={"w": torch.ones(1)}, metrics={"accuracy": 0.5}, samples=b"of the second")
    found = CheckpointStore(tmp_path).latest()
    assert found is not None
    assert found.metrics == {"loss": 2.0, "accuracy": 0.5}
    assert (found.path / "samples.npy").read_bytes() == b"of the second"
    assert load_weights(found.path)["w"].tolist() == [5.0] * 5


# --- unreachable file systems


class FailingFsync:
    """Makes every fsync fail while `error` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
        self.error: int | None = error
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(retry._Mode, "within_s", 0.05)


def test_unreachable_file_system_fails_the_last_save_alone(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FailingFsync(monkeypatch, errno.ESTALE)
    saver = AsyncSaver(store)
    for step, settle in ((1, saver.check), (3, lambda: save(saver, 4, wait=True))):
        disk.error = errno.ESTALE
        save(saver, step)
        assert saver._pending is not None
        saver._pending.exception()
        disk.error = None
        settle()
        (message,) = [text for text in caplog.messages if text.startswith(f"checkpoint of step {step} could not be")]
        assert message.endswith("unchanged; the training continues, and the next save tries again")
    assert [path.name for path in store.folder.iterdir()] == ["step-00000004"]
    disk.error = errno.ESTALE
    save(saver, 5)
    with pytest.raises(CheckpointError, match=r"step 5 could not be written to .*older checkpoints are unchanged"):
        saver.close()


def test_metrics_of_a_saved_step_do_not_end_the_training(
    store: CheckpointStore, saver: AsyncSaver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(saver, 1, wait=True)
    disk = FailingFsync(monkeypatch, errno.ESTALE)
    disk.error = errno.ESTALE
    save(saver, 1)
    assert "its metrics could not be written: Stale file handle; the training continues" in caplog.text
    disk.error = errno.ENOSPC
    with pytest.raises(CheckpointError, match="its metrics could not be written: No space left"):
        save(saver, 1)
    disk.error = None


def test_full_disk_is_an_error_of_the_next_call_once(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingFsync(monkeypatch, errno.ENOSPC)
    saver = AsyncSaver(store)
    save(saver, 2)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*older checkpoints are unchanged"):
        save(saver, 3)
    assert list(store.folder.iterdir()) == []
    disk.error = errno.EIO
    monkeypatch.setattr(retry._Mode, "within_s", 30.0)
    monkeypatch.setattr(time, "sleep", lambda _: setattr(disk, "error", None))
    save(saver, 4)
    saver.close()
    assert value(store, 4) == 4.0


def test_unreachable_journal_fails_only_a_wait(store: CheckpointStore) -> None:
    def flush() -> None:
        raise HpcdistError("the journal cannot be written") from OSError(errno.EIO, "Input/output error")

    saver = AsyncSaver(store, before_publish=flush)
    save(saver, 1)
    saver.check()
    with pytest.raises(CheckpointError, match="the journal cannot be written"):
        save(saver, 2, wait=True)
    saver.close()


# --- Copies of a state in reused host buffers.


def test_copy_has_equal_values_and_plain_containers() -> None:
    class Kind(IntEnum):
        A = 3

    tensors = [torch.arange(3), torch.tensor(1.5), torch.zeros(0, 4), torch.ones(2, dtype=torch.bfloat16)]
    same: dict[Any, Any] = {
        "tuple": (1, 2.5, "x", None, True, b"y"),
        "ordered": OrderedDict(a=1),
        "milestones": Counter([30, 30, 60]),
        "set": {1, 2},
        ("beta", 1): torch.Size([2]),
    }
    converted = {"default": defaultdict(list, a=[1]), "numbers": (np.float64(0.5), Kind.A)}
    host, events = HostBuffers().copy({"tensors": tensors, **same, **converted})
    assert events == []
    for copied, original in zip(host.pop("tensors"), tensors, strict=True):
        assert torch.equal(copied, original)
        assert copied.dtype == original.dtype
        assert original.numel() == 0 or copied.data_ptr() != original.data_ptr()
    default, numbers = host.pop("default"), host.pop("numbers")
    assert (type(default), default) == (dict, {"a": [1]})
    assert [(type(number), number) for number in numbers] == [(float, 0.5), (int, 3)]
    assert host == same
    assert [type(value) for value in host.values()] == [type(value) for value in same.values()]


def test_buffers_are_reused_except_for_changed_tensors() -> None:
    buffers = HostBuffers()
    first, _ = buffers.copy({"a": torch.zeros(100), "b": torch.zeros(7), "gone": torch.zeros(3)})
    pointers = {key: tensor.data_ptr() for key, tensor in first.items()}
    second, _ = buffers.copy({"b": torch.ones(8), "a": torch.ones(100), "new": torch.ones(2, dtype=torch.int8)})

    assert second["a"].data_ptr() == pointers["a"]
    assert second["b"].shape == (8,)
    assert all(bool((tensor == 1).all()) for tensor in second.values())
    assert len({tensor.data_ptr() for tensor in second.values()}) == 3
    assert set(buffers._buffers) == {("a",), ("b",), ("new",)}
    square = torch.randn(4, 4)
    image = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    for other in (square, square.double(), square.t(), square.to(torch.int32), image):
        host, _ = buffers.copy({"w": other})
        assert (host["w"].dtype, host["w"].stride()) == (other.dtype, other.stride())
        assert torch.equal(host["w"], other)
        assert not host["w"].requires_grad


def test_buffers_of_any_sizes_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdist.checkpoint.saver._SLAB_BYTES", 1000)
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
    state = {
        f"{dtype} {size}": torch.randint(0, 2, (size,), generator=generator).to(dtype)
        for dtype in dtypes
        for size in (1, 3, 17, 65, 300)
    }
    host, _ = HostBuffers().copy(state)
    assert all(torch.equal(host[key], tensor) for key, tensor in state.items())
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in host.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_tied_tensors_share_a_buffer_and_views_copy_no_storage() -> None:
    embedding = torch.randn(10, 4)
    big = torch.randn(1000, 1000)
    state: dict[str, Any] = {
        "tied": [embedding, nn.Parameter(embedding).detach(), embedding[:]],
        "column": big[:, 3],
        "expanded": torch.ones(3, 1).expand(3, 50),
    }
    host, _ = HostBuffers().copy(state)
    assert len({tensor.data_ptr() for tensor in host["tied"]}) == 1
    assert torch.equal(host["column"], big[:, 3])
    assert host["column"].untyped_storage().nbytes() == 4000
    assert torch.equal(host["expanded"], state["expanded"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float16(0.5), 0.5), (np.float32(0.5), 0.5), (np.float64(0.5), 0.5), (np.int8(3), 3), (np.int64(3), 3),
        (np.uint8(3), 3), (np.bool_(True), True), (np.complex64(1j), 1j), (np.complex128(1j), 1j), (np.str_("a"), "a"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_number_of_numpy_becomes_one_of_python(value: Any, expected: Any) -> None:
    for convert in (lambda state: HostBuffers().copy(state)[0], lambda state: plain_state(state, "local")):
        found = convert({"value": value, "list": [value], value: 1, ("a", value): 2, "set": {value}})
        assert found == {"value": expected, "list": [expected], expected: 1, ("a", expected): 2, "set": {expected}}
        parts = [found["value"], *found["list"], *found["set"], list(found)[2], list(found)[3][1]]
        assert {type(part) for part in parts} == {type(expected)}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"trainer": {"best": np.zeros(2)}}, r"trainer\['best'\] is a numpy.ndarray, which a checkpoint cannot"),
        ({"trainer": {"day": np.datetime64("2026-11-28")}}, r"trainer\['day'\] is a datetime.date, which a checkpoint"),
        ({"trainer": [0, lambda: 0]}, r"trainer\[1\] is a builtins.function"),
        ({"trainer": {frozenset(): 1}}, r"the key frozenset\(\), but keys in a checkpoint are strings or numbers"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, r"model\['w'\] is a Tensor of layout torch.sparse_coo on cpu"),
        ({"model": {"w": nn.UninitializedParameter()}}, r"model\['w'\] is a UninitializedParameter"),
    ],
)
def test_value_that_could_not_be_loaded_is_refused_with_its_path(state: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        HostBuffers().copy(state)


def test_step_may_be_a_number_of_numpy(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, Config()) as ctx:
        ctx.should_stop(np.int64(3), np.int64(5))  # type: ignore[arg-type]
        ctx.save(
            np.int64(3),  # type: ignore[arg-type]
            model=nn.Linear(1, 1),
            trainer={},
            local={"best": np.float32(0.5)},
        )
        close(ctx)
        beat = run.attempt(1).read_beat(0)
    assert beat is not None
    assert (beat["step"], beat["total_steps"]) == (3, 5)
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None
    states = CheckpointStore(run.checkpoints).load(newest.path).rank_states
    assert (newest.step, states[0]["local"]) == (3, {"best": 0.5})


def test_local_state_is_copied_before_the_call_returns(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    position = torch.zeros(2)
    may_write = threading.Event()
    with open_context(SINGLE_RANK, run, Config()) as ctx:
        ctx._saves._saver._thread.submit(may_write.wait)
        ctx.save(1, model=nn.Linear(1, 1), local={"sampler": {"position": position}})
        position.fill_(9)
        may_write.set()
        close(ctx)
    newest = CheckpointStore(run.checkpoints).latest()
    assert newest is not None
    (state,) = CheckpointStore(run.checkpoints).load(newest.path).rank_states
    assert state["local"]["sampler"]["position"].tolist() == [0, 0]


@pytest.mark.parametrize(("target", "is_regular"), [("own:train", False), ("ddp", True)])
def test_restore_promises_no_further_heartbeats(tmp_path: Path, target: str, is_regular: bool) -> None:
    """A rank that reports no steps may be silent while others make progress, after a resume as at the first start."""
    run = new_run(tmp_path)
    config = Config(trainer=TrainerConfig(target=target))
    with open_context(SINGLE_RANK, run, config) as ctx:
        assert ctx._heartbeat.is_regular is is_regular
        ctx.save(1, model=nn.Linear(1, 1))
        close(ctx)
    with open_context(SINGLE_RANK, run, config) as ctx:
        promises = []
        beat = ctx.timer._beat

        def alive() -> None:
            beat()
            promises.append(ctx._heartbeat.is_regular)

        ctx.timer._beat = alive
        assert ctx.restore() is not None
        assert promises
        assert all(promises), "a rank that hangs in the search is found"
        assert ctx._heartbeat.is_regular is is_regular
        close(ctx)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_cuda_copy_is_pinned_and_queued_without_waiting() -> None:
    buffers = HostBuffers()
    state = {"w": torch.randn(1 << 22, device="cuda"), "step": torch.tensor(1.0, device="cuda"), "cpu": torch.ones(3)}
    buffers.copy(state)
    expected = state["w"].cpu()
    torch.cuda.set_sync_debug_mode("error")
    try:
        host, events = buffers.copy(state)
        state["w"].zero_()  # queued behind the copy
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(events) == 1
    events[0].synchronize()
    assert torch.equal(host["w"], expected)
    assert host["step"].item() == 1.0
    assert host["w"].is_pinned()
    assert not host["cpu"].is_pinned()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sharded_cuda_save_returns_when_streams_may_go_on(tmp_path: Path) -> None:
    model, table = nn.Linear(2, 2, device="cuda"), torch.ones(4, 2, device="cuda")
    weight = model.weight.detach()
    expected = weight.cpu()
    run = new_run(tmp_path)
    with open_context(SINGLE_RANK, run, Config(checkpoint=CheckpointConfig(keep_last=3))) as ctx, torch.no_grad():
        ctx.restore()
        for step in (1, 2, 3, 4):  # steps 1 and 3 allocate memory for the copies
            torch.cuda._sleep(200_000_000)  # the copies are queued behind it
            shard = Shard(model={"table": table}, boxes={"table": Box((0, 0), (4, 2))})
            ctx.save(step, model=model if step > 2 else None, trainer={}, shard=shard)
            with torch.cuda.stream(torch.cuda.Stream()):  # as a call of another rank does
                table += 1
                weight += 1
            torch.cuda.synchronize()
        close(ctx)
    assert torch.equal(load_weights(run.checkpoints / "step-00000002")["table"], torch.full((4, 2), 2.0))
    saved = load_weights(run.checkpoints / "step-00000004")
    assert torch.equal(saved["table"], torch.full((4, 2), 4.0))
    assert torch.equal(saved["weight"], expected + 1 + 1 + 1)
