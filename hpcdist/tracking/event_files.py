"""The scalars in TensorBoard's event files.

The package `tensorboard` is not used: the supervisor's Python need not have it, and its import takes seconds. A file is
a sequence of TFRecords, each with an `Event` in protobuf's format:

    length (8 bytes)  masked CRC of the length (4)  event  masked CRC of the event (4)

https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/util/event.proto
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/framework/summary.proto
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/framework/tensor.proto
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from hpcdist.host.files import open_regular

_HEADER = struct.Struct("<QI")
_CRC = struct.Struct("<I")
#: Larger records hold images, audio or histograms, and are skipped.
MAX_RECORD_BYTES = 64 * 1024
#: Limit of the scalars of one call.
MAX_SCALARS = 100_000

_ONE = FieldDescriptorProto.LABEL_OPTIONAL
_MANY = FieldDescriptorProto.LABEL_REPEATED
#: The messages with the fields of scalars: name, number, type, label. protobuf skips other fields. A tag has the type
#: bytes, because a script may write one that is not UTF-8.
_MESSAGES = {
    "Event": (
        ("wall_time", 1, FieldDescriptorProto.TYPE_DOUBLE, _ONE),
        ("step", 2, FieldDescriptorProto.TYPE_INT64, _ONE),
        ("summary", 5, "Summary", _ONE),
    ),
    "Summary": (("value", 1, "Value", _MANY),),
    "Value": (
        ("tag", 1, FieldDescriptorProto.TYPE_BYTES, _ONE),
        ("simple_value", 2, FieldDescriptorProto.TYPE_FLOAT, _ONE),
        ("tensor", 8, "Tensor", _ONE),
    ),
    "Tensor": (
        ("dtype", 1, FieldDescriptorProto.TYPE_INT32, _ONE),
        ("tensor_content", 4, FieldDescriptorProto.TYPE_BYTES, _ONE),
        ("float_val", 5, FieldDescriptorProto.TYPE_FLOAT, _MANY),
        ("double_val", 6, FieldDescriptorProto.TYPE_DOUBLE, _MANY),
        ("int_val", 7, FieldDescriptorProto.TYPE_INT32, _MANY),
        ("int64_val", 10, FieldDescriptorProto.TYPE_INT64, _MANY),
    ),
}
#: By the data type of a tensor: the format of one element in `tensor_content`, and the field of listed elements.
_ELEMENTS = {1: ("<f", "float_val"), 2: ("<d", "double_val"), 3: ("<i", "int_val"), 9: ("<q", "int64_val")}


def _event_class() -> Any:
    """Return the class of the message `Event`."""
    file = FileDescriptorProto(name="hpcdist_event.proto", package="hpcdist")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, label in fields:
            field = message.field.add(name=field_name, number=number, label=label)
            if isinstance(kind, str):
                field.type = FieldDescriptorProto.TYPE_MESSAGE
                field.type_name = f".hpcdist.{kind}"
            else:
                field.type = kind
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("hpcdist.Event"))


_Event = _event_class()


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
                try:
                    scalars += _scalars_of(record)
                except (DecodeError, OverflowError, struct.error) as error:
                    raise ValueError(f"the record at byte {offset} is no event ({error})") from error
            offset = end
    return scalars, offset


def _scalars_of(record: bytes) -> Iterator[Scalar]:
    """Yield the scalars of an event. Raises DecodeError, OverflowError and struct.error for other content."""
    event = _Event.FromString(record)
    for value in event.summary.value:
        numbers = [value.simple_value] if value.HasField("simple_value") else _elements(value.tensor)
        if len(numbers) == 1:
            yield Scalar(int(1000 * event.wall_time), event.step, value.tag.decode(errors="replace"), numbers[0])


def _elements(tensor: Any) -> list[float]:
    """Return the elements of a tensor of numbers; empty for other tensors."""
    if tensor.dtype not in _ELEMENTS:
        return []
    element, listed = _ELEMENTS[tensor.dtype]
    content = [number for (number,) in struct.iter_unpack(element, tensor.tensor_content)]
    return [*content, *getattr(tensor, listed)]


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
