"""Exceptions of hpcdist, with one base class.

`exit_code` is the exit code of the process: 1 for a failure that a retry may fix, 2 for a user error, which no retry
fixes (the outcome of the rank is then `rejected`).
"""

import difflib
import errno
import os
import re
import reprlib
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Self

#: Limits of a UserMistake's message: characters per line, and listed problems.
MAX_LINE = 500
MAX_PROBLEMS = 20
#: Limit of the characters of a value in a message.
MAX_SHOWN = 60
#: Limit of an integer in a message: 39 digits, so it needs no shortening by characters.
MAX_SHOWN_BITS = 128
#: Durations below it are shown as `0 s`: the number would need an exponent.
MIN_SHOWN_S = 0.01

_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: Characters that control a terminal or the order of its characters: C0 except tab and newline, DEL, C1, separators,
#: bidi. Lone surrogates are included because they cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class _Short(reprlib.Repr):
    """`repr` with bounded length, depth and cost."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxdict = 3
        self.maxlist = 4
        self.maxstring = MAX_SHOWN
        self.maxother = MAX_SHOWN

    def repr_str(self, value: str, _level: int) -> str:
        if len(value) <= MAX_SHOWN:
            return repr(value)
        # A string in a container, without its beginning: in there, `redaction.hide_values` finds no shortened secret.
        return f"'...' ({len(value):,} characters)"

    def repr_int(self, value: int, _level: int) -> str:
        if value.bit_length() <= MAX_SHOWN_BITS:
            return repr(value)
        # Python refuses to write an integer of more than 4,300 digits.
        return f"an integer of {value.bit_length():,} bits"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return the repr of a value for a message; for a long value its beginning and size."""
    if isinstance(value, str) and len(value) > MAX_SHOWN:
        return f"{shortened(repr(value[:MAX_SHOWN]), MAX_SHOWN)} ({len(value):,} characters)"
    text = repr(value) if isinstance(value, str) else _SHORT.repr(value)
    if len(text) <= 2 * MAX_SHOWN:
        return text
    beginning = shortened(text, 2 * MAX_SHOWN)
    if isinstance(value, list | tuple | dict | set):
        return f"{beginning} ({len(value):,} entries)"
    return beginning


def shortened(text: str, limit: int = 120) -> str:
    """Return `text` with its middle replaced by `...` if it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    mark = "..."
    end = limit // 5
    beginning = limit - end - len(mark)
    return f"{text[:beginning]}{mark}{text[-end:]}"


#: Advice if no process or thread can be started.
NO_PROCESS = "this user or container may start no more processes and threads (`ulimit -u`, its limit of pids)"
#: Advice if a disk is full.
_FULL = {
    errno.ENOSPC: "free space there (`df -h`), or choose another runs_dir (HPCDIST_RUNS_DIR)",
    errno.EDQUOT: "free space there (`quota`), or choose another runs_dir (HPCDIST_RUNS_DIR)",
}


def path_and_fix(error: OSError) -> tuple[str, str]:
    """Return the path in an error of the system, and advice for the user; each is empty if unknown."""
    fix = _FULL.get(error.errno or 0, "")
    path = error.filename
    if fix and error.filename2 is not None:
        path = error.filename2  # a copy reads the first file and fills the disk of the second one
    if path is not None:
        return str(path), fix
    # A failed fork has this text; a write that would block has the same errno with another text.
    if error.strerror == os.strerror(errno.EAGAIN):
        return "", NO_PROCESS
    return "", ""


def error_text(error: Exception) -> str:
    """Return the error that ended a run as a sentence, with advice for the user."""
    if isinstance(error, HpcdistError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        path, fix = path_and_fix(error)
        return ": ".join(filter(None, [path, error.strerror, fix]))
    return f"the supervisor failed with {type(error).__name__}: {error}"


def suggestion(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question for the known name that is nearest to a misspelt one; `otherwise` if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    if not nearest:
        return otherwise
    return f"did you mean {nearest[0]!r}?"


def few(names: Sequence[str], most: int = 5) -> str:
    """Return names separated by commas; after `most`, only the number of further ones."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def plural(number: int, noun: str) -> str:
    """Return `1 step` or `1,200 steps`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


_MIB = 2**20
_GIB = 2**30


def memory_size(num_bytes: int) -> str:
    """Return `3.5 GiB` or `12 MiB`."""
    if num_bytes >= _GIB:
        return f"{num_bytes / _GIB:.1f} GiB"
    return f"{num_bytes / _MIB:.0f} MiB"


#: Seconds and name of a unit of time, and of the next smaller one.
_UNITS = (
    (24 * 3600, "d", 3600, "h"),
    (3600, "h", 60, "min"),
    (60, "min", 1, "s"),
)


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: `4.2 s`, `12 min 5 s`, `3 h 20 min`, `2 d 4 h`."""
    whole_s = round(seconds)
    for unit_s, unit, part_s, part in _UNITS:
        if whole_s >= unit_s:
            text = f"{whole_s // unit_s} {unit}"
            num_parts = whole_s % unit_s // part_s
            if num_parts:
                text += f" {num_parts} {part}"
            return text
    if seconds < MIN_SHOWN_S:
        return "0 s"
    return f"{seconds:.2g} s"


