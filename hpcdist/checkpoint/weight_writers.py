"""Write weights one tensor at a time, for programs that load them without hpcdist: safetensors, and torch's DCP."""

import json
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from hpcdist.checkpoint.sharded import Whole
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.errors import ExportError

#: Names of types in the header of a safetensors file.
_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
#: Data begin at a multiple of this number of bytes.
_ALIGNMENT_BYTES = 8
#: Largest file of a folder in Hugging Face's layout; transformers has the same limit.
MAX_FILE_BYTES = 5_000_000_000


def write_safetensors(weights: StoredWeights, names: Sequence[str], file: Path, metadata: Mapping[str, str]) -> None:
    """Write tensors to a file, as `safetensors.torch.save_file` does, which needs all of them in memory."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        whole = weights.whole(name)
        if whole.dtype not in _SAFETENSORS_DTYPES:
            raise ExportError(
                f"{name} has the type {whole.dtype}, which safetensors does not support: choose --format torch"
            )
        begin, end = end, end + num_bytes(whole)
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[whole.dtype],
            "shape": list(whole.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            content = weights[name].detach().contiguous().flatten().view(torch.uint8)
            out.write(content.numpy().data)


def num_bytes(whole: Whole) -> int:
    """Return the number of bytes of a tensor's values."""
    size = whole.dtype.itemsize
    for length in whole.shape:
        size *= length
    return size


def write_safetensors_folder(
    weights: StoredWeights, folder: Path, metadata: Mapping[str, str], *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write Hugging Face's layout to an empty folder: `model.safetensors`, or several files with an index."""
    parts: list[list[str]] = [[]]
    size = 0
    for name in weights:
        own_size = num_bytes(weights.whole(name))
        if parts[-1] and size + own_size > max_file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += own_size
    if len(parts) == 1:
        write_safetensors(weights, parts[0], folder / "model.safetensors", metadata)
        return
    files: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(weights, names, folder / file, metadata)
        files |= dict.fromkeys(names, file)
    total = sum(num_bytes(weights.whole(name)) for name in weights)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class _OneAtATime(DefaultSavePlanner):
    """Reads each tensor when the writer asks for it; the state dict has tensors without data in their place."""

    def __init__(self, weights: StoredWeights) -> None:
        super().__init__()
        self._weights = weights

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._weights[write_item.index.fqn]


def write_dcp(weights: StoredWeights, folder: Path) -> None:
    """Write a checkpoint of `torch.distributed.checkpoint` to a folder, which `dcp.load` reads on any mesh."""
    state: dict[str, Tensor] = {}
    for name in weights:
        whole = weights.whole(name)
        state[name] = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    # One file per tensor: the writer keeps all tensors of a file until it is complete.
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.10 warns of its own code
        try:
            save(state, storage_writer=writer, planner=_OneAtATime(weights), no_dist=True)
        except CheckpointException as error:  # no Exception; it contains the errors of all ranks, here of one
            failure, _ = next(iter(error.failures.values()))
            raise failure from None
