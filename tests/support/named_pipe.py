"""A named pipe that processes write lines to and hold open for as long as they live."""

from __future__ import annotations

import os
import select
from pathlib import Path
from types import TracebackType
from typing import Self

WAIT_S = 20.0


class NamedPipe:
    """The reading end. `line` waits for the next line; `is_released` for the end of all writing processes.

    Args:
        reopened: writers may open and close the pipe repeatedly; then `is_released` must not be used.
    """

    def __init__(self, path: Path, *, reopened: bool = False) -> None:
        self.path = path
        os.mkfifo(path)
        # With a writer in this process the pipe never reports its end.
        self._descriptor = os.open(path, os.O_NONBLOCK | (os.O_RDWR if reopened else os.O_RDONLY))
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def line(self, timeout_s: float = WAIT_S) -> str:
        while b"\n" not in self._text:
            assert self._poll(timeout_s) & select.POLLIN, f"no line was written, only {self._text!r}"
            self._text += os.read(self._descriptor, 4096)
        first, _, self._text = self._text.partition(b"\n")
        return first.decode()

    def is_released(self, timeout_s: float) -> bool:
        """Return whether all writers close the pipe within this time; their remaining output is dropped."""
        while (events := self._poll(timeout_s)) & select.POLLIN:
            if not os.read(self._descriptor, 4096):
                break
        return bool(events & select.POLLHUP)

    def _poll(self, timeout_s: float) -> int:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        found = poll.poll(timeout_s * 1000)
        return found[0][1] if found else 0
