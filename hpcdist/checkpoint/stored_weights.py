"""The weights of a checkpoint one tensor at a time, so that a process needs memory for the largest one only."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcdist.checkpoint.sharded import Box, Target, Whole, copy_overlap, is_extra_state, parts_of
from hpcdist.checkpoint.store import load_file, verified
from hpcdist.errors import CheckpointError
from hpcdist.run.checkpoint_files import MODEL_FILE


class StoredWeights(Mapping[str, Tensor]):
    """The whole tensors of a model by name. Each access reads one from files that are mapped into memory.

    Extra state of modules that is no tensor is left out.

    Args:
        whole: the content of `model.pt`: tensors, None in place of those in shards, and extra state of modules.
        shards: the files with parts of tensors.

    Raises CheckpointError if a file cannot be read, or if values of a tensor are in no file.
    """

    def __init__(self, whole: Mapping[str, Any], shards: Sequence[Path]) -> None:
        # Names of DTensors are in both, so that they keep their order.
        self._tensors: dict[str, Tensor | None] = {}
        for name, value in whole.items():
            if isinstance(value, Tensor) or not is_extra_state(name):
                self._tensors[name] = value
        self._parts: dict[str, list[tuple[Box, Tensor]]] = {}
        for path in shards:
            for key, box, part in parts_of(path):
                if isinstance(key, str):
                    self._parts.setdefault(key, []).append((box, part))
                    self._tensors[key] = None

    @classmethod
    def of(cls, folder: Path) -> "StoredWeights":
        """Return the weights of a checkpoint whose files have the hashes of its manifest."""
        manifest = verified(folder)
        return cls(load_file(folder / MODEL_FILE, mmap=True), [folder / name for name in manifest.shards])

    def is_whole(self, name: str) -> bool:
        """Return whether a tensor is in `model.pt`; otherwise its parts are in shards."""
        return self._tensors[name] is not None

    def without(self, name: str) -> "StoredWeights":
        """Return these weights without one of them."""
        rest = StoredWeights({other: tensor for other, tensor in self._tensors.items() if other != name}, [])
        rest._parts = self._parts
        return rest

    def whole(self, name: str) -> Whole:
        """Return shape and type of a tensor, without reading it."""
        tensor = self._tensors[name]
        if tensor is not None:
            return Whole(tuple(tensor.shape), tensor.dtype)
        if name not in self._parts:
            raise CheckpointError(f"the checkpoint has no values of {name}: its shards are missing")
        box, part = self._parts[name][0]
        return Whole(box.shape, part.dtype)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor is not None:
            return tensor
        whole = self.whole(name)
        tensor = torch.empty(whole.shape, dtype=whole.dtype)
        target = Target(tensor, (0,) * tensor.dim())
        num_values = 0
        for box, part in self._parts[name]:
            num_values += copy_overlap(part, box.offset, target)
        if num_values != tensor.numel():
            raise CheckpointError(f"{tensor.numel() - num_values} values of {name} are in no shard of the checkpoint")
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
