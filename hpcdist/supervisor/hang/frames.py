"""Parsers of the stacks that py-spy and Python's faulthandler print, and the location that a stack is at.

https://github.com/benfred/py-spy, https://docs.python.org/3/library/faulthandler.html. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_SPIED_THREAD = re.compile(r"Thread (?P<id>\S+) \(.*\)(?:: \"(?P<name>.*)\")?")
_SPIED_FRAME = re.compile(r"    (?P<function>.+) \((?P<file>.+):(?P<line>\d+)\)")
_FAULT_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+(?: \[.*\])? \(most recent call first\):")
_FAULT_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.+)')
_FAULT_OTHER = re.compile(r"|  \.\.\.|\.\.\.|  <no Python frame>|  <.*>")
#: Library code: Python's standard library, installed packages, and hpcdist's code around a trainer.
_STDLIB = re.compile(r"^<|/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
_ROOT = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/")
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/")
_OURS = re.compile(r"/hpcdist/(?:rank|checkpoint|tracking)/.*\.py$")
_WORKER = re.compile(r"/hpcdist/rank/worker\.py$")


class Frame(NamedTuple):
    """One call on a stack."""

    function: str
    file: str
    line: int

    def text(self) -> str:
        """Return such as `all_reduce (torch/distributed/distributed_c10d.py:4181)` or `train (counting.py:29)`."""
        library = _ROOT.sub("", self.file)
        name = library if library != self.file else self.file.rpartition("/")[2]
        return f"{self.function} ({name}:{self.line})"


class Location(NamedTuple):
    """Location of a stack: its innermost call, and the line of user code that led there."""

    inner: Frame
    own: Frame

    def text(self) -> str:
        """Return such as `wait (threading.py:629), called by train (counting.py:29)`."""
        return self.inner.text() + (f", called by {self.own.text()}" if self.own != self.inner else "")

    def key(self) -> tuple[str, int, str, int]:
        """Return a key of the location without function names, which py-spy and faulthandler print differently."""
        return (*self.own_key(), self.inner.file, self.inner.line)

    def own_key(self) -> tuple[str, int]:
        """Return a key of the line of user code."""
        return (self.own.file, self.own.line)


def location_of(frames: Sequence[Frame]) -> Location | None:
    """Return the location of a stack (innermost call first), or None if it has no frames.

    User code is the innermost frame outside of libraries. If there is none, because the trainer is an installed
    package, it is the function that hpcdist's worker called, or else the worker's own line.
    """
    if not frames:
        return None
    own = next((frame for frame in frames if not _is_library(frame.file)), None)
    if own is None:
        by_worker = [(inner, outer) for inner, outer in pairwise(frames) if _WORKER.search(outer.file)]
        inner, outer = by_worker[0] if by_worker else (frames[0], frames[0])
        own = outer if _STDLIB.search(inner.file) else inner
    return Location(frames[0], own)


def _is_library(file: str) -> bool:
    return any(pattern.search(file) for pattern in (_STDLIB, _INSTALLED, _OURS))


def parse_py_spy(text: str) -> list[Frame]:
    """Parse `py-spy dump --full-filenames`. Returns the main thread's stack, innermost call first."""
    inside = False
    frames: list[Frame] = []
    for line in text.splitlines():
        if (thread := _SPIED_THREAD.fullmatch(line)) is not None:
            if frames:
                break  # the child processes that follow have main threads, too
            inside = thread["name"] == "MainThread"
        elif inside and (found := _SPIED_FRAME.fullmatch(line)) is not None:
            frames.append(Frame(found["function"], found["file"], int(found["line"])))
    return frames


def parse_faulthandler(log: str) -> tuple[list[Frame], str]:
    """Parse the last dump of faulthandler in a rank's log.

    The main thread is the last one in a dump. Forked children of a rank print to the same log; their stacks contain
    frames of multiprocessing.

    Returns:
        The main thread's stack, and the text of the dump.
    """
    for lines in reversed(_dumps(log)):
        threads: list[list[Frame]] = []
        for line in lines:
            if _FAULT_THREAD.fullmatch(line):
                threads.append([])
            elif threads and (found := _FAULT_FRAME.fullmatch(line)):
                threads[-1].append(Frame(found["function"], found["file"], int(found["line"])))
        if threads and threads[-1] and not any("/multiprocessing/" in frame.file for frame in threads[-1]):
            return threads[-1], "\n".join(lines) + "\n"
    return [], ""


def _dumps(log: str) -> list[list[str]]:
    """Return the dumps of faulthandler in a log, each as lines from the first thread's header to the last frame."""
    found: list[list[str]] = []
    lines: list[str] = []
    ended = True
    for line in log.splitlines():
        if _FAULT_THREAD.fullmatch(line):
            # A blank line separates two threads, but not two dumps.
            if ended or (lines and lines[-1]):
                lines = []
                found.append(lines)
            ended = False
            lines.append(line)
        elif not ended and (_FAULT_FRAME.fullmatch(line) or _FAULT_OTHER.fullmatch(line)):
            lines.append(line)
        else:
            ended = True
    return found
