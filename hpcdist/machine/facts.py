"""Facts of this machine: software versions, GPUs, network interfaces, name lookups. Unknown facts are empty or None.

The module uses the standard library alone, because the preflight probe runs it where installed packages may be broken.
`versions` and `source_digest` are also executed as source text by an image's Python, so they contain their imports.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import os
import resource
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist.machine.time_limit import start

#: nvidia-smi takes seconds if nothing keeps the driver loaded.
NVIDIA_SMI_S = 8.0
#: Bits of `clocks_event_reasons.active` that mean throttling; other bits are harmless.
#: Source: NVML API reference, nvmlClocksEventReasons
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "too hot (software slowdown)",
    0x40: "too hot (hardware slowdown)",
    0x80: "power brake",
}
#: Prefixes of variables that configure the ranks' communication.
NETWORK_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_", "FI_")
_SIOCGIFADDR = 0x8915


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
    """Return installed versions: `python`, `hpcdist` and its `source` digest, `torch`, `cuda`, `nccl`, `driver`.

    Torch is not imported. Missing packages are omitted.
    """
    import importlib.util
    import os
    import platform
    import re

    facts = {"python": platform.python_version()}
    try:
        import hpcdist

        facts["hpcdist"] = hpcdist.__version__
        facts["source"] = source_digest(os.path.dirname(hpcdist.__file__))
    except ImportError:
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


def driver_version() -> str:
    """Return the version of the NVIDIA driver; nvidia-smi is asked where /proc does not show it, as on WSL."""
    return versions().get("driver", "") or (_nvidia_smi("--query-gpu=driver_version") or "").partition("\n")[0].strip()


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as reported by nvidia-smi; None for values that it does not report, as for MIG slices."""

    index: int
    name: str
    used_mb: int | None
    total_mb: int | None
    uncorrected_errors: int | None  #: since the driver was loaded
    throttled: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()  #: visible processes that compute on it


def gpus() -> list[Gpu]:
    """Return the GPUs that this process may access; none without nvidia-smi or a working driver."""
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # the latter before driver 535
        fields = f"index,uuid,name,memory.used,memory.total,ecc.errors.uncorrected.volatile.total,{reasons}"
        listing = _nvidia_smi(f"--query-gpu={fields}")
        if listing is None:
            break
        if listing:
            return parse_gpus(listing, _nvidia_smi("--query-compute-apps=gpu_uuid,pid") or "")
    return []


def count_gpus() -> int:
    """Return the number of this machine's GPUs, whatever CUDA_VISIBLE_DEVICES selects."""
    return sum(line.strip().isdigit() for line in (_nvidia_smi("--query-gpu=index") or "").splitlines())


def _nvidia_smi(query: str) -> str | None:
    """Return the output of a query: empty if it fails, None if nvidia-smi is missing or does not answer in time.

    nvidia-smi is installed with the driver, while pynvml may be missing from the Python that runs the preflight probe.
    """
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else ""


