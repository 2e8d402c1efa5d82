"""On a node: copy a packed environment to the local disk, check it, and start its Python once.

    python -m hpcdist.environments.node_copy REQUEST

REQUEST is the JSON of a `NodeRequest`. One process per node does this; others on the same node wait for its lock and
then find the copy. Needs the standard library alone.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.environments.packed import MAX_AGE_S, first_difference, write_listing
from hpcdist.errors import RunFolderError
from hpcdist.host.files import long_lock, make_private, parse_object
from hpcdist.slurm.on_nodes import print_answer

#: Errors of a local folder that a retry does not solve.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_UNFIT_DISK = (*_FULL_DISK, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
#: `missing` is about packages that a rank imports before the user's code.
_CODE = """
import importlib.util, json, sys
facts = {"python": "%d.%d.%d" % sys.version_info[:3]}
if sys.version_info >= (3, 11):
    from hpcdist.host.machine import versions
    facts.update(versions())
    facts["missing"] = [name for name in ("numpy", "psutil", "torch") if importlib.util.find_spec(name) is None]
print("facts:", json.dumps(facts))
"""


@dataclass(frozen=True, kw_only=True)
class NodeRequest:
    python: str  #: the ranks' Python, on the node
    sources: str  #: folder with hpcdist, on the shared file system
    folder: str = ""  #: the user's folder on the local disk; empty if the environment is used in place
    key: str = ""
    archive: str = ""
    sha256: str = ""
    prefix: str = ""


class CopyError(Exception):
    """The environment cannot be used on this node; `may_pass` if a retry may help."""

    def __init__(self, text: str, *, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


def main(argv: Sequence[str]) -> None:
    """Prepare the environment on this node and print `copied`, `seconds` and `facts`, or `error` and `may_pass`."""
    # Slurm sends SIGUSR2 ahead of the time limit.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    request = NodeRequest(**json.loads(argv[0]))
    began = time.monotonic()
    answer: dict[str, Any] = {}
    try:
        answer["copied"] = prepare(request)
        answer["facts"] = start_python(request)
    except CopyError as error:
        answer |= {"error": str(error), "may_pass": error.may_pass}
    except OSError as error:
        # shutil.copytree collects errors as texts.
        reason = str(error.args[0][0][2]) if isinstance(error, shutil.Error) else error.strerror or str(error)
        unfit = error.errno in _UNFIT_DISK or any(os.strerror(number) in reason for number in _FULL_DISK)
        fix = ": set cluster.environment.local_dir to a local disk with enough space" if unfit else ""
        answer |= {"error": f"{reason}: {error.filename or request.folder}{fix}", "may_pass": not unfit}
    answer["seconds"] = round(time.monotonic() - began, 2)
    print_answer(answer)


def local_sources(request: NodeRequest) -> Path:
    return Path(request.folder or Path(request.sources).parent) / Path(request.sources).name


def prepare(request: NodeRequest) -> bool:
    """Make sure that complete copies are on the local disk; returns whether the environment had to be copied."""
    if not request.folder:
        return False
    folder = Path(request.folder)
    try:
        make_private(folder)
    except RunFolderError as error:
        raise CopyError(f"cluster.environment.local_dir: {error}") from error
    with long_lock(folder / "lock"):
        for partial in folder.glob(".partial-*"):  # of a process that was killed
            shutil.rmtree(partial)
        copied = not _is_complete(folder, request.key)
        if copied:
            _copy(request, folder)
        sources = local_sources(request)
        if not _is_complete(folder, sources.name):
            partial = shutil.copytree(request.sources, folder / f".partial-{os.getpid()}")
            _finish(folder, sources.name, partial)
        for name in (request.key, sources.name):
            os.utime(_listing(folder, name))
        _remove_unused(folder)
    return copied


def start_python(request: NodeRequest) -> dict[str, Any]:
    """Start the environment's Python once and return its versions."""
    env = {**os.environ, "PYTHONPATH": str(local_sources(request))}
    try:
        done = subprocess.run(
            [request.python, "-c", _CODE], env=env, cwd="/", capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise CopyError(f"{request.python} cannot be started: {error.strerror}") from error
    found = re.search(r"^facts: (\{.*\})$", done.stdout, re.MULTILINE)
    if found is None:
        lines = done.stderr.split("\n") if done.stderr.strip() else [f"exit code {done.returncode}"]
        raise CopyError(f"{request.python} does not start: {[line for line in lines if line.strip()][-1].strip()}")
    try:
        return parse_object(found[1], "python")
    except ValueError as error:
        raise CopyError(f"{request.python} gives no valid description of itself: {error}") from error


def _listing(folder: Path, name: str) -> Path:
    return folder / f"{name}.files"


def _is_complete(folder: Path, name: str) -> bool:
    """Return whether a copy has all its files; programs that clean up /tmp may have removed some."""
    return first_difference(folder / name, _listing(folder, name)) is None


def _finish(folder: Path, name: str, partial: Path) -> None:
    """Replace a copy by a new one. Processes that use the old one miss its files for the time of two renames only."""
    old = folder / f".partial-old-{os.getpid()}"
    _listing(folder, name).unlink(missing_ok=True)
    if (folder / name).exists():
        os.rename(folder / name, old)
    write_listing(partial, _listing(folder, name))
    os.rename(partial, folder / name)
    shutil.rmtree(old, ignore_errors=True)


def _copy(request: NodeRequest, folder: Path) -> None:
    partial = folder / f".partial-{os.getpid()}"
    partial.mkdir()
    try:
        found = _unpack(Path(request.archive), partial)
        if found != request.sha256:
            raise CopyError(
                f"{request.archive} has another content (sha256 {found[:16]}…) than when the run was submitted"
                f" ({request.sha256[:16]}…): restore it, or submit again"
            )
        relocate(partial, request.prefix, folder / request.key)
        _finish(folder, request.key, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(archive: Path, target: Path) -> str:
    """Unpack an archive while it is read, once; returns its sha256."""
    if missing := [name for name in ("zstd", "tar") if shutil.which(name) is None]:
        raise CopyError(f"{missing[0]} is not installed: install it, or use cluster.environment.stage=false")
    digest = hashlib.sha256()
    command = ["tar", "--extract", "--no-same-owner", "--use-compress-program=zstd -dq", "--file=-"]
    with open(archive, "rb") as file, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([*command, f"--directory={target}"], stdin=subprocess.PIPE, stderr=errors)
        assert process.stdin is not None
        # tar ends early if it cannot write; its error output has the reason.
        with suppress(BrokenPipeError), process.stdin as pipe:
            while chunk := file.read(4 << 20):
                digest.update(chunk)
                pipe.write(chunk)
        if process.wait() != 0:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            # The last lines only say that the program gave up.
            full = next((line for line in lines if "No space left" in line or "quota" in line.lower()), "")
            fix = ": free space, or set cluster.environment.local_dir to a larger disk" if full else ""
            reason = full or next(iter(lines), "no error message")
            raise CopyError(f"cannot unpack {archive}: {reason}{fix}", may_pass=not full)
    return digest.hexdigest()


def relocate(copy: Path, prefix: str, target: Path) -> None:
    """Change the paths of the original's folder, if that is known, in a copy that will be renamed to `target`."""
    settings = copy / "pyvenv.cfg"
    if (copy / "base" / "bin").is_dir() and settings.is_file():
        lines = settings.read_text().splitlines()
        home = f"home = {target / 'base' / 'bin'}"
        settings.write_text("\n".join(home if line.partition("=")[0].strip() == "home" else line for line in lines))
    if not prefix:
        return
    old, new = f"#!{prefix}/bin/".encode(), f"#!{target}/bin/".encode()
    for script in (copy / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        with open(script, "r+b") as file:
            if file.read(len(old)) == old:
                rest = file.read()
                file.seek(0)
                file.write(new + rest)
                file.truncate()


def _remove_unused(folder: Path) -> None:
    before = time.time() - MAX_AGE_S
    for copy in filter(Path.is_dir, folder.iterdir()):
        listing = _listing(folder, copy.name)
        # A copy without a listing is one whose removal was interrupted.
        if not listing.exists() or (listing.stat().st_mtime < before and not _is_in_use(copy)):
            listing.unlink(missing_ok=True)  # first: without it the copy counts as incomplete
            shutil.rmtree(copy)


def _is_in_use(copy: Path) -> bool:
    """Return whether a process of this user has been started from a copy or has mapped a library in it."""
    text = f"{copy}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "maps"):
            try:
                if text in (process / name).read_bytes():
                    return True
            except OSError:  # the process has ended, or belongs to another user
                continue
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
