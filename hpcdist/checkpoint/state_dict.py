"""State dicts under the names of the bare model, without the prefixes of DDP and `torch.compile`."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten


def clean_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module without the prefixes of DDP and `torch.compile` wrappers at any level.

    The prefixes are derived from the wrapper modules, so a layer that a user calls `module` keeps its name. The tensors
    share memory with the module.
    """
    prefixes = _wrapper_prefixes(module)
    return {_clean(key, prefixes): value for key, value in module.state_dict().items()}


class MaybeSharded:
    """A state that may contain tensors sharded over ranks (DTensor), as those of FSDP2 and tensor parallelism."""

    def __init__(self, state: Any) -> None:
        self._values, self._structure = tree_flatten(state)
        sharding = sys.modules.get("torch.distributed.tensor")  # its import takes long, and sharded models have done it
        self._kind = sharding.DTensor if sharding is not None else ()
        self.is_sharded = any(isinstance(value, self._kind) for value in self._values)

    def gather(self, *, keep: bool) -> Any:
        """Return the state with whole tensors in host memory; None unless `keep`. Call it on all ranks of the mesh."""
        for number, value in enumerate(self._values):
            if isinstance(value, self._kind):
                whole = value.full_tensor()
                self._values[number] = whole.cpu() if keep else None
        return tree_unflatten(self._values, self._structure) if keep else None


def _wrapper_prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of a wrapper's key prefix and its replacement, the longest prefix first."""
    prefixes = []
    for name, part in module.named_modules(remove_duplicate=False):
        outer = f"{name}." if name else ""
        if isinstance(part, DistributedDataParallel | DataParallel):
            prefixes.append((f"{outer}module.", outer))
        elif isinstance(part._modules.get("_orig_mod"), nn.Module):  # torch.compile's OptimizedModule
            prefixes.append((f"{outer}_orig_mod.", outer))
    return sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True)


def _clean(key: str, prefixes: list[tuple[str, str]]) -> str:
    for prefix, outer in prefixes:
        if key.startswith(prefix):
            key = outer + key[len(prefix) :]
    return key