def local_time(seconds: float) -> str:
    """Return a time, in seconds since the epoch, by this machine's clock: `2026-11-22 12:30`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def terminal_text(text: str) -> str:
    """Return text without colours, with carriage returns as newlines, and other control characters as escapes.

    Logs, names and messages come from programs, other users and servers; they must not control the terminal.
    """
    text = _COLOUR.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(lambda match: ascii(match[0]).strip("'"), text)


class HpcdistError(Exception):
    """Base of all errors of this package. Commands show its message without a traceback."""

    exit_code = 1


class UserMistake(HpcdistError):
    """Error that only the user can fix; never retried.

    The lines of its message have at most MAX_LINE characters and no control characters.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__("\n".join(shortened(line, MAX_LINE) for line in terminal_text(message).split("\n")))


class ConfigError(UserMistake):
    """One or more errors in a config, one line each in `problems`. The message lists at most MAX_PROBLEMS."""

    def __init__(self, *problems: str, source: str = "") -> None:
        self.problems = problems
        self.source = source
        head = f"{shortened(source, MAX_LINE // 2)}: " if source else ""
        listed = [terminal_text(problem).replace("\n", " ") for problem in self.problems[:MAX_PROBLEMS]]
        if len(self.problems) == 1:
            super().__init__(head + listed[0])
            return
        if len(self.problems) > MAX_PROBLEMS:
            listed.append(f"and {len(self.problems) - MAX_PROBLEMS:,} more")
        lines = [f"{head}{len(self.problems):,} mistakes"]
        lines += [f"  - {line}" for line in listed]
        super().__init__("\n".join(lines))


class TopologyError(UserMistake):
    """The environment variables that define the rank are missing or contradict each other."""


class TrainerError(UserMistake):
    """The trainer or script that a config names cannot be imported or run."""


class DataError(UserMistake):
    """A dataset is missing, unreadable, or has other content than expected."""


class RunFolderError(UserMistake):
    """A run does not exist, has an ambiguous name, or its folder is damaged, not writable or held by a process."""


class LeaseLostError(HpcdistError):
    """Another process has taken over a run that this process held, so this process must not write to it."""


class CheckpointError(HpcdistError):
    """A checkpoint could not be written or read.

    `may_pass`: the file system was unavailable, so the next save may succeed.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class ExportError(UserMistake):
    """A checkpoint cannot be written in the requested format, or there is no such checkpoint."""


class RendezvousError(HpcdistError):
    """The ranks did not connect in time, or another program answered at the master's address."""


class PreflightError(HpcdistError):
    """The preflight check rejected nodes; a restart on the same nodes would fail again."""


class PeerLost(HpcdistError):
    """Another rank does not respond. The cause is in that rank's log."""


class RemoteError(HpcdistError):
    """A function failed on another rank. The message names role, rank and host, and ends with the remote traceback."""

    @classmethod
    def of(cls, error: BaseException, where: str) -> Self:
        """Return the error of the rank `where`, with its traceback as text; an error of a third rank is kept."""
        if isinstance(error, cls):
            return error
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(f"{where}: {type(error).__name__}: {error}\n{trace}")


class CommError(HpcdistError):
    """A communication operation returned a wrong result; names rank, node, index, expected and actual value."""


class TrackingError(HpcdistError):
    """The tracking server refused a request or did not answer. Never raised in a training process.

    `code`: the error code in MLflow's answer, such as `PERMISSION_DENIED`; empty without one.
    """

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class TrackingUriError(TrackingError):
    """The tracking URI lacks its password, which only the user can add."""

    exit_code = 2


class DevClusterError(UserMistake):
    """The dev cluster cannot be created, changed or reached on this machine."""


class ImageError(UserMistake):
    """An image is missing, incompatible with this machine, or lacks required software."""
