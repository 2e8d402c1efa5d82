"""The packed environments of a `runs_dir`: each is made once, as one compressed file, and used by all runs with the
same environment.
"""

import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import hpcdist
from hpcdist.config.launch_schema import EnvironmentConfig
from hpcdist.errors import UserMistake
from hpcdist.host.files import fill, long_lock, make_private, parse_object, read_json, write_json
from hpcdist.host.machine import source_digest
from hpcdist.run.folder import own_place

# Listings of the files of an environment, to find out whether it has changed or a copy is incomplete.

#: Name of the Python in an environment.
PYTHON = "python3"
#: Python writes these at any time, so they neither change nor complete an environment.
CACHE = "__pycache__"


def files_below(folder: Path, *, skip: frozenset[str] = frozenset({CACHE})) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the relative path and status of each file and symbolic link below a folder, in a fixed order."""
    for path, folders, names in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(path, name))]
        folders[:] = sorted(name for name in folders if name not in skip and name not in links)
        for name in sorted([*names, *links]):
            full = os.path.join(path, name)
            yield os.path.relpath(full, folder), os.lstat(full)


def fingerprint(*sources: Path, skip: frozenset[str] = frozenset({CACHE})) -> str:
    """Return a digest of files or folders that changes when a file in them is written, added or removed."""
    found = hashlib.sha256()
    for source in sources:
        found.update(os.fsencode(source) + b"\0")
        entries = files_below(source, skip=skip) if source.is_dir() else [("", source.stat())]
        for name, status in entries:
            found.update(f"{os.fsencode(name)!r} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def write_listing(folder: Path, target: Path) -> None:
    with open(target, "wb") as file:
        for name, status in files_below(folder):
            file.write(f"{_size(status)} ".encode() + os.fsencode(name) + b"\n")


def first_difference(folder: Path, listing: Path) -> str | None:
    """Return a file of the listing that is missing or has another size; None if the folder is complete.

    Additional files are not reported, because programs write caches into environments. A missing listing counts as a
    difference: the folder may be incomplete.
    """
    if not folder.is_dir() or not listing.is_file():
        return str(folder)
    for line in listing.read_bytes().splitlines():
        size, _, name = line.partition(b" ")
        try:
            status = os.lstat(os.path.join(os.fsencode(folder), name))
        except FileNotFoundError:
            return os.fsdecode(name)
        if str(_size(status)).encode() != size:
            return os.fsdecode(name)
    return None


def _size(status: os.stat_result) -> int:
    return status.st_size if stat.S_ISREG(status.st_mode) else -1


# Environments of projects that are locked by uv (`uv.lock`).

LOCK = "uv.lock"
_PROJECT = "pyproject.toml"


def uv_problems(project: Path, env: Mapping[str, str]) -> list[str]:
    key = "cluster.environment.path"
    if not (project / LOCK).is_file() or not (project / _PROJECT).is_file():
        return [
            f"{key}: {project} has no {LOCK} with a {_PROJECT}: name the project's folder, or create it by `uv lock`"
        ]
    if uv_program(env) is None:
        return [f"{key}: {project} needs the program uv, which is not installed here: `pip install uv`"]
    return []


def uv_fingerprint(project: Path, uv_args: Sequence[str]) -> str:
    """Return a digest of all that determines the environment: the lock, uv's options, the processor, local packages."""
    found = hashlib.sha256(repr((list(uv_args), platform.machine())).encode())
    for name in (LOCK, _PROJECT, ".python-version"):
        if (file := project / name).is_file():
            found.update(name.encode() + b"\0" + file.read_bytes())
    for folder in _local_packages(project):
        found.update(fingerprint(folder, skip=frozenset({CACHE, ".venv", ".git"})).encode())
    return found.hexdigest()


def _local_packages(project: Path) -> Iterator[Path]:
    """Yield folders of packages in a lock file whose content is not part of it, except the project itself."""
    try:
        lock = tomllib.loads((project / LOCK).read_text())
        sources = [package.get("source", {}) for package in lock.get("package", [])]
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError, OSError) as error:
        raise UserMistake(f"cluster.environment.path: {project / LOCK} cannot be read ({error}): `uv lock`") from error
    for source in sources:
        place = source.get("directory") or source.get("editable")
        if place and (folder := project / place).resolve() != project.resolve() and folder.is_dir():
            yield folder


