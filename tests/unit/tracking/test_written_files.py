"""The files that a rank has opened for writing."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hpcdist.run.folder import Attempt
from hpcdist.tracking import written_files
from hpcdist.tracking.written_files import WrittenFile, WrittenFiles, read_written_files

SCRIPT = """
import os, sys
from pathlib import Path
from hpcdist.run.folder import Attempt
from hpcdist.tracking.written_files import WrittenFiles

sys.addaudithook(WrittenFiles(Attempt(Path(sys.argv[1]))).note)
Path("old.csv").read_text()
open("old.csv", "a").close()
open("new.csv", "w").close()
open("new.csv", "a").write("x")
open(b"events.out.tfevents.1", "ab").close()
os.close(os.open("low.CSV", os.O_RDWR | os.O_CREAT))
open("notes.txt", "w").close()
open("swap.tmp", "w").close()
os.replace("swap.tmp", "swapped.csv")
if os.fork() == 0:
    open("child.csv", "w").close()
    os._exit(0)
os.wait()
"""


@pytest.mark.processes
def test_files_opened_for_writing_are_recorded(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "001")
    attempt.path.mkdir()
    (tmp_path / "old.csv").write_text("12345")
    code = textwrap.dedent(SCRIPT)
    subprocess.run([sys.executable, "-c", code, str(attempt.path)], cwd=tmp_path, check=True)
    assert read_written_files(attempt) == [
        WrittenFile(tmp_path / "old.csv", 5),
        WrittenFile(tmp_path / "new.csv", 0),
        WrittenFile(tmp_path / "events.out.tfevents.1", 0),
        WrittenFile(tmp_path / "low.CSV", 0),
        WrittenFile(tmp_path / "swapped.csv", 0),
    ]


def test_script_writes_on_if_its_file_cannot_be_noted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WrittenFiles(Attempt(tmp_path / "001"))
    written.note("open", ("a.csv", "w", os.O_WRONLY))
    written.note("open", (3, "w", os.O_WRONLY))
    assert "a.csv do not reach MLflow" in caplog.text
    (tmp_path / "001").mkdir()
    monkeypatch.setattr(written_files, "MAX_FILES", 2)
    for name in ("b.csv", "c.csv"):
        written.note("open", (name, "w", os.O_WRONLY))
    assert [file.path.name for file in read_written_files(Attempt(tmp_path / "001"))] == ["b.csv"]
