"""Read the copy of the weights that `model.init_from` names, and fit them to a model by name and shape.

Nothing in the files is executed: tensors are read with `torch.load(weights_only=True)`, by safetensors, or as bytes.
"""

import json
import logging
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcdist.checkpoint.sharded import targets_of
from hpcdist.checkpoint.state import clean_names, require_memory
from hpcdist.checkpoint.store import load_file
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.training_schema import ModelConfig
from hpcdist.errors import CheckpointError, ConfigError, few, plural
from hpcdist.host.image_identity import install_command
from hpcdist.run.checkpoint_files import MODEL_FILE, PROGRAM_FILE
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import (
    HUGGING_FACE_INDEX,
    HUGGING_FACE_WEIGHTS,
    KEY,
    WEIGHTS_NAME,
    WeightOrigin,
    read_origin_of_weights,
    require_unchanged_links,
)

log = logging.getLogger(__name__)

#: Names that DistributedDataParallel, DataParallel and torch.compile add to those of the bare model.
WRAPPERS = ("module", "_orig_mod")
#: Under one of these keys a file that holds more than the weights usually has them, beside epoch and optimizer.
STATE_DICT_KEYS = ("model_state_dict", "state_dict", "model")
#: Batch normalisation counts its batches, but uses the number only with `momentum=None`: older files lack it.
COUNTER = "num_batches_tracked"
#: Older files of Llama have a table that follows from the config.
ROTARY_TABLE = "rotary_emb.inv_freq"
#: Data types in a program of torch.export, by the numbers of its format.
_PROGRAM_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    12: torch.bool,
    13: torch.bfloat16,
}


def initial_weights(run: RunDir, module: nn.Module, cfg: ModelConfig) -> StoredWeights:
    """Return the weights from which a new run starts, by the names of the bare model and with their shapes.

    Weights that `init_from_skip` leaves out are missing in the result, which is empty without `init_from`.

    Args:
        module: the model, wrapped or bare. Its own weights do not matter: it may be on the device `meta`.

    Raises ConfigError if the weights do not fit the model, or if their copy cannot be read.
    """
    if not cfg.init_from:
        return StoredWeights({})
    origin = read_origin_of_weights(run)
    if origin is None:
        raise ConfigError(f"{KEY}: {run.init_from} has no weights: the run was started without this key")
    require_unchanged_links(run.init_from)
    try:
        weights = read_weights(run.init_from)
    except CheckpointError as error:
        raise ConfigError(f"{KEY}: {origin.found}: {error}") from error
    wanted = wanted_shapes(module)
    for name in _tied_to_others(module, {bare_name(name, wanted) for name in weights}):
        del wanted[name]
    fitting = fitted(weights, wanted, cfg.init_from_skip, origin)
    left = [name for name in wanted if name not in fitting]
    text = f"starts from {len(fitting)} of {plural(len(wanted), 'tensor')} of {origin.found}"
    if left:
        text += f"; initialised anew: {few(left)}"
    log.info("%s", text)
    return fitting


def load_into(module: nn.Module, weights: StoredWeights) -> None:
    """Copy weights by the names of the bare model into a module; other weights of the module stay as they are.

    Of a weight that is sharded over ranks (DTensor), each rank reads its own box.

    Raises TrainerError if a weight is on the device `meta`.
    """
    require_memory(module, "ctx.init_from")
    state = module.state_dict()
    for key, name in clean_names(module).items():
        if not isinstance(state[key], Tensor):  # extra state of a module
            continue
        targets = targets_of(state[key])
        if name in weights:
            weights.fill(name, targets)


def _tied_to_others(module: nn.Module, found: Collection[str]) -> list[str]:
    """Return the names that are not found, of weights that are found under another name.

    Hugging Face's format stores a weight once, such as that of a tied embedding.
    """
    names: dict[int, list[str]] = {}
    clean = clean_names(module)
    for key, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(clean.get(key, key))
    tied = []
    for same in names.values():
        missing = [name for name in same if name not in found]
        if len(missing) < len(same):
            tied += missing
    return tied


def wanted_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a model's weights by the names of the bare model, of sharded ones those of the whole."""
    state = module.state_dict()
    return {name: state[key].shape for key, name in clean_names(module).items() if isinstance(state[key], Tensor)}


