"""The weights of `model.init_from`: the formats of their files, and how they fit a model."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file as save_safetensors
from torch import Tensor, nn

from hpcdist.checkpoint import sharded
from hpcdist.checkpoint.initial_weights import fitted, initial_weights, load_into, read_weights, wanted_shapes
from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.store import CheckpointStore, FileRecord, Snapshot, save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.training_schema import ModelConfig
from hpcdist.errors import CheckpointError, ConfigError, TrainerError
from hpcdist.run.checkpoint_files import PROGRAM_FILE
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import LocalWeights, WeightOrigin, hugging_face_weights, weight_file
from hpcdist.tracking.weight_source import checkpoint_weights

ORIGIN = WeightOrigin(source="old.pth", found="file old.pth")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def copied(source: LocalWeights, tmp_path: Path) -> Mapping[str, Tensor]:
    source.copy_to(tmp_path / "init_from")
    return read_weights(tmp_path / "init_from")


def assert_equal(found: Mapping[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- Formats


@pytest.mark.parametrize("kind", ["pt", "pth", "old pth", "safetensors"])
def test_state_dict_is_read_from_each_format(tmp_path: Path, kind: str) -> None:
    expected = network().state_dict()
    file = tmp_path / f"weights.{kind.rpartition(' ')[2]}"
    if kind == "safetensors":
        save_safetensors(expected, file)
    else:
        torch.save(expected, file, _use_new_zipfile_serialization=kind != "old pth")
    assert_equal(copied(weight_file(str(file)), tmp_path), expected)


@pytest.mark.parametrize("keys", [("model",), ("state_dict",), ("model_state_dict",), ("model", "state_dict")])
def test_state_dict_beside_other_values_is_found(tmp_path: Path, keys: tuple[str, ...]) -> None:
    expected = network().state_dict()
    content: dict[str, Any] = expected
    for key in reversed(keys):
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: torch.ones(1)}}}
    torch.save(content, tmp_path / "weights.pt")
    assert_equal(copied(weight_file(str(tmp_path / "weights.pt")), tmp_path), expected)


def test_file_without_weights_is_an_error(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "stage0": {"weight": torch.ones(1)}}, tmp_path / "weights.pt")
    message = r"^weights.pt has no weights by name, alone or under model_state_dict, .*: it has epoch, stage0$"
    with pytest.raises(CheckpointError, match=message):
        copied(weight_file(str(tmp_path / "weights.pt")), tmp_path)


def test_pickled_module_is_not_loaded(tmp_path: Path) -> None:
    torch.save(network(), tmp_path / "weights.pt")
    message = r"weights.pt was not loaded, because it does not contain plain data only"
    with pytest.raises(CheckpointError, match=message):
        copied(weight_file(str(tmp_path / "weights.pt")), tmp_path)


def test_damaged_safetensors_are_an_error(tmp_path: Path) -> None:
    header = b"{not json"
    (tmp_path / "weights.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"^weights.safetensors cannot be read: "):
        copied(weight_file(str(tmp_path / "weights.safetensors")), tmp_path)


def test_checkpoint_has_the_weights_of_all_shards(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(monitor=""))
    rows = torch.arange(6.0).view(3, 2)
    shard = Shard(
        model={"table.weight": rows}, boxes={"table.weight": Box((0, 0), (3, 2))}, trainer={"state": torch.ones(9)}
    )

    def collect(folder: Path) -> dict[str, FileRecord]:
        return {shard_name(1): save_file(shard.content(), folder / shard_name(1))}

    model = {"fc.weight": torch.ones(2, 2)}
    folder = store.add(Snapshot(step=7, model=model, trainer={}, rank_states=[None], collect_shards=collect))
    source = checkpoint_weights(str(folder), folder)
    assert_equal(copied(source, tmp_path), {**model, "table.weight": rows})
    assert not (tmp_path / "init_from" / "trainer.pt").exists()
    assert (source.origin.step, source.origin.found) == (7, f"checkpoint {folder} of step 7")


class ManyKinds(nn.Module):
    """Has weights of two types, one in another memory layout, one under two names, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.first.weight.data = self.first.weight.data.t().contiguous().t()
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2).bfloat16()
        self.tied = self.second
        self.empty = nn.Embedding(0, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).bfloat16()
        outputs: Tensor = self.second(hidden) + self.tied(hidden) + self.empty.weight.sum()
        return outputs


@pytest.mark.filterwarnings("ignore:No complete tensor found")  # torch.export on the one without elements
def test_exported_program_is_read_without_its_code(tmp_path: Path) -> None:
    model = ManyKinds().eval()
    torch.export.save(torch.export.export(model, (torch.ones(2, 3),)), tmp_path / "model.pt2")
    source = LocalWeights(origin=ORIGIN, files={PROGRAM_FILE: tmp_path / "model.pt2"}, sha256={})
    assert_equal(copied(source, tmp_path), model.state_dict())


