"""Contents of a checkpoint: clean state dicts, states of random number generators, the shard of a rank."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcdist.checkpoint.saver import plain_state
from hpcdist.checkpoint.sharded import Box, Key
from hpcdist.checkpoint.store import load_file
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.errors import CheckpointError, TrainerError
from hpcdist.run.checkpoint_files import MODEL_FILE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def clean_names(module: nn.Module) -> dict[str, str]:
    """Return the names in a module's state dict, and the names without DDP's and `torch.compile`'s wrappers."""
    return _without_wrappers(module, module.state_dict())


def _without_wrappers(module: nn.Module, keys: Iterable[str]) -> dict[str, str]:
    """Return the names in a module's state dict, and the names without wrappers.

    The prefixes of wrappers at any level are derived from the modules, so a layer that a user calls `module` keeps its
    name.
    """
    prefixes = {}  # each with its replacement
    for name, part in module.named_modules(remove_duplicate=False):
        outer = f"{name}." if name else ""
        if isinstance(part, DistributedDataParallel | DataParallel):
            prefixes[f"{outer}module."] = outer
        elif isinstance(part._modules.get("_orig_mod"), nn.Module):  # torch.compile's OptimizedModule
            prefixes[f"{outer}_orig_mod."] = outer
    names = {}
    for key in keys:
        clean = key
        for prefix in sorted(prefixes, key=len, reverse=True):
            if clean.startswith(prefix):
                clean = prefixes[prefix] + clean.removeprefix(prefix)
        names[key] = clean
    return names


def clean_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module under the names of the bare module. The tensors share memory with it."""
    state = module.state_dict()
    names = _without_wrappers(module, state)
    return {names[key]: value for key, value in state.items()}


def load_clean_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a result of `clean_state_dict` into a module with the same or other wrappers, or without them."""
    wrapped = {clean: key for key, clean in clean_names(module).items()}
    module.load_state_dict({wrapped.get(name, name): value for name, value in state.items()})


def require_memory(module: nn.Module, call: str) -> None:
    """Raise TrainerError if a weight is on the device `meta`, on which a copy has no effect."""
    for name, value in clean_state_dict(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise TrainerError(
                f"{call}: {name} is on the device meta, which has no memory: call to_empty(device=ctx.device) on the"
                " model before"
            )


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of this process's generators: torch (CPU, and a GPU), NumPy and Python."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert not isinstance(keys, str)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {
            "name": name,
            "keys": torch.from_numpy(keys.astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a result of `rng_state`. The state of a GPU is ignored on another type of device."""
    torch.set_rng_state(state["torch"])
    numpy = state["numpy"]
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that one rank owns, for `Context.save`.

    Attributes:
        model: tensors by their name in the whole model.
        boxes: for each tensor that is a part of a larger one: where this part is, such as
            `Box.of_rows(part, first, total)`.
        trainer: further state that this rank needs to resume, such as optimizer state.
    """

    model: Mapping[str, Tensor] = field(default_factory=dict)
    boxes: Mapping[Key, Box] = field(default_factory=dict)
    trainer: Any = None

    @classmethod
    @torch.no_grad()  # with it, `to_local` records nothing for a backward pass
    def of(cls, tensors: Mapping[Key, "DTensor"], boxes: Mapping[Key, Box]) -> "Shard":
        """Return this rank's parts of DTensors that have boxes."""
        parts = {key: tensors[key].to_local() for key in boxes}
        model = {key: part for key, part in parts.items() if isinstance(key, str)}
        trainer = {key: part for key, part in parts.items() if not isinstance(key, str)}
        return cls(model=model, boxes=boxes, trainer=trainer)

    @property
    def state(self) -> dict[str, Any]:
        """The tensors and other values, which change from save to save."""
        return {"model": self.model, "trainer": self.trainer}

    def content(self) -> dict[str, Any]:
        """Return the content of the shard's file."""
        return shard_content(self.state, self.boxes)


def shard_content(state: Mapping[str, Any], boxes: Mapping[Key, Box]) -> dict[str, Any]:
    """Return the content of a shard's file.

    Raises CheckpointError for a name that a checkpoint cannot contain.
    """
    # Offsets and names may be numbers of NumPy, of which no checkpoint can be loaded.
    lists = {key: [list(map(int, box.offset)), list(map(int, box.shape))] for key, box in boxes.items()}
    return {**state, "boxes": plain_state(lists, "boxes")}


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the model's state dict from one checkpoint folder, in host memory, for use in a single process.

    Keys are the names in the bare model, whichever trainer saved it; shards of several ranks are merged. The result
    needs memory for the weights once. `load_state_dict(weights, assign=True)` takes its tensors into a model, which may
    be on the device `meta`, instead of copying them.

    Args:
        path: a checkpoint folder, such as `runs/digits/first/checkpoints/step-00001200`, or a copy of one.

    Raises CheckpointError if the checkpoint is incomplete, has changed, or contains anything other than plain data.
    """
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file, not the folder of a checkpoint: load its weights with"
            " torch.load(path, weights_only=True), or those of a .safetensors file with safetensors.torch.load_file"
        )
    stored = StoredWeights.of(folder)
    # Not those of `stored`, which are mapped: they would change with the file.
    plain = load_file(folder / MODEL_FILE)
    weights = {}
    for name in dict.fromkeys([*plain, *stored]):  # extra state of modules is in `plain` only
        if name in stored and not stored.is_whole(name):
            weights[name] = stored[name]
        else:
            weights[name] = plain[name]
    return weights
