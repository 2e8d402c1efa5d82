"""`secrets.json` in a run folder: values that `config.yaml` shows as `***`, readable by the owner only.

Each start writes the file. A detached supervisor, the batch step of a job, a task of a job array and `resume` read it.
It is removed when the run is finished or cancelled; a failed or stopped run keeps it for `resume`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping

from hpcdist.errors import RunFolderError
from hpcdist.files import formats, retry
from hpcdist.files.private_file import write_private
from hpcdist.run.folder import RunDir


def keep(run: RunDir, values: Mapping[str, str]) -> None:
    """Write secrets by variable name, mode 0600; remove the file if there are none."""
    if not values:
        retry.remove(run.secrets)
        return
    write_private(run.secrets, json.dumps(formats.stamped({"values": dict(values)})))


def kept(run: RunDir) -> dict[str, str]:
    """Return the secrets by variable name; empty if there is no such file or it belongs to another user.

    Raises:
        RunFolderError: other users can read the file, or it is damaged.
    """
    try:
        raw = retry.retry(lambda: _read(run), run.secrets)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunFolderError(f"{run.secrets} cannot be read: {error.strerror}") from error
    if raw is None:
        return {}
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    values = formats.unstamped(found, run.secrets).get("values") if isinstance(found, dict) else None
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RunFolderError(f"{run.secrets} is damaged: remove it, and set its variables in the environment")
    return values


def _read(run: RunDir) -> bytes | None:
    with open(os.open(run.secrets, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid():
            return None
        if stat.S_IMODE(about.st_mode) & 0o077:
            raise RunFolderError(
                f"{run.secrets} has mode {stat.S_IMODE(about.st_mode):04o}, so other users may have read its secrets:"
                " replace them, then `chmod 600` the file"
            )
        return file.read()
