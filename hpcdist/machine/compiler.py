"""The compiler and headers that torch.compile needs at run time."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hpcdist.errors import ConfigError


def require_compiler(device: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError if torch.compile cannot work for a device of this machine, before the run starts.

    Triton builds a launcher for each GPU kernel with a C compiler, Inductor builds CPU kernels with a C++ compiler, and
    both need Python's headers.
    """
    missing = []
    if device == "cpu" and not _found(env, "CXX", "g++"):
        missing.append("a C++ compiler (g++)")
    if device != "cpu" and not _found(env, "CC", "gcc", "clang", "cc"):
        missing.append("a C compiler (gcc)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python's headers (Python.h)")
    if missing:
        raise ConfigError(
            [
                f"model.compile=true needs {' and '.join(missing)}, not found here: install g++ and libpython3-dev,"
                " use an image of the target `default` instead of `slim`, or set model.compile=false"
            ]
        )


def _found(env: Mapping[str, str], variable: str, *names: str) -> bool:
    chosen = env.get(variable, "").split()[:1]
    return any(shutil.which(name, path=env.get("PATH", os.defpath)) for name in chosen or names)
