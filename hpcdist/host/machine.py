"""Facts about this machine: its processors, its name, its capabilities. Unknown facts are empty or None.

Only the functions that need psutil import it, so that the probe of a node starts with the standard library alone.
"""

import os
import re
import socket
import time
from pathlib import Path
from typing import Any


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


CAP_SYS_RESOURCE = 24
STATUS = Path("/proc/self/status")


def has_capability(number: int) -> bool:
    lines = STATUS.read_text().splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> number & 1)
