"""State dicts under the names of the bare model, without the prefixes of DDP and `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcdist.errors import CheckpointError


def clean_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module without the prefixes of DDP and `torch.compile` wrappers at any level.

    The prefixes are derived from the wrapper modules, so a layer that a user calls `module` keeps its name. The tensors
    share memory with the module.
    """
    prefixes = _wrapper_prefixes(module)
    return {_clean(key, prefixes): value for key, value in module.state_dict().items()}


def load_clean_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a result of `clean_state_dict` into the same architecture with any wrappers or none.

    Raises CheckpointError if names or shapes differ.
    """
    prefixes = _wrapper_prefixes(module)
    names = {_clean(key, prefixes): key for key in module.state_dict()}
    try:
        module.load_state_dict({names.get(key, key): value for key, value in state.items()})
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error


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
