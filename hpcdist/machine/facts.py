"""Facts of this machine, each a small function. What cannot be known is empty or None, never an error.

`versions` and `source_digest` are also executed as text by the Python of a container's image, so they import what they
need themselves.
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

#: nvidia-smi takes seconds where nothing keeps the driver loaded.
NVIDIA_SMI_S = 8.0
#: What a throttled GPU may say of the reason, by bits of `clocks_event_reasons.active`; others are harmless.
#: Source: NVML API reference, nvmlClocksEventReasons
THROTTLES = {
    0x08: "hardware slowdown",
    0x20: "too hot (software slowdown)",
    0x40: "too hot (hardware slowdown)",
    0x80: "power brake",
}
#: Variables that decide how ranks talk to each other.
NETWORK_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_", "FI_")
_SIOCGIFADDR = 0x8915


def source_digest(folder: str) -> str:
    """Twelve digits that stand for a package's modules and shell scripts: equal versions may be of different checkouts.

    Its own source is executed in images, so it imports what it needs.
    """
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
    """What this Python has: `python`, `hpcdist` with its `source` digest, `torch` with its `cuda` and `nccl`, `driver`.

    Torch is not imported. What is not there is left out. Its own source is executed in images.
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
    """One GPU as nvidia-smi shows it; None where it does not tell, as of MIG slices."""

    index: int
    name: str
    used_mb: int | None
    total_mb: int | None
    uncorrected_errors: int | None  #: since the driver was loaded
    throttled: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()  #: of processes that compute on it, as far as they can be seen from here


def gpus() -> list[Gpu]:
    """The GPUs that this process may use by the rights it has; none without nvidia-smi or a driver that works."""
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
    """GPUs from two answers of nvidia-smi, see `gpus`."""
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
    """How many of the machine's GPUs a program sees under CUDA_VISIBLE_DEVICES."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    chosen = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    # A GPU may have several slices.
    return len(chosen) if any(item.startswith("MIG-") for item in chosen) else min(num_gpus, len(chosen))


def gpu_device_files() -> int:
    """GPUs that have a device file here, whether or not anything can be asked of them."""
    return len([path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()])


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def interfaces() -> list[dict[str, Any]]:
    """Network interfaces with an IPv4 address, besides loopback: `name`, `address`, `up`, `speed_mbit` or None."""
    found: list[dict[str, Any]] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            address = socket.inet_ntoa(raw[20:24])
            if not address.startswith("127."):
                speed = _number(_read(f"/sys/class/net/{name}/speed").strip())
                up = _read(f"/sys/class/net/{name}/operstate").strip() in ("up", "unknown")
                found.append({"name": name, "address": address, "up": up, "speed_mbit": speed or None})
    return found


def infiniband() -> dict[str, Any]:
    """Adapters for InfiniBand or RoCE: active `ports`, and whether programs can use them (`device`, `library`)."""
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
    """Bytes that a process may lock in memory, as RDMA must; None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def network_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What the environment says about how ranks talk to each other."""
    return {name: value for name, value in env.items() if name.startswith(NETWORK_VARIABLES)}


class Lookups:
    """Names and addresses that are looked up in the background, since a broken resolver takes its time.

    Args:
        names: whose addresses are looked up.
        reverse: those of them whose addresses are then looked up in turn.
    """

    def __init__(self, names: Iterable[str], reverse: Iterable[str]) -> None:
        self._began = time.monotonic()
        wanted = set(reverse)
        self._running: dict[str, Future[dict[str, Any]]] = {
            name: start(partial(_look_up, name, name in wanted)) for name in names
        }

    def result(self, limit_s: float) -> dict[str, dict[str, Any]]:
        """By name: `address` or `error`, `forward_s`; where it was asked for `reverse` and `reverse_s`.

        Args:
            limit_s: since the beginning. Where it was too short there is `late`, the seconds waited, and nothing else.
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
    """Whose program listens on a TCP port here: `pid 123 (python3) of ada`, as far as it can be seen; else empty."""
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
            continue  # another user's, or gone
    return "a program"


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _read(path: str) -> str:
    """A small file's text; empty where it cannot be read, as files of drivers may not be."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
