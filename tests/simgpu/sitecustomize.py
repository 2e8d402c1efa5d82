"""Load the simulated libraries before torch looks for the real ones. Python imports this module at its start."""

import ctypes
from pathlib import Path

for library in ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2", "libcupti.so.13"):
    ctypes.CDLL(str(Path(__file__).parent / library), ctypes.RTLD_GLOBAL)
