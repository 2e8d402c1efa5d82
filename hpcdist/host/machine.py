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
    match = re.search(r"^model name\s*: *(.+)", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    model = match[1] if match else os.uname().machine
    return f"{model}, {os.cpu_count()} logical CPUs"


def num_cores() -> int:
    """Return the number of cores that this process may use, which Slurm or a container may limit."""
    return len(os.sched_getaffinity(0))


#: Of a process in `/proc/PID/stat`, counted after the name in brackets, which may contain blanks: see proc(5).
_STATE_FIELD, _START_FIELD = 0, 19


def process_start(pid: int) -> int | None:
    """Return when a process of this machine started, in clock ticks since the boot; None if it has ended.

    Together with the process id the number identifies a process until the next boot. psutil's time of the start is not
    used: it changes whenever the clock of the machine is set.
    """
    try:
        fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    if fields[_STATE_FIELD] in "ZX":  # it waits for its parent to read its exit code
        return None
    return int(fields[_START_FIELD])


def boot_id() -> str:
    """Return the identity of the machine's current boot; empty if the kernel does not show it."""
    return text_of(Path("/proc/sys/kernel/random/boot_id")).strip()


def look_up(name: str) -> dict[str, Any]:
    """Look up the address of a host name, and the name of that address. A broken resolver takes many seconds.

    Returns:
        `address`, `forward_s` (seconds of the lookup), `reverse` or `reverse_error`, and `reverse_s`. If the name has
        no address, only `error` and `forward_s`.
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
    """Return whether this process has an effective capability of Linux, given by its number, as CAP_SYS_RESOURCE."""
    effective = 0
    for line in STATUS.read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
    return bool(effective >> number & 1)
