"""A run folder, fake ranks that execute a script, and their supervisor.

    python supervisor_scene.py RUN_DIR

supervises in this process, as `hpcdist run` does, and prints the last state.

    LD_PRELOAD=io_faults.so python supervisor_scene.py FOLDER UNATTENDED_S

reads cells from standard input, one JSON object per line: supervisors with a fault in one kind of file operation. It
prints one result per line. One process runs many cells, because imports take longer than a run of fake ranks. The
fault is active only in this process, not in the ranks, the guard or the shipper.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

from io_faults import Fault, Preloaded

import hpcdist.supervisor.local_launcher as local_module
import hpcdist.supervisor.supervisor as supervisor_module
import hpcdist.supervisor.watch as watch_module
from hpcdist.config.launch_schema import LaunchConfig, NotifyConfig
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig, TrainerConfig
from hpcdist.host import retry
from hpcdist.run import lease
from hpcdist.run.folder import Attempt, RunDir, State, sentence_of
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.supervisor.local_launcher import LocalLauncher
from hpcdist.supervisor.plan import Plan
from hpcdist.supervisor.protocols import NodeChanges
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.supervisor.supervisor import Supervisor
from hpcdist.supervisor.watch import Allocation

FAKE_RANK = Path(__file__).with_name("fake_rank.py")
Script = dict[str, list[list[Any]]]

#: Actions of a rank that succeeds.
DONE: list[list[Any]] = [["beat", 9], ["report", {"outcome": "done", "reason": "all epochs are done"}]]
STOP_ON_REQUEST: list[list[Any]] = [["await", "{attempt}/request.json"], ["report", {"outcome": "stopped"}]]
#: A rank that SIGTERM does not end.
STUBBORN: list[list[Any]] = [["ignore", signal.SIGTERM], ["beat", 3], ["forever", None]]
EXIT_0: list[list[Any]] = []


def fails(error: str, *, step: int = 5, **changes: Any) -> list[list[Any]]:
    return [["beat", step], ["report", {"outcome": "failed", "error": error} | changes], ["exit", 1]]


class Recorder:
    """A Reporter that records its calls; the hooks let a test act in the middle of an attempt."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.failures: list[tuple[Failure, Path]] = []
        self.steps: list[int] = []
        self.printed = ""
        self.on_attempt: Callable[[Attempt], object] = lambda attempt: None
        self.on_progress: Callable[[Mapping[str, Any]], object] = lambda beat: None

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        self.on_attempt(attempt)

    def progress(self, beat: Mapping[str, Any]) -> None:
        self.steps.append(beat["step"])
        self.on_progress(beat)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def output(self, text: str) -> None:
        self.printed += text

    def failure(self, failure: Failure, log: Path) -> None:
        self.failures.append((failure, log))


class Printer(Recorder):
    """Prints its notes, as on a terminal."""

    def note(self, text: str) -> None:
        print(text, flush=True)


@dataclass
class ScriptedJob:
    """A Slurm job whose answers a test prescribes."""

    allocation: Allocation | None = None
    nodes: NodeChanges = field(default_factory=NodeChanges)
    restart_count: int = 0
    ending: bool = False
    requeued: bool = False
    on_requeue: Callable[[], object] = lambda: None
    on_release: Callable[[], object] = lambda: None

    def is_ending(self) -> bool:
        return self.ending

    def is_requeued(self) -> bool:
        return self.requeued

    def requeue(self) -> None:
        self.on_requeue()

    def release_nodes(self) -> None:
        self.on_release()