def test_damaged_program_is_an_error(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.pt2")
    source = LocalWeights(origin=ORIGIN, files={PROGRAM_FILE: tmp_path / "model.pt2"}, sha256={})
    with pytest.raises(CheckpointError, match=r"^model.pt2 cannot be read \(StopIteration"):
        copied(source, tmp_path)


# --- Names and shapes


class Inner(nn.Module):
    """A model with a layer that is called `module`, as in DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("model", [network(), Inner()], ids=["network", "own module"])
def test_prefixes_of_wrappers_do_not_matter(prefix: str, model: nn.Module) -> None:
    expected = model.state_dict()
    weights = {f"{prefix}{name}": tensor for name, tensor in expected.items()}
    assert_equal(fitted(StoredWeights(weights), wanted_shapes(model), [], ORIGIN), expected)


def test_wrapper_within_the_source_or_the_model_does_not_matter() -> None:
    model = network()
    weights = {name.replace(".", "._orig_mod.", 1): tensor for name, tensor in model.state_dict().items()}
    assert fitted(StoredWeights(weights), wanted_shapes(model), [], ORIGIN).keys() == model.state_dict().keys()
    wrapped = nn.DataParallel(network())
    load_into(wrapped, fitted(StoredWeights(weights), wanted_shapes(wrapped), [], ORIGIN))
    assert torch.equal(wrapped.state_dict()["module.0.weight"], model.state_dict()["0.weight"])


def test_all_names_that_do_not_fit_are_listed_with_shapes() -> None:
    weights = network().state_dict()
    weights["2.weight"] = torch.ones(5, 4)
    weights["3.bias"] = torch.ones(7)
    del weights["2.bias"]
    with pytest.raises(ConfigError) as caught:
        fitted(StoredWeights(weights), wanted_shapes(network()), [], ORIGIN)
    assert str(caught.value).splitlines() == [
        "model.init_from: file old.pth does not fit the model; for a new head set"
        " model.init_from_skip=[2*,3*]: 3 mistakes",
        "  - 2.weight is [5, 4] in the weights, [2, 4] in the model",
        "  - 2.bias [2] of the model is missing in the weights",
        "  - 3.bias [7] of the weights is not in the model",
    ]


def test_skipped_weights_stay_as_the_model_has_them() -> None:
    weights = network().state_dict()
    weights["2.weight"] = torch.ones(5, 4)
    weights["head.bias"] = torch.ones(7)
    model = network()
    before = model.state_dict()["2.weight"].clone()
    load_into(model, fitted(StoredWeights(weights), wanted_shapes(model), ["2.*", "head.*"], ORIGIN))
    after = model.state_dict()
    assert torch.equal(after["0.weight"], weights["0.weight"])
    assert torch.equal(after["2.weight"], before)


def test_pattern_that_fits_no_weight_is_an_error() -> None:
    message = r"^model.init_from_skip: no weight has a name like fc\.\*: the model has 0.weight, 0.bias, "
    with pytest.raises(ConfigError, match=message):
        fitted(StoredWeights(network().state_dict()), wanted_shapes(network()), ["2.*", "fc.*"], ORIGIN)


def test_counters_of_batch_norm_may_be_missing() -> None:
    weights = network().state_dict()
    del weights["1.num_batches_tracked"]
    assert fitted(StoredWeights(weights), wanted_shapes(network()), [], ORIGIN).keys() == weights.keys()


def test_weights_of_another_type_are_converted() -> None:
    model = network()
    weights = {name: tensor.double() for name, tensor in network().state_dict().items()}
    load_into(model, fitted(StoredWeights(weights), wanted_shapes(model), [], ORIGIN))
    after = model.state_dict()["0.weight"]
    assert after.dtype == torch.float32
    assert torch.equal(after, weights["0.weight"].float())


def test_run_without_a_copy_of_weights_is_an_error(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    with pytest.raises(ConfigError, match=r"^model.init_from: .*init_from has no weights: the run was started without"):
        initial_weights(run, network(), ModelConfig(init_from="old.pth"))


def test_damaged_copy_names_its_origin(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs" / "exp" / "first")
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    weight_file(str(tmp_path / "weights.pt")).copy_to(run.init_from)
    (run.init_from / "weights.pt").unlink()
    message = rf"^model.init_from: file {tmp_path}/weights.pt: {run.init_from} has no weights$"
    with pytest.raises(ConfigError, match=message):
        initial_weights(run, network(), ModelConfig(init_from="old.pth"))


def test_weights_of_shards_are_read_when_they_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    expected = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    content: dict[str, Any] = {"model": {}, "boxes": {}, "trainer": None}
    for name, tensor in expected.items():
        content["model"][name] = tensor
        content["boxes"][name] = [[0] * tensor.dim(), list(tensor.shape)]
    save_file(content, tmp_path / shard_name(0))
    save_file(dict.fromkeys(expected), tmp_path / "model.pt")
    num_read = 0
    copy = sharded.copy_overlap

    def counted(*args: Any) -> int:
        nonlocal num_read
        num_read += 1
        return copy(*args)

    monkeypatch.setattr(sharded, "copy_overlap", counted)
    fitting = fitted(read_weights(tmp_path), wanted_shapes(model), [], ORIGIN)
    assert num_read == 0
    load_into(model, fitting)
    assert num_read == len(expected)
    assert_equal(model.state_dict(), expected)


# --- Folders in Hugging Face's format


class Tied(nn.Module):
    """A model with two names for one table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def hugging_face_folder(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, tensors in files.items():
        save_safetensors(dict(tensors), folder / name)
    if "model.safetensors" not in files:
        places = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("is_linked", [True, False])
def test_hugging_face_folder_of_several_files_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    folder = hugging_face_folder(tmp_path / "hf", {"model-1.safetensors": first, "model-2.safetensors": second})
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.bin").touch()
    if not is_linked:  # as on another file system
        monkeypatch.setattr(os, "link", lambda *args: os.stat(tmp_path / "missing"))
    assert_equal(copied(hugging_face_weights(str(folder)), tmp_path), first | second)
    copy = tmp_path / "init_from"
    assert os.path.samefile(copy / "model-1.safetensors", folder / "model-1.safetensors") == is_linked
    assert sorted(path.name for path in copy.iterdir()) == [
        *("config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json", "source.json"),
        "tokenizer.json",
    ]


def test_link_to_a_cached_file_leads_to_the_file(tmp_path: Path) -> None:
    folder = hugging_face_folder(tmp_path / "hf", {"model.safetensors": {"a": torch.ones(2)}})
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert_equal(copied(hugging_face_weights(str(folder)), tmp_path), {"a": torch.ones(2)})
    assert not (tmp_path / "init_from" / "model.safetensors").is_symlink()


def test_linked_file_that_was_overwritten_is_an_error(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    model = nn.Linear(2, 1, bias=False)
    folder = hugging_face_folder(tmp_path / "hf", {"model.safetensors": model.state_dict()})
    hugging_face_weights(str(folder)).copy_to(run.init_from)
    cfg = ModelConfig(init_from=str(folder))
    assert_equal(initial_weights(run, model, cfg), model.state_dict())
    os.utime(folder / "model.safetensors", ns=(1, 1))
    message = rf"^model.init_from: model.safetensors in {folder} was overwritten after the run had been created: start "
    with pytest.raises(ConfigError, match=message):
        initial_weights(run, model, cfg)


def test_tied_weight_may_be_stored_once(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    stored = {"embed.weight": torch.full((4, 3), 2.0), "layers.0.rotary_emb.inv_freq": torch.ones(1)}
    folder = hugging_face_folder(tmp_path / "hf", {"model.safetensors": stored})
    hugging_face_weights(str(folder)).copy_to(run.init_from)
    model = Tied()
    load_into(model, initial_weights(run, model, ModelConfig(init_from=str(folder))))
    assert torch.equal(model.head.weight, stored["embed.weight"])
    untied = Tied()
    untied.head = nn.Linear(3, 4, bias=False)
    with pytest.raises(ConfigError, match=r"head.weight \[4, 3\] of the model is missing in the weights"):
        initial_weights(run, untied, ModelConfig(init_from=str(folder)))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"pytorch_model.bin": b""},
            r"{folder} has no model.safetensors, only pytorch_model.bin: write one with trans",
        ),
        ({}, r"{folder} has no model.safetensors: write one with transformers, model.save_pretrained\(folder\)"),
        ({"model.safetensors": b"<html>"}, r"{folder}/model.safetensors is not a safetensors file: was it downloaded"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "a.safetensors"}}'},
            r"{folder}/a.safetensors cannot be read: No such file or directory$",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../a.safetensors"}}'},
            r"{folder}/model.safetensors.index.json cannot be read \(ValueError: a name in weight_map is not one of a ",
        ),
        ({"model.safetensors.index.json": b"[]"}, r"{folder}/model.safetensors.index.json cannot be read \(TypeError"),
    ],
)
def test_unusable_hugging_face_folder_is_an_error(tmp_path: Path, files: dict[str, bytes], problem: str) -> None:
    (tmp_path / "config.json").touch()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="^model.init_from: " + problem.replace("{folder}", str(tmp_path))):
        hugging_face_weights(str(tmp_path))


def test_model_without_memory_cannot_take_weights() -> None:
    """Its `copy_` has no effect."""
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(TrainerError, match=r"^ctx.init_from: weight is on the device meta, .*: call to_empty\(device="):
        load_into(model, StoredWeights({"weight": torch.ones(2, 2)}))
