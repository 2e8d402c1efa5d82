"""Uploads of the runs that nothing else uploads, while `hpcdist ui` is open.

    python -P -m hpcdist.tracking.ui_uploads RUNS_DIR PID

`hpcdist ui` starts it as a child process before it becomes MLflow's server, process PID; it ends with that server. It
uploads Slurm runs to a database on this machine, which their jobs cannot do, and closes the runs of dead supervisors.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdist.errors import HpcdistError, TrackingError
from hpcdist.host.log_files import say
from hpcdist.run.folder import RunDir
from hpcdist.run.lookup import find_runs
from hpcdist.tracking.sent_points import is_complete
from hpcdist.tracking.sync_runs import sync_run

#: Shortest and longest pause between two searches for runs with new records.
PAUSE_S = 20.0
_LONGEST_PAUSE_S = 60.0
#: A pause is so many times as long as the search before it, which reads files of all runs and asks Slurm.
_PAUSE_FACTOR = 10
_POLL_S = 1.0


class RunUploads:
    """Uploads the new records of runs; a problem of a run is printed once."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._reported: set[str] = set()

    def upload(self, runs: Sequence[RunDir]) -> None:
        """Upload the records of these runs that MLflow does not have.

        If the store fails, the other runs wait for the next call.
        """
        for run in runs:
            try:
                if not is_complete(run):
                    sync_run(run, self._env)
            except (HpcdistError, OSError) as error:
                self.report(f"{run.name}: {error}")
                if isinstance(error, TrackingError):
                    return

    def report(self, text: str) -> None:
        """Print a problem, unless it is known already."""
        if text not in self._reported:
            say(text, error=True)
        self._reported.add(text)


def main(arguments: Sequence[str], env: Mapping[str, str]) -> None:
    """Upload until the server ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the server and this process, which is safe at any time
    runs_dir = Path(arguments[0])
    server = int(arguments[1])
    uploads = RunUploads(env)
    pause_s = PAUSE_S  # `hpcdist ui` has just uploaded everything
    while _is_open(server, pause_s):
        began = time.monotonic()
        try:
            uploads.upload(find_runs(runs_dir))
        except OSError as error:  # the folder of the runs is not available
            uploads.report(f"{runs_dir}: {error.strerror or error}")
        search_s = time.monotonic() - began
        pause_s = min(max(PAUSE_S, _PAUSE_FACTOR * search_s), _LONGEST_PAUSE_S)


def _is_open(server: int, pause_s: float) -> bool:
    """Wait for a pause. Returns False as soon as the server, the parent of this process, has ended."""
    until = time.monotonic() + pause_s
    while os.getppid() == server:
        if time.monotonic() >= until:
            return True
        time.sleep(_POLL_S)
    return False


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
