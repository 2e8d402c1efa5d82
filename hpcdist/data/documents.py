"""The documents of text, JSONL and Parquet files, in pieces that processes read independently of each other.

A text file is one document. A line of a JSONL file and a row of a Parquet file have one in their field `text`. The
pieces follow from the files alone, so the documents and their order do not depend on the number of processes.
"""

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from hpcdist.errors import DataError, shortened

JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
#: Endings of the files that are read of a folder. A file with any other ending is text.
FOLDER_SUFFIXES = (".txt", ".md", *JSONL_SUFFIXES, PARQUET_SUFFIX)
#: The field of a JSONL record and the column of a Parquet file with the text.
TEXT_FIELD = "text"
#: Size of a piece of the files. With many pieces, all processes end at about the same time; a finished piece costs a
#: file of its own until all are finished.
PIECE_BYTES = 4 << 20
#: Text files are read in parts of so many bytes, to their next line end, which limits the memory for their tokens.
TEXT_PART_BYTES = 1 << 20
#: Limit of the text of an exception of pyarrow in a message.
_MAX_REASON_LENGTH = 200
#: Bytes that are read at once to count lines.
_COUNTED_BYTES = 1 << 20

#: Takes the place and the reason of a corrupt record.
OnCorrupt = Callable[[str], None]


@dataclass(frozen=True)
class Document:
    """A document, or a part of one."""

    text: str
    ends: bool = True  #: whether the document ends here


@dataclass(frozen=True)
class Span:
    """The lines of a file that begin in bytes `begin` to `end` - 1; of a Parquet file these row groups."""

    path: Path
    begin: int
    end: int
    num_bytes: int


#: Consecutive spans of files.
Piece = tuple[Span, ...]


def pieces_of(files: Sequence[Path], piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """Divide files into pieces of about `piece_bytes`.

    Raises DataError for a file that cannot be opened, for a Parquet file without a column of text, and for any Parquet
    file if pyarrow is missing.
    """
    pieces: list[Piece] = []
    spans: list[Span] = []
    num_bytes = 0
    for path in files:
        for span in _spans_of(path, piece_bytes):
            spans.append(span)
            num_bytes += span.num_bytes
            if num_bytes >= piece_bytes:
                pieces.append(tuple(spans))
                spans = []
                num_bytes = 0
    if spans:
        pieces.append(tuple(spans))
    return pieces


def _spans_of(path: Path, piece_bytes: int) -> Iterator[Span]:
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if path.suffix == PARQUET_SUFFIX:
        yield from _row_groups_of(path, num_bytes)
        return
    for begin in range(0, num_bytes, piece_bytes):
        end = min(begin + piece_bytes, num_bytes)
        yield Span(path, begin, end, end - begin)


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}")


def documents_of(piece: Piece, on_corrupt: OnCorrupt) -> Iterator[Document]:
    """Yield the documents of a piece. Corrupt records are left out and passed to `on_corrupt`.

    Raises DataError for a file that cannot be opened.
    """
    for span in piece:
        try:
            if span.path.suffix == PARQUET_SUFFIX:
                yield from _parquet_documents(span, on_corrupt)
            elif span.path.suffix in JSONL_SUFFIXES:
                yield from _jsonl_documents(span, on_corrupt)
            else:
                yield from _text_documents(span, on_corrupt)
        except OSError as error:
            raise _unreadable(span.path, error) from error


def split_held_out(documents: Iterator[Document], every: int) -> Iterator[tuple[Document, bool]]:
    """Yield the documents of a piece, and whether each is held out: the last one of every `every`.

    With fewer documents, the same fraction of their text is held out, at their end. A part of a document ends where
    what follows it is in the other file: without an end, it would continue in another text.
    """
    # The first document of the next piece is not held out.
    following = (Document(""), False)
    divided = chain(_divided(documents, every), [following])
    for (document, is_held_out), (_, is_next_held_out) in pairwise(divided):
        if is_held_out != is_next_held_out:
            document = replace(document, ends=True)
        yield document, is_held_out


def _divided(documents: Iterator[Document], every: int) -> Iterator[tuple[Document, bool]]:
    first = list(islice(documents, every))
    if len(first) < every:
        yield from _with_end_held_out(first, every)
        return
    for number, document in enumerate(chain(first, documents), start=1):
        yield document, number % every == 0


def _with_end_held_out(documents: list[Document], every: int) -> Iterator[tuple[Document, bool]]:
    num_train = sum(len(document.text) for document in documents)
    num_train -= num_train // every
    for document in documents:
        cut = min(num_train, len(document.text))
        num_train -= cut
        if cut == len(document.text):
            yield document, False
        elif cut == 0:
            yield document, True
        else:
            yield replace(document, text=document.text[:cut]), False
            yield replace(document, text=document.text[cut:]), True


