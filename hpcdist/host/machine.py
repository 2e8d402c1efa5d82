"""Facts about this machine: versions, network, GPUs and drivers, compiler, the container around this process, its
capabilities.
"""

import inspect
import logging
import os
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.commands import done_within, start
from hpcdist.host.files import make_private

# Unknown facts are empty or None. Only the functions that need psutil import it, so that the probe of a node starts
# with the standard library alone. `versions` and `source_digest` are also executed as source text by the Python of an
# image or of an environment, so they contain their imports.

VERSIONS_MARK = "hpcdist-versions"


def source_digest(folder: str) -> str:
    """Return a 12-digit digest of a package's modules and scripts, because equal versions may have different code."""
    import hashlib
    import os

    found = hashlib.sha256()
    for path, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            if name.endswith((".py", ".sh")):
                with open(os.path.join(path, name), "rb") as file:
                    found.update(os.path.relpath(file.name, folder).encode() + b"\0" + file.read())
    return found.hexdigest()[:12]


def versions() -> dict[str, str]:
    """Return installed versions: `python`, `hpcdist` and its `source` digest, `torch`, `cuda`, `nccl`, `driver`."""
    import importlib.util
    import os
    import platform
    import re

    facts = {"python": platform.python_version()}
    try:
        import hpcdist

        facts["hpcdist"] = hpcdist.__version__
        facts["source"] = source_digest(os.path.dirname(hpcdist.__file__))
    except (ImportError, AttributeError):  # the second one if only a folder of this name is left
        pass
    torch = importlib.util.find_spec("torch")
    package = os.path.dirname(torch.origin) if torch and torch.origin else ""
    for key, path, pattern in (
        ("torch", os.path.join(package, "version.py"), r"__version__ = '(.+)'"),
        ("cuda", os.path.join(package, "version.py"), r"(?m)^cuda\b[^=\n]*= '(.+)'"),
        ("driver", "/proc/driver/nvidia/version", r"Kernel Module(?: for \S+)?\s+([0-9.]+)"),
    ):
        if (package or key == "driver") and os.path.exists(path):
            with open(path) as file:
                found = re.search(pattern, file.read())
            if found:
                facts[key] = found[1]
    for name in sorted(os.listdir(os.path.dirname(package))) if package else ():
        found = re.match(r"nvidia_nccl_cu\d+-([0-9.]+)\.dist-info", name)
        if found:
            facts["nccl"] = found[1]
    return facts


def versions_program() -> str:
    """Return a program that prints the `versions` of the Python that runs it, behind the word VERSIONS_MARK."""
    return f"""
from __future__ import annotations
{inspect.getsource(source_digest)}
{inspect.getsource(versions)}
import json
print({VERSIONS_MARK!r}, json.dumps(versions()), flush=True)
"""


