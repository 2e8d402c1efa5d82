"""Files on file systems that others share: atomic writes, bounded JSON with a format number, private and regular files,
the owner of folders, and locks.
"""

import errno
import fcntl
import grp
import io
import json
import logging
import os
import pwd
import secrets
import shlex
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host import retry

log = logging.getLogger(__name__)

# Opening of files that must be regular: a pipe blocks its reader, and a device such as /dev/zero has no end.


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Raises OSError; for a pipe, a device or a socket io.UnsupportedOperation, which is an OSError and a ValueError.
    """
    # Without O_NONBLOCK, a pipe that nobody writes to would block; regular files do not know the flag.
    extra = os.O_NONBLOCK | os.O_NOCTTY
    # With an opener, Python closes the descriptor of a folder, and its error has the path.
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | extra))  # noqa: SIM115  # the caller closes
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise io.UnsupportedOperation(errno.EINVAL, "not a regular file", str(path))
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. Raises ValueError if it is longer than `max_bytes`, and OSError."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"{os.fstat(file.fileno()).st_size} bytes, more than {max_bytes}")
    return data


# Untrusted JSON: an integer of 20,000 digits, 100,000 nested brackets or a file of 100 GB must neither exhaust memory
# nor raise another exception than ValueError.

#: The largest JSON files of a run folder, such as the cells of a sweep, have a few MB.
MAX_JSON_BYTES = 64 << 20


def parse_json(text: str | bytes) -> Any:
    try:
        return _DECODER.decode(text if isinstance(text, str) else text.decode())
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def parse_object(text: str | bytes, *keys: str) -> dict[str, Any]:
    found = parse_json(text)
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__} instead of an object")
    if missing := set(keys) - found.keys():
        raise ValueError(f"it has no {min(missing)!r}")
    return found


def read_json_value(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    return parse_json(read_regular(path, max_bytes))


def _int(digits: str) -> int:
    if len(digits) > 300:  # 64 bits have 19 digits, and every integer with up to 300 digits fits a float
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_int)


# Format number of the JSON files in a run folder, and type-checked reading of them.
#
# Each file holds an integer `format`; a missing number means format 0, which is otherwise equal to format 1. The number
# rises when an older hpcdist would misread the file. New keys do not raise it, because readers ignore unknown keys.

FORMAT = 1
KEY = "format"
#: Limit for counts, sizes and times (in seconds since 1970: the year 33658).
LARGEST = 10**12
T = TypeVar("T")
_hints: Callable[[type], dict[str, Any]] = cache(get_type_hints)


def stamped(value: Mapping[str, Any]) -> dict[str, Any]:
    return {KEY: FORMAT, **value}


def unstamped(value: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file without its format number. Raises RunFolderError if this hpcdist cannot read it."""
    number = value.get(KEY, 0)
    if type(number) is not int or number < 0:
        raise RunFolderError(f"{path} is damaged: its format is {str(number)[:20]!r}, not an integer")
    if number > FORMAT:
        raise RunFolderError(
            f"{path} was written by a newer hpcdist (format {str(number)[:20]}; this version reads up to {FORMAT}):"
            " upgrade hpcdist"
        )
    return {key: item for key, item in value.items() if key != KEY}


def fill(kind: type[T], raw: Mapping[str, Any], path: Path) -> T:
    values = {}
    hints = _hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in raw:
            if not _fits(hints[field.name], raw[field.name]):
                given = str(raw[field.name])[:40]
                raise RunFolderError(f"{path} is damaged: {field.name} cannot be {given!r}")
            values[field.name] = raw[field.name]
        elif field.default is MISSING and field.default_factory is MISSING:
            raise RunFolderError(f"{path} is damaged: it has no {field.name}")
    return kind(**values)


def _fits(declared: Any, value: Any) -> bool:
    if isinstance(declared, UnionType):
        return any(_fits(one, value) for one in get_args(declared))
    if get_origin(declared) is Literal:
        return isinstance(value, str) and value in get_args(declared)
    if declared is NoneType:
        return value is None
    if declared is float:
        return type(value) in (int, float) and abs(value) <= LARGEST  # which NaN is not
    if declared is int:
        return type(value) is int and 0 <= value <= LARGEST
    return type(value) is (get_origin(declared) or declared)


# Atomic file writes, and JSON files with a format number.


