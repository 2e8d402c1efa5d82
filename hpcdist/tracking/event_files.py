"""The scalars in TensorBoard's event files.

The package `tensorboard` is not used: the supervisor's Python need not have it, and its import takes seconds. A file is
a sequence of TFRecords, each with an `Event` in protobuf's format:

    length (8 bytes)  masked CRC of the length (4)  event  masked CRC of the event (4)

    Event    1 wall_time (double)  2 step (varint)  5 summary
    Summary  1 value (repeated)
    Value    1 tag  2 simple_value (float)  8 tensor

https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/framework/summary.proto
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/framework/tensor.proto
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hpcdist.host.files import open_regular

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
#: Larger records hold images, audio or histograms, and are skipped.
MAX_RECORD_BYTES = 64 * 1024
#: Limit of the scalars of one call.
MAX_SCALARS = 100_000
#: By the data type of a tensor: the format of one element in `tensor_content`, and the field of listed values.
_TENSORS = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10)}
_TENSOR_CONTENT = 4
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5
_WORD_BITS = 64


class Scalar(NamedTuple):
    """A value that a script has logged."""

    time_ms: int
    step: int
    tag: str
    value: float


def read_scalars(path: Path, offset: int) -> tuple[list[Scalar], int]:
    """Return the scalars of the complete records from `offset` on, and the offset at which the next call continues.

    Raises OSError, and ValueError if the file is damaged.
    """
    scalars: list[Scalar] = []
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while len(scalars) < MAX_SCALARS:
            file.seek(offset)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                break
            length, crc = _HEADER.unpack(header)
            if _masked_crc(header[:8]) != crc:
                raise ValueError(f"no record begins at byte {offset}")
            end = offset + _HEADER.size + length + _CRC.size
            if end > size:  # it is being written
                break
            if length <= MAX_RECORD_BYTES:
                record = file.read(length)
                if _CRC.pack(_masked_crc(record)) != file.read(_CRC.size):
                    raise ValueError(f"the record at byte {offset} has another checksum")
                scalars += _scalars_of(record)
            offset = end
    return scalars, offset


def _scalars_of(event: bytes) -> Iterator[Scalar]:
    """Yield the scalars of an event."""
    time_s = 0.0
    step = 0
    summaries = []
    for number, content in _fields(event):
        match number, content:
            case 1, bytes():
                (time_s,) = struct.unpack("<d", content)
            case 2, int():
                step = content
            case 5, bytes():
                summaries.append(content)
    if step >= 2 ** (_WORD_BITS - 1):  # two's complement
        step -= 2**_WORD_BITS
    for summary in summaries:
        for number, content in _fields(summary):
            if number == 1 and isinstance(content, bytes):
                for tag, value in _value(content):
                    yield Scalar(int(1000 * time_s), step, tag, value)


def _value(content: bytes) -> Iterator[tuple[str, float]]:
    """Yield tag and value of a summary's value if it is a scalar."""
    tag = ""
    values: list[float] = []
    for number, part in _fields(content):
        match number, part:
            case 1, bytes():
                tag = part.decode(errors="replace")
            case 2, bytes():
                values += struct.unpack("<f", part)
            case 8, bytes():
                values += _elements(part)
    if len(values) == 1:
        yield tag, values[0]


def _elements(tensor: bytes) -> list[float]:
    """Return the elements of a tensor of numbers; empty for other tensors."""
    parts = list(_fields(tensor))
    kinds = [content for number, content in parts if number == 1]
    kind = kinds[0] if kinds else 0
    if not isinstance(kind, int) or kind not in _TENSORS:
        return []
    element, listed = _TENSORS[kind]
    values: list[float] = []
    for number, content in parts:
        if number == listed and isinstance(content, int):
            values.append(content)
        elif number in (listed, _TENSOR_CONTENT) and isinstance(content, bytes):
            is_packed_integer = number == listed and element in ("<i", "<q")
            if is_packed_integer:
                values += _varints(content)
            else:
                values += [value for (value,) in struct.iter_unpack(element, content)]
    return values


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a protobuf message: an int of a varint, else the bytes.

    Raises ValueError if the message is damaged.
    """
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            content, place = _varint(message, place)
            yield number, content
            continue
        if kind == _BYTES:
            length, place = _varint(message, place)
        elif kind == _EIGHT_BYTES:
            length = 8
        elif kind == _FOUR_BYTES:
            length = 4
        else:
            raise ValueError(f"a field of the unknown kind {kind}")
        if place + length > len(message):
            raise ValueError("a field is longer than its message")
        yield number, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Return the integer at a place, and the place behind it: seven bits a byte, the lowest ones first."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(message):
            break
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004  # the highest bit says whether another byte follows
            return value, place
    raise ValueError("an integer without an end")


def _varints(content: bytes) -> list[float]:
    values: list[float] = []
    place = 0
    while place < len(content):
        value, place = _varint(content, place)
        if value >= 2 ** (_WORD_BITS - 1):
            value -= 2**_WORD_BITS
        values.append(value)
    return values


def _crc_table() -> list[int]:
    """Return the table of CRC-32C (Castagnoli) for single bytes."""
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    """Return the checksum of TFRecords: CRC-32C, rotated by 15 bits, plus a constant."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
