"""Weights by name, one tensor at a time, so that a process needs memory for the largest one only, or for a box."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hpcdist.checkpoint.sharded import ShardReader, Target, Whole, copy_overlap, is_extra_state
from hpcdist.checkpoint.store import load_file, verified
from hpcdist.errors import CheckpointError
from hpcdist.run.checkpoint_files import MODEL_FILE


class StoredWeights(Mapping[str, Tensor]):
    """The whole tensors of a model by name. Each access reads one from files that are mapped into memory.

    Extra state of modules that is no tensor is left out.

    Args:
        whole: tensors, None in place of those in shards, and extra state of modules: the content of `model.pt`.
        shards: the files with parts of tensors.

    Raises CheckpointError if a file cannot be read, or if values of a tensor are in no file.
    """

    def __init__(self, whole: Mapping[str, Any], shards: Sequence[Path] = ()) -> None:
        self._reader = ShardReader(shards)
        self._in_shards = self._reader.wholes()
        # Names of DTensors are in both, so that they keep their order.
        self._tensors: dict[str, Tensor | None] = {}
        for name, value in whole.items():
            if isinstance(value, Tensor) or not is_extra_state(name):
                self._tensors[name] = value
        for key in self._in_shards:
            if isinstance(key, str):
                self._tensors[key] = None
        self._stored_names = {name: name for name in self._tensors}  #: by the names of this mapping
        self._change: Callable[[str, Tensor], Tensor] | None = None

    @classmethod
    def of(cls, folder: Path) -> "StoredWeights":
        """Return the weights of a checkpoint, after a check of its files by the manifest."""
        manifest = verified(folder)
        return cls(load_file(folder / MODEL_FILE, mmap=True), [folder / name for name in manifest.shards])

    def renamed(self, names: Mapping[str, str]) -> "StoredWeights":
        """Return some of these weights under other names.

        Args:
            names: their names here by the new names.
        """
        chosen = copy.copy(self)
        chosen._stored_names = {new: self._stored_names[old] for new, old in names.items()}
        return chosen

    def without(self, name: str) -> "StoredWeights":
        """Return these weights without one of them."""
        return self.renamed({other: other for other in self if other != name})

    def changed(self, change: Callable[[str, Tensor], Tensor]) -> "StoredWeights":
        """Return these weights, each of which a function of its name and itself changes when it is read.

        The function keeps shape and type.
        """
        changed = copy.copy(self)
        changed._change = change
        return changed

    def is_whole(self, name: str) -> bool:
        """Return whether a tensor is in `model.pt`; otherwise its parts are in shards."""
        return self._tensors[self._stored_names[name]] is not None

    def whole(self, name: str) -> Whole:
        """Return shape and type of a tensor, without reading it."""
        stored_name = self._stored_names[name]
        tensor = self._tensors[stored_name]
        if tensor is not None:
            return Whole(tuple(tensor.shape), tensor.dtype)
        if stored_name not in self._in_shards:
            raise CheckpointError(f"the checkpoint has no values of {name}: its shards are missing")
        return self._in_shards[stored_name]

    def fill(self, name: str, targets: Sequence[Target]) -> None:
        """Copy boxes of a tensor into memory; nothing else of it is read, unless it is changed."""
        stored_name = self._stored_names[name]
        if self._tensors[stored_name] is None and self._change is None:
            self._reader.fill(stored_name, targets)
            return
        tensor = self[name]
        for target in targets:
            copy_overlap(tensor, (0,) * tensor.dim(), target)

    def __getitem__(self, name: str) -> Tensor:
        stored_name = self._stored_names[name]
        tensor = self._tensors[stored_name]
        if tensor is None:
            tensor = self._reader.read(stored_name, self.whole(name))
        if self._change is not None:
            tensor = self._change(name, tensor)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._stored_names  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def __len__(self) -> int:
        return len(self._stored_names)
