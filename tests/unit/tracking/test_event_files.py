"""Scalars in TensorBoard's event files."""

import math
from pathlib import Path

import pytest
from event_records import EVENT_FILE, part, record_of

from hpcdist.tracking import event_files
from hpcdist.tracking.event_files import read_scalars


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "events.out.tfevents.1760000000.n1"
    path.write_bytes(EVENT_FILE)
    return path


def test_scalars_of_both_forms_are_read_and_texts_left_out(file: Path) -> None:
    scalars, offset = read_scalars(file, 0)
    assert offset == len(EVENT_FILE)
    assert [(one.tag, one.step, one.value) for one in scalars if not math.isnan(one.value)] == [
        ("train/loss", 1, 0.5),
        ("new", 7, 0.25),
        ("double", -1, 0.1),
    ]
    assert [(one.step, one.time_ms) for one in scalars][:2] == [(1, 1_760_000_000_250), (2, 1_760_000_002_000)]
    assert read_scalars(file, offset) == ([], offset)


def test_each_scalar_is_read_once_while_the_file_grows(file: Path) -> None:
    scalars = []
    offset = 0
    for size in range(len(EVENT_FILE) + 1):
        file.write_bytes(EVENT_FILE[:size])
        new, offset = read_scalars(file, offset)
        scalars += new
    assert [one.tag for one in scalars] == ["train/loss", "train/loss", "new", "double"]


@pytest.mark.parametrize(
    ("place", "message"), [(3, "no record begins at byte 0"), (20, "the record at byte 0 has another checksum")]
)
def test_damaged_event_file_is_refused(file: Path, place: int, message: str) -> None:
    file.write_bytes(EVENT_FILE[:place] + b"\xff" + EVENT_FILE[place + 1 :])
    with pytest.raises(ValueError, match=message):
        read_scalars(file, 0)


def test_records_of_images_are_skipped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MAX_RECORD_BYTES", 50)
    assert [one.tag for one in read_scalars(file, 0)[0]] == ["train/loss", "train/loss", "new"]


def event_with(value: bytes) -> bytes:
    """Return an event with one value in its summary: the tag `t`, and these further fields."""
    return part(5, part(1, part(1, b"t") + value))


SIMPLE_VALUE = b"\x15\x00\x00\x80\x3e"
AT_INFINITY = b"\x09\x00\x00\x00\x00\x00\x00\xf0\x7f"


@pytest.mark.parametrize(
    "event",
    [
        b"\x2a\x7fabc",
        b"\x10\xff",
        AT_INFINITY + event_with(SIMPLE_VALUE),
        event_with(part(8, b"\x08\x01" + part(4, b"abc"))),
    ],
    ids=["field longer than its message", "integer without an end", "infinite time", "three bytes of a float"],
)
def test_record_without_an_event_is_refused(file: Path, event: bytes) -> None:
    file.write_bytes(record_of(event))
    with pytest.raises(ValueError, match="the record at byte 0 is no event"):
        read_scalars(file, 0)


def test_value_with_another_wire_type_is_left_out(file: Path) -> None:
    file.write_bytes(record_of(event_with(b"\x10\x05")) + EVENT_FILE)
    assert [one.tag for one in read_scalars(file, 0)[0]][:1] == ["train/loss"]


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        (b"\x08\x01\x15\x00\x00\x80\x3e", []),  # a field that is not read
        (b"\x08\x01\x2a\x04\x00\x00\x80\x3e", [0.25]),  # listed floats
        (b"\x08\x03\x3a\x0a\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", [-2]),  # packed integers
        (b"\x08\x03\x38\x05", [5]),  # one integer
        (b"\x08\x09\x22\x08\x07\x00\x00\x00\x00\x00\x00\x00", [7]),  # 64-bit content
        (b"\x08\x03\x38\x05\x38\x06", []),  # two integers: no scalar
        (b"\x08\x07\x42\x01a", []),  # a text
    ],
)
def test_tensors_with_one_number_are_scalars(file: Path, tensor: bytes, values: list[float]) -> None:
    file.write_bytes(record_of(event_with(part(8, tensor))))
    assert [one.value for one in read_scalars(file, 0)[0]] == values
