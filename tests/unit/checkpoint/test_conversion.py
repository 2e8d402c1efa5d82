"""Export of checkpoints to files for other programs, and of the model's code."""

import contextlib
import importlib
import importlib.util
import io
import json
import random
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.parallel import DistributedDataParallel

from hpcdist.checkpoint import export
from hpcdist.checkpoint.export import export_model
from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard, clean_state_dict, rng_state, set_rng_state
from hpcdist.checkpoint.store import CheckpointStore, FileRecord, Snapshot, save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.checkpoint.weight_writers import write_dcp, write_safetensors, write_safetensors_folder
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.errors import CheckpointError, ExportError
from hpcdist.run.folder import RunDir

# --- Selection of a checkpoint, and its model as a file. `tests/multiproc/test_model_export.py` loads the files

METRIC = "eval/accuracy"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with checkpoints of the steps 1 to 4. Step 2 and 3 have the best accuracy."""
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    store = CheckpointStore(run.checkpoints)
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.8)):
        save(store, step, {"fc.weight": torch.full((2, 3), float(step))}, {METRIC: accuracy})
    return run


def save(store: CheckpointStore, step: int, model: dict[str, Any], metrics: dict[str, float], **options: Any) -> None:
    store.add(Snapshot(step=step, model=model, trainer={}, rank_states=[None], metrics=metrics, **options))


def find(run: RunDir, which: str, metric: str = METRIC, mode: Any = "max") -> int:
    return export.find_checkpoint(run, which, CheckpointConfig(monitor=metric, monitor_mode=mode)).step


def test_checkpoint_is_found_by_metric_order_or_step(run: RunDir) -> None:
    assert [find(run, which) for which in ("best", "final", "1", "00000002")] == [3, 4, 1, 2]
    assert find(run, "best", mode="min") == 1


@pytest.mark.parametrize(
    ("which", "metric", "message"),
    [
        ("7", METRIC, r"^run first has no checkpoint of step 7: it has 1, 2, 3, 4$"),
        ("last", METRIC, r"^--checkpoint last: expected best, final or a step \(1, 2, 3, 4\)$"),
        ("best", "f1", r"^no checkpoint of first has the metric of checkpoint.monitor \(f1\): choose --check"),
    ],
)
def test_unknown_checkpoints_are_errors(run: RunDir, which: str, metric: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        find(run, which, metric)
    empty = RunDir.create(run.path.with_name("empty"))
    with pytest.raises(ExportError, match=r"^run empty has no valid checkpoint in /.*/checkpoints$"):
        find(empty, "final")


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_exported_shards_have_the_names_of_the_whole_model(run: RunDir, tmp_path: Path, kind: Any) -> None:
    shard = Shard(model={"table.weight": torch.ones(4, 2)}, boxes={"table.weight": Box((0, 0), (4, 2))}, trainer={})

    def collect(folder: Path) -> dict[str, FileRecord]:
        name = shard_name(2)
        return {name: save_file(shard.content(), folder / name)}

    tied = torch.arange(6.0).view(2, 3)
    save(CheckpointStore(run.checkpoints), 5, {"a": tied, "b": tied.t()}, {}, collect_shards=collect)
    chosen = export.find_checkpoint(run, "final", CheckpointConfig(monitor=METRIC))
    file = tmp_path / f"weights{export.SUFFIXES[kind]}"
    export.write_model(run, chosen, kind, file)
    if kind == "torch":
        found = torch.load(file, weights_only=True)
    else:
        from safetensors import safe_open
        from safetensors.torch import load_file

        found = load_file(file)
        with safe_open(file, "pt") as content:
            assert content.metadata() == {"format": "pt", "run": "first", "step": "5"}
    expected = {"a": tied, "b": tied.t(), "table.weight": torch.ones(4, 2)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    other = tmp_path / "other"
    other.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    assert {path.name for path in tmp_path.iterdir()} == {"runs", file.name, "other"}


def test_dot_in_a_name_does_not_make_a_folder_a_file(run: RunDir, tmp_path: Path) -> None:
    chosen = export.find_checkpoint(run, "final", CheckpointConfig(monitor=METRIC))
    export.write_model(run, chosen, "safetensors", tmp_path / "llama-3.2")
    assert [path.name for path in (tmp_path / "llama-3.2").iterdir()] == ["model.safetensors"]


def stored(tensors: dict[str, torch.Tensor], folder: Path) -> StoredWeights:
    """Return the weights of a checkpoint in which two ranks hold the parts of each matrix."""
    shards: list[dict[str, Any]] = [{"model": {}, "boxes": {}, "trainer": {}} for _ in range(2)]
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            half = len(tensor) // 2
            for rank, part in enumerate((tensor[:half], tensor[half:])):
                shards[rank]["model"][name] = part.clone()
                shards[rank]["boxes"][name] = [[rank * half, 0], list(tensor.shape)]
    files = [folder / shard_name(rank) for rank in range(2)]
    for file, content in zip(files, shards, strict=True):
        save_file(content, file)
    return StoredWeights({name: None if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}, files)


def tensors_of_many_types() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(15.0).view(5, 3),
        "a.bias": torch.ones(3, dtype=torch.bfloat16),
        "b.weight": torch.arange(8).view(4, 2).half(),
        "mask": torch.tensor([True, False]),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 4).flatten(),
    }


@pytest.mark.parametrize(("max_bytes", "num_files"), [(10**9, 1), (40, 2), (1, 6)])
def test_hugging_face_layout_has_an_index_for_several_files(tmp_path: Path, max_bytes: int, num_files: int) -> None:
    from safetensors.torch import load_file

    expected = tensors_of_many_types()
    (tmp_path / "out").mkdir()
    weights = stored(expected, tmp_path)
    write_safetensors_folder(weights, tmp_path / "out", {"format": "pt"}, max_file_bytes=max_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == num_files
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (num_files > 1)
    if num_files > 1:
        content = json.loads(index.read_text())
        assert content["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
        assert all(name in load_file(index.with_name(file)) for name, file in content["weight_map"].items())


def test_type_that_safetensors_lacks_is_an_error(tmp_path: Path) -> None:
    weights = stored({"a": torch.ones(2, dtype=torch.complex128)}, tmp_path)
    with pytest.raises(
        ExportError, match=r"^a has the type torch.complex128, which safetensors does not support: choose --fo"
    ):
        write_safetensors(weights, ["a"], tmp_path / "a.safetensors", {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_an_export_and_no_tensor_is_read_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tensors_of_many_types()
    weights = stored(expected, tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = StoredWeights.__getitem__

    def counted(self: StoredWeights, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name).clone()
        alive.append(weakref.ref(tensor))
        most = max(most, sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(StoredWeights, "__getitem__", counted)
    write_dcp(weights, tmp_path / "out")
    assert most <= 2, "the one that is written, and the one before"
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_unusable_targets_and_bad_checkpoints_are_export_errors(run: RunDir, tmp_path: Path) -> None:
    def write(name: str) -> None:
        found = export.find_checkpoint(run, "best", CheckpointConfig(monitor=METRIC))
        export.write_model(run, found, "torch", tmp_path / name)

    (tmp_path / "there.pt").write_text("mine")
    with pytest.raises(ExportError, match=r"there.pt exists: remove it, or choose another --output$"):
        write("there.pt")
    assert (tmp_path / "there.pt").read_text() == "mine"
    with pytest.raises(ExportError, match=r"^--output /.*/a/b.pt: /.*/a cannot be written \(No such file or dir"):
        write("a/b.pt")
    save(CheckpointStore(run.checkpoints), 9, {}, {METRIC: 1.0})
    with pytest.raises(ExportError, match=r"^the checkpoint of step 9 of first contains no weights$"):
        write("a.pt")
    file = run.checkpoints / "step-00000009" / "model.pt"
    file.write_bytes(file.read_bytes().replace(b"PK", b"XX"))
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        write("a.pt")
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_full_disk_is_an_export_error_for_each_format(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    save(CheckpointStore(run.checkpoints), 5, {"a": torch.arange(6.0)}, {})
    output = tmp_path / f"weights{export.SUFFIXES[kind]}"
    scratch = tmp_path / "scratch"
    full = scratch / output.name
    if kind == "dcp":
        full = full / "__0_0.distcp"
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    monkeypatch.setattr(tempfile, "TemporaryDirectory", lambda **_: contextlib.nullcontext(scratch))
    found = export.find_checkpoint(run, "5", CheckpointConfig())
    with pytest.raises(
        ExportError, match=r"^--output /.* cannot be written: No space left on device \(.* MB free\): f"
    ):
        export.write_model(run, found, kind, output)
    assert not output.exists()


def test_missing_package_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    install = r"run `pip install '\.\[export\]'` in a checkout of hpcdist$"
    with pytest.raises(ExportError, match=rf"^format safetensors needs a package: {install}"):
        export.require_package("safetensors")
    export.require_package("torch")


# --- The code of the user that accompanies a model which `torch.export` cannot export


def test_package_of_a_pickled_model_has_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    package = run.code / "pickled_model"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "net.py").write_text("import torch\n\nclass Model(torch.nn.Identity): pass\n")
    (package / "same.py").symlink_to("net.py")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large.bin").touch()
    (package / "data").symlink_to(tmp_path / "data")
    monkeypatch.syspath_prepend(str(run.code))
    saved: set[str] = set()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("data-dependent")

    def save_model(*_: Any, serialization_format: str, code_paths: tuple[str, ...] = (), **__: Any) -> None:
        assert serialization_format == "pickle"
        (folder,) = code_paths
        assert Path(folder).name == "pickled_model"
        saved.update(path.name for path in Path(folder).rglob("*"))

    monkeypatch.setattr(torch.export, "export", fail)
    spec = importlib.util.find_spec("mlflow")
    mlflow, flavor, models = ModuleType("mlflow"), ModuleType("mlflow.pytorch"), ModuleType("mlflow.models")
    vars(mlflow).update(pytorch=flavor, __spec__=spec)
    vars(flavor)["save_model"] = save_model
    vars(models)["infer_signature"] = lambda *_: None
    for module in (mlflow, flavor, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    export_model(importlib.import_module("pickled_model.net").Model(), torch.ones(2, 1), run)
    assert saved - {"__pycache__"} - {name for name in saved if name.endswith(".pyc")} == {
        "__init__.py",
        "net.py",
        "same.py",
    }
    assert not run.exported.exists()
    assert not [path.name for path in run.path.iterdir() if path.name.startswith(".")]


# --- Clean weight names and the states of random number generators.


CPU = torch.device("cpu")


class Net(nn.Module):
    """A model with a layer named `module`, as in DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.fixture
