"""Size limit of logs while processes write to them: the middle is removed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdist.host.log_files import is_log_of, shorten

LIMITED = """
import sys, time
from pathlib import Path
from hpcdist.host import log_files as log_limit
log_limit.CHECK_EVERY_S = 0.01
assert log_limit.limit_log(Path(sys.argv[1]), 0.5) == (sys.argv[2] == "yes")
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
    assert re.fullmatch(r"\[hpcdist: 600,\d\d\d bytes of this log were removed here, see launch.log_max_mb\]", note)


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
def test_log_of_a_process_that_ends_before_the_first_check_is_shortened(log: Path) -> None:
    code = LIMITED.replace("0.01", "60").replace("time.sleep(1.0)", "")
    with open(log, "ab") as output:
        subprocess.run([sys.executable, "-c", code, str(log.parent), "yes"], stdout=output, check=True)
    assert log.stat().st_size <= 510_000
    assert log.read_text().endswith("\nthe end\n")


def test_pipe_is_not_a_log(log: Path) -> None:
    reader, writer = os.pipe()
    assert not is_log_of(log.parent, writer)
    os.close(reader)
    os.close(writer)
    assert not is_log_of(log.parent, writer)
