"""Simulated GPUs: build their libraries, and give tests the environment in which torch uses them.

The simulation shows that the paths for GPUs run and keep their order. It says nothing about speed or about kernels: the
kernels of the CPU compute the operators of CUDA, on memory that the host can access only by copies.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from containers import CHECKOUT
from io_faults import REQUIRE

SOURCES = Path(__file__).parent
PACKAGES = Path(torch.__file__).parents[1]
HEADERS = PACKAGES / "nvidia" / "cu13" / "include"
#: Library, its source, and functions that fail with this code if torch needs them and the source has none.
LIBRARIES = (
    ("libcudart.so.13", "cudart", r"_*cuda[A-Z]", 801),
    ("libcuda.so.1", "driver", r"cu[A-Z](?!F)", 801),
    ("libnccl.so.2", "nccl", r"nccl[A-Z]", 5),
    ("libcupti.so.13", "", r"cupti[A-Z]", 27),
    ("libnvidia-ml.so.1", "nvml", r"nvml[A-Z]", 3),
    ("libsimgpu_kernels.so", "kernels", "$", 0),
)


def build(folder: Path) -> None:
    """Compile the libraries and make an importable folder of them."""
    torch_libraries = PACKAGES / "torch" / "lib"
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *map(str, torch_libraries.glob("*.so"))],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    needed = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
    looked_up = re.findall(rb"\0(nvml\w+)\0", (torch_libraries / "libc10_cuda.so").read_bytes())
    needed |= {name.decode() for name in looked_up}
    includes = [SOURCES, HEADERS, PACKAGES / "nvidia/nccl/include", PACKAGES / "torch/include"]
    includes.append(PACKAGES / "torch/include/torch/csrc/api/include")
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-pthread", *(f"-I{path}" for path in includes)]
    compilers = []
    for library, source, pattern, code in LIBRARIES:
        sources = [SOURCES / f"{source}.cpp"] if source else []
        text = "".join(path.read_text() for path in sources)
        missing = [name for name in sorted(needed) if re.match(pattern, name) and not re.search(rf"\b{name}\b", text)]
        sources.append(folder / f"{library}.cpp")
        sources[-1].write_text("".join(f'extern "C" int {name}() {{ return {code}; }}\n' for name in missing))
        flags = [f"-Wl,-soname,{library}"]
        if library.endswith(".so.13"):  # torch asks for the version of these symbols
            versions = folder / f"{library}.map"
            versions.write_text(f"{library} {{ global: *; }};\n")
            flags.append(f"-Wl,--version-script={versions}")
        if source == "kernels":
            flags += [f"-L{torch_libraries}", "-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda"]
        compilers.append(subprocess.Popen([*command, *map(str, sources), "-o", str(folder / library), *flags]))
    assert [compiler.wait() for compiler in compilers] == [0] * len(LIBRARIES)
    shutil.copy(SOURCES / "sitecustomize.py", folder)
    record = folder / "simgpu-1.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: simgpu\nVersion: 1\n")
    (record / "entry_points.txt").write_text("[torch.backends]\nsimgpu = sitecustomize:install_kernels\n")


def missing_requirement() -> str | None:
    if shutil.which("g++") is None:
        return "no C++ compiler: install g++"
    if not HEADERS.is_dir():
        return f"torch {torch.__version__} is not built for CUDA 13, whose headers the simulated GPUs need"
    return None


@pytest.fixture(scope="session")
def libraries() -> Path:
    """Return the folder of the simulated libraries, which are built once for each state of their sources."""
    if (reason := missing_requirement()) is not None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
    key = hashlib.sha256(f"{torch.__version__} {sys.version_info} {PACKAGES}".encode())
    for path in sorted((*SOURCES.glob("[!t]*.*"), *SOURCES.glob("crt/*"))):
        key.update(path.read_bytes())
    store = CHECKOUT / "build" / "simgpu"
    store.mkdir(parents=True, exist_ok=True)
    folder = store / key.hexdigest()[:16]
    with (store / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = store / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture
def gpus(libraries: Path, tmp_path: Path) -> dict[str, str]:
    """Return an environment in which programs see two simulated GPUs."""
    path = os.pathsep.join(filter(None, [str(libraries), os.environ.get("PYTHONPATH")]))
    (tmp_path / "faults").mkdir()
    return {
        **os.environ,
        "PYTHONPATH": path,
        "SIMGPU_DEVICES": "2",
        "SIMGPU_FAULTS": str(tmp_path / "faults"),
        "SIMGPU_LOG": str(tmp_path / "simulated_gpus.log"),
    }