def write_atomic(
    path: Path, data: bytes | str, *, durable: bool = False, mode: int = 0o666, within_s: float | None = None
) -> None:
    """Replace a file atomically: a reader sees either the old or the new content.

    Args:
        durable: also wait until content and name are on disk (fsync).
        mode: permissions of the new file, reduced by the umask.
    """
    raw = data.encode() if isinstance(data, str) else data

    def write() -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(temporary, flags, mode), "wb") as file:
                file.write(raw)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            retry.discard(temporary)
            raise
        if durable:
            fsync_folder(path.parent)

    retry.retry(write, path, within_s=within_s)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False, within_s: float | None = None) -> None:
    text = json.dumps(stamped(value), indent=2, sort_keys=True) + "\n"
    write_atomic(path, text, durable=durable, within_s=within_s)


def read_json(path: Path, *, within_s: float | None = None) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file is missing, not regular, or does not hold an object."""
    try:
        value = retry.retry(lambda: read_json_value(path), path, within_s=within_s)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return unstamped(value, path) if isinstance(value, dict) else None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in the complete lines of a file, without damaged lines; empty like `read_json` is None."""
    try:
        lines = retry.retry(lambda: read_regular(path, MAX_JSON_BYTES), path).split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return []
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(parse_json(line))
    return [value for value in found if isinstance(value, dict)]


def read_if_valid(kind: type[T], path: Path) -> T | None:
    """Return a dataclass with the values of a JSON file; None if the file is missing, damaged or cannot be read."""
    try:
        raw = read_json(path)
        return None if raw is None else fill(kind, raw, path)
    except (RunFolderError, OSError):
        return None


# Files that hold passwords or tokens: readable by their owner alone.


def require_private(path: Path) -> None:
    """Raise UserMistake when group or others may read or write a file, or when it belongs to another user."""
    try:
        about = path.stat()
    except OSError as error:
        raise UserMistake(f"{path} cannot be read: {error.strerror}") from error
    if about.st_uid not in (os.geteuid(), 0):
        raise UserMistake(f"{path} belongs to user {about.st_uid}: use a file of your own with mode 0600")
    if mode := stat.S_IMODE(about.st_mode) & 0o077:
        raise UserMistake(
            f"{path} has mode {stat.S_IMODE(about.st_mode):04o}, so that other users can"
            f" {'read' if mode & 0o044 else 'change'} the credentials in it: `chmod 600 {shlex.quote(str(path))}`"
        )


def write_private(path: Path, text: str) -> None:
    write_atomic(path, text, durable=True, mode=0o600)


def short_path(path: str | Path) -> str:
    """Return a path relative to the current folder if it is below it, else the absolute path."""
    full = os.path.abspath(path)
    try:
        return os.path.relpath(full) if Path(full).is_relative_to(os.getcwd()) else full
    except OSError:  # the current folder was deleted
        return full


# Ownership and permission checks of run folders.
#
# Several users may share a `runs_dir`. A run's config selects a server, its `slurm.json` a job, and its code is
# executed. Therefore commands act only on run folders that belong to the effective user, also if that is root, and that
# no other user can write to or replace: the folders above are checked, too, as sshd does with StrictModes.

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
#: Groups of this site whose members may change the folders above a user's runs: names, separated by commas.
TRUSTED_GROUPS = "HPCDIST_TRUSTED_GROUPS"
_FIX = (
    "set `runs_dir` to a folder of your own, such as '${oc.env:HOME}/runs', and share results through a tracking"
    " server (`tracking.uri`); start a container as the folder's owner with `--user $(id -u):$(id -g)`"
)


def is_mine(folder: Path) -> bool:
    """Return whether a folder belongs to the effective user, and so does the symbolic link if `folder` is one."""
    try:
        return os.lstat(folder).st_uid == os.stat(folder).st_uid == os.geteuid()
    except OSError:
        return False


def require_mine(folder: Path, action: str) -> None:
    """Raise RunFolderError unless the folder of a run or sweep belongs to the effective user and is safe."""
    if not is_mine(folder):
        raise RunFolderError(
            f"run folder {folder} belongs to {_owner(folder)}, and `hpcdist {action}` acts only on your own runs,"
            f" because a run's config and code act with your rights: ask {_owner(folder)}, or start a new run"
        )
    require_safe(folder)


