"""Read logs of any size and line length in bounded memory."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpcdist.files.regular_file import open_regular

#: Bytes per read. A longer line is shown truncated.
PIECE_BYTES = 1 << 16
#: Shown part of a line that is longer than a piece.
SHOWN_BYTES = 2000
#: Of more new text than this, only the last piece is shown.
MAX_NEWS_BYTES = 1 << 20
#: Limits of `last_lines`: bytes at the end of the log, and characters of one line.
TAIL_BYTES = 8 << 20
MAX_LINE_CHARS = 4096
#: Lines are numbered only if the log before the tail is not longer than this.
COUNT_BYTES = 256 << 20
_READ_BYTES = 1 << 20


class LogTail:
    """New lines of a log file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        #: Whether the position is inside a truncated line.
        self._in_line = False

    def news(self) -> Iterator[str]:
        """Yield the new text in pieces; an incomplete line waits for the next call."""
        with open_regular(self._path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._position:  # shortened by `log_limit`
                self._position, self._in_line = size, True
            if size - self._position > MAX_NEWS_BYTES:
                self._position, before, self._in_line = size - PIECE_BYTES, self._position, True
                yield f"[{self._position - before:,} bytes not shown, see {self._path}]\n"
            file.seek(self._position)
            while data := file.read(PIECE_BYTES):
                text, used = self._take(data)
                if not used:
                    return
                self._position += used
                if text:
                    yield text.decode(errors="replace")
                file.seek(self._position)

    def _take(self, data: bytes) -> tuple[bytes, int]:
        """Return the text of a piece to show, and the number of consumed bytes."""
        begin = 0
        if self._in_line:
            ends = [end for mark in (b"\n", b"\r") if (end := data.find(mark)) >= 0]
            if not ends:
                return b"", len(data)
            self._in_line, begin = False, min(ends) + 1
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end == 0 and len(data) == PIECE_BYTES:
            self._in_line = True
            return data[:SHOWN_BYTES] + b" [line of more than %d bytes, truncated]\n" % PIECE_BYTES, len(data)
        return data[begin:end], end


def last_lines(path: Path, max_lines: int) -> list[tuple[int, str]]:
    """Return the last lines of a log with their numbers, from 1; the number is 0 if the log is too long to count.

    Carriage returns separate lines, too, which share a number. Long lines are truncated.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - TAIL_BYTES)
        number = (_count_lines(file, begin) + 1) if begin <= COUNT_BYTES else 0
        file.seek(begin)
        lines: deque[tuple[int, str]] = deque(maxlen=max_lines)
        data = b""
        while more := file.read(_READ_BYTES):
            *whole, data = (data + more).split(b"\n")
            for line in whole:
                lines.extend(_parts(number, line))
                number += number > 0
            data = data[:MAX_LINE_CHARS] if len(data) > _READ_BYTES else data
        lines.extend(_parts(number, data) if data else ())
    return list(lines)


def _count_lines(file: BinaryIO, end: int) -> int:
    count, position = 0, 0
    while position < end and (data := file.read(min(_READ_BYTES, end - position))):
        count += data.count(b"\n")
        position += len(data)
    return count


def _parts(number: int, line: bytes) -> Iterator[tuple[int, str]]:
    for part in line.removesuffix(b"\r").split(b"\r"):
        yield number, part[: 4 * MAX_LINE_CHARS].decode(errors="replace")[:MAX_LINE_CHARS]
