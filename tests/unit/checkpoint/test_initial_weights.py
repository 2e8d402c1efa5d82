"""The weights of `model.init_from`: the formats of their files, and how they fit a model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcdist.checkpoint.initial_weights import fitted, initial_weights, load_into, read_weights, wanted_shapes
from hpcdist.checkpoint.sharded import Box
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.store import CheckpointStore, FileRecord, Snapshot, save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.training_schema import ModelConfig
from hpcdist.errors import CheckpointError, ConfigError
from hpcdist.run.checkpoint_files import PROGRAM_FILE
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import LocalWeights, WeightOrigin, weight_file
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
        from safetensors.torch import save_file as save_safetensors

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
    """A model whose own layer is called `module`, as in DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("model", [network(), Inner()], ids=["network", "own module"])
def test_prefixes_of_wrappers_do_not_matter(prefix: str, model: nn.Module) -> None:
    expected = model.state_dict()
    weights = {f"{prefix}{name}": tensor for name, tensor in expected.items()}
    assert_equal(fitted(weights, wanted_shapes(model), [], ORIGIN), expected)


def test_wrapper_within_the_source_or_the_model_does_not_matter() -> None:
    model = network()
    weights = {name.replace(".", "._orig_mod.", 1): tensor for name, tensor in model.state_dict().items()}
    assert fitted(weights, wanted_shapes(model), [], ORIGIN).keys() == model.state_dict().keys()
    wrapped = nn.DataParallel(network())
    load_into(wrapped, fitted(weights, wanted_shapes(wrapped), [], ORIGIN))
    assert torch.equal(wrapped.state_dict()["module.0.weight"], model.state_dict()["0.weight"])


def test_all_names_that_do_not_fit_are_listed_with_shapes() -> None:
    weights = network().state_dict()
    weights["2.weight"] = torch.ones(5, 4)
    weights["3.bias"] = torch.ones(7)
    del weights["2.bias"]
    with pytest.raises(ConfigError) as caught:
        fitted(weights, wanted_shapes(network()), [], ORIGIN)
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
    load_into(model, fitted(weights, wanted_shapes(model), ["2.*", "head.*"], ORIGIN))
    after = model.state_dict()
    assert torch.equal(after["0.weight"], weights["0.weight"])
    assert torch.equal(after["2.weight"], before)


def test_pattern_that_fits_no_weight_is_an_error() -> None:
    message = r"^model.init_from_skip: no weight has a name like fc\.\*: the model has 0.weight, 0.bias, "
    with pytest.raises(ConfigError, match=message):
        fitted(network().state_dict(), wanted_shapes(network()), ["2.*", "fc.*"], ORIGIN)


def test_counters_of_batch_norm_may_be_missing() -> None:
    weights = network().state_dict()
    del weights["1.num_batches_tracked"]
    assert fitted(weights, wanted_shapes(network()), [], ORIGIN).keys() == weights.keys()


def test_weights_of_another_type_are_converted() -> None:
    model = network()
    weights = {name: tensor.double() for name, tensor in network().state_dict().items()}
    load_into(model, fitted(weights, wanted_shapes(model), [], ORIGIN))
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
    read = StoredWeights.__getitem__

    def counted(self: StoredWeights, name: str) -> Tensor:
        nonlocal num_read
        num_read += 1
        return read(self, name)

    monkeypatch.setattr(StoredWeights, "__getitem__", counted)
    fitting = fitted(read_weights(tmp_path), wanted_shapes(model), [], ORIGIN)
    assert num_read == 0
    load_into(model, fitting)
    assert num_read == len(expected)
    assert_equal(model.state_dict(), expected)
