"""The owner and the permissions of files and folders.

Files with passwords or tokens must be readable by their owner alone.

Several users may share a `runs_dir`. A run's config selects a server, its `slurm.json` a job, and its code is executed.
Therefore commands act only on run folders of the effective user, who may be root, and only if no other user can write
to them or replace them: the folders above are checked, too, as sshd does with StrictModes.
"""

import grp
import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host.files import write_atomic


def require_private(path: Path) -> None:
    """Raise UserMistake when group or others may read or write a file, or when it belongs to another user."""
    try:
        about = path.stat()
    except OSError as error:
        raise UserMistake(f"{path} cannot be read: {error.strerror}") from error
    if about.st_uid not in (os.geteuid(), 0):
        raise UserMistake(f"{path} belongs to user {about.st_uid}: use a file of your own with mode 0600")
    mode = stat.S_IMODE(about.st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        action = "read" if mode & (stat.S_IRGRP | stat.S_IROTH) else "change"
        raise UserMistake(
            f"{path} has mode {mode:04o}, so that other users can {action} the credentials in it:"
            f" `chmod 600 {shlex.quote(str(path))}`"
        )


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically and durably by one of mode 0600."""
    write_atomic(path, text, durable=True, mode=0o600)


_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
#: In a user namespace, users without an id there have this one (`nobody`).
_OVERFLOW_ID = 65534
#: Groups of this site with members who may change the folders above a user's runs: names, separated by commas.
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
    trusted_groups = os.environ.get(TRUSTED_GROUPS, "").split(",")
    known_ids = {os.geteuid(), 0}
    if _is_in_user_namespace():
        known_ids.add(_OVERFLOW_ID)  # perhaps root has no id there, either
    is_open = False  # whether anyone may write to the folder above
    for place, about in _way(path.absolute()):
        group, mode, name = _group(about.st_gid), about.st_mode, shlex.quote(str(place))
        is_trusted = bool(group) and group in trusted_groups
        trust = f"; if you trust the group {group}, set {TRUSTED_GROUPS}={group}" if group else ""
        # In an open folder anyone may have made this one, which then has the group by the setgid bit.
        if about.st_uid not in known_ids and (is_open or not is_trusted):
            owners = f"{user_of(about.st_uid)}, not to {user_of(os.geteuid())}"
            raise RunFolderError(f"{place} belongs to {owners}: {_FIX}{trust}")
        is_open = bool(mode & stat.S_IWOTH)
        is_writable = is_open if is_trusted else is_shared(about)
        if stat.S_ISDIR(mode) and not mode & stat.S_ISVTX and is_writable:
            raise RunFolderError(
                f"others may write to {place} (mode {stat.S_IMODE(mode):04o}) and replace code of your runs:"
                f" `chmod go-w {name}`, or `chmod +t {name}` to keep it shared{trust}"
            )


def _is_in_user_namespace() -> bool:
    """Return whether this process runs in a user namespace: outside of one, every user id is mapped to itself."""
    return Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]


def is_shared(about: os.stat_result) -> bool:
    """Return whether other users may write to a folder. A group with the name of this user has no other members."""
    group = _group(about.st_gid)
    is_private_group = group == user_of(os.geteuid())
    if not group:  # as in a container
        is_private_group = about.st_gid == os.geteuid()
    writable = stat.S_IWOTH if is_private_group else _WRITABLE
    return bool(about.st_mode & writable)


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
    """Yield the folders and symbolic links by which the kernel finds a path, as far as they exist.

    Like the kernel, it follows at most 40 links in a chain.
    """
    for place in [*reversed(path.parents), path]:
        try:
            about = place.lstat()
        except OSError:  # opening it reports the reason
            return
        yield place, about
        if stat.S_ISLNK(about.st_mode) and num_links:
            yield from _way(place.parent / os.readlink(place), num_links - 1)


def _group(gid: int) -> str:
    """Return the name of a group; empty if its id has no name."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return ""


def _owner(folder: Path) -> str:
    """Return the other user who owns a folder or the link to it; this user if it owns both."""
    try:
        uids = (os.lstat(folder).st_uid, os.stat(folder).st_uid)
    except OSError:
        return "an unknown user"
    return user_of(next((uid for uid in uids if uid != os.geteuid()), uids[0]))


def user_of(uid: int) -> str:
    """Return the name of a user, or `user 1234` if the id has no name, as in some containers."""
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