def process_group() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # torch exports it at run time
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_clean_state_dict_has_the_names_of_the_bare_module() -> None:
    torch.manual_seed(0)
    bare = Net()
    names = list(bare.state_dict())
    inner = Net()
    inner.load_state_dict(bare.state_dict())
    inner.head[0] = cast(nn.Module, torch.compile(inner.head[0]))
    wrapped = cast(nn.Module, torch.compile(DistributedDataParallel(inner)))

    assert "_orig_mod.module.head.0._orig_mod.weight" in wrapped.state_dict()
    for module in (bare, wrapped, nn.DataParallel(bare), cast(nn.Module, torch.compile(bare))):
        state = clean_state_dict(module)
        assert list(state) == names
        assert all(torch.equal(state[name], bare.state_dict()[name]) for name in names)


def draw() -> tuple[list[float], list[float], list[float]]:
    return (
        torch.rand(5).tolist(),
        [*np.random.standard_normal(3).tolist(), *np.random.rand(2).tolist()],
        [random.random(), random.gauss(0, 1), random.random()],
    )


def test_restored_generators_continue_the_same_sequence() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    random.gauss(0, 1)  # keeps a second value, which is part of the state
    np.random.standard_normal()

    file = io.BytesIO()
    torch.save(rng_state(CPU), file)
    expected = draw()
    assert draw() != expected
    set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True), CPU)
    assert draw() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_restored_cuda_generator_continues_the_same_sequence() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = rng_state(device)
    expected = torch.rand(5, device=device)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(5, device=device), expected)
