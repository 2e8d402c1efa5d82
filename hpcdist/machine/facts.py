"""Facts of this machine: software versions, network interfaces, name lookups. Unknown facts are empty or None.

Only the functions that need psutil import it, so that the preflight probe starts with the standard library alone.
`versions` and `source_digest` are also executed as source text by an image's Python, so they contain their imports.
"""

from __future__ import annotations

import ctypes.util
import os
import resource
import socket
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from hpcdist.files.ownership import user_of
from hpcdist.machine.time_limit import start

#: Prefixes of variables that configure the ranks' communication.
NETWORK_VARIABLES = ("NCCL_", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_", "FI_")


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


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def interfaces() -> list[dict[str, Any]]:
    """Return network interfaces with an IPv4 address, except loopback: `name`, `address`, `up`, `speed_mbit`."""
    import psutil

    try:
        states = psutil.net_if_stats()
    except OSError:  # a sandbox without some of the ioctls
        return []
    return [
        {"name": name, "address": one.address, "up": states[name].isup, "speed_mbit": states[name].speed or None}
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.") and name in states
    ]


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
        reverse: names to look up in reverse as well, by their addresses.
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
    import psutil

    # psutil does not report the owner of a socket, and the process of another user's socket is hidden.
    for line in (_read("/proc/net/tcp") + _read("/proc/net/tcp6")).splitlines():
        fields = line.split()
        if len(fields) > 9 and fields[3] == "0A" and fields[1].rpartition(":")[2] == f"{port:04X}":
            listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
            pid = next((one.pid for one in listening if one.laddr[1:] == (port,)), None)
            program = f"pid {pid} ({_read(f'/proc/{pid}/comm').strip()})" if pid else "a program"
            return f"{program} of {user_of(int(fields[7]))}"
    return ""


def _read(path: str) -> str:
    """Return a small file's text; empty if it cannot be read, as some drivers' files."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
