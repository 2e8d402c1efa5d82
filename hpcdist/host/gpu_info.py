"""GPUs of this machine as reported by NVML, the library behind nvidia-smi. Unknown values are None.

NVML instead of nvidia-smi: there is no text to parse, and telemetry reads it every few seconds without a new process.
pynvml is imported by the functions, because most commands need no GPU facts.
"""

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.host.time_limits import done_within, start
from hpcdist.host.versions import versions

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
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        log.debug("NVML is not available: %s", error)
        return {}
    handles = {}
    for index in range(count):
        with suppress(pynvml.NVMLError):  # the GPU is lost, or a cgroup denies access to it
            handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
    return handles


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
        name = query("nvmlDeviceGetName", handle)
        if name is None:  # the GPU is lost
            continue
        used_mb = total_mb = None
        memory = query("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2)  # as in nvidia-smi
        if memory:
            used_mb = memory.used >> 20
            total_mb = memory.total >> 20
        uncorrected = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        reasons = query("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0  # drivers from 535 on
        rates = query("nvmlDeviceGetUtilizationRates", handle)
        processes = query("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        gpu = Gpu(
            index=index,
            name=name,
            used_mb=used_mb,
            total_mb=total_mb,
            uncorrected_errors=query("nvmlDeviceGetTotalEccErrors", handle, *uncorrected),
            throttled=tuple(text for bit, text in THROTTLES.items() if reasons & bit),
            pids=tuple(process.pid for process in processes),
            busy=rates is not None and rates.gpu > 0,
        )
        found.append(gpu)
    return found


def driver_version() -> str:
    """Return the version of the NVIDIA driver, from NVML where /proc does not show it, as on WSL; empty if unknown."""

    def from_nvml() -> str:
        import pynvml

        if not open_gpus():
            return ""
        return str(pynvml.nvmlSystemGetDriverVersion())

    return versions().get("driver") or done_within(DRIVER_S, start(from_nvml), "")


def selected_gpus(env: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs and MIG slices that CUDA_VISIBLE_DEVICES lists; None if it is not set."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    return [item for item in listed.split(",") if item.strip() not in ("", "-1")]


def visible_gpus(num_gpus: int, env: Mapping[str, str]) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES selects of those of this machine."""
    selected = selected_gpus(env)
    if selected is None:
        return num_gpus
    if any(item.startswith("MIG-") for item in selected):
        return len(selected)  # a GPU may have several MIG slices
    return min(num_gpus, len(selected))


def visible_devices(env: Mapping[str, str]) -> str:
    """Return the GPUs that a process sees, such as `2 × NVIDIA A100`; `CPU` without any, empty if it is unknown."""
    names = [gpu.name for gpu in gpus()]
    if not names:
        return "" if gpu_device_files() else "CPU"
    if len(set(names)) > 1 or "MIG-" in env.get("CUDA_VISIBLE_DEVICES", ""):
        return ""
    number = visible_gpus(len(names), env)
    if not number:
        return "CPU"
    return f"{number} × {names[0]}"


#: Exists if AMD's driver is loaded.
AMD_DRIVER = Path("/dev/kfd")


def has_amd_driver() -> bool:
    """Return whether this machine has AMD's driver: its GPUs are not among those that are counted here."""
    return AMD_DRIVER.exists()


def gpu_device_files() -> int:
    """Return the number of GPUs with a device file, whether or not the driver works."""
    names = [path.name for path in Path("/dev").glob("nvidia[0-9]*")]
    return sum(name.removeprefix("nvidia").isdigit() for name in names)


#: Oldest driver by major version of CUDA (minor versions are compatible with each other).
#: Source: https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}


def driver_problem(cuda: str, driver: str) -> str:
    """Return why a driver is too old for a version of CUDA; empty if it is compatible or unknown.

    The text has the form `driver 580.65 or newer for its CUDA 13.2, found 550.54`.
    """
    cuda_major = re.match(r"\d+", cuda)
    installed = re.match(r"(\d+)\.(\d+)", driver)
    if cuda_major is None or installed is None:
        return ""
    oldest = OLDEST_DRIVER.get(int(cuda_major[0]))
    if oldest is None or (int(installed[1]), int(installed[2])) >= oldest:
        return ""
    return f"driver {oldest[0]}.{oldest[1]} or newer for its CUDA {cuda}, found {driver}"
