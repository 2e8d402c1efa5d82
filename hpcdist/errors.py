"""Every error that hpcdist raises on purpose, in one tree.

`exit_code` is what the process ends with: 1 for a failure that a retry may cure, 2 for the user's mistake,
which no retry cures (the rank's outcome is then `rejected`).
"""

from __future__ import annotations

import base64
import re
import reprlib
import traceback
from collections.abc import Sequence

#: Bounds of a UserMistake's message: characters in a line, and problems that are listed.
MAX_LINE = 500
MAX_PROBLEMS = 20
#: How much of a value a message shows.
MAX_SHOWN = 60


class _Short(reprlib.Repr):
    """`repr` whose length, depth and cost are bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxstring, self.maxother = 3, 3, 4, MAX_SHOWN, MAX_SHOWN

    def repr_str(self, value: str, _level: int) -> str:
        # Nothing of a long one: `redaction.hide_values` would not find a secret of which a part is shown.
        return repr(value) if len(value) <= MAX_SHOWN else f"'...' ({len(value):,} characters)"

    def repr_int(self, value: int, _level: int) -> str:
        # Python refuses to write an integer of more than 4,300 digits.
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length():,} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return the repr of a value for a message; of a long one the beginning, and its size."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{shortened(repr(value[:MAX_SHOWN]), MAX_SHOWN)} ({len(value):,} characters)"
    text = repr(value) if isinstance(value, str) else _SHORT.repr(value)
    if len(text) <= 2 * MAX_SHOWN:
        return text
    size = f" ({len(value):,} entries)" if isinstance(value, list | tuple | dict | set) else ""
    return shortened(text, 2 * MAX_SHOWN) + size


def shortened(text: str, limit: int = 120) -> str:
    """Return `text` with its middle left out where it is longer than `limit` characters."""
    end = limit // 5
    return text if len(text) <= limit else f"{text[: limit - end - 3]}...{text[-end:]}"


def _printable(text: str) -> str:
    """Lines without control characters and lone surrogates, each at most MAX_LINE characters long."""
    lines = text.encode("utf-8", "backslashreplace").decode().split("\n")
    # Escapes, since names and values of a file must not steer the terminal.
    clean = (
        "".join(char if char.isprintable() or char == "\t" else ascii(char)[1:-1] for char in line) for line in lines
    )
    return "\n".join(shortened(line, MAX_LINE) for line in clean)


class HpcdistError(Exception):
    """Base of all errors of this package. Its message is shown to the user without a traceback."""

    exit_code = 1


class UserMistake(HpcdistError):
    """Something that only the user can put right; never retried.

    The lines of its message are at most MAX_LINE characters long and free of control characters.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(_printable(message))


class ConfigError(UserMistake):
    """One or more mistakes in a config; `problems` holds one line for each. The message lists MAX_PROBLEMS of them."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        head = f"{shortened(source, MAX_LINE // 2)}: " if source else ""
        listed = [" ".join(problem.split("\n")) for problem in self.problems[:MAX_PROBLEMS]]
        if len(self.problems) == 1:
            super().__init__(head + listed[0])
            return
        if len(self.problems) > MAX_PROBLEMS:
            listed.append(f"and {len(self.problems) - MAX_PROBLEMS:,} more")
        super().__init__("\n".join([f"{head}{len(self.problems):,} mistakes", *(f"  - {line}" for line in listed)]))


class TopologyError(UserMistake):
    """The environment's variables do not say, or contradict each other about, which rank this is."""


class TrainerError(UserMistake):
    """The trainer or script that a config names cannot be imported or run."""


class DataError(UserMistake):
    """A dataset is missing, unreadable, or not what its name says."""


class RunFolderError(UserMistake):
    """No such run, an ambiguous prefix, a folder that cannot be written, or one that another process holds."""


class LeaseLostError(HpcdistError):
    """Another process has taken over a run that this one held: whatever it does from here on is not to be written."""


class CheckpointError(HpcdistError):
    """A checkpoint could not be written, or none that is asked for can be read.

    `may_pass`: its file system was away, so that the next save may succeed.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class RendezvousError(HpcdistError):
    """The ranks did not find each other in time, or a stranger answered in the master's place."""


class PreflightError(HpcdistError):
    """Nodes are not fit for a run; another start in the same place would find the same."""


class PeerLost(HpcdistError):
    """Another rank does not answer any more. The cause stands in that rank's log."""


class RemoteError(HpcdistError):
    """A function failed on another rank. Its message names role, rank and host, and ends with the remote traceback.

    RPC carries an exception as one string, wrapped in its own report; in there the message travels encoded, so that
    it can be found again and is read once.
    """

    _ENCODED = re.compile(r"<hpcdist:([A-Za-z0-9+/=]+)>")
    #: What is raised from C++ is a RuntimeError with the message in it.
    _RAISED = re.compile(r"RemoteError: (.*?)(?:\n\nAt:\n|\Z)", re.DOTALL)

    def __init__(self, text: str) -> None:
        found = self._ENCODED.search(text)
        encoded = found[0] if found else f"<hpcdist:{base64.b64encode(text.encode()).decode()}>"
        self.message = base64.b64decode(found[1]).decode() if found else text
        super().__init__(encoded)

    def __str__(self) -> str:
        return self.message

    @classmethod
    def received(cls, error: BaseException) -> RemoteError | None:
        """The remote failure that a call's exception tells of, or None where it is another one."""
        found = cls._RAISED.search(str(error))
        return cls(found[1]) if found else None

    @classmethod
    def of(cls, error: BaseException, where: str) -> RemoteError:
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(f"{where}: {type(error).__name__}: {error}\n{trace}")


class CommError(HpcdistError):
    """A communication operation gave a wrong result; names rank, node, index, what was expected and what came."""


class TrackingError(HpcdistError):
    """The tracking server refused or did not answer. Never raised in a training process."""


class DevClusterError(UserMistake):
    """The dev cluster cannot be made, changed or reached here; says what it needs."""


class ImageError(UserMistake):
    """An image is missing, made for another machine, or not what it must be."""