def build(project: Path, uv_args: Sequence[str], target: Path, env: Mapping[str, str]) -> None:
    """Create the environment of a project in a new folder, with exactly the locked versions.

    The project itself is not installed, because ranks import the run's copy of the code.
    """
    uv = uv_program(env)
    if uv is None:  # a job that packs again may run on another machine than `submit`
        raise UserMistake("cluster.environment: the program uv is not installed here: `pip install uv`")
    command = [uv, "sync", "--quiet", "--locked", "--no-editable", "--no-install-project", "--compile-bytecode"]
    command += ["--no-progress", f"--project={project}", *uv_args]
    # Without links to uv's cache, whose files may be removed while the environment is in use.
    own = {"UV_PROJECT_ENVIRONMENT": str(target), "UV_LINK_MODE": "copy"}
    cleared = {name: value for name, value in env.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(command, env={**cleared, **own}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shutil.rmtree(target, ignore_errors=True)
        raise UserMistake(f"cluster.environment.path: uv cannot build {project}: {' '.join(done.stderr.split())}")


def uv_program(env: Mapping[str, str]) -> str | None:
    """Return uv of the search path, or the one installed beside this Python."""
    own = os.path.dirname(sys.executable)
    return shutil.which("uv", path=os.pathsep.join([env.get("PATH", os.defpath), own]))


log = logging.getLogger(__name__)
#: Time without use after which copies on nodes and packed environments are removed; no job should be longer.
MAX_AGE_S = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Packed:
    key: str = ""  #: name of its copy on the nodes
    kind: str = ""
    path: str = ""  #: the archive
    sha256: str = ""  #: of the archive
    prefix: str = ""  #: folder of the environment that was packed, which its scripts name


def store_of(runs_dir: Path) -> Path:
    return own_place(runs_dir) / ".environments"


def pack(environment: EnvironmentConfig, runs_dir: Path, env: Mapping[str, str]) -> Packed:
    """Return the packed form of an environment, created if there is none of the same content; remove unused ones."""
    make_private(store := store_of(runs_dir))
    source = Path(environment.path)
    digest = uv_fingerprint(source, environment.uv_args) if environment.kind == "uv" else fingerprint(source)
    record = store / f"{environment.kind}-{digest[:16]}.json"
    with long_lock(store / "lock"):
        raw = read_json(record)
        found = fill(Packed, raw, record) if raw is not None else None
        if found is None or not Path(found.path).exists():
            began = time.monotonic()
            log.info("packing %s, once for all runs", source)
            found = _make(environment, store, record.stem, env)
            write_json(record, asdict(found))
            took_s, size_mb = time.monotonic() - began, Path(found.path).stat().st_size / 1e6
            log.info("packed %s in %.0f s, %.0f MB: %s", source, took_s, size_mb, found.path)
        os.utime(record)
        _remove_unused(store, keep=record.stem)
    return found


def touch(packed: Packed, runs_dir: Path) -> bool:
    """Mark an environment as used now; returns whether its file still exists."""
    with suppress(OSError):
        os.utime(store_of(runs_dir) / f"{packed.key}.json")
    return Path(packed.path).exists()


def _make(environment: EnvironmentConfig, store: Path, name: str, env: Mapping[str, str]) -> Packed:
    original, archive = Path(environment.path), store / f"{name}.tar.zst"
    with ExitStack() as leftovers:
        if environment.kind == "uv":
            source, original = original, store / f".{name}.{os.getpid()}"
            leftovers.callback(shutil.rmtree, original, ignore_errors=True)
            build(source, environment.uv_args, original, env)
        write_archive(original, interpreter(original), archive)
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Packed(key=name, kind=environment.kind, path=str(archive), sha256=digest, prefix=str(original))


def _remove_unused(store: Path, *, keep: str) -> None:
    """Remove environments, copies of hpcdist and unfinished files that have not been used for a time."""
    before = time.time() - MAX_AGE_S
    for path in sorted(store.iterdir(), key=lambda path: path.suffix == ".json"):  # records after their files
        name = path.name.removesuffix(".json").removesuffix(".tar.zst")
        if name in (keep, "lock"):
            continue
        record = store / f"{name}.json"
        with suppress(FileNotFoundError):
            used = (record if record.exists() else path).stat().st_mtime
            if used < before:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                if path != record:
                    record.unlink(missing_ok=True)
                log.info("removed %s, which was not used for 30 days", path)


# A virtual environment as one compressed file, together with its Python unless that is part of the system.
#
# Reading one large file from a shared file system takes a fraction of the time of opening thousands of small ones.

#: Folder in the archive for the files of the Python that the virtual environment is based on.
BASE = "base"
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
    base: Path  #: the installation of Python that it is based on, without symbolic links
    executable: Path  #: the program, without symbolic links
    library: str  #: name of the folder of the standard library, such as `python3.12`

    @property
    def is_packed(self) -> bool:
        """Whether the installation is part of the archive. Python below /usr exists on each node."""
        local = Path("/usr/local")  # may be shared, or exist on some machines only
        in_system = self.base.is_relative_to("/usr") and not self.base.is_relative_to(local)
        return not in_system and self.executable.is_relative_to(self.base)


def interpreter(environment: Path) -> Interpreter:
    """Return the Python of a virtual environment, by starting it."""
    program = environment / "bin" / PYTHON
    try:
        done = subprocess.run([program, "-I", "-c", _PROBE], capture_output=True, text=True, check=True)
        found = parse_object(done.stdout, "base", "executable", "library")
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UserMistake(f"cluster.environment: {program} does not start: {' '.join(reason.split())}") from error
    return Interpreter(base=Path(found["base"]), executable=Path(found["executable"]), library=found["library"])


def write_archive(environment: Path, python: Interpreter, target: Path) -> None:
    """Write a virtual environment to `target`, a tar archive compressed by zstd."""
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
            path = environment / name
            leads_out = path.is_symlink() and os.path.isabs(os.readlink(path))
            if python.is_packed and leads_out and path.resolve() == python.executable:
                # A relative link to the packed Python, in place of the absolute one to the installed Python.
                entry = tar.gettarinfo(path, name)
                packed = Path(BASE) / python.executable.relative_to(python.base)
                entry.linkname = os.path.relpath(packed, Path(name).parent)
                tar.addfile(entry)
            else:
                tar.add(path, name, recursive=False)
        if python.is_packed:
            library = python.base / "lib"
            standard = library / python.library
            # The interpreter's own shared libraries lie beside its standard library.
            shared = [path for path in sorted(library.glob("*.so*")) if path.is_file()]
            modules = (standard / name for name, _ in files_below(standard, skip=_NOT_NEEDED))
            for path in (python.executable, *shared, *modules):
                tar.add(path, f"{BASE}/{path.relative_to(python.base)}", recursive=False)


# A copy of hpcdist for environments of ranks, so that ranks and supervisor have the same version.


def copy_sources(store: Path) -> Path:
    """Copy the running hpcdist into a folder of `store`, unless it is there; return that folder, for PYTHONPATH.

    The copy includes the entry points, by which MLflow in a rank finds hpcdist's tracking store.
    """
    from importlib import metadata  # slow to import

    package = Path(hpcdist.__file__).parent
    target = store / f"hpcdist-{source_digest(str(package))}"
    if target.is_dir():
        os.utime(target)
        return target
    partial = Path(tempfile.mkdtemp(dir=store, prefix=f".{target.name}."))
    try:
        shutil.copytree(package, partial / "hpcdist", ignore=shutil.ignore_patterns("__pycache__"))
        with suppress(metadata.PackageNotFoundError):
            own = metadata.distribution("hpcdist")
            target_info = partial / f"hpcdist-{hpcdist.__version__}.dist-info"
            target_info.mkdir()
            for name in ("METADATA", "entry_points.txt"):
                if (text := own.read_text(name)) is not None:
                    (target_info / name).write_text(text)
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():  # otherwise another job has created it meanwhile
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
