"""Compute torch's CUDA operators by the kernels of the CPU, on the memory of the simulated devices (`devices.cpp`)."""

import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Views, allocation and transfers stay torch's own.
OWN = (
    *("empty", "empty_strided", "resize_", "set_", "_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory"),
    *("is_set_to", "_efficientzerotensor", "_copy_from", "_copy_from_and_resize", "_resize_output_", "_indices"),
    *("_values", "indices", "values", "_coalesced_", "is_coalesced", "_nnz", "sparse_dim", "dense_dim", "_dimI"),
    *("_dimV", "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors", "copy_sparse_to_sparse_"),
    *("sparse_resize_", "sparse_resize_and_clear_"),
)
#: FSDP2 joins gradients of several types with it, in new releases of torch.
MIXED_TYPES = "chunk_cat_mixed_dtype"
CPU = torch.device("cpu")
#: A key without kernels of its own: it has the one of `copy_` that transfers between devices.
TRANSFER = torch._C.DispatchKeySet(torch._C.DispatchKey.HPU)
simulation = ctypes.CDLL(None)
simulation.sim_memory.restype = ctypes.c_void_p
simulation.sim_memory.argtypes = [ctypes.c_void_p]
simulation.sim_begin.restype = ctypes.c_int64
simulation.cudaGetErrorString.restype = ctypes.c_char_p
libraries: list[torch.library.Library] = []  #: registrations end with these objects


class Range(ctypes.Structure):
    """Memory that an operator accesses: `SimRange` of `sim.h`."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t), ("write", ctypes.c_bool))


class Call:
    """One call of an operator: the device on which it runs, and the memory that it accesses."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.ranges: list[Range] = []

    def on_cpu(self, value: Any, *, write: bool = False) -> Any:
        """Return an argument for the CPU: tensors have the same memory."""
        if isinstance(value, list | tuple):
            return type(value)(self.on_cpu(one, write=write) for one in value)
        if isinstance(value, torch.device) and value.type == "cuda":
            self.device = value
            return CPU
        if not isinstance(value, Tensor) or not value.is_cuda:
            return value
        self.device = self.device or value.device
        if value.is_sparse:
            parts = (self.on_cpu(part, write=write) for part in (value._indices(), value._values()))
            found = torch.ops.aten._sparse_coo_tensor_unsafe(*parts, value.shape)
            return found._coalesced_(value.is_coalesced())
        if not value.numel():
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        num_bytes = extent * value.element_size()
        self.ranges.append(Range(value.data_ptr(), num_bytes, write))
        address = simulation.sim_memory(value.data_ptr())
        storage = torch._C._construct_storage_from_data_pointer(address, CPU, num_bytes)
        return torch.empty(0, dtype=value.dtype).set_(storage, 0, value.shape, value.stride())

    def on_device(self, value: Any) -> Any:
        """Return a result of the CPU as one of the device."""
        if isinstance(value, list | tuple):
            return type(value)(self.on_device(one) for one in value)
        if not isinstance(value, Tensor):
            return value
        if value.is_sparse:
            parts = (self.on_device(part) for part in (value._indices(), value._values()))
            return torch.ops.aten._sparse_coo_tensor_unsafe(*parts, value.shape)._coalesced_(value.is_coalesced())
        return copy_(torch.empty_like(value, device=self.device), value)

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Run a function when all is done that the current stream holds; raise the error of a lost device."""
        assert self.device is not None
        index = self.device.index
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index))
        ranges = (Range * len(self.ranges))(*self.ranges)
        ticket = simulation.sim_begin(index, stream, name.encode(), ranges, len(ranges))
        if ticket < 0:
            raise torch.AcceleratorError(f"CUDA error: {simulation.cudaGetErrorString(-ticket).decode()}")
        try:
            return function()
        finally:
            simulation.sim_end(index, stream, ctypes.c_int64(ticket))


def with_seed(generator: torch.Generator | None, index: int, function: Callable[[], Any]) -> Any:
    """Run a function with random numbers that follow from the seed and the offset of a device's generator."""
    generator = generator or torch.cuda.default_generators[index]
    before, offset = torch.get_rng_state(), generator.get_offset()
    torch.default_generator.manual_seed((generator.initial_seed() * 0x9E3779B97F4A7C15 + offset) % 2**63)
    generator.set_offset(offset + 4)
    try:
        return function()
    finally:
        torch.set_rng_state(before)


