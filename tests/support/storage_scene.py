"""Supervisors of fake ranks, one after the other, each with a fault in one kind of file operation.

    LD_PRELOAD=io_faults.so python storage_scene.py FOLDER [unattended_s]

Reads cells from standard input, one JSON object per line, and prints one result per line. One process runs many
cells, because imports take longer than a run of fake ranks. The fault is active only in this process, not in the
ranks, the guard or the shipper.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from io_faults import Fault, Preloaded
from supervisor_scene import DONE, STOP_ON_REQUEST, Scene, fails

from hpcdist.host import retry
from hpcdist.run import lease
from hpcdist.run.folder import RunDir

#: Actions of the ranks: finish, fail once and then finish, or stop at a signal or a request.
STOP_ON_SIGNAL: list[list[Any]] = [["block", 15], ["beat", 3], ["await_signal", 15], ["report", {"outcome": "stopped"}]]
SCRIPTS: dict[str, dict[str, Any]] = {
    "done": {"first": [[["beat", 1], ["sleep", 0.1], *DONE], []]},
    "restart": {"first": [fails("RuntimeError: broken"), []], "second": [[*DONE], []]},
    "slow": {"first": [[["beat", 1], ["sleep", 3.0], *DONE], [["beat", 1], ["sleep", 3.0]]]},
    "stop by signal": {"first": [STOP_ON_SIGNAL, STOP_ON_SIGNAL[:-1]]},
    "stop": {"first": [[["beat", 3], *STOP_ON_REQUEST], [["await", "{attempt}/request.json"]]]},
}


def play(cell: dict[str, Any], folder: Path, library: Preloaded) -> dict[str, Any]:
    run = RunDir.create(folder)
    (run.path / "config.yaml").write_text("")
    scene = Scene(run)
    scene.script(**SCRIPTS[cell["scene"]])
    scene.launch = cell.get("launch", {})
    if cell["scene"].startswith("stop"):
        scene.report.on_progress = lambda beat: scene.report.steps[1:] or signal.raise_signal(signal.SIGTERM)
    supervisor = scene.supervisor()
    result: dict[str, Any] = {"error": None}
    if record := cell.get("record"):
        library.record(run.path, Path(record))
    if cell.get("fault"):
        library.arm(run.path, Fault(**cell["fault"]))
    try:
        with retry.patient(retry.UNATTENDED_S), lease.hold(run):
            state = scene.supervise_unchecked(supervisor)
        result |= {"status": state.status, "reason": state.reason}
    except Exception as error:
        result["error"] = "".join(traceback.format_exception(error))
    finally:
        result["fired"] = library.disarm()
        library.record(run.path, None)
    state = run.read_state()
    result |= {"on_disk": [state.status, state.reason], "notes": scene.report.notes}
    result["lease_left"] = run.lease.exists()
    result["threads"] = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    return result


def main() -> None:
    library = Preloaded()
    if sys.argv[2:]:
        retry.UNATTENDED_S = retry.FULL_S = float(sys.argv[2])
    for number, line in enumerate(sys.stdin):
        print(json.dumps(play(json.loads(line), Path(sys.argv[1]) / f"run-{number:04d}", library)), flush=True)


if __name__ == "__main__":
    main()
