"""`secrets.json` in a run folder: values that `config.yaml` shows as `***`, readable by the owner only.

Each start writes the file. A detached supervisor, the batch step of a job, a task of a job array and `resume` read it.
It is removed when the run is finished or cancelled; a failed or stopped run keeps it for `resume`.
"""

import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from hpcdist.errors import RunFolderError
from hpcdist.host import retry
from hpcdist.host.json_files import parse_object, stamped, unstamped
from hpcdist.host.ownership import write_private
from hpcdist.run.folder import RunDir


def keep(run: RunDir, values: Mapping[str, str]) -> None:
    """Write the secrets of a run, by variable name; without any, remove the file."""
    if values:
        write_private(run.secrets, json.dumps(stamped({"values": dict(values)})))
    else:
        retry.remove(run.secrets)


def kept(run: RunDir) -> dict[str, str]:
    """Return the secrets by variable name; empty if there is no such file or it belongs to another user."""

    def read() -> tuple[os.stat_result, bytes]:
        # Without O_NONBLOCK, a pipe that nobody writes to would block.
        with open(os.open(run.secrets, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            raw = b""
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                raw = file.read()
            return status, raw

    try:
        status, raw = retry.retry(read, run.secrets)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunFolderError(f"{run.secrets} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise RunFolderError(f"{run.secrets} is not a regular file: remove it")
    if status.st_uid != os.geteuid():
        return {}
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise RunFolderError(
            f"{run.secrets} has mode {mode:04o}, so other users may have read its secrets: replace them, then `chmod"
            " 600` the file"
        )
    values = None
    with suppress(ValueError):
        values = unstamped(parse_object(raw), run.secrets).get("values")
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RunFolderError(f"{run.secrets} is damaged: remove it, and set its variables in the environment")
    return values
