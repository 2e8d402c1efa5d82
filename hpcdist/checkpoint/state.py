"""Contents of a checkpoint: clean state dicts, states of random number generators, shards of ranks, merged weights."""

import json
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them at run time
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from hpcdist.checkpoint.store import FileRecord, load_file, save_file, shard_name, verified
from hpcdist.errors import CheckpointError
from hpcdist.host import retry
from hpcdist.host.files import fsync_folder
from hpcdist.run.checkpoint_files import MODEL_FILE, TRAINER_FILE


def clean_names(module: nn.Module) -> dict[str, str]:
    """Return the names in a module's state dict, and the names without DDP's and `torch.compile`'s wrappers.

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
    for key in module.state_dict():
        clean = key
        for prefix in sorted(prefixes, key=len, reverse=True):
            if clean.startswith(prefix):
                clean = prefixes[prefix] + clean.removeprefix(prefix)
        names[key] = clean
    return names


def clean_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a module under the names of the bare module. The tensors share memory with it."""
    names = clean_names(module)
    return {names[key]: value for key, value in module.state_dict().items()}


def load_clean_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a result of `clean_state_dict` into a module with the same or other wrappers, or without them."""
    wrapped = {clean: key for key, clean in clean_names(module).items()}
    module.load_state_dict({wrapped.get(name, name): value for name, value in state.items()})


class MaybeSharded:
    """A state that may contain tensors sharded over ranks (DTensor), such as a model of FSDP2 or tensor parallelism.

    Attributes:
        is_sharded: whether it contains such tensors.
    """

    def __init__(self, state: Any) -> None:
        self._values, self._structure = tree_flatten(state)
        # The import of DTensor takes long, and a process with a sharded model has imported it already.
        sharding = sys.modules.get("torch.distributed.tensor")
        self._kind: Any = ()
        if sharding is not None:
            self._kind = sharding.DTensor
        self.is_sharded = any(isinstance(value, self._kind) for value in self._values)

    def gather(self, *, keep: bool) -> Any:
        """Return the state with whole tensors in host memory; None unless `keep`. Call it on all ranks of the mesh."""
        for number, value in enumerate(self._values):
            if isinstance(value, self._kind):
                whole = value.full_tensor()  # a collective: also on ranks that do not keep the result
                self._values[number] = whole.cpu() if keep else None
        if not keep:
            return None
        return tree_unflatten(self._values, self._structure)


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


# Shards: parts of a model that several ranks own. Each owner writes its own file, rank 0 collects them.
#
#     {"model": {name: tensor}, "rows": {name: [first row, total rows]}, "trainer": further state of the owner}
#
# Names belong to the whole model. A tensor with `rows` is a slice of a table, so that no rank has to hold the whole
# table. Owners report to rank 0 through the store: both sides write in background threads, which must not call
# collectives.

#: How long rank 0 waits for the last owner; the death of an owner ends the attempt earlier.
OWNER_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The part of a model that one rank owns, for `Context.save`.

    Attributes:
        model: tensors by their name in the whole model.
        rows: for each tensor that is a slice of a table: its first row and the total number of rows of the table.
        trainer: further state that this rank needs to resume, such as optimizer state.
    """

    model: Mapping[str, Tensor] = field(default_factory=dict)
    rows: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    trainer: Any = None

    def content(self) -> dict[str, Any]:
        """Return the content of the shard's file."""
        rows = {name: list(span) for name, span in self.rows.items()}
        return {"model": self.model, "rows": rows, "trainer": self.trainer}


class ShardExchange:
    """Reports from the owners to rank 0 that their shards of a step are on disk."""

    def __init__(self, store: Store, *, rank: int, attempt: int) -> None:
        self._store = PrefixStore(f"shards/{attempt}", store)
        self._rank = rank

    def write(self, content: Mapping[str, Any], step: int, staging: Path) -> None:
        """Write the shard of this rank, and report the success or the error to rank 0.

        Raises CheckpointError if it cannot be written.
        """
        key = f"{step}/{self._rank}"
        try:
            retry.retry(lambda: staging.mkdir(parents=True, exist_ok=True), staging)
            record = save_file(dict(content), staging / shard_name(self._rank))
            report: dict[str, Any] = {"bytes": record.size_bytes, "sha256": record.sha256}
        except OSError as error:
            text = f"rank {self._rank} could not write its shard of step {step}: {error.strerror or error}"
            may_pass = retry.is_away(error)
            self._store.set(key, json.dumps({"error": text, "may_pass": may_pass}))
            raise CheckpointError(text, may_pass=may_pass) from error
        self._store.set(key, json.dumps(report))

    def collect(self, step: int, owners: Sequence[int], staging: Path, into: Path) -> dict[str, FileRecord]:
        """Wait on rank 0 for every owner, and move the shards into the checkpoint folder.

        Returns the record of each file by its name. Raises CheckpointError if an owner could not write its shard.
        """
        try:
            reports = {rank: self._report(step, rank) for rank in owners}
            for rank in owners:
                retry.rename(staging / shard_name(rank), into / shard_name(rank))
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        retry.retry(lambda: fsync_folder(into), into)
        return {shard_name(rank): record for rank, record in reports.items()}

    def _report(self, step: int, rank: int) -> FileRecord:
        key = f"{step}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=OWNER_TIMEOUT_S))
        except DistStoreError as error:
            text = f"rank {rank} has not written its shard of step {step} in {OWNER_TIMEOUT_S:g} s"
            raise CheckpointError(text) from error
        report = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if "error" in report:
            raise CheckpointError(report["error"], may_pass=report["may_pass"])
        return FileRecord(size_bytes=report["bytes"], sha256=report["sha256"])


def merge(shards: Sequence[Mapping[str, Any]], source: str) -> dict[str, Tensor]:
    """Return the tensors of the whole model. Raises CheckpointError if a shard is damaged or rows are missing."""
    whole: dict[str, Tensor] = {}
    pieces: dict[str, list[tuple[int, int, Tensor]]] = {}  # of each table: first row, rows of the table, slice
    try:
        for shard in shards:
            for name, tensor in shard["model"].items():
                if name in shard["rows"]:
                    first, total = shard["rows"][name]
                    pieces.setdefault(name, []).append((first, total, tensor))
                else:
                    whole[name] = tensor
        for name, slices in pieces.items():
            slices.sort(key=lambda piece: piece[0])
            _, num_rows, _ = slices[0]
            next_row = 0
            for first, _, tensor in slices:
                if first != next_row:
                    break
                next_row += len(tensor)
            if next_row != num_rows:
                raise CheckpointError(f"{source}: rows of {name} are missing after row {next_row} of {num_rows}")
            whole[name] = torch.cat([tensor for _, _, tensor in slices])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise CheckpointError(f"{source}: a shard is damaged ({type(error).__name__}: {str(error)[:200]})") from error
    return whole


def load_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the model's state dict from one checkpoint folder, in host memory, for use in a single process.

    Keys are the names in the bare model, whichever trainer saved it; shards of several ranks are merged.

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
    manifest = verified(folder)
    weights = load_file(folder / MODEL_FILE)
    shard_names = sorted(manifest.files.keys() - {MODEL_FILE, TRAINER_FILE})
    shards = [load_file(folder / name) for name in shard_names]
    return weights | merge(shards, str(folder))
