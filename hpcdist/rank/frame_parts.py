"""The parts in which ZeroMQ sends large frames between nodes, so that its sockets can refuse to read larger ones.

ZeroMQ reads a whole frame before it checks who sends it. A client without the key could otherwise send frames of any
size, until the kernel kills the rank for its memory.

References: https://rfc.zeromq.org/spec/37/ (ZMTP), https://rfc.zeromq.org/spec/26/ (CurveZMQ)
"""

from collections import deque
from collections.abc import Sequence

Buffer = bytes | memoryview

#: Size of all parts of a frame but the last one. With larger parts, each client that has not proved that it knows the
#: key may occupy more memory; smaller ones make calls with tensors of 1 MiB more than 10 % slower.
PART_BYTES = 2**18
#: Longest frame that a socket between nodes reads, in bytes. CURVE adds 33 bytes to a part: the name of its command, a
#: nonce, an authentication code and flags.
MAX_FRAME_BYTES = PART_BYTES + 33


def cut(content: Buffer) -> list[Buffer]:
    """Return the parts of a content, of a length that the receiver knows, without a copy; no parts if it is empty."""
    if len(content) == 0:
        return []
    if len(content) <= PART_BYTES:
        return [content]
    view = memoryview(content)
    return [view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)]


def split(frame: Buffer) -> list[Buffer]:
    """Return the parts of a frame. The first one shorter than PART_BYTES, which may be empty, ends the frame."""
    parts = cut(frame)
    if len(frame) % PART_BYTES == 0:
        parts.append(b"")
    return parts


def take_frame(parts: deque[Buffer]) -> bytes:
    """Remove the parts of the first frame, and return the frame. Raises ValueError if its last part is missing."""
    taken = []
    while parts:
        taken.append(parts.popleft())
        if len(taken[-1]) < PART_BYTES:
            return b"".join(taken)
    raise ValueError("the last part of a frame is missing")


def split_all(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return the parts of frames, from which `join_all` returns the frames."""
    parts: list[Buffer] = []
    for frame in frames:
        parts += split(frame)
    return parts


def join_all(parts: Sequence[Buffer]) -> list[bytes]:
    """Return the frames of these parts. Raises ValueError if the last part is missing."""
    remaining = deque(parts)
    frames = []
    while remaining:
        frames.append(take_frame(remaining))
    return frames
