"""Parsing of untrusted JSON: every failure is a ValueError."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.host import files
from hpcdist.host.files import parse_json, read_json, read_json_lines, read_json_value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("9" * 5000, "a number of 5000 digits"),
        ("[-" + "9" * 400 + "]", "a number of 401 digits"),
        (b"\xff\xfe", "utf-8"),
        ("", "Expecting value"),
        ('{"a": 1} x', "Extra data"),
    ],
)
def test_invalid_or_excessive_json_is_a_value_error(text: str | bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
    (tmp_path / "x.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert read_json(tmp_path / "x.json") is None


def test_valid_json_is_parsed() -> None:
    assert parse_json(b'{"a": [1, -2, 1e3, null, "\xc3\xa4"]}') == {"a": [1, -2, 1000.0, None, "ä"]}
    assert parse_json("9" * 300) == 10**300 - 1


def test_file_above_the_limit_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="1099511627776 bytes, more than 1000"):
        read_json_value(path, 1000)
    path.write_text('{"a": 1}')
    assert read_json_value(path, 8) == {"a": 1}


def test_lines_above_the_limit_and_of_a_device_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a": 1}\n')
    assert read_json_lines(path) == [{"a": 1}]
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 8)
    assert read_json_lines(path) == []
    assert read_json_lines(Path("/dev/zero")) == []
