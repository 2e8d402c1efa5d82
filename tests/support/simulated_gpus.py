"""Simulated GPUs: build the libraries of `tests/simgpu`, with which torch finds GPUs.

The simulation shows that the paths for GPUs run and keep their order. It says nothing about speed or about kernels: the
kernels of the CPU compute the operators of CUDA, on memory that the host can access only by copies.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from containers import CHECKOUT
from io_faults import REQUIRE

SOURCES = CHECKOUT / "tests" / "simgpu"
PACKAGES = Path(torch.__file__).parents[1]
HEADERS = PACKAGES / "nvidia" / "cu13" / "include"
INCLUDES = [SOURCES, HEADERS, PACKAGES / "nvidia/nccl/include", PACKAGES / "triton/backends/nvidia/include"]
#: One library has all functions; torch loads the others by these names.
LIBRARY = "libcudart.so.13"
NAMES = ("libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1")
#: Functions that torch needs and the sources do not have are logged and return this code.
MISSING = {r"_*cuda[A-Z]": 801, r"cu[A-Z](?!F)": 801, r"nccl[A-Z]": 5, r"nvml[A-Z]": 3}
TORCH_LIBRARIES = PACKAGES / "torch" / "lib"


def _build(folder: Path) -> None:
    """Compile the libraries and make an importable folder of them."""
    nm = ["nm", "-D", "--undefined-only", *map(str, TORCH_LIBRARIES.glob("*.so"))]
    listed = subprocess.run(nm, capture_output=True, text=True, check=True).stdout
    needed = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
    looked_up = re.findall(rb"\0(nvml\w+)\0", (TORCH_LIBRARIES / "libc10_cuda.so").read_bytes())
    needed |= {name.decode() for name in looked_up}
    sources = [*SOURCES.glob("*.cpp"), folder / "missing.cpp", folder / "cupti.cpp"]
    text = "".join(path.read_text() for path in sources[:-2])
    missing, cupti = ['#include "sim.h"\n'], []
    for name in sorted(needed):
        codes = [code for pattern, code in MISSING.items() if re.match(pattern, name)]
        if codes and not re.search(rf"\b{name}\b", text):
            log = f'sim_log("no function {name} in the simulation")'
            missing.append(f'extern "C" int {name}() {{ {log}; return {codes[0]}; }}\n')
        if name.startswith("cupti"):
            cupti.append(f'extern "C" int {name}() {{ return 27; }}\n')
    sources[-2].write_text("".join(missing))
    sources[-1].write_text("".join(cupti))
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-w", "-c", *(f"-I{path}" for path in INCLUDES)]
    compilers = [subprocess.Popen([*command, str(source)], cwd=folder) for source in sources]
    assert [compiler.wait() for compiler in compilers] == [0] * len(sources)
    objects = [f"{source.stem}.o" for source in sources]
    _link(folder, LIBRARY, *objects[:-1], "-pthread")
    _link(folder, "libcupti.so.13", objects[-1])
    for name in NAMES:
        _link(folder, name, "-Wl,--no-as-needed", LIBRARY, "-Wl,-rpath,$ORIGIN")
    for name in ("sitecustomize.py", "simgpu_kernels.py"):
        shutil.copy(SOURCES / name, folder)
    record = folder / "simgpu-1.dist-info"  # torch calls the function at the end of its import
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: simgpu\nVersion: 1\n")
    (record / "entry_points.txt").write_text("[torch.backends]\nsimgpu = simgpu_kernels:install\n")


def _link(folder: Path, name: str, *arguments: str) -> None:
    """Link a library; torch asks for the version of the symbols of CUDA's."""
    (folder / "versions").write_text(f"{name} {{ global: *; }};\n")
    versions = ["-Wl,--version-script=versions"] if name.endswith(".so.13") else []
    subprocess.run(["g++", "-shared", "-o", name, f"-Wl,-soname,{name}", *versions, *arguments], cwd=folder, check=True)


@cache
def libraries() -> Path:
    """Return the folder of the simulated libraries, which are built once for each state of their sources."""
    key = hashlib.sha256(f"{torch.__version__} {sys.version_info} {PACKAGES}".encode())
    for path in (Path(__file__), *sorted(SOURCES.glob("[!t]*.*"))):
        key.update(path.read_bytes())
    store = CHECKOUT / "build" / "simgpu"
    store.mkdir(parents=True, exist_ok=True)
    folder = store / key.hexdigest()[:16]
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            reason = "" if shutil.which("g++") else "no C++ compiler: install g++"
            if not HEADERS.is_dir():
                reason = f"torch {torch.__version__} is not built for CUDA 13, whose headers the simulated GPUs need"
            if reason:
                (pytest.fail if os.environ.get(REQUIRE) == "1" else pytest.skip)(reason)
            unfinished = store / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _build(unfinished)
            unfinished.rename(folder)
    return folder
