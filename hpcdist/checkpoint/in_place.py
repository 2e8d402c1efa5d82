"""Load a checkpoint into the objects of a trainer, whatever their mesh and that of the checkpoint.

Of a tensor in shards, each rank reads its own part, and writes it where it belongs: into the parameters of the model,
or into new memory for the state of an optimizer. So no rank needs memory for more than its part.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcdist.checkpoint.sharded import (
    Key,
    ShardReader,
    Target,
    Whole,
    copy_overlap,
    is_dtensor,
    is_extra_state,
    is_sharded,
    key_text,
    map_leaves,
    targets_of,
)
from hpcdist.checkpoint.state import clean_names, clean_state_dict, load_clean_state_dict, require_memory
from hpcdist.errors import CheckpointError, few


class Stateful(Protocol):
    """An object with a state for checkpoints, such as an optimizer, a scheduler or a sampler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class StoredState:
    """The state in a checkpoint.

    Args:
        model: state dict of the model, with None in place of tensors in shards.
        trainer: state of the trainer, likewise.
        sharded: shape and type of the tensors in shards, by name or path.
        files: the shards, in the order in which to search.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        trainer: Mapping[str, Any],
        sharded: Mapping[Key, Sequence[Any]],
        files: Sequence[Path],
    ) -> None:
        self.model = model
        self.trainer = trainer
        self._wholes = {key: Whole(tuple(shape), dtype) for key, (shape, dtype) in sharded.items()}
        self._files = files
        self._targets: dict[Key, list[Target]] = {}  #: memory to fill from the shards

    def whole_model(self) -> dict[str, Any]:
        """Return the state dict of the model with whole tensors in host memory."""
        reader = ShardReader(self._files)
        whole = dict(self.model)
        for key in self._wholes:
            if isinstance(key, str):
                whole[key] = reader.read(key, self._wholes[key])
        return whole

    def whole_trainer(self) -> dict[str, Any]:
        """Return the state of the trainer with whole tensors in host memory."""
        reader = ShardReader(self._files)

        def read(path: tuple[Any, ...], value: Any) -> Any:
            if path in self._wholes:
                return reader.read(path, self._wholes[path])
            return value

        whole: dict[str, Any] = map_leaves(read, self.trainer)
        return whole

    def load(self, model: nn.Module | None, states: Mapping[str, Stateful]) -> None:
        """Load the state of each object under its name. Objects without a saved state stay as they are.

        Raises CheckpointError if names or shapes differ from those in the checkpoint, and TrainerError if a module has
        no memory.
        """
        pending: list[tuple[Stateful, Any]] = []  # objects with their states, which `ShardReader.fill` completes
        if model is not None:
            self._load_module("model", model, self.model, ())
        for name, value in states.items():
            if name not in self.trainer:
                continue
            saved = self.trainer[name]
            if isinstance(value, nn.Module):
                self._load_module(name, value, saved, (name,))
            elif saved:  # empty if it had nothing to save, such as a disabled GradScaler
                pending.append((value, self._state_for(value, saved, name)))
        reader = ShardReader(self._files)
        for key, targets in self._targets.items():
            reader.fill(key, targets)
        self._targets = {}
        for value, state in pending:
            value.load_state_dict(state)

    def _load_module(self, name: str, module: nn.Module, saved: Mapping[str, Any], path: tuple[Any, ...]) -> None:
        """Load a module; `load` reads its tensors in shards at the end."""
        require_memory(module, "restore of the checkpoint")

        def key_of(name: str) -> Key:
            return (*path, name) if path else name

        if not is_sharded(module.state_dict()) and not any(key_of(each) in self._wholes for each in saved):
            try:
                load_clean_state_dict(module, saved)
            except RuntimeError:
                self._require_fit(name, module, saved, path)
                raise
            return
        self._require_fit(name, module, saved, path)
        own = clean_state_dict(module)
        for each, value in saved.items():
            if isinstance(own[each], Tensor) and not is_extra_state(each):
                self._copy(key_of(each), value, own[each])
        others = {each: value for each, value in saved.items() if is_extra_state(each)}
        if others:
            keys = {clean: key for key, clean in clean_names(module).items()}
            module.load_state_dict({keys[each]: value for each, value in others.items()}, strict=False)

    def _require_fit(self, name: str, module: nn.Module, saved: Mapping[str, Any], path: tuple[Any, ...]) -> None:
        """Raise CheckpointError if the names or shapes in a module differ from the saved ones."""
        own = clean_state_dict(module)
        missing = [each for each in own if each not in saved]
        unexpected = [each for each in saved if each not in own]
        if missing:
            raise CheckpointError(f"{name} has {few(missing)}, which the checkpoint lacks: load it into the same model")
        if unexpected:
            raise CheckpointError(
                f"the checkpoint has {few(unexpected)} of {name}, which {name} lacks: load it into the same model"
            )
        for each, value in saved.items():
            if isinstance(own[each], Tensor) and not is_extra_state(each):
                self._require_shape((*path, each) if path else each, value, own[each])

    def _require_shape(self, key: Key, value: Tensor | None, target: Tensor) -> None:
        """Raise CheckpointError if a saved tensor, or the one in shards, has another shape than that to fill."""
        shape = self._wholes[key].shape if value is None else tuple(value.shape)
        if shape != tuple(target.shape):
            raise CheckpointError(
                f"{key_text(key)} has the shape {list(target.shape)}, but {list(shape)} in the checkpoint: load it into"
                " the same model"
            )

    def _copy(self, key: Key, value: Tensor | None, target: Tensor) -> None:
        """Copy a saved tensor into a tensor of any mesh, or note the target for `load`, which reads the shards."""
        self._require_shape(key, value, target)
        targets = targets_of(target)
        if value is None:
            self._targets.setdefault(key, []).extend(targets)
        else:
            for each in targets:
                copy_overlap(value, (0,) * value.dim(), each)

    def _state_for(self, value: Stateful, saved: Any, name: str) -> Any:
        """Return a saved state with tensors of the meshes of an object, those in shards still empty."""
        if isinstance(value, Optimizer):
            like = dict(_optimizer_tensors(value, saved, name))
        else:
            like = {}
            map_leaves(like.setdefault, value.state_dict(), (name,))

        def tensor_for(path: tuple[Any, ...], leaf: Any) -> Any:
            whole = self._wholes.get(path)
            near = like.get(path)
            if whole is None and not (isinstance(leaf, Tensor) and is_dtensor(near) and leaf.dim()):
                return leaf
            if whole is None:
                whole = Whole(tuple(leaf.shape), leaf.dtype)
            target = _empty(whole, near)
            self._copy(path, leaf, target)
            return target

        return map_leaves(tensor_for, saved, (name,))


def _optimizer_tensors(optimizer: Optimizer, saved: Any, name: str) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the path of each saved state of a parameter, with the parameter.

    An optimizer has no states before its first step.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, states in saved.get("state", {}).items():
        if isinstance(index, int) and index < len(parameters):
            for key in states:
                yield (name, "state", index, key), parameters[index]


def _empty(whole: Whole, like: Any) -> Tensor:
    """Return an empty tensor, of the mesh and the device of another one."""
    if not isinstance(like, Tensor):
        return torch.empty(whole.shape, dtype=whole.dtype)
    if tuple(like.shape) == whole.shape:
        return torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    if not is_dtensor(like):
        return torch.empty(whole.shape, dtype=whole.dtype, device=like.device)
    from torch.distributed.tensor import Replicate, empty

    # As torch's `new_zeros` does for a shape that differs from that of the parameter, such as Adafactor's rows.
    mesh = like.device_mesh  # type: ignore[attr-defined]
    return empty(whole.shape, dtype=whole.dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
