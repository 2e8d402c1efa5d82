"""A TensorBoard event file that `torch.utils.tensorboard.SummaryWriter` of tensorboard 2.21 has written.

The package is not installed for the tests. The calls were

    writer.add_scalar("train/loss", 0.5, 1, walltime=1760000000.25)
    writer.add_text("note", "hello", 1, walltime=1760000001)
    writer.add_scalar("train/loss", float("nan"), 2, walltime=1760000002)
    writer.add_scalar("new", 0.25, 7, walltime=1760000003, new_style=True)
    writer.add_scalar("double", 0.1, -1, walltime=1760000004, new_style=True, double_precision=True)
"""

import base64
import struct

from hpcdist.tracking.event_files import _masked_crc

EVENT_FILE = base64.b64decode(
    "SAAAAAAAAAD+kkidCWepDUQTw9pBGg1icmFpbi5FdmVudDoyUi4KLHRlbnNvcmJvYXJkLnN1bW1hcnkud3JpdGVyLmV2ZW50X2ZpbGVfd3JpdG"
    "VyG/YouyAAAAAAAAAAKe2pUAkAABAA3jnaQRABKhMKEQoKdHJhaW4vbG9zcxUAAAA/MExFIj0AAAAAAAAAYEnx7AkAAEAA3jnaQRABKjAKLgoR"
    "bm90ZS90ZXh0X3N1bW1hcnlCDwgHEgQSAggBQgVoZWxsb0oICgYKBHRleHQc8ROKIAAAAAAAAAAp7alQCQAAgADeOdpBEAIqEwoRCgp0cmFpbi"
    "9sb3NzFQAAwH+zAVb+KwAAAAAAAACGG8NLCQAAwADeOdpBEAcqHgocCgNuZXdCCAgBKgQAAIA+SgsKCQoHc2NhbGFycy0c91A7AAAAAAAAABoj"
    "rFwJAAAAAd452kEQ////////////ASolCiMKBmRvdWJsZUIMCAIyCJqZmZmZmbk/SgsKCQoHc2NhbGFyc0QS7pQ="
)


def record_of(event: bytes) -> bytes:
    """Return an event as a TFRecord."""
    length = struct.pack("<Q", len(event))
    checksums = [struct.pack("<I", _masked_crc(data)) for data in (length, event)]
    return length + checksums[0] + event + checksums[1]


def scalar_record(tag: str, step: int, value: float) -> bytes:
    """Return the record of a scalar, as `SummaryWriter.add_scalar` writes it; the step is below 128."""
    scalar = part(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    time = b"\x09" + struct.pack("<d", 1_760_000_000.0 + step)
    return record_of(time + b"\x10" + bytes([step]) + part(5, part(1, scalar)))


def part(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message with less than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content
