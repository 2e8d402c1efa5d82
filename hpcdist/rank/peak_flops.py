"""The floating-point rate of a device: as its data sheet specifies it, and as measured by a product of matrices."""

import re
import statistics
import time

import torch

#: Dense bfloat16 rate in TFLOPS by whole words of the name that the driver reports; the first entry that fits counts.
#: Sources: data sheets of NVIDIA and AMD; torch has two devices for an MI250X, each with half of its rate.
SPECIFIED_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,
}
#: In the name of a part of a GPU (multi-instance GPU). Its rate depends on its size.
_PART_OF_A_GPU = "MIG"
#: Sizes of the square matrices of a measurement, which takes the first one that is slow enough to be timed.
SIZES = (1024, 2048, 4096, 8192)
LONG_ENOUGH_S = 1e-3
#: Products that are timed: fewer once they have taken a tenth of a second, since each start of a rank waits for them.
MAX_PRODUCTS, MIN_PRODUCTS = 15, 3
MEASURE_S = 0.1


def specified_flops(name: str) -> float | None:
    """Return the dense bfloat16 rate of a device in FLOPS, by its name; None if it is unknown or that of a part."""
    words = re.split(r"[ -]", name)
    if _PART_OF_A_GPU in words:
        return None
    for entry, tflops in SPECIFIED_TFLOPS.items():
        if set(entry.split()) <= set(words):
            return tflops * 1e12
    return None


def measured_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the median rate of a product of random square matrices in FLOPS: hardly a model exceeds it."""
    for size in SIZES:
        left, right = torch.randn(2, size, size, device=device, dtype=dtype)
        _seconds(left, right)  # the first product of a size is slower
        if _seconds(left, right) >= LONG_ENOUGH_S:
            break
    seconds: list[float] = []
    while len(seconds) < MIN_PRODUCTS or (len(seconds) < MAX_PRODUCTS and sum(seconds) < MEASURE_S):
        seconds.append(_seconds(left, right))
    return 2 * size**3 / statistics.median(seconds)


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return how long one product takes."""
    _wait(left.device)
    began = time.perf_counter()
    left @ right
    _wait(left.device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