class _Lines:
    """The lines of a span; `number` is that of the current line in the file, from 1."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._first_number: int | None = None
        self._num_read = 0
        self.is_at_end = False  #: whether the current line is the last one of the file

    def __iter__(self) -> Iterator[bytes]:
        with open(self._span.path, "rb") as file:
            self._skip_to_first(file)
            self._begin = file.tell()
            num_bytes = file.seek(0, 2)
            file.seek(self._begin)
            while file.tell() < self._span.end:
                line = file.readline()
                if not line:  # the file has become shorter
                    return
                if self._begin == 0 and self._num_read == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                self._num_read += 1
                self.is_at_end = file.tell() == num_bytes
                yield line

    def _skip_to_first(self, file: BinaryIO) -> None:
        """Move to the first line that begins in the span."""
        if self._span.begin > 0:
            file.seek(self._span.begin - 1)
            file.readline()

    @property
    def number(self) -> int:
        if self._first_number is None:  # lines are counted for the first corrupt one only
            self._first_number = 1 + _count_lines(self._span.path, self._begin)
        return self._first_number + self._num_read - 1


def _count_lines(path: Path, num_bytes: int) -> int:
    """Return the number of line ends in the first `num_bytes` of a file."""
    num_lines = 0
    with open(path, "rb") as file:
        while num_bytes > 0:
            content = file.read(min(num_bytes, _COUNTED_BYTES))
            if not content:
                break
            num_bytes -= len(content)
            num_lines += content.count(b"\n")
    return num_lines


def _text_documents(span: Span, on_corrupt: OnCorrupt) -> Iterator[Document]:
    lines = _Lines(span)
    part: list[str] = []
    num_bytes = 0
    for line in lines:
        try:
            part.append(line.decode())
        except UnicodeDecodeError as error:
            on_corrupt(f"{span.path}, line {lines.number}: {_not_utf8(error)}")
        num_bytes += len(line)
        if num_bytes >= TEXT_PART_BYTES:
            yield Document("".join(part), ends=lines.is_at_end)
            part = []
            num_bytes = 0
    if num_bytes > 0:
        yield Document("".join(part), ends=lines.is_at_end)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.start + 1} is not UTF-8"


def _jsonl_documents(span: Span, on_corrupt: OnCorrupt) -> Iterator[Document]:
    lines = _Lines(span)
    for line in lines:
        if not line.strip():
            continue
        text, problem = _text_of_record(line)
        if problem:
            on_corrupt(f"{span.path}, line {lines.number}: {problem}")
        elif text:
            yield Document(text)


def _text_of_record(line: bytes) -> tuple[str, str]:
    """Return the text of a JSONL record and an empty string, or an empty text and the mistake in the record."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        return "", _not_utf8(error)
    except (ValueError, RecursionError) as error:
        return "", f"not valid JSON ({shortened(str(error))})"
    if not isinstance(record, dict):
        return "", f"not an object with a field {TEXT_FIELD!r}"
    text = record.get(TEXT_FIELD)
    if not isinstance(text, str):
        return "", f"no field {TEXT_FIELD!r} with a text"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may escape half of a surrogate pair
        return "", f"the field {TEXT_FIELD!r} is not valid Unicode"
    return text, ""


class _ParquetText:
    """The column of text of a Parquet file. Raises DataError if the file has none, and one of `damaged`."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa  # here, because it takes 0.3 s
        from pyarrow import parquet

        self._pa = pa
        # Checksums are verified if the file has them; other changes may go unnoticed.
        self._file = parquet.ParquetFile(path, page_checksum_verification=True)
        names = self._file.schema_arrow.names
        if TEXT_FIELD not in names:
            listed = shortened(", ".join(names))
            raise DataError(f"{path} has no column {TEXT_FIELD!r}, only {listed}: rename the column with the text")
        kind = self._file.schema_arrow.field(TEXT_FIELD).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise DataError(f"{path}: column {TEXT_FIELD!r} is {kind}, not a string: convert it")

    def group_sizes(self) -> list[int]:
        """Return the size of each row group in bytes, before compression."""
        metadata = self._file.metadata
        return [max(0, metadata.row_group(number).total_byte_size) for number in range(metadata.num_row_groups)]

    def texts(self, group: int) -> list[bytes | None]:
        """Return the texts of a row group; None for a null."""
        column = self._file.read_row_group(group, columns=[TEXT_FIELD])[TEXT_FIELD]
        texts: list[bytes | None] = column.cast(self._pa.large_string()).cast(self._pa.large_binary()).to_pylist()
        return texts


def _damaged() -> tuple[type[Exception], ...]:
    """Return the exceptions of pyarrow for damaged content: its functions document none."""
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError("Parquet files need pyarrow, which is not installed: pip install pyarrow") from error
    kinds = (OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, NotImplementedError)
    return (*kinds, pa.ArrowException)


def _reason(error: Exception) -> str:
    return shortened(" ".join(str(error).split()), _MAX_REASON_LENGTH)


def _row_groups_of(path: Path, num_bytes: int) -> Iterator[Span]:
    """Yield a span for each row group of a Parquet file; one without row groups for a damaged file."""
    damaged = _damaged()
    try:
        sizes = _ParquetText(path).group_sizes()
    except damaged:
        yield Span(path, 0, 0, num_bytes)  # its reader reports the file
        return
    for number, size in enumerate(sizes):
        yield Span(path, number, number + 1, size)


def _parquet_documents(span: Span, on_corrupt: OnCorrupt) -> Iterator[Document]:
    damaged = _damaged()
    try:
        file = _ParquetText(span.path)
    except damaged as error:
        on_corrupt(f"{span.path}: not a readable Parquet file ({_reason(error)})")
        return
    for group in range(span.begin, span.end):
        try:
            texts: list[Any] = file.texts(group)
        except damaged as error:
            on_corrupt(f"{span.path}, row group {group}: {_reason(error)}")
            continue
        for row, text in enumerate(texts):
            if text is None:
                on_corrupt(f"{span.path}, row group {group}, row {row}: the text is null")
                continue
            try:
                decoded = text.decode()
            except UnicodeDecodeError as error:
                on_corrupt(f"{span.path}, row group {group}, row {row}: {_not_utf8(error)}")
                continue
            if decoded:
                yield Document(decoded)
