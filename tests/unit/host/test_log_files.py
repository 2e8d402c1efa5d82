"""Logs: reading in bounded memory, the size limit, and the form of lines."""

import io
import logging
import os
import re
import socket
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpcdist.cli.options import console
from hpcdist.host import log_files
from hpcdist.host.log_files import MAX_LINE_CHARS, PIECE_BYTES, LogTail, last_lines, shorten


@contextmanager
def bounded(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < num_bytes
    finally:
        tracemalloc.stop()


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def test_complete_lines_are_shown_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"one\ntw")
    tail = LogTail(path)
    assert list(tail.news()) == ["one\n"]
    assert list(tail.news()) == []
    append(path, "o ü\n 50%\r 51".encode())
    assert list(tail.news()) == ["two ü\n 50%\r"]
    append(path, b"%\r\xff\n" + b"".join(b"line %d\n" % number for number in range(20_000)))
    shown = "".join(tail.news())
    assert shown.startswith(" 51%\r\N{REPLACEMENT CHARACTER}\nline 0\n")
    assert shown.endswith("line 19999\n")
    assert shown.count("\n") == 20_001


def test_memory_is_bounded_for_long_lines_and_much_new_text(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "wb") as file:
        file.write(b"first\n")
        file.truncate(3 << 30)  # a line of 3 GiB, sparse
    tail = LogTail(path)
    with bounded(1_000_000):
        (note,) = tail.news()
    assert note == f"[{(3 << 30) - PIECE_BYTES:,} bytes not shown, see {path}]\n"
    append(path, b"\nnow\n")
    assert list(tail.news()) == ["now\n"]
    with bounded(30_000_000):
        (_, long), now = last_lines(path, 100)
    assert len(long) == MAX_LINE_CHARS
    assert now == (0, "now"), "the log is too long to count lines"


def test_tail_continues_at_the_end_of_a_shortened_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"line\n" * 100)
    tail = LogTail(path)
    assert len("".join(tail.news())) == 500
    path.write_bytes(b"line\nnoted\npart of a")
    assert list(tail.news()) == []
    append(path, b" line\nnew\n")
    assert list(tail.news()) == ["new\n"]


def test_last_lines_have_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    append(path, b"one\r\ntwo a\rtwo b\n\nfour \xff")
    four = (4, "four \N{REPLACEMENT CHARACTER}")
    assert last_lines(path, 100) == [(1, "one"), (2, "two a"), (2, "two b"), (3, ""), four]
    assert last_lines(path, 2) == [(3, ""), four]
    monkeypatch.setattr(log_files, "TAIL_BYTES", 9)
    assert last_lines(path, 100) == [(2, "b"), (3, ""), four]
    monkeypatch.setattr(log_files, "COUNT_BYTES", 4)
    assert last_lines(path, 100)[-1] == (0, four[1])
    (tmp_path / "empty").touch()
    assert last_lines(tmp_path / "empty", 5) == []


# --- Size limit of logs while processes write to them: the middle is removed.


