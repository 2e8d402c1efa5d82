"""Documents of text, JSONL and Parquet files, whole and corrupt."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from hpcdist.data import documents
from hpcdist.data.documents import Document, documents_of, pieces_of, split_held_out
from hpcdist.errors import DataError


def read(files: Sequence[Path], piece_bytes: int = 100) -> tuple[list[Document], list[str]]:
    """Return the documents of files, and what is reported on corrupt records."""
    found: list[Document] = []
    corrupt: list[str] = []
    for piece in pieces_of(files, piece_bytes):
        found += documents_of(piece, corrupt.append)
    return found, corrupt


def joined(found: Sequence[Document]) -> list[str]:
    """Return the texts of whole documents."""
    texts = [""]
    for document in found:
        texts[-1] += document.text
        if document.ends:
            texts.append("")
    return texts[:-1]


def write_parquet(path: Path, texts: Sequence[str | None], rows_per_group: int = 2, column: str = "text") -> Path:
    table = pa.table({column: pa.array(texts, pa.string()), "id": list(range(len(texts)))})
    parquet.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True, compression="none")
    return path


LINES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=10), max_size=5)
TEXTS = st.lists(LINES.map("\n".join), max_size=15)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, piece_bytes=st.integers(1, 300))
def test_jsonl_documents_do_not_depend_on_the_pieces(texts: list[str], piece_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in texts))
        found, corrupt = read([path], piece_bytes)
    assert [document.text for document in found] == [text for text in texts if text]
    assert corrupt == []


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, piece_bytes=st.integers(1, 300), part_bytes=st.integers(1, 100))
def test_text_files_are_one_document_each(texts: list[str], piece_bytes: int, part_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "TEXT_PART_BYTES", part_bytes)
        files = []
        for number, text in enumerate(texts):
            files.append(Path(folder) / f"{number}.txt")
            files[-1].write_bytes(text.encode())
        found, corrupt = read(files, piece_bytes)
    assert joined(found) == [text.removeprefix("\ufeff") for text in texts if text]
    assert corrupt == []


@pytest.mark.parametrize("piece_bytes", [2000, 1 << 20])
def test_corrupt_jsonl_lines_are_named(piece_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    good = b'{"text": "good"}'
    deep = b"[" * (sys.getrecursionlimit() + 100_000)
    lines = [
        good,
        b"",
        b'{"text": ',
        good,
        b'{"text": 3}',
        b"[]",
        b"\xff",
        b'{"text": "\\ud800"}',
        deep,
        b'{"a": 1}',
        good,
    ]
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    found, corrupt = read([path], piece_bytes)
    assert [document.text for document in found] == ["good"] * 3
    no_text = "no field 'text' with a text"
    assert [text.removeprefix(f"{path}, line ") for text in corrupt] == [
        "3: not valid JSON (Expecting value: line 2 column 1 (char 10))",
        f"5: {no_text}",
        "6: not an object with a field 'text'",
        "7: byte 1 is not UTF-8",
        "8: the field 'text' is not valid Unicode",
        corrupt[5].removeprefix(f"{path}, line "),
        f"10: {no_text}",
    ]
    assert corrupt[5].startswith(f"{path}, line 9: not valid JSON (")


def test_corrupt_lines_of_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(b"first\nsecond \xff\nthird\n")
    found, corrupt = read([path])
    assert joined(found) == ["first\nthird\n"]
    assert corrupt == [f"{path}, line 2: byte 8 is not UTF-8"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", ["a", "", "bc", None, "d"])
    found, corrupt = read([path], 1)
    assert joined(found) == ["a", "bc", "d"]
    assert corrupt == [f"{path}, row group 1, row 1: the text is null"]
    assert len(pieces_of([path], 1)) == 3
    coded = pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    parquet.write_table(coded, path)
    assert joined(read([path])[0]) == ["a", "b", "a"]


def test_corrupt_row_groups_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", ["first", "text", "second", "group", "third", "one"])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"second", b"SECOND", 1))
    found, corrupt = read([path])
    assert joined(found) == ["first", "text", "third", "one"]
    (report,) = corrupt
    assert report.startswith(f"{path}, row group 1: ")
    path.write_bytes(content[:-20])
    found, corrupt = read([path])
    assert found == []
    assert corrupt[0].startswith(f"{path}: not a readable Parquet file (")


def test_parquet_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    binary = pa.array([b"good", b"\xff\xfe"], pa.binary())
    parquet.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 2, binary.buffers())}), path)
    found, corrupt = read([path])
    assert joined(found) == ["good"]
    assert corrupt == [f"{path}, row group 0, row 1: byte 1 is not UTF-8"]


def test_parquet_files_need_a_column_of_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", ["a"], column="content")
    with pytest.raises(DataError, match=r"t\.parquet has no column 'text', only content, id: rename the column"):
        pieces_of([path])
    parquet.write_table(pa.table({"text": [1]}), path)
    with pytest.raises(DataError, match=r"t\.parquet: column 'text' is int64, not a string: convert it"):
        pieces_of([path])


def test_parquet_files_need_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "t.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="need pyarrow, which is not installed: pip install pyarrow"):
        pieces_of([path])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    with pytest.raises(DataError, match=r"t\.txt cannot be read: No such file or directory"):
        pieces_of([path])
    path.write_text("text")
    (piece,) = pieces_of([path])
    path.unlink()
    with pytest.raises(DataError, match=r"t\.txt cannot be read: No such file or directory"):
        list(documents_of(piece, pytest.fail))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_damage_is_reported_or_harmless(data: st.DataObject) -> None:
    """Bytes that are changed, lost or added never raise anything, and every lost document has a report."""
    texts = [f"document {number} with some words" for number in range(12)]
    with tempfile.TemporaryDirectory() as folder:
        kind = data.draw(st.sampled_from(["jsonl", "parquet"]))
        path = Path(folder) / f"t.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            write_parquet(path, texts, rows_per_group=3)
        content = bytearray(path.read_bytes())
        begin = data.draw(st.integers(0, len(content) - 1))
        num_bytes = data.draw(st.integers(0, 8))
        content[begin : begin + num_bytes] = data.draw(st.binary(max_size=8))
        path.write_bytes(content)
        try:
            found, corrupt = read([path], 200)
        except DataError:  # the name or the type of the column has changed: an error of its own
            return
    assert all(report.startswith(str(path)) for report in corrupt)
    if kind == "jsonl":
        # A changed letter is still a text, lines that are joined are one corrupt record, and one text may be empty now.
        num_lines = sum(bool(line.strip()) for line in bytes(content).split(b"\n"))
        assert num_lines - 1 <= len(found) + len(corrupt) <= num_lines
    elif not corrupt:
        assert [document.text for document in found] == texts


def split(texts: Sequence[str], every: int) -> tuple[list[str], list[str]]:
    train: list[Document] = []
    held_out: list[Document] = []
    for document, is_held_out in split_held_out(iter([Document(text) for text in texts]), every):
        if is_held_out:
            held_out.append(document)
        else:
            train.append(document)
    return [document.text for document in train], [document.text for document in held_out]


def test_one_of_every_few_documents_is_held_out() -> None:
    assert split("abcdefgh", 3) == (["a", "b", "d", "e", "g", "h"], ["c", "f"])
    assert split("abc", 3) == (["a", "b"], ["c"])


def test_of_few_documents_the_end_is_held_out() -> None:
    assert split(["abcd", "0123456789ab"], 4) == (["abcd", "01234567"], ["89ab"])
    assert split(["abcdefghijklmnopqrst", "01"], 4) == (["abcdefghijklmnopq"], ["rst", "01"])
    assert split(["abcdefgh", "0123"], 3) == (["abcdefgh"], ["0123"])
    assert split(["abc"], 4) == (["abc"], [])
    assert split([], 4) == ([], [])


def test_divided_document_ends_where_it_is_divided() -> None:
    parts = [Document("abcd", ends=False), Document("efgh", ends=False)]
    assert list(split_held_out(iter(parts), 4)) == [
        (parts[0], False),
        (Document("ef"), False),
        (Document("gh"), True),
    ]
    parts = [Document("abcdefgh", ends=False), Document("01")]
    assert list(split_held_out(iter(parts), 3)) == [
        (Document("abcdefg"), False),
        (Document("h", ends=False), True),
        (Document("01"), True),
    ]


def test_parts_beside_a_held_out_part_end() -> None:
    parts = [Document(text, ends=False) for text in "abcdefg"]
    found = list(split_held_out(iter(parts), 3))
    assert [document.text for document, is_held_out in found if is_held_out] == ["c", "f"]
    # The last one continues in the next piece.
    assert "".join(document.text + "." * document.ends for document, _ in found) == "ab.c.de.f.g"
