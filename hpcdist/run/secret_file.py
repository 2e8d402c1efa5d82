"""`secrets.json` in a run folder: the values that its `config.yaml` shows as `***`, for the owner alone.

Every start writes it, and whatever goes on with the run reads it: a detached supervisor, the batch step of a job, a
task of a job array, `resume`. It is removed when the run is finished or cancelled. A run that has failed or was stopped
keeps it, so that `resume` works as it stands, as submitit's pickles do.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping

from hpcdist.errors import RunFolderError
from hpcdist.files import formats, retry
from hpcdist.files.atomic import write_atomic
from hpcdist.run.folder import RunDir


def keep(run: RunDir, values: Mapping[str, str]) -> None:
    """Write the values by the names of their variables, mode 0600; without any the file is removed."""
    if not values:
        run.secrets.unlink(missing_ok=True)
        return
    # The mode of the temporary file, too: the values are never readable by others, whatever the umask is.
    write_atomic(run.secrets, json.dumps(formats.stamped({"values": dict(values)})), durable=True, mode=0o600)


def kept(run: RunDir) -> dict[str, str]:
    """Return what `keep` has written; nothing where there is no such file, or where it is another user's.

    Raises RunFolderError when others may read the file, or when it does not hold names and values.
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
                " replace these, then `chmod 600` it"
            )
        return file.read()