LIMITED = """
import sys, time
from pathlib import Path
from hpcdist.host import log_files as log_limit
log_limit.CHECK_EVERY_S = 0.01
log_limit.MAX_BYTES = 500_000
assert log_limit.limit_log(Path(sys.argv[1])) == (sys.argv[2] == "yes")
for number in range(60_000):
    print(f"line {number:06d} " + "x" * 80, flush=number % 100 == 0)
sys.stdout.flush()
time.sleep(1.0)
print("the end", flush=True)
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run / "rank.log"


def test_middle_of_the_log_is_removed(log: Path) -> None:
    log.write_bytes(b"".join(b"%07d\n" % number for number in range(100_000)))
    with open(log, "ab", buffering=0) as writer, open(log, "ab", buffering=0) as other:
        assert shorten(writer.fileno(), 800_000) == 0
        writer.write(b"one more\n")
        removed = shorten(writer.fileno(), 800_000)
        # Writers that have opened the file for appending continue at its new end.
        writer.write(b"later\n")
        other.write(b"last\n")
    lines = log.read_text().splitlines()
    assert lines[0] == "0000000"
    assert lines[-4:] == ["0099999", "one more", "later", "last"]
    assert log.stat().st_size == 800_009 - removed + len("later\nlast\n")
    assert 200_000 < log.stat().st_size < 200_200
    (note,) = [line for line in lines if "hpcdist" in line]
    assert re.fullmatch(r"\[hpcdist: 600,\d\d\d bytes of this log were removed here\]", note)


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "limited"), [("log", "yes"), ("elsewhere", "no"), ("not appending", "no")])
def test_process_limits_only_a_log_in_its_run_folder(log: Path, tmp_path: Path, kind: str, limited: str) -> None:
    path = tmp_path / "mine.log" if kind == "elsewhere" else log
    with open(path, "wb" if kind == "not appending" else "ab") as output:
        subprocess.run([sys.executable, "-c", LIMITED, str(log.parent), limited], stdout=output, check=True)
    text = path.read_text()
    assert text.startswith("line 000000 ")
    assert text.endswith("\nthe end\n")
    if limited == "yes":
        assert len(text) <= 510_000
        assert "bytes of this log were removed here" in text
        assert f"line {59_999:06d} " in text
    else:
        assert len(text) > 5_000_000


@pytest.mark.processes
def test_log_of_a_short_process_is_shortened(log: Path) -> None:
    code = LIMITED.replace("0.01", "60").replace("time.sleep(1.0)", "")
    with open(log, "ab") as output:
        subprocess.run([sys.executable, "-c", code, str(log.parent), "yes"], stdout=output, check=True)
    assert log.stat().st_size <= 510_000
    assert log.read_text().endswith("\nthe end\n")


# --- Rank and host in every line, and nothing said twice.


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("hpcdist")
    before = root.handlers[:], root.level, ours.level, ours.handlers[:]
    yield
    logging.captureWarnings(False)
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    ours.handlers[:] = before[3]
    ours.propagate = True


def test_elsewhere_a_line_is_just_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_files.configure()
    logging.getLogger("hpcdist").warning("careful")
    logging.getLogger("hpcdist").debug("not this")
    logging.getLogger("someone.else").info("nor this")
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING careful\n", capsys.readouterr().err)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old API", stacklevel=1)
    assert "WARNING" in capsys.readouterr().err


def test_log_lines_of_a_rank_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers[:] = []
    log_files.configure(rank=3)
    log_files.configure(rank=3)
    logging.basicConfig(level=logging.INFO, format="mine: %(message)s")
    logging.getLogger("someone.else").info("shown")
    logging.getLogger("hpcdist.rank").info("resumed at step %d", 7)
    out, err = capsys.readouterr()
    mine, ours = err.splitlines()
    assert (out, mine, log_files.RANK_LINE.sub("", ours)) == ("", "mine: shown", "resumed at step 7")
    assert re.fullmatch(rf"\d\d:\d\d:\d\d INFO rank 3 on {re.escape(socket.gethostname())}: .*", ours)


# --- A supervisor outlives the reader of its output.


@contextmanager
def unread_pipe() -> Iterator[io.TextIOWrapper]:
    """A stream into a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield io.TextIOWrapper(io.FileIO(writer, "w", closefd=False), write_through=True)
    os.close(writer)


def test_output_without_a_reader_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with unread_pipe() as out, unread_pipe() as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with pytest.raises(BrokenPipeError):
            log_files.say("step 1")
        log_files.drop_undelivered_output()
        log_files.say("step 2")
        log_files.say("step 3", error=True)
        console().print("step 4")
        monkeypatch.undo()


def test_output_with_a_reader_stays_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w", encoding="ascii", errors="backslashreplace") as file:
        monkeypatch.setattr(sys, "stdout", file)
        file.write("step 1\n")
        log_files.drop_undelivered_output()
        log_files.say("step 2 \N{EURO SIGN}")
        assert (tmp_path / "log").read_text() == "step 1\nstep 2 \\u20ac\n"
