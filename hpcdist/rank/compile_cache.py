"""The cache of torch.compile, kept beyond this process and this node.

On a node the cache is a folder on the local disk, one for each kind of machine. Before a process compiles for the first
time, the files that other processes have stored on the shared file system are copied to it. Processes copy new files
back, in a thread and one of a node at a time: after the first step, with each checkpoint, every minute, and at their
end. A process that does not compile copies nothing.

The copy every minute is for scripts: hpcdist sees neither the steps nor the checkpoints of most of them, and a killed
process reaches no end. Without new files nothing is copied.

The cache does not use torch.compiler.save_cache_artifacts, because its artifacts contain no compiled C++ code: a start
on CPUs took 51 s with them, 61 s without, and 5 s with the folder. Processes that a script starts share the folder.

No error of the cache ends a run: it is logged once.
"""

import hashlib
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from zipfile import BadZipFile

from hpcdist.errors import HpcdistError
from hpcdist.host.compiled_archive import SUFFIX, cached_files, limit, pack, unpack
from hpcdist.host.compiler import CACHE_VARIABLE
from hpcdist.host.gpu_info import gpus
from hpcdist.host.locks import exclusive, lock_now, open_lock
from hpcdist.host.machine import text_of
from hpcdist.host.ownership import make_private
from hpcdist.host.versions import versions

log = logging.getLogger(__name__)
#: Triton's own cache, for kernels that are not torch's.
TRITON_VARIABLE = "TRITON_CACHE_DIR"
#: `torch.compile` imports this module when it is called.
_COMPILES = "torch._inductor.compile_fx"
_EVERY_S = 60.0
#: Pause between two copies, since a loop may save a checkpoint after each step. On two busy cores a look at 1,000 files
#: takes 0.01 s of CPU time, and a copy of 9 MB 0.2 s, in which steps of 1.1 ms take 1.2 ms.
_PAUSE_S = 5.0
#: Limit of a wait for another process that saves, and of the last copy: a file system that hangs must not keep a rank.
_END_S = 10.0
#: Pause between two tries for the lock of the process that saves.
_POLL_S = 0.2
#: Wait for another process of this node that unpacks the archive.
_UNPACK_S = 120.0
#: Lines of /proc/cpuinfo on which `-march=native` depends.
_PROCESSOR = re.compile(
    r"^(?:vendor_id|cpu family|model|model name|flags|Features|CPU implementer|CPU part)\s*:.*$", re.MULTILINE
)


#: The caches that this process keeps.
_kept: list["_Cache"] = []


def save_soon() -> None:
    """Let the threads of `kept` copy new files now. The call itself takes a microsecond."""
    for cache in _kept:
        cache.save_soon()


@contextmanager
def kept(store: Path, local: Path, *, now: bool = False) -> Iterator[None]:
    """Keep what the code in the block compiles.

    Args:
        store: folder on the shared file system, which this user alone may write to.
        local: folder on the local disk, likewise; subfolders are for kinds of machines.
        now: whether child processes compile; this process does not notice their first compilation.
    """
    cache = _Cache(store, local)
    finder = _BeforeImport(_COMPILES, cache.begin)
    if now or _COMPILES in sys.modules:
        cache.begin()
    else:
        sys.meta_path.insert(0, finder)
    has_finished = False
    _kept.append(cache)
    try:
        yield
        has_finished = True
    finally:
        finder.remove()
        _kept.remove(cache)
        # A failed rank ends at once, so that the others do not wait for it.
        cache.end(save=has_finished)


def machine_kind() -> str:
    """Return a file name for all machines that can execute the same compiled code, and for the version of torch."""
    installed = versions()
    torch = installed.get("torch", "unknown")
    gpu_names = sorted({gpu.name for gpu in gpus()})
    processor = text_of(Path("/proc/cpuinfo")).partition("\n\n")[0]
    facts = [
        torch,
        installed.get("cuda", ""),
        sys.version,
        *gpu_names,
        installed.get("driver", ""),
        # Code for CPUs uses all instructions of this processor, and functions of this C library.
        platform.machine(),
        *_PROCESSOR.findall(processor),
        *platform.libc_ver(),
    ]
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:12]
    devices = "+".join(gpu_names) or "cpu"
    return re.sub(r"[^A-Za-z0-9.+_-]", "-", f"torch-{torch}_{devices}_{digest}")