def require_trusted(folder: Path, action: str) -> None:
    """Raise RunFolderError unless the folder belongs to the effective user, who alone can write to it.

    Modes of files inside the folder are checked only if group or others can enter it.
    """
    checked = [folder] if is_mine(folder) else []
    if checked and folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH):
        checked += [*sorted(folder.iterdir()), *sorted((folder / "attempts").glob("*"))]
    for path in checked:
        if path.lstat().st_mode & _WRITABLE and not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            raise RunFolderError(
                f"{path} is writable by group or others (mode {mode:04o}), and `hpcdist {action}` would execute"
                f" their code: `chmod -R go-w {shlex.quote(str(folder))}`"
            )
    require_mine(folder, action)


def require_safe(path: Path) -> None:
    """Raise RunFolderError if another user could replace a folder or file; the message ends with `: ` and the fix.

    All folders and symbolic links by which the kernel finds it must belong to this user or root, and only they may
    write to the folders, except for those with the sticky bit. Members of TRUSTED_GROUPS count as this user.
    """
    trusted_groups, is_open = os.environ.get(TRUSTED_GROUPS, "").split(","), False
    is_inside = Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]  # of a user namespace
    known_ids = (os.geteuid(), 0, *[65534] * is_inside)  # there, users without an id have this one, perhaps also root
    for place, about in _way(path.absolute()):
        group, mode, name = _group(about.st_gid), about.st_mode, shlex.quote(str(place))
        is_trusted = bool(group) and group in trusted_groups
        trust = f"; if you trust the group {group}, set {TRUSTED_GROUPS}={group}" if group else ""
        # Anyone may have made a folder in an open one, whose setgid bit then gives it the group.
        if about.st_uid not in known_ids and (is_open or not is_trusted):
            owners = f"{user_of(about.st_uid)}, not to {user_of(os.geteuid())}"
            raise RunFolderError(f"{place} belongs to {owners}: {_FIX}{trust}")
        is_open = bool(mode & stat.S_IWOTH)
        if stat.S_ISDIR(mode) and not mode & stat.S_ISVTX and (is_open if is_trusted else is_shared(about)):
            raise RunFolderError(
                f"others may write to {place} (mode {stat.S_IMODE(mode):04o}) and replace what your runs execute:"
                f" `chmod go-w {name}`, or `chmod +t {name}` to keep it shared{trust}"
            )


def is_shared(about: os.stat_result) -> bool:
    """Return whether other users may write to a folder. A group with the name of this user has no other members."""
    group = _group(about.st_gid)
    is_own = group == user_of(os.geteuid()) if group else about.st_gid == os.geteuid()  # no name in a container
    return bool(about.st_mode & (stat.S_IWOTH if is_own else _WRITABLE))


def make_private(folder: Path) -> None:
    """Create a folder of mode 0700. Raises RunFolderError if it exists and is shared, not safe or no folder."""
    with suppress(FileExistsError):  # perhaps a link to nothing
        folder.mkdir(mode=0o700, parents=True)
    require_safe(folder)
    if not folder.is_dir() or not is_mine(folder) or is_shared(folder.stat()):
        raise RunFolderError(
            f"{folder} is not a folder of {user_of(os.geteuid())} alone: remove it, or use another one"
        )


def _way(path: Path, num_links: int = 40) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the folders and symbolic links by which the kernel finds a path, as far as they exist."""
    for place in [*reversed(path.parents), path]:
        try:
            about = place.lstat()
        except OSError:  # opening it reports the reason
            return
        yield place, about
        if stat.S_ISLNK(about.st_mode) and num_links:
            yield from _way(place.parent / os.readlink(place), num_links - 1)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


def _owner(folder: Path) -> str:
    try:  # also of a link of this user to a folder of another one
        return user_of(max(os.lstat(folder).st_uid, os.stat(folder).st_uid, key=lambda uid: uid != os.geteuid()))
    except OSError:
        return "an unknown user"


def user_of(uid: int) -> str:
    """Return the name of a user, or such as `user 1234` if the id has no name, as in some containers."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def stays_inside(path: Path, folder: Path) -> bool:
    """Return whether a path below `folder` stays below it when all symbolic links are resolved."""
    try:
        return path.resolve(strict=True).is_relative_to(folder.resolve(strict=True))
    except (OSError, RuntimeError):  # a dangling link, or a loop of links
        return False


