"""A virtual environment as one compressed file, together with its Python unless that is part of the system.

Reading one large file from a shared file system takes a fraction of the time of opening thousands of small ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hpcdist.environments.listing import files_below
from hpcdist.errors import UserMistake
from hpcdist.files.bounded_json import parse_object

if TYPE_CHECKING:
    import tarfile

#: Folder in the archive for the files of the Python that the virtual environment is based on.
BASE = "base"
#: Python below this folder belongs to the system, and each node has its own.
_SYSTEM = Path("/usr")
#: Parts of a Python installation that ranks do not need, or that the virtual environment replaces.
_NOT_NEEDED = frozenset({"site-packages", "dist-packages", "test", "idlelib", "ensurepip", "tkinter", "turtledemo"})
#: Fast, and close to the size of the slowest level for shared libraries.
_COMPRESS = ("zstd", "-q", "-T0", "-3", "-f", "-o")
_PROBE = """
import json, os, sys
print(json.dumps({"base": os.path.realpath(sys.base_prefix), "executable": os.path.realpath(sys.executable),
                  "library": "python%d.%d" % sys.version_info[:2]}))
"""


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The Python of a virtual environment."""

    base: Path  #: the installation of Python that it is based on, without symbolic links
    executable: Path  #: the program, without symbolic links
    library: str  #: name of the folder of the standard library, such as `python3.12`

    @property
    def is_packed(self) -> bool:
        """Whether the installation is part of the archive. Python below /usr exists on each node."""
        local = Path("/usr/local")  # may be shared, or exist on some machines only
        in_system = self.base.is_relative_to(_SYSTEM) and not self.base.is_relative_to(local)
        return not in_system and self.executable.is_relative_to(self.base)


def interpreter(environment: Path, python: str) -> Interpreter:
    """Return the Python of a virtual environment, by starting it.

    Raises:
        UserMistake: it does not start.
    """
    program = environment / "bin" / python
    try:
        done = subprocess.run([program, "-I", "-c", _PROBE], capture_output=True, text=True, check=True)
        found = parse_object(done.stdout, "base", "executable", "library")
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UserMistake(f"cluster.environment: {program} does not start: {' '.join(reason.split())}") from error
    return Interpreter(
        base=Path(found["base"]),
        executable=Path(found["executable"]),
        library=found["library"],
    )


def write_archive(environment: Path, python: Interpreter, target: Path) -> None:
    """Write a virtual environment to `target`, a tar archive compressed by zstd.

    Raises:
        UserMistake: zstd is not installed.
        OSError: the archive cannot be written.
    """
    if shutil.which("zstd") is None:
        raise UserMistake("cluster.environment: packing needs the program zstd: install it, or set stage=false")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*_COMPRESS, str(partial)], stdin=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None
        try:
            # zstd ends early if it cannot write; its error output has the reason.
            with suppress(BrokenPipeError), process.stdin as pipe:
                _write_tar(environment, python, pipe)
            if process.wait() != 0:
                errors.seek(0)
                raise OSError(f"cannot write {target}: {' '.join(errors.read().split())}")
            os.replace(partial, target)
        finally:
            process.kill()
            process.wait()
            partial.unlink(missing_ok=True)


def _write_tar(environment: Path, python: Interpreter, output: IO[bytes]) -> None:
    import tarfile  # slow to import; `submit` and a batch step seldom write an archive

    with tarfile.open(fileobj=output, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        # The compiled modules are included: compiling them again takes longer than reading them.
        for name, _ in files_below(environment, skip=frozenset()):
            if python.is_packed and _leads_to(environment / name, python.executable):
                tar.addfile(_link_to_base(tar, environment, name, python))
            else:
                tar.add(environment / name, name, recursive=False)
        if python.is_packed:
            for path in _base_files(python):
                tar.add(path, f"{BASE}/{path.relative_to(python.base)}", recursive=False)


def _leads_to(path: Path, program: Path) -> bool:
    """Return whether a path is an absolute symbolic link to a program outside of the environment."""
    return path.is_symlink() and os.path.isabs(os.readlink(path)) and path.resolve() == program


def _link_to_base(tar: tarfile.TarFile, environment: Path, name: str, python: Interpreter) -> tarfile.TarInfo:
    """Return a relative link to the packed Python, in place of the absolute one to the installed Python."""
    entry = tar.gettarinfo(environment / name, name)
    target = Path(BASE) / python.executable.relative_to(python.base)
    entry.linkname = os.path.relpath(target, Path(name).parent)
    return entry


def _base_files(python: Interpreter) -> Iterator[Path]:
    """Yield the files of a Python installation that a virtual environment uses."""
    yield python.executable
    library = python.base / "lib"
    # The interpreter's own shared libraries lie beside its standard library.
    yield from (path for path in sorted(library.glob("*.so*")) if path.is_file())
    standard = library / python.library
    for name, _ in files_below(standard, skip=_NOT_NEEDED):
        yield standard / name