def fitted(
    weights: StoredWeights, wanted: Mapping[str, torch.Size], skip: Sequence[str], origin: WeightOrigin
) -> StoredWeights:
    """Return the weights under the names of a model, without those that `skip` leaves out.

    No tensor is read: each access to the result reads one.

    Raises ConfigError with all names that are missing, unexpected or of another shape.
    """
    names = {bare_name(name, wanted): name for name in weights}
    found = {bare: weights.whole(name).shape for bare, name in names.items()}
    unknown = [pattern for pattern in skip if not any(fnmatchcase(name, pattern) for name in (*wanted, *found))]
    if unknown:
        raise ConfigError(f"{KEY}_skip: no weight has a name like {few(unknown)}: the model has {few(list(wanted))}")

    def is_skipped(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in skip)

    problems: dict[str, str] = {}
    for name, shape in wanted.items():
        if is_skipped(name) or (name not in found and name.endswith(COUNTER)):
            continue
        if name not in found:
            problems[name] = f"{name} {list(shape)} of the model is missing in the weights"
        elif found[name] != tuple(shape):
            problems[name] = f"{name} is {list(found[name])} in the weights, {list(shape)} in the model"
    for name, found_shape in found.items():
        is_known = name in wanted or name.endswith(ROTARY_TABLE)
        if not is_known and not is_skipped(name):
            problems[name] = f"{name} {list(found_shape)} of the weights is not in the model"
    if problems:
        parts = sorted({name.rpartition(".")[0] or name for name in problems})
        patterns = ",".join(f"{part}*" for part in parts)
        raise ConfigError(
            *problems.values(),
            source=f"{KEY}: {origin.found} does not fit the model; for a new head set {KEY}_skip=[{patterns}]",
        )
    return weights.renamed({name: names[name] for name in wanted if name in found and not is_skipped(name)})


def bare_name(name: str, wanted: Mapping[str, torch.Size]) -> str:
    """Return a name without the parts that wrappers add at any level, unless the model itself has them."""
    parts = name.split(".")
    while ".".join(parts) not in wanted and parts[0] in WRAPPERS and len(parts) > 1:
        parts = parts[1:]
    outer = ".".join(parts)
    bare = ".".join(part for part in parts if part not in WRAPPERS)
    if outer in wanted or bare not in wanted:
        return outer
    return bare


# The readers, by the files in `init_from/`. Another kind of source is another file name and its reader.


def read_weights(folder: Path) -> StoredWeights:
    """Return the weights in the folder `init_from` of a run.

    Raises CheckpointError if a file cannot be read or holds anything but weights.
    """
    readers: dict[str, Callable[[Path], StoredWeights]] = {
        f"{WEIGHTS_NAME}.pt": _torch_weights,
        f"{WEIGHTS_NAME}.safetensors": _safetensors_weights,
        HUGGING_FACE_INDEX: _indexed_weights,
        HUGGING_FACE_WEIGHTS: _safetensors_weights,
        MODEL_FILE: _checkpoint_weights,
        PROGRAM_FILE: _program_weights,
    }
    for name, read in readers.items():
        if (folder / name).is_file():
            return read(folder / name)
    raise CheckpointError(f"{folder} has no weights")


def _torch_weights(path: Path) -> StoredWeights:
    # Mapped memory is shared by the ranks of a node; files from before torch 1.6 cannot be mapped.
    content = load_file(path, mmap=zipfile.is_zipfile(path))
    return StoredWeights(state_dict_in(content, path))


def state_dict_in(content: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return the state dict that a file holds, alone or beside other values. Raises CheckpointError without one."""
    for key in STATE_DICT_KEYS:
        nested = content.get(key)
        if isinstance(nested, Mapping):
            return state_dict_in(nested, path)
    weights = {name: value for name, value in content.items() if isinstance(value, Tensor)}
    others = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if not weights:
        expected = ", ".join(STATE_DICT_KEYS)
        raise CheckpointError(f"{path.name} has no weights by name, alone or under {expected}: it has {few(others)}")
    return weights


def _safetensors_weights(path: Path) -> StoredWeights:
    return StoredWeights(_load_safetensors(path))


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file as load_safetensors
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path.name} needs the package safetensors: run {install_command('export')}") from error
    try:
        return load_safetensors(path)  # mapped into memory: pages are read when a tensor is copied
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _indexed_weights(index: Path) -> StoredWeights:
    weights: dict[str, Tensor] = {}
    for path in sorted(index.parent.glob("*.safetensors")):
        weights |= _load_safetensors(path)
    return StoredWeights(weights)


def _checkpoint_weights(path: Path) -> StoredWeights:
    return StoredWeights(load_file(path, mmap=True), sorted(path.parent.glob("shard-*.pt")))


def _program_weights(path: Path) -> StoredWeights:
    """Return the weights of a program of torch.export.

    `torch.export.load` is not used: it evaluates expressions of the file, and may unpickle its example.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            index = next(name for name in archive.namelist() if name.endswith("model_weights_config.json"))
            folder = index.rpartition("/")[0]
            weights = {}
            for name, entry in json.loads(archive.read(index))["config"].items():
                weights[name] = _program_tensor(archive.read(f"{folder}/{entry['path_name']}"), entry["tensor_meta"])
            return StoredWeights(weights)
    except (OSError, KeyError, TypeError, ValueError, StopIteration, RuntimeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path.name} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error


def _program_tensor(content: bytes, meta: Mapping[str, Any]) -> Tensor:
    sizes = [size["as_int"] for size in meta["sizes"]]
    strides = [stride["as_int"] for stride in meta["strides"]]
    dtype = _PROGRAM_DTYPES[meta["dtype"]]
    if not prod(sizes):
        return torch.empty(sizes, dtype=dtype)
    flat = torch.frombuffer(bytearray(content), dtype=dtype)
    return flat.as_strided(sizes, strides, meta["storage_offset"]["as_int"])
