"""Log files and output: their size limit, reading logs of any size in bounded memory, the format of log lines."""

import atexit
import fcntl
import io
import logging
import os
import re
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcdist.errors import terminal_text
from hpcdist.host.files import open_regular

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Size limit of the log file that a process writes as its standard output and error.
#
# Ranks, supervisor and shipper write directly to files in the run folder, without a pipe. Each process checks the size
# of its own log once a second, and at its end. Beyond the limit the middle of the log is removed. The file must be open
# for appending, so that writers continue at its new end; lines that they write during the removal may be lost. Some
# network file systems do not support sparse files.

#: Limit of a log.
MAX_BYTES = 10**9
CHECK_EVERY_S = 1.0
_STDOUT = 1
_STDERR = 2


def limit_log(run: Path) -> bool:
    """Limit the size of standard output if it is a log in the run folder `run`, and return whether it is."""
    if not is_log_of(run, _STDOUT):
        return False
    ending = threading.Event()

    def keep_below() -> None:
        is_last = False
        while not is_last:
            is_last = ending.wait(CHECK_EVERY_S)
            with suppress(OSError):  # the disk is full or not available: the next check tries again
                shorten(_STDOUT, MAX_BYTES)

    thread = threading.Thread(target=keep_below, name="log limit", daemon=True)
    thread.start()

    def end() -> None:
        ending.set()
        thread.join()

    atexit.register(end)
    return True


def is_log_of(run: Path, descriptor: int) -> bool:
    """Return whether a descriptor is a regular file below `run`, open for appending."""
    with suppress(OSError):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        appends = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return bool(appends) and is_file and path.is_relative_to(run.resolve())
    return False


def shorten(descriptor: int, max_bytes: int) -> int:
    """Remove the middle of a file that is open for appending and longer than `max_bytes`; return the number of bytes.

    The first and the last eighth of `max_bytes` stay, with a note in between.
    """
    size = os.fstat(descriptor).st_size
    if size <= max_bytes:
        return 0
    kept = max_bytes // 8  # so that the log grows by six times the copied size between copies
    # A descriptor opened for appending ignores positions, so a second one writes in the middle.
    with open(f"/proc/self/fd/{descriptor}", "r+b", buffering=0) as file:
        begin = size - kept
        note = f"\n[hpcdist: {begin - kept:,} bytes of this log were removed here]\n".encode()
        place = os.pwrite(file.fileno(), note, kept) + kept
        # Up to the current end: the file may have grown since.
        while data := os.pread(file.fileno(), _READ_BYTES, begin):
            place += os.pwrite(file.fileno(), data, place)
            begin += len(data)
        os.ftruncate(file.fileno(), place)
    return begin - place


# Read logs of any size and line length in bounded memory.

#: Bytes per read. A longer line is shown truncated.
PIECE_BYTES = 1 << 16
_TRUNCATED = b" [line of more than %d bytes, truncated]\n" % PIECE_BYTES
#: The part of such a line that is shown.
_SHOWN_BYTES = 2000
#: Limits of `last_lines`: bytes at the end of the log, and characters of one line.
TAIL_BYTES = 8 << 20
MAX_LINE_CHARS = 4096
#: Lines are numbered only if the log before the tail is not longer than this.
COUNT_BYTES = 256 << 20
_READ_BYTES = 1 << 20


