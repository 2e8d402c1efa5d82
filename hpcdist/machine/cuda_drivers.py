"""Compatibility of NVIDIA drivers with CUDA versions."""

from __future__ import annotations

import re

#: Oldest driver by major version of CUDA (minor versions are compatible with each other).
#: Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def driver_problem(cuda: str, driver: str) -> str:
    """Return e.g. `driver 580.65 or newer for its CUDA 13.2, found 550.54`; empty if compatible or unknown.

    Args:
        cuda: CUDA version of torch or an image, such as `13.2`; may be empty.
        driver: version of the driver, such as `550.54.15`; may be empty.
    """
    line = re.match(r"\d+", cuda)
    found = re.match(r"(\d+)\.(\d+)", driver)
    oldest = OLDEST_DRIVER.get(int(line[0])) if line else None
    if oldest is None or found is None or (int(found[1]), int(found[2])) >= oldest:
        return ""
    return f"driver {oldest[0]}.{oldest[1]} or newer for its CUDA {cuda}, found {driver}"
