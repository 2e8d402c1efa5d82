"""Load the simulated libraries before torch looks for the real ones, if SIMGPU_DEVICES is set.

Python imports this module at its start, and torch calls `install_kernels` (an entry point) at the end of its import.
"""

import ctypes
import os
from pathlib import Path

FOLDER = Path(__file__).parent

if os.environ.get("SIMGPU_DEVICES"):
    for name in ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2", "libcupti.so.13"):
        ctypes.CDLL(str(FOLDER / name), ctypes.RTLD_GLOBAL)


def install_kernels() -> None:
    if os.environ.get("SIMGPU_DEVICES"):
        import torch

        torch.ops.load_library(str(FOLDER / "libsimgpu_kernels.so"))
        torch.backends.cudnn.enabled = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