def run_on_cpu(namespace: str, name: str, overload: str, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of CUDA."""
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    schema, call = op._schema, Call()
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    is_random = "generator" in given or torch.Tag.nondeterministic_seeded in op.tags
    generator = given.pop("generator", None)
    given.pop("pin_memory", None)
    written = {argument.name: argument.alias_info.before_set for argument in schema.arguments if argument.is_write}
    cpu = {key: call.on_cpu(value, write=key in written) for key, value in given.items()}
    if call.device is None or call.device.index is None:
        call.device = torch.device("cuda", torch.cuda.current_device())
    function = functools.partial(ONLY_CUDA.get(name, op), **cpu)
    if is_random:
        function = functools.partial(with_seed, generator, call.device.index, function)
    found = call.run(name, function)
    for key in written.keys() & given.keys():
        out = given[key]
        if isinstance(out, Tensor) and not out.is_sparse and not out.numel() and cpu[key].numel():
            copy_(out.resize_(cpu[key].shape), cpu[key])  # the CPU has given the empty result a size
    results = found if isinstance(found, tuple) and len(schema.returns) > 1 else (found,)
    returned = []
    for value, declared in zip(results, schema.returns, strict=False):
        is_argument = declared.alias_info and declared.alias_info.is_write
        names = [key for key in written if is_argument and written[key] == declared.alias_info.before_set]
        returned.append(given[names[0]] if names else call.on_device(value))
    return None if not schema.returns else returned[0] if len(returned) == 1 else tuple(returned)


def copy_(to: Tensor, source: Tensor) -> Tensor:
    """Write to memory of a device by the CPU; this replaces copies within a device."""
    call = Call()
    target, origin = call.on_cpu(to, write=True), call.on_cpu(source)
    call.run("copy_", lambda: target.copy_(origin))
    return to


def copy_or_transfer(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if to.device == source.device:
        return copy_(to, source)
    copied: Tensor = torch.ops.aten.copy_.default.redispatch(TRANSFER, to, source, non_blocking)
    return copied


def lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor, hidden_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gates = input_gates + hidden_gates + input_bias + hidden_bias
    inputs, forget, new, output = gates.chunk(4, 1)
    inputs, forget, new, output = inputs.sigmoid(), forget.sigmoid(), new.tanh(), output.sigmoid()
    cell = forget * cx + inputs * new
    return output * cell.tanh(), cell, torch.cat([inputs, forget, new, output], 1)


def lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    inputs, forget, new, output = workspace.chunk(4, 1)
    squashed = cy.tanh()
    hidden = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad = hidden * output * (1 - squashed * squashed) + (0 if grad_cy is None else grad_cy)
    grads = [grad * new * inputs * (1 - inputs), grad * cx * forget * (1 - forget)]
    grads += [grad * inputs * (1 - new * new), hidden * squashed * output * (1 - output)]
    gates = torch.cat(grads, 1)
    return gates, grad * forget, gates.sum(0) if has_bias else None


def rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,  # noqa: A002 (the name of torch)
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight. The CPU has no kernel for it: there, torch differentiates the parts."""
    dimensions = list(range(-len(normalized_shape), 0))
    normalized = input * rstd
    weighted = grad_out if weight is None else grad_out * weight
    of_input = of_weight = None
    if output_mask[0]:
        of_input = rstd * (weighted - normalized * (weighted * normalized).mean(dimensions, keepdim=True))
        of_input = of_input.to(input.dtype)
    if output_mask[1] and weight is not None:
        of_weight = (grad_out * normalized).reshape(-1, *normalized_shape).sum(0).to(weight.dtype)
    return of_input, of_weight


def sleep(cycles: int) -> None:
    """Replace `torch.cuda._sleep`, with a clock of 1 GHz."""
    index = torch.cuda.current_device()
    simulation.sim_sleep(index, ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(index)), cycles // 1000)


ONLY_CUDA = {
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_fused_rms_norm_backward": rms_norm_backward,
}


def is_replaced(name: str, overload: str, key: str, cpu_key: str) -> bool:
    schema = torch._C._get_schema(f"aten::{name}", overload)
    if name in OWN or "cudnn" in name or any(one.alias_info and not one.alias_info.is_write for one in schema.returns):
        return False
    full = f"aten::{name}" + (f".{overload}" if overload else "")
    if key == "CUDA" and name in ("convolution", "convolution_backward", *ONLY_CUDA):
        return True
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
    return bool(has_kernel and torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, cpu_key))


def install() -> None:
    """Replace the operators of CUDA in this process."""
    torch.cuda._sleep = sleep
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of each kernel that is replaced
        library = torch.library.Library("aten", "IMPL")
        libraries.append(library)
        assert library.m is not None
        for full in names:
            name, _, overload = full.partition(".")
            for key, cpu_key in (("CUDA", "CPU"), ("SparseCUDA", "SparseCPU")):
                if name != "copy_" and is_replaced(name, overload, key, cpu_key):
                    library.m.impl(full, key, functools.partial(run_on_cpu, "aten", name, overload), False)
        library.m.impl("copy_", "CUDA", copy_or_transfer, False)
        if f"fsdp::{MIXED_TYPES}" in torch._C._dispatch_get_all_op_names():
            library = torch.library.Library("fsdp", "IMPL")
            libraries.append(library)
            assert library.m is not None
            library.m.impl(MIXED_TYPES, "CUDA", functools.partial(run_on_cpu, "fsdp", MIXED_TYPES, ""), False)
