"""What a checkpoint is made of: weights under clean names, and the random number generators of a rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hpcdist.errors import CheckpointError


def clean_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the module inside DDP and `torch.compile`, wherever these wrappers stand.

    Keys are those of the bare module: found from the wrappers themselves, so a layer that a user calls
    `module` keeps its name. Tensors share memory with the module.
    """
    prefixes = _wrapper_prefixes(module)
    return {_clean(key, prefixes): value for key, value in module.state_dict().items()}


def load_clean_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load what `clean_state_dict` gave into the same architecture, wrapped in another way or not at all.

    Raises CheckpointError when names or shapes do not fit.
    """
    prefixes = _wrapper_prefixes(module)
    names = {_clean(key, prefixes): key for key in module.state_dict()}
    try:
        module.load_state_dict({names.get(key, key): value for key, value in state.items()})
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint does not fit the model: {error}") from error


def _wrapper_prefixes(module: nn.Module) -> list[tuple[str, str]]:
    """(prefix of the wrapped module's keys, what it is to become), deepest first."""
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
