"""The end of a rank's process, in a process without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: All tests of this file start processes.
pytestmark = pytest.mark.processes

PROGRAM = """\
import atexit, os, signal, sys, threading
from pathlib import Path
from hpcdist.rank import outcome as process_end
folder, limit_s, process_end.ATEXIT_S, process_end._STUCK_S = Path(sys.argv[1]), *map(float, sys.argv[2:])
forever = threading.Event().wait
kept = open(folder / "buffer", "w")
kept.write("written")

def conclude():
    (folder / "concluded").touch()
    return 3

{actions}
process_end.end(conclude, limit_s)
"""
#: Threads often run as long as the main thread.
LATE = "threading.Thread(target=lambda: (threading.main_thread().join(), (folder / 'late').touch())).start()"
ENDLESS = "threading.Thread(target=forever, name='endless').start()"
ENDLESS_AT_EXIT = "atexit.register(forever)"
UNINTERRUPTED = "atexit.register(lambda: (signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]), forever()))"
RAISES = "atexit.register(lambda: 1 / 0)"


def end(
    tmp_path: Path, *actions: str, limit_s: float = 60.0, stuck_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a process that ends after some actions; all its files must be written."""
    program = PROGRAM.format(actions="\n".join(actions))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(limit_s), "0.2", str(stuck_s)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "concluded").exists()
    return done


def test_threads_and_functions_of_atexit_end_before_the_conclusion(tmp_path: Path) -> None:
    done = end(tmp_path, LATE, RAISES)
    assert (tmp_path / "late").exists(), "a thread that waits for the end of the main thread"
    assert (tmp_path / "buffer").read_text() == "written"
    assert "ZeroDivisionError" in done.stderr
    assert "cut off" not in done.stderr


@pytest.mark.parametrize("endless", [ENDLESS, ENDLESS_AT_EXIT])
def test_what_does_not_end_is_cut_off_and_the_rest_is_done(tmp_path: Path, endless: str) -> None:
    done = end(tmp_path, "atexit.register((folder / 'left').touch)", endless, limit_s=0.3)
    assert (tmp_path / "left").exists()
    assert (tmp_path / "buffer").read_text() == "written"
    assert ("thread 'endless' (" in done.stderr) == (endless == ENDLESS)


def test_a_call_that_no_signal_interrupts_is_cut_off(tmp_path: Path) -> None:
    done = end(tmp_path, UNINTERRUPTED, limit_s=0.1, stuck_s=0.1)
    assert "a function of atexit does not end, and is cut off: thread 'MainThread' (" in done.stderr


def test_errors_and_unusual_files_do_not_change_the_end(tmp_path: Path) -> None:
    done = end(
        tmp_path,
        "import io, logging",
        "logging.basicConfig()",
        "full = open('/dev/full', 'w'); full.write('lost')",
        "detached = io.TextIOWrapper(io.BytesIO()); detached.detach()",
        "threading._register_atexit(lambda: 1 / 0)",
    )
    assert (tmp_path / "buffer").read_text() == "written"
    assert "'/dev/full'" in done.stderr
    assert "is not written completely: No space left on device" in done.stderr
    assert "ZeroDivisionError" in done.stderr