# Locks between processes of several hosts that share a folder, also on file systems without flock.
#
# Lustre without `-o flock` and some NFS servers refuse flock. `exclusive` then creates a lock file with O_EXCL, which
# is atomic on every network file system. A killed process leaves its lock file behind. Another process removes it if
# it has not changed for longer than any work under such a lock takes.

NO_FLOCK = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
WAIT_S = 30.0
#: A lock file that is unchanged for this time was left by a killed process. Shorter than each wait for a lock.
LEFT_AFTER_S = 8.0
_POLL_S = 0.05


@contextmanager
def exclusive(path: Path, *, within_s: float = WAIT_S) -> Iterator[None]:
    """Hold a lock for work that takes milliseconds. Raises RunFolderError if it is not free within `within_s`.

    Args:
        path: the lock file, which is created and stays. Without flock, `path.held` exists while the lock is held.
    """
    until = time.monotonic() + within_s
    file = retry.retry(lambda: open_lock(path), path)
    try:
        while (locked := _try_flock(file)) is False:
            _wait(path, until, within_s)
        if locked:
            yield
            return
    finally:
        # Closing releases the lock; errors concern written data, and this file has none.
        with suppress(OSError):
            file.close()
    held = path.with_name(f"{path.name}.held")
    mine = _make(held, until, within_s)
    try:
        yield
    finally:
        if retry.retry(lambda: _content(held), held) == mine:  # not of a process that took this one for dead
            retry.remove(held)


def open_lock(path: Path, mode: int = 0o666, *, shared: bool = False) -> IO[str]:
    """Open a lock file, which is created if it is missing.

    Raises OSError if it is a link, no regular file, or, unless `shared`, of another user, who could hold it for ever.
    """

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, mode)
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or not (shared or about.st_uid in (os.geteuid(), 0)):
            os.close(descriptor)
            raise PermissionError(errno.EPERM, "it is not a lock file of this user", name)
        return descriptor

    return open(path, "a+", opener=opener)


@contextmanager
def long_lock(path: Path, *, mode: int = 0o666, waiting: str = "", shared: bool = False) -> Iterator[None]:
    """Hold a lock for work that may take minutes, after waiting for it without a time limit.

    On a file system without flock, a warning is logged and the work is done without a lock.

    Args:
        waiting: logged before a wait.
        shared: whether the file may be another user's.
    """
    with open_lock(path, mode, shared=shared) as file:
        if not lock_now(file):
            if waiting:
                log.info("%s", waiting)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def lock_now(file: IO[str]) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock."""
    found = _try_flock(file)
    if found is None:
        log.warning("%s cannot be locked (no flock): do not start another process that writes there", file.name)
    return found is not False


def _try_flock(file: IO[str]) -> bool | None:
    def try_now() -> bool | None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in NO_FLOCK:
                return None
            raise
        return True

    return retry.retry(try_now, Path(file.name))


def _make(held: Path, until: float, within_s: float) -> str:
    mine = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(8)}"

    def create() -> bool:
        try:
            descriptor = os.open(held, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            # The server may have created the file in an earlier try and answered with an error.
            return _content(held) == mine
        try:
            os.write(descriptor, mine.encode())
        finally:
            os.close(descriptor)
        return True

    seen, since = "", time.monotonic()
    while not retry.retry(create, held):
        found = retry.retry(lambda: _content(held), held)
        if found is None:
            continue
        if found != seen:
            seen, since = found, time.monotonic()
        if time.monotonic() - since >= LEFT_AFTER_S:
            _remove_left(held, found)
            continue
        _wait(held, until, within_s)
    return mine


def _content(held: Path) -> str | None:
    try:
        return held.read_text()
    except FileNotFoundError:
        return None


def _remove_left(held: Path, content: str) -> None:
    """Remove a lock file that was left behind, but not a new one that has replaced it."""
    aside = held.with_name(f".{held.name}.{secrets.token_hex(4)}")
    try:
        os.rename(held, aside)
    except FileNotFoundError:
        return
    if _content(aside) != content:
        with suppress(FileExistsError):
            os.link(aside, held)
    retry.discard(aside)


def _wait(path: Path, until: float, within_s: float) -> None:
    if time.monotonic() >= until:
        raise RunFolderError(
            f"{path} has been locked by another process for more than {within_s:g} s: `fuser -v {path}` shows it on"
            " this host; end it, or remove the file if no process uses it"
        )
    time.sleep(_POLL_S)