class Scene:
    """One run with two fake ranks, and a supervisor with a short polling interval."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.report = Recorder()
        self.launch: dict[str, Any] = {}
        self.notify: dict[str, Any] = {}
        self.tracking: dict[str, Any] = {}
        self.trainer: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self.env: dict[str, str] = {"PATH": os.environ["PATH"]}
        self.tracking_uri = "sqlite:////nowhere/mlflow.db"
        #: Command that replaces the shipper.
        self.shipper = ["true"]
        self.num_ranks = 2
        #: Replaces PEER_GRACE_S. On a busy machine, a rank that is about to end needs seconds; a test whose ranks stay
        #: until they are killed sets less.
        self.peer_grace_s = 60.0
        self.roles: dict[str, int] = {}

    def script(self, **attempts: list[list[list[Any]]]) -> None:
        """Set the actions of the ranks in each attempt: `first=[actions of rank 0, actions of rank 1], second=…`."""
        numbers = {"first": 1, "second": 2, "third": 3}
        script = {
            f"{numbers[name]}.{rank}": actions for name, by in attempts.items() for rank, actions in enumerate(by)
        }
        (self.run.path / "script.json").write_text(json.dumps(script))

    def supervisor(self, job: ScriptedJob | None = None, check_lease: Callable[[], None] = lambda: None) -> Supervisor:
        config = Config(
            trainer=TrainerConfig(**self.trainer),
            data=DataConfig(**self.data),
            roles=self.roles,
            launch=LaunchConfig(**self.launch),
            notify=NotifyConfig(**self.notify),
            tracking=TrackingConfig(**self.tracking),
        )
        self.config = config
        plan = Plan(num_ranks=self.num_ranks, device="cpu", backend="gloo", threads=1, env=dict(config.launch.env))
        self.launcher = LocalLauncher(self.run, plan, env=self.env, import_path=[], cwd=self.run.path)
        return Supervisor(
            self.run,
            config,
            self.launcher,
            self.report,
            tracking_uri=self.tracking_uri,
            env=self.env,
            check_lease=check_lease,
            job=job,
        )

    def supervise(self, supervisor: Supervisor | None = None) -> State:
        """Run to the end with fake ranks; return the last state, which must also be on disk."""
        state = self.supervise_unchecked(supervisor)
        assert self.run.read_state() == state
        return state

    def supervise_unchecked(self, supervisor: Supervisor | None = None) -> State:
        """Run to the end with fake ranks; return the last state, which may not be on disk."""
        scene = self

        class StubShipper(ShipperProcess):
            def __init__(self, *_: object) -> None:
                self._run = scene.run
                self._process = subprocess.Popen(scene.shipper)
                self._has_low_priority = False

        supervisor = supervisor or self.supervisor()
        with (
            mock.patch.object(watch_module, "POLL_S", 0.02),
            mock.patch.object(watch_module, "PEER_GRACE_S", scene.peer_grace_s),
            mock.patch.object(
                local_module, "rank_command", lambda run_dir: [sys.executable, "-S", str(FAKE_RANK), str(run_dir)]
            ),
            mock.patch.object(supervisor_module, "ShipperProcess", StubShipper),
            self.launcher,
        ):
            return supervisor.run()

    def log(self, rank: int, attempt: int = 1) -> str:
        return self.run.attempt(attempt).log(rank).read_text()


# --- A named pipe that processes write lines to and hold open for as long as they live.


WAIT_S = 60.0


class NamedPipe:
    """The reading end. `line` waits for the next line; `is_released` for the end of all writing processes.

    Args:
        reopened: writers may open and close the pipe repeatedly; then `is_released` must not be used.
    """

    def __init__(self, path: Path, *, reopened: bool = False) -> None:
        self.path = path
        os.mkfifo(path)
        # With a writer in this process the pipe never reports its end.
        self._descriptor = os.open(path, os.O_NONBLOCK | (os.O_RDWR if reopened else os.O_RDONLY))
        self._text = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._descriptor)

    def line(self, timeout_s: float = WAIT_S) -> str:
        while b"\n" not in self._text:
            assert self._poll(timeout_s) & select.POLLIN, f"no line was written, only {self._text!r}"
            self._text += os.read(self._descriptor, 4096)
        first, _, self._text = self._text.partition(b"\n")
        return first.decode()

    def is_released(self, timeout_s: float) -> bool:
        """Return whether all writers close the pipe within this time; their remaining output is dropped."""
        while (events := self._poll(timeout_s)) & select.POLLIN:
            if not os.read(self._descriptor, 4096):
                break
        return bool(events & select.POLLHUP)

    def _poll(self, timeout_s: float) -> int:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        found = poll.poll(timeout_s * 1000)
        return found[0][1] if found else 0


# --- Supervisors of fake ranks, one after the other, each with a fault in one kind of file operation.

#: Actions of the ranks: finish, fail once and then finish, or stop at a signal or a request.
STOP_ON_SIGNAL: list[list[Any]] = [["block", 15], ["beat", 3], ["await_signal", 15], ["report", {"outcome": "stopped"}]]
SCRIPTS: dict[str, dict[str, Any]] = {
    "done": {"first": [[["print", "started"], ["beat", 1], ["sleep", 0.1], *DONE], []]},
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

        def stop_at_first_step(beat: object) -> None:
            if not scene.report.steps[1:]:
                signal.raise_signal(signal.SIGTERM)

        scene.report.on_progress = stop_at_first_step
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


def main(folder: str, unattended_s: str = "") -> None:
    if unattended_s:
        retry.UNATTENDED_S = retry.FULL_S = float(unattended_s)
        library = Preloaded()
        for number, line in enumerate(sys.stdin):
            print(json.dumps(play(json.loads(line), Path(folder) / f"run-{number:04d}", library)), flush=True)
        return
    scene = Scene(RunDir(Path(folder)))
    scene.report = Printer()
    scene.launch = {"stop_grace_s": 30.0}
    ended = scene.supervise()
    print(sentence_of(ended.status, ended.reason), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
