"""The form in which RPC sends values: JSON, and the bytes of each tensor. Nothing is pickled.

Values are None, bool, int, float, str, tensors, and lists, tuples and dicts of these. The JSON contains the number of
a tensor. Its description has dtype, shape, order of the axes in memory, and whether it is on a GPU.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcdist.rank.frame_parts import Buffer

#: The names of dtypes, such as `float32`, and their reverse.
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return a value as JSON types; its tensors are appended to `tensors`. Raises TypeError for other types."""
    if isinstance(value, np.generic):  # a number of NumPy
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"RPC sends dense tensors, not {value.layout}: use its indices and values")
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [encode(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, tensors) for key, item in value.items()}}
    kind = type(value).__name__
    if isinstance(value, dict):
        kind = "a dict with keys that are not strings"
    raise TypeError(
        f"RPC cannot send {kind}: use None, bool, int, float, str, tensors, and lists, tuples, dicts of them"
    )


def decode(content: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the value that `encode` was given. Raises ValueError for other content."""
    if isinstance(content, list):
        return [decode(item, tensors) for item in content]
    if not isinstance(content, dict):
        return content
    match content:
        case {"tensor": int(index)} if 0 <= index < len(tensors):
            return tensors[index]
        case {"tuple": list(items)}:
            return tuple(decode(item, tensors) for item in items)
        case {"dict": dict(items)}:
            return {key: decode(item, tensors) for key, item in items.items()}
    raise ValueError("not a value of RPC")


def to_frames(tensors: Sequence[Tensor]) -> tuple[list[Any], list[memoryview]]:
    """Return the descriptions of tensors, and a frame for each one that has elements.

    The frame is the memory of the tensor if it is dense on the host, otherwise that of a copy.
    """
    descriptions: list[Any] = []
    on_host: list[Tensor] = []
    for tensor in tensors:
        # The order of the strides is kept: kernels round differently for channels_last.
        order = list(range(tensor.dim()))
        if not tensor.is_contiguous():
            order.sort(key=tensor.stride, reverse=True)
        descriptions.append([_NAMES[tensor.dtype], list(tensor.shape), order, not tensor.is_cpu])
        dense = tensor.permute(order).contiguous().resolve_conj().resolve_neg()
        if not tensor.is_cpu:
            # The copy is complete after the synchronization below.
            pinned = torch.empty(dense.shape, dtype=dense.dtype, pin_memory=True)
            dense = pinned.copy_(dense, non_blocking=True)
        on_host.append(dense)
    on_gpu = [tensor for tensor in tensors if not tensor.is_cpu]
    if on_gpu:
        torch.accelerator.current_stream(on_gpu[0].device).synchronize()
    return descriptions, [_bytes_of(tensor) for tensor in on_host if tensor.numel()]


def from_parts(description: Any, parts: deque[Buffer], device: torch.device) -> Tensor:
    """Remove the parts of a tensor's frame, and return the tensor, on `device` if the sender had it on a GPU.

    Raises ValueError, TypeError, LookupError or RuntimeError for a description that does not fit the parts.
    """
    dtype_name, shape, order, on_gpu = description
    dtype = _DTYPES[dtype_name]
    missing = math.prod(shape) * dtype.itemsize
    taken = []
    while missing > 0 and parts:
        taken.append(parts.popleft())
        missing -= len(taken[-1])
    is_permutation = sorted(order) == list(range(len(shape)))
    if not is_permutation or missing != 0:
        raise ValueError(f"{sum(map(len, taken))} bytes for a tensor of shape {shape}")
    # A copy, because the parts are aligned differently, and kernels round differently then.
    tensor = torch.empty([shape[axis] for axis in order], dtype=dtype)
    start = 0
    for part in taken:
        _bytes_of(tensor)[start : start + len(part)] = part
        start += len(part)
    tensor = tensor.permute([order.index(axis) for axis in range(len(shape))])
    if on_gpu:
        return tensor.to(device)
    return tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    return tensor.view(-1).view(torch.uint8).numpy().data