class _BeforeImport(MetaPathFinder):
    """Calls a function before the first import of a module; finds no module itself.

    It stays in `sys.meta_path` until the end: if it were removed, the next finder would take its place, and imports
    that are just going through the list, this one or others in other threads, would skip that finder.
    """

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module = module
        self._function = function
        self._is_done = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == self._module and not self._is_done:
            self._is_done = True
            self._function()

    def remove(self) -> None:
        """Take this finder out of the import system, if it is in it."""
        with suppress(ValueError):
            sys.meta_path.remove(self)


class _Cache:
    """The local folder of this kind of machine, and its archive."""

    def __init__(self, store: Path, local: Path) -> None:
        self._store = store
        self._local = local
        self._stored: set[Path] = set()  #: local files that this process has seen in the archive
        self._has_warned = False
        self._has_ended = False
        self._is_due = threading.Event()
        self._saver: threading.Thread | None = None
        self._is_damaged = False  #: whether the archive has a damaged file

    def begin(self) -> None:
        """Unpack the archive, and save new files from now on."""
        try:
            make_private(self._store)
            kind = machine_kind()
            self._folder = self._local / kind
            self._archive = self._store / f"{kind}{SUFFIX}"
            make_private(self._folder)
            os.environ[CACHE_VARIABLE] = str(self._folder)
            os.environ.setdefault(TRITON_VARIABLE, str(self._folder / "triton"))
            self._unpack_once()
            self._start_saver()
        except Exception as error:  # whatever it is, torch compiles again
            self._warn(error)

    def end(self, *, save: bool) -> None:
        """Stop saving, after a last time if `save`."""
        if self._saver is None:
            return
        self._has_ended = True
        self._is_due.set()
        if save:
            # A thread of its own, because the one that saves every minute may wait for a file system.
            last = threading.Thread(target=self._save, args=(_END_S,), name="compile-cache-end", daemon=True)
            last.start()
            last.join(_END_S)
            if last.is_alive():
                self._warn(TimeoutError(f"the last copy did not end within {_END_S:g} s"))

    def save_soon(self) -> None:
        """Save new files in the background now instead of within a minute."""
        self._is_due.set()

    def _unpack_once(self) -> None:
        """Unpack the archive, unless a process of this node has unpacked this version of it."""
        marker = self._folder / ".unpacked"
        with exclusive(self._folder / ".unpacking", within_s=_UNPACK_S):
            try:
                about = self._archive.stat()
            except FileNotFoundError:
                return
            version = f"{about.st_ino} {about.st_size}"
            if text_of(marker) == version:
                return
            try:
                num_files = unpack(self._archive, self._folder)
            except BadZipFile as error:
                self._is_damaged = True
                self._warn(error)
                return
            marker.write_text(version)
            log.info("%d compiled files were copied from %s", num_files, self._archive)

    def _start_saver(self) -> None:
        self._is_due.clear()  # steps before the first compilation
        self._saver = threading.Thread(target=self._save_repeatedly, name="compile-cache", daemon=True)
        self._saver.start()

    def _save_repeatedly(self) -> None:
        while True:
            self._is_due.wait(_EVERY_S)
            self._is_due.clear()
            if self._has_ended:
                return
            # Other ranks of this node save after the same step.
            self._save(_END_S)
            time.sleep(_PAUSE_S)

    def _save(self, within_s: float) -> None:
        """Copy new files to the archive; another process of this node that does so is awaited for `within_s`."""
        store = hashlib.sha256(str(self._store).encode()).hexdigest()[:12]
        try:
            with open_lock(self._folder / f".saving-{store}", 0o600) as lock:
                deadline = time.monotonic() + within_s
                while not lock_now(lock):
                    if time.monotonic() >= deadline:
                        return
                    time.sleep(_POLL_S)
                files = set(cached_files(self._folder))
                if files <= self._stored:
                    return
                pack(self._folder, self._archive, is_damaged=self._is_damaged)
                limit(self._store, self._archive)
                self._stored = files
                self._is_damaged = False
        except (OSError, HpcdistError, BadZipFile) as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "compiled code is not kept for later starts (launch.cache_dir): %s: %s",
                type(error).__name__,
                error,
            )
