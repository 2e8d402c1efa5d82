"""Frames of Python's stacks, and the line of the user's code from which a library was called."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_STDLIB = re.compile(r"^<|/lib(?:64)?/python3[^/]*/(?!(?:site|dist)-packages/)")
#: torch itself, and code that torch.compile has generated.
_TORCH = r"/(?:site|dist)-packages/torch/|/torchinductor(?:_[^/]*)?/"
#: Library code: Python's standard library, installed packages, and hpcdist's code around a trainer.
_LIBRARY = re.compile(
    rf"{_STDLIB.pattern}|{_TORCH}|^.*/(?:site|dist)-packages/|/hpcdist/(?:rank|checkpoint|tracking)/.*\.py$"
)
#: Code of torch and of the standard library, which says less about an allocation or a hang than the code that calls it.
_INNER = re.compile(rf"{_STDLIB.pattern}|{_TORCH}")
_ROOT = re.compile(r"^.*/(?:site-packages|dist-packages|lib(?:64)?/python3[^/]*)/")


class Frame(NamedTuple):
    function: str
    file: str
    line: int

    def text(self) -> str:
        """Return such as `all_reduce (torch/distributed/distributed_c10d.py:4181)` or `train (counting.py:29)`."""
        name = _ROOT.sub("", self.file)
        if name == self.file:
            # Not below a folder of packages: user code.
            name = self.file.rpartition("/")[2]
        return f"{self.function} ({name}:{self.line})"


def location_of(frames: Sequence[Frame]) -> str:
    """Return the location of a stack: the innermost call, and the user code that it was called by.

    For example `wait (threading.py:629), called by train (counting.py:29)`; empty without frames.

    Args:
        frames: innermost first.
    """
    if not frames:
        return ""
    innermost = frames[0]
    user_frame = _user_frame(frames)
    if user_frame == innermost:
        return innermost.text()
    return f"{innermost.text()}, called by {user_frame.text()}"


def caller_of(frames: Sequence[Frame]) -> str:
    """Return the user code of a stack, and what it called last outside of torch and Python's standard library.

    For example `train (own.py:29)`, or `train (own.py:29), in forward (transformers/modeling.py:310)`; empty without
    frames.

    Args:
        frames: innermost first.
    """
    if not frames:
        return ""
    user_frame = _user_frame(frames)
    called = next((frame for frame in frames if not _INNER.search(frame.file)), user_frame)
    if called == user_frame:
        return user_frame.text()
    return f"{user_frame.text()}, in {called.text()}"


def _user_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame outside of libraries.

    If there is none, because the trainer is an installed package, it is the function that hpcdist's worker called, or
    else the worker's own line.
    """
    user_frame = next((frame for frame in frames if not _LIBRARY.search(frame.file)), None)
    if user_frame is None:
        user_frame = _called_by_worker(frames)
    return user_frame


def _called_by_worker(frames: Sequence[Frame]) -> Frame:
    """Return the frame that stands for user code in a stack of library frames only; see `_user_frame`."""
    for inner, outer in pairwise(frames):
        if outer.file.endswith("/hpcdist/rank/worker.py"):
            return outer if _STDLIB.search(inner.file) else inner
    return frames[0]