def cpu_name() -> str:
    """Return model and number of this machine's processors, such as `AMD EPYC 7B13, 8 logical CPUs`."""
    model = re.search(r"^model name\s*: *(.+)", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return f"{model[1] if model else os.uname().machine}, {os.cpu_count()} logical CPUs"


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def look_up(name: str) -> dict[str, Any]:
    """Return `address`, `forward_s`, `reverse` or `reverse_error`, `reverse_s`; or `error` and `forward_s`.

    A broken resolver takes many seconds.
    """
    began = time.monotonic()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return {"error": error.strerror or str(error), "forward_s": round(time.monotonic() - began, 3)}
    found: dict[str, Any] = {"address": address, "forward_s": round(time.monotonic() - began, 3)}
    began = time.monotonic()
    try:
        found["reverse"] = socket.gethostbyaddr(address)[0]
    except OSError as error:
        found["reverse_error"] = error.strerror or str(error)
    found["reverse_s"] = round(time.monotonic() - began, 3)
    return found


def text_of(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# GPUs of this machine as reported by NVML, the library behind nvidia-smi. Unknown values are None.
#
# NVML instead of nvidia-smi: there is no text to parse, and telemetry reads it every few seconds without a new process.
# pynvml is imported by the functions, because most commands need no GPU facts.

log = logging.getLogger(__name__)

#: Time limit for the answer of the driver, which takes seconds to load if nothing keeps it loaded.
DRIVER_S = 8.0
#: Bits of NVML's clock event reasons that mean throttling; other bits are harmless.
#: Source: NVML API reference, nvmlClocksEventReasons
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "too hot (software slowdown)",
    0x40: "too hot (hardware slowdown)",
    0x80: "power brake",
}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; None for values that it does not report, as in MIG mode."""

    index: int
    name: str
    used_mb: int | None
    total_mb: int | None
    uncorrected_errors: int | None  #: since the driver was loaded
    throttled: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()  #: visible processes that use it
    busy: bool = False  #: whether it has computed within the last second


def open_gpus() -> dict[int, Any]:
    """Return NVML's handle of each GPU that answers, by index; empty without a working driver."""
    try:
        import pynvml
    except ModuleNotFoundError:  # an environment of ranks need not contain nvidia-ml-py
        log.debug("no facts about GPUs: the package nvidia-ml-py is not installed")
        return {}
    found = {}
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        log.debug("NVML is not available: %s", error)
        return {}
    for index in range(count):
        with suppress(pynvml.NVMLError):  # the GPU is lost, or a cgroup denies access to it
            found[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
    return found


def gpus() -> list[Gpu]:
    """Return this machine's GPUs, whatever CUDA_VISIBLE_DEVICES selects; none if the driver does not answer in time."""
    return done_within(DRIVER_S, start(_read_gpus), [])


def count_gpus() -> int:
    """Return the number of this machine's GPUs, also those that CUDA_VISIBLE_DEVICES hides; MIG slices do not count."""
    return len(done_within(DRIVER_S, start(open_gpus), {}))


def _read_gpus() -> list[Gpu]:
    import pynvml

    def query(name: str, *arguments: object) -> Any:
        try:
            return getattr(pynvml, name)(*arguments)
        except (pynvml.NVMLError, AttributeError):
            return None  # GPUs in MIG mode, virtual GPUs, and other versions of driver or pynvml lack some queries

    found = []
    for index, handle in open_gpus().items():
        memory = query("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)  # as in nvidia-smi
        uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        reasons = query("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0  # drivers from 535 on
        rates = query("nvmlDeviceGetUtilizationRates", handle)
        if (name := query("nvmlDeviceGetName", handle)) is not None:  # else the GPU is lost
            found.append(
                Gpu(
                    index=index,
                    name=name,
                    used_mb=memory.used >> 20 if memory else None,
                    total_mb=memory.total >> 20 if memory else None,
                    uncorrected_errors=query("nvmlDeviceGetTotalEccErrors", handle, *uncorrected),
                    throttled=tuple(text for bit, text in THROTTLES.items() if reasons & bit),
                    pids=tuple(one.pid for one in query("nvmlDeviceGetComputeRunningProcesses", handle) or ()),
                    busy=rates is not None and rates.gpu > 0,
                )
            )
    return found


def driver_version() -> str:
    """Return the version of the NVIDIA driver, from NVML where /proc does not show it, as on WSL; empty if unknown."""

    def from_nvml() -> str:
        import pynvml

        return str(pynvml.nvmlSystemGetDriverVersion()) if open_gpus() else ""

    return versions().get("driver") or done_within(DRIVER_S, start(from_nvml), "")


def selected_gpus(env: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs and MIG slices that CUDA_VISIBLE_DEVICES lists; None if it is not set."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    return None if listed is None else [item for item in listed.split(",") if item.strip() not in ("", "-1")]


def visible_gpus(num_gpus: int, env: Mapping[str, str]) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES selects of those of this machine."""
    selected = selected_gpus(env)
    if selected is None:
        return num_gpus
    # A GPU may have several MIG slices.
    return len(selected) if any(item.startswith("MIG-") for item in selected) else min(num_gpus, len(selected))


def visible_devices(env: Mapping[str, str]) -> str:
    """Return the GPUs that a process sees, such as `2 × NVIDIA A100`; `CPU` without any, empty if it is unknown."""
    names = [gpu.name for gpu in gpus()]
    if not names:
        return "" if gpu_device_files() else "CPU"
    if len(set(names)) > 1 or "MIG-" in env.get("CUDA_VISIBLE_DEVICES", ""):
        return ""
    number = visible_gpus(len(names), env)
    return f"{number} × {names[0]}" if number else "CPU"


def gpu_device_files() -> int:
    """Return the number of GPUs with a device file, whether or not the driver works."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


#: Oldest driver by major version of CUDA (minor versions are compatible with each other).
#: Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def driver_problem(cuda: str, driver: str) -> str:
    """Return e.g. `driver 580.65 or newer for its CUDA 13.2, found 550.54`; empty if compatible or unknown."""
    line = re.match(r"\d+", cuda)
    found = re.match(r"(\d+)\.(\d+)", driver)
    oldest = OLDEST_DRIVER.get(int(line[0])) if line else None
    if oldest is None or found is None or (int(found[1]), int(found[2])) >= oldest:
        return ""
    return f"driver {oldest[0]}.{oldest[1]} or newer for its CUDA {cuda}, found {driver}"


# What torch.compile needs at run time: a compiler, headers, and a cache that no other user can write to.

_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def require_compiler(device: str, env: Mapping[str, str]) -> None:
    """Raise ConfigError if torch.compile cannot work for a device of this machine, before the run starts.

    Triton builds a launcher for each GPU kernel with a C compiler, Inductor builds CPU kernels with a C++ compiler, and
    both need Python's headers.
    """
    compiler, variable, names = "a C compiler (gcc)", "CC", ["gcc", "clang", "cc"]
    if device == "cpu":
        compiler, variable, names = "a C++ compiler (g++)", "CXX", ["g++"]
    names = env.get(variable, "").split()[:1] or names
    has_compiler = any(shutil.which(name, path=env.get("PATH", os.defpath)) for name in names)
    missing = [] if has_compiler else [compiler]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python's headers (Python.h)")
    if missing:
        raise ConfigError(
            f"model.compile=true needs {' and '.join(missing)}, not found here: install g++ and libpython3-dev,"
            " use an image of the target `default` instead of `slim`, or set model.compile=false"
        )


def cache_environment(env: Mapping[str, str], run: Path) -> dict[str, str]:
    """Return the variables with which torch.compile executes no code that another user has put into its cache.

    torch's default is a folder `torchinductor_USER` in /tmp, whose name anyone can take first. `env` may have that
    default as a value, since an import of torch sets it, perhaps under another TMPDIR: such a name is not used.

    Args:
        run: a run folder, in which the cache is if another user has taken the name that hpcdist uses.
    """
    prefix = "torchinductor_"
    if not Path(env.get(_CACHE, prefix)).name.startswith(prefix):
        return {}
    folder = Path(tempfile.gettempdir(), f"{prefix}{os.geteuid()}")
    try:
        make_private(folder)
    except RunFolderError as error:
        log.warning("the cache of torch.compile is in the run folder: %s", error)
        folder = run / "torchinductor"
    return {_CACHE: str(folder)}


# The container that this process runs in, and the identity of its image, recorded as tags of the MLflow run.

#: Written by the image build: a hash of the build's inputs, because an image cannot contain its own digest.
BUILD_ID = Path(sys.prefix) / "build-id"
#: Written by the image build: the digest of the base image, else its id or name.
BASE = Path(sys.prefix) / "base-image"
#: Variables that the starter of a container sets to the image's name and digest.
NAME, DIGEST = "HPCDIST_IMAGE", "HPCDIST_IMAGE_DIGEST"

#: Files that runtimes leave in a container.
_MARKS = {
    ".dockerenv": "docker",
    "run/.containerenv": "podman",
    ".singularity.d": "apptainer",
}


def container_runtime(root: Path = Path("/")) -> str:
    """Return the runtime whose files are in this process's root file system; empty outside of a container.

    The files alone prove nothing: the disk of a virtual machine, which is its root, may have been made of an image.
    """
    # The fields are described in proc(5): root within the file system, mount point, …, -, type, source, options.
    mounts = [line.split() for line in text_of(root / "proc/self/mountinfo").splitlines()]
    source = next((mount[mount.index("-") + 2] for mount in mounts if mount[3:5] == ["/", "/"]), "")
    if source.startswith("/dev/") and not source.startswith("/dev/loop"):
        return ""
    return next((runtime for mark, runtime in _MARKS.items() if (root / mark).exists()), "")


def image_facts(
    env: Mapping[str, str], build_id: Path = BUILD_ID, base: Path = BASE, root: Path = Path("/")
) -> dict[str, str]:
    found = {"image": env.get(NAME, ""), "image_digest": env.get(DIGEST, "")}
    for key, file in (("image_build", build_id), ("image_base", base)):
        if file.is_file():
            found[key] = file.read_text().strip()
    found["container_runtime"] = container_runtime(root)
    return {key: value for key, value in found.items() if value}


def install_command(*extras: str) -> str:
    """Return the command that installs hpcdist with optional dependencies; it is not on a package index."""
    return f"`pip install '.[{','.join(extras)}]'` in a checkout of hpcdist"


# Capabilities of this process, see capabilities(7).

CAP_SYS_RESOURCE = 24
STATUS = Path("/proc/self/status")


def has_capability(number: int) -> bool:
    lines = STATUS.read_text().splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)


# The result of one check.

Level = Literal["ok", "note", "warning", "failure"]
#: Ordered by severity.
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "failure")


@dataclass(frozen=True, kw_only=True)
class Check:
    name: str
    level: Level  #: `warning` for a loss of time or a possible error; `failure` if a run would fail
    text: str  #: one sentence with the values found
    fix: str = ""
    node: str = ""  #: empty for this machine or all nodes

    def sentence(self) -> str:
        where = f"{self.node}: " if self.node else ""
        return f"{where}{self.name}: {self.text}" + (f"; {self.fix}" if self.fix else "")


def _check(level: Level, name: str, text: str, fix: str = "", *, node: str = "") -> Check:
    return Check(name=name, level=level, text=text, fix=fix, node=node)


ok = partial(_check, "ok")
note = partial(_check, "note")
warning = partial(_check, "warning")
failure = partial(_check, "failure")
