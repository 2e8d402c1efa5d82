"""Contents of a checkpoint: clean state dicts, states of random number generators, shards of ranks."""

import json
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import DistStoreError, PrefixStore, Store  # type: ignore[attr-defined]  # torch exports them at run time
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.serialization import get_crc32_options, set_crc32_options

from hpcdist.checkpoint.saver import plain_state
from hpcdist.checkpoint.sharded import Box, Key
from hpcdist.checkpoint.store import FileRecord, load_file, save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.errors import CheckpointError, TrainerError
from hpcdist.host import retry
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


# Shards: parts of a model that several ranks own (see sharded.py). Each owner writes its own file, rank 0 collects all.
# Owners report to rank 0 through the store: both sides write in background threads, which must not call collectives.

#: How long rank 0 waits for the last owner; the death of an owner ends the attempt earlier.
OWNER_TIMEOUT_S = 3600.0


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


@contextmanager
def _without_crc() -> Iterator[None]:
    """Let `torch.save` leave out the CRC-32 of each tensor, a fifth of the processor time of a save.

    The manifest has the SHA-256 of a shard. Other files keep their CRC-32, which tools for zip files compare. The
    setting is one of this thread, in older versions of torch one of the process.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class ShardExchange:
    """Reports from the owners to rank 0 that their shards of a step are on disk."""

    def __init__(self, store: Store, *, rank: int, attempt: int) -> None:
        self._store = PrefixStore(f"shards/{attempt}", store)
        self._rank = rank

    def write(self, state: Mapping[str, Any], *, boxes: Mapping[Key, Box], step: int, staging: Path) -> None:
        """Write the shard of this rank, and report the success or the error to rank 0.

        Args:
            state: a copy of `Shard.state`.

        Raises CheckpointError if it cannot be written.
        """
        key = f"{step}/{self._rank}"
        try:
            retry.retry(lambda: staging.mkdir(parents=True, exist_ok=True), staging)
            with _without_crc():
                record = save_file(shard_content(state, boxes), staging / shard_name(self._rank))
            report: dict[str, Any] = {"bytes": record.size_bytes, "sha256": record.sha256}
        except OSError as error:
            text = f"rank {self._rank} could not write its shard of step {step}: {error.strerror or error}"
            may_pass = retry.is_away(error)
            self._store.set(key, json.dumps({"error": text, "may_pass": may_pass}))
            raise CheckpointError(text, may_pass=may_pass) from error
        self._store.set(key, json.dumps(report))

    def pending(self, step: int, owners: Sequence[int], staging: Path) -> "PendingShards":
        """Return on rank 0 the shards of a step, which their owners are writing."""
        return PendingShards(self._store, step, owners, staging)


class PendingShards:
    """The shards of a step until rank 0 has collected or dropped them."""

    def __init__(self, store: Store, step: int, owners: Sequence[int], staging: Path) -> None:
        self._store = store
        self._step = step
        self._owners = owners
        self._staging = staging
        self._is_awaited = True

    def collect(self, into: Path) -> dict[str, FileRecord]:
        """Wait for every owner, and move the shards into the checkpoint folder.

        Returns the record of each file by its name. Raises CheckpointError if an owner could not write its shard.
        """
        records = {}
        reports = self._reports()
        try:
            for rank, report in reports.items():
                if "error" in report:
                    raise CheckpointError(report["error"], may_pass=report["may_pass"])
                records[shard_name(rank)] = FileRecord(size_bytes=report["bytes"], sha256=report["sha256"])
            for name in records:
                retry.rename(self._staging / name, into / name)
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
        # The folder itself is synced with the manifest, which is written later.
        return records

    def drop(self) -> None:
        """Wait for every owner, and remove the shards, unless they have been collected.

        Raises CheckpointError if an owner has not reported in time.
        """
        if self._is_awaited:
            self._reports()
            shutil.rmtree(self._staging, ignore_errors=True)

    def _reports(self) -> dict[int, dict[str, Any]]:
        """Wait for the reports of all owners, also after an error of one: the others still write to the folder."""
        self._is_awaited = False
        keys = {rank: f"{self._step}/{rank}" for rank in self._owners}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=OWNER_TIMEOUT_S))
        except DistStoreError as error:
            late = ", ".join(str(rank) for rank, key in keys.items() if not self._store.check([key]))
            text = f"rank {late} has not written its shard of step {self._step} in {OWNER_TIMEOUT_S:g} s"
            raise CheckpointError(text) from error
        reports = {}
        for rank, key in keys.items():
            reports[rank] = json.loads(self._store.get(key))
            self._store.delete_key(key)
        return reports


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