class LogTail:
    """New lines of a log file since the last call; of more text than `max_news_bytes`, the last piece only."""

    def __init__(self, path: Path, max_news_bytes: int = 1 << 20) -> None:
        self._path = path
        self._max_news_bytes = max_news_bytes
        self._position = 0
        #: Whether the position is inside a truncated line.
        self._in_line = False

    def news(self) -> Iterator[str]:
        """Yield the new text in pieces; an incomplete line waits for the next call."""
        with open_regular(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._position:  # shortened by `limit_log`
                self._position = size
                self._in_line = True
            if size - self._position > self._max_news_bytes:
                begin = size - PIECE_BYTES
                num_skipped = begin - self._position
                self._position = begin
                self._in_line = True
                yield f"[{num_skipped:,} bytes not shown, see {self._path}]\n"
            while True:
                file.seek(self._position)
                data = file.read(PIECE_BYTES)
                end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
                is_long = not end and len(data) == PIECE_BYTES
                if end:
                    self._position += end
                    text = data[:end]
                    if self._in_line:  # its rest is left out
                        text = b"".join(re.split(rb"(?<=[\n\r])", text, maxsplit=1)[1:])
                elif is_long:
                    self._position += len(data)
                    text = b"" if self._in_line else data[:_SHOWN_BYTES] + _TRUNCATED
                else:
                    return
                self._in_line = is_long
                if text:
                    yield text.decode(errors="replace")


def last_lines(path: Path, max_lines: int) -> list[tuple[int, str]]:
    """Return the last lines of a log with their numbers, from 1; the number is 0 if the log is too long to count."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - TAIL_BYTES)
        number = 0
        if begin <= COUNT_BYTES:
            number = 1 + _count_lines(file, begin)
        file.seek(begin)
        lines: deque[tuple[int, str]] = deque(maxlen=max_lines)
        rest = b""
        while data := file.read(_READ_BYTES):
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                lines.extend(_parts(number, line))
                if number > 0:
                    number += 1
            if len(rest) > _READ_BYTES:
                rest = rest[:MAX_LINE_CHARS]
        if rest:
            lines.extend(_parts(number, rest))
    return list(lines)


def output_size() -> int:
    """Return the size of this process's log in bytes; 0 if its standard error is no file."""
    with suppress(OSError):
        status = os.fstat(_STDERR)
        if stat.S_ISREG(status.st_mode):
            return status.st_size
    return 0


def last_line_of_output(begin: int) -> str:
    """Return the last line of this process's log that is not empty; empty if there is none, or no log.

    Args:
        begin: position in bytes from which lines count.
    """
    with suppress(OSError, ValueError):  # ValueError: the code has closed the stream
        sys.stdout.flush()
        sys.stderr.flush()
    size = output_size()
    if size < begin:  # shortened by `limit_log`
        begin = 0
    begin = max(begin, size - MAX_LINE_CHARS)
    data = b""
    if begin < size:
        # The descriptor itself may be open for writing only.
        with suppress(OSError), open(f"/proc/self/fd/{_STDERR}", "rb") as file:
            data = os.pread(file.fileno(), size - begin, begin)
    for line in reversed(data.decode(errors="replace").splitlines()):
        if line.strip():
            return line.strip()
    return ""


def _count_lines(file: io.BufferedReader, end: int) -> int:
    """Return the number of line ends in the first `end` bytes of a file."""
    number = position = 0
    while position < end:
        data = file.read(min(_READ_BYTES, end - position))
        if not data:  # shortened meanwhile
            break
        number += data.count(b"\n")
        position += len(data)
    return number


def _parts(number: int, line: bytes) -> Iterator[tuple[int, str]]:
    """Yield what a line shows, which a progress bar overwrites by carriage returns, with its number."""
    for part in line.removesuffix(b"\r").split(b"\r"):
        yield number, part[: 4 * MAX_LINE_CHARS].decode(errors="replace")[:MAX_LINE_CHARS]


# The output of commands, and log lines with rank and host: both without control characters.

#: The beginning of a line of hpcdist in the log of a rank.
RANK_LINE = re.compile(r"\d\d:\d\d:\d\d (?P<level>[A-Z]+) rank \d+ on \S+: ")


def say(text: object, *, end: str = "\n", error: bool = False, raw: bool = False) -> None:
    """Print text without control characters, unless it is `raw`."""
    shown = str(text) if raw else terminal_text(str(text))
    print(shown, end=end, file=sys.stderr if error else None, flush=True)


class _DroppingFile(io.FileIO):
    """A file whose writes are dropped when they fail."""

    def write(self, data: "ReadableBuffer", /) -> int:
        with suppress(OSError):
            written = super().write(data)
            if written is not None:
                return written
        return memoryview(data).nbytes


def drop_undelivered_output() -> None:
    """Make standard output and error drop what they cannot deliver, instead of raising an OSError.

    A supervisor must outlive the reader of its output: Ctrl-C ends the `tee` of a pipeline before the ranks have saved,
    and the disk of a log file may be full.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # None, if the process was started without it
            continue
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:  # a file in memory
            continue
        with suppress(OSError):
            stream.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_DroppingFile(descriptor, "w", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)


class _Clean(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return terminal_text(super().format(record))


def configure(*, rank: int | None = None) -> None:
    """Send log records to stderr: in a rank those of hpcdist, elsewhere also warnings of libraries.

    The lines of a rank name the rank and its host. All other loggers of a rank, and Python's warnings, are left to the
    script or trainer.
    """
    origin = ""
    if rank is not None:
        origin = f" rank {rank} on {socket.gethostname()}:"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Clean(f"%(asctime)s %(levelname)s{origin} %(message)s", "%H:%M:%S"))
    ours, root = logging.getLogger("hpcdist"), logging.getLogger()
    ours.setLevel(logging.INFO)
    if rank is not None:
        ours.handlers[:] = [handler]
        ours.propagate = False
    else:
        root.handlers[:] = [handler]
        root.setLevel(logging.WARNING)
        logging.captureWarnings(True)
