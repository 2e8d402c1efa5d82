"""Errors, delays and short transfers in file operations of real processes: `io_faults.c`, compiled once a session."""

import ctypes
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REQUIRE = "HPCDIST_REQUIRE_COMPILER"
"""If set to 1, a missing C compiler is a failure instead of a skip."""
SOURCE = Path(__file__).with_suffix(".c")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault in the file operations of one process.

    Attributes:
        operation: such as `open`, `create`, `read`, `write`, `fsync`, `rename`, `stat`, `opendir`; `*` for all.
        path: glob below the folder under test.
        error: errno; 0 for none.
        first, count: number of the first matching call that fails, and how many fail (0: all later ones).
        delay_ms: duration of a call with the fault.
        window_ms: all matching calls within this time fail, regardless of `first` and `count`.
        short: reads and writes transfer about half of the data.
    """

    operation: str
    path: str = "*"
    error: int = 0
    first: int = 1
    count: int = 1
    delay_ms: int = 0
    window_ms: int = 0
    short: bool = False

    def numbers(self) -> tuple[int, ...]:
        return self.error, self.first, self.count, self.delay_ms, self.window_ms, int(self.short)

    def environment(self, library: Path, folder: Path, *, only: str, fired: Path) -> dict[str, str]:
        """Variables that inject this fault into processes with `only` in their command line.

        Args:
            folder: the folder under test.
            fired: file outside of it, to which a line is appended for each call with the fault.
        """
        return {
            "LD_PRELOAD": str(library),
            "IO_FAULT": "|".join(map(str, (folder, self.operation, self.path, *self.numbers()))),
            "IO_FAULT_ONLY": only,
            "IO_FAULT_FIRED": str(fired),
        }


def compile_library(folder: Path) -> Path:
    """Compile the library, or skip the test with the reason."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but there is no C compiler")
        pytest.skip("no C compiler (cc): install gcc and libc6-dev")
    library = folder / "io_faults.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE)], check=True)
    return library


class Preloaded:
    """The library inside a process that was started with it in LD_PRELOAD."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)

    def arm(self, folder: Path, fault: Fault) -> None:
        names = (os.fsencode(folder), fault.operation.encode(), fault.path.encode())
        self._library.io_faults_arm(*names, *fault.numbers())

    def disarm(self) -> int:
        """End the fault; return the number of calls that it affected."""
        self._library.io_faults_disarm()
        return int(self._library.io_faults_fired())

    def record(self, folder: Path, file: Path | None) -> None:
        """Append every operation on the folder to a file outside of it; None ends that."""
        self._library.io_faults_record(os.fsencode(folder), os.fsencode(file or ""))


def recorded(file: Path) -> set[tuple[str, str]]:
    """Return the operations in a record, each with the path of its file; random parts of names are replaced by `*`."""
    found = set()
    for line in file.read_text().splitlines():
        operation, _, path = line.partition("\t")
        found.add((operation, re.sub(r"\.\d+\.[0-9a-f]{8}$", ".*", path)))
    return found
