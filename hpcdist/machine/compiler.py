"""What torch.compile needs at run time besides torch: looked for before it is missed in the middle of a start."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from hpcdist.errors import ConfigError


def check(device: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError if torch.compile cannot compile for a device on this machine.

    Triton builds a launcher for each GPU kernel with a C compiler, Inductor the CPU's kernels with a C++ compiler, and
    both need Python's headers.
    """
    wanted = []
    if device == "cpu" and not _found(env, "CXX", "g++"):
        wanted.append("a C++ compiler (g++)")
    if device != "cpu" and not _found(env, "CC", "gcc", "clang", "cc"):
        wanted.append("a C compiler (gcc)")
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        wanted.append("Python's headers (Python.h)")
    if wanted:
        raise ConfigError(
            [
                f"model.compile=true needs {' and '.join(wanted)}, not found here: install g++ and libpython3-dev,"
                " use an image of the target `default` instead of `slim`, or set model.compile=false"
            ]
        )


def _found(env: Mapping[str, str], variable: str, *names: str) -> bool:
    chosen = env.get(variable, "").split()[:1]
    return any(shutil.which(name, path=env.get("PATH", os.defpath)) for name in chosen or names)