def parse_gpus(listing: str, processes: str) -> list[Gpu]:
    """Parse the two answers of nvidia-smi, see `gpus`."""
    pids: dict[str, list[int]] = {}
    for line in processes.splitlines():
        uuid, _, pid = line.partition(", ")
        if pid.strip().isdigit():
            pids.setdefault(uuid, []).append(int(pid))
    found = []
    for line in listing.splitlines():
        index, uuid, name, used, total, errors, reasons = line.split(", ")
        bits = int(reasons, 16) if reasons.strip().startswith("0x") else 0
        found.append(
            Gpu(
                index=int(index),
                name=name,
                used_mb=_number(used),
                total_mb=_number(total),
                uncorrected_errors=_number(errors),
                throttled=tuple(text for bit, text in THROTTLES.items() if bits & bit),
                pids=tuple(pids.get(uuid, ())),
            )
        )
    return found


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def visible_gpus(num_gpus: int, env: Mapping[str, str]) -> int:
    """Return the number of GPUs that CUDA_VISIBLE_DEVICES selects."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    chosen = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    # A GPU may have several MIG slices.
    return len(chosen) if any(item.startswith("MIG-") for item in chosen) else min(num_gpus, len(chosen))


def gpu_device_files() -> int:
    """Return the number of GPUs with a device file, whether or not the driver works."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def interfaces() -> list[dict[str, Any]]:
    """Return network interfaces with an IPv4 address, except loopback: `name`, `address`, `up`, `speed_mbit`."""
    found: list[dict[str, Any]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # no IPv4 address
            address = socket.inet_ntoa(raw[20:24])
            if not address.startswith("127."):
                speed = _number(_read(f"/sys/class/net/{name}/speed").strip())
                up = _read(f"/sys/class/net/{name}/operstate").strip() in ("up", "unknown")
                found.append({"name": name, "address": address, "up": up, "speed_mbit": speed or None})
    return found


def infiniband() -> dict[str, Any]:
    """Return active InfiniBand or RoCE `ports`, and whether programs can use them (`device`, `library`)."""
    ports = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" in _read(str(port / "state")):
            ports.append(f"{port.parts[-3]}:{port.name} ({_read(str(port / 'link_layer')).strip() or 'unknown'})")
    if not ports:
        return {}
    return {
        "ports": ports,
        "device": any(Path("/dev/infiniband").glob("uverbs*")),
        "library": ctypes.util.find_library("ibverbs") is not None,
    }


def locked_memory() -> int | None:
    """Return the bytes that a process may lock in memory, as RDMA must; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def network_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure the ranks' communication."""
    return {name: value for name, value in env.items() if name.startswith(NETWORK_VARIABLES)}


class Lookups:
    """Name lookups in background threads, because a broken resolver takes many seconds.

    Args:
        names: names to look up.
        reverse: those names whose address is then looked up in reverse.
    """

    def __init__(self, names: Iterable[str], reverse: Iterable[str]) -> None:
        self._began = time.monotonic()
        reverse = set(reverse)
        self._running: dict[str, Future[dict[str, Any]]] = {
            name: start(partial(_look_up, name, name in reverse)) for name in names
        }

    def result(self, limit_s: float) -> dict[str, dict[str, Any]]:
        """Return by name: `address` or `error`, `forward_s`; for reverse lookups also `reverse` and `reverse_s`.

        Args:
            limit_s: seconds since the start of the lookups. A lookup that takes longer has only `late`, the limit.
        """
        found = {}
        for name, running in self._running.items():
            try:
                found[name] = running.result(max(0.0, self._began + limit_s - time.monotonic()))
            except TimeoutError:
                found[name] = {"late": limit_s}
        return found


def _look_up(name: str, reverse: bool) -> dict[str, Any]:
    began = time.monotonic()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return {"error": error.strerror or str(error), "forward_s": round(time.monotonic() - began, 3)}
    found: dict[str, Any] = {"address": address, "forward_s": round(time.monotonic() - began, 3)}
    if reverse:
        began = time.monotonic()
        try:
            found["reverse"] = socket.gethostbyaddr(address)[0]
        except OSError as error:
            found["reverse_error"] = error.strerror or str(error)
        found["reverse_s"] = round(time.monotonic() - began, 3)
    return found


def listener(port: int) -> str:
    """Return the program that listens on a local TCP port, such as `pid 123 (python3) of ada`; empty if unknown."""
    for line in (_read("/proc/net/tcp") + _read("/proc/net/tcp6")).splitlines():
        words = line.split()
        if len(words) > 9 and words[3] == "0A" and words[1].rpartition(":")[2] == f"{port:04X}":
            return f"{_program(words[9])} of {_user(int(words[7]))}"
    return ""


def _program(inode: str) -> str:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) == f"socket:[{inode}]" for link in (process / "fd").iterdir()):
                return f"pid {process.name} ({_read(str(process / 'comm')).strip()})"
        except OSError:
            continue  # another user's process, or it has ended
    return "a program"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _read(path: str) -> str:
    """Return a small file's text; empty if it cannot be read, as some drivers' files."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
