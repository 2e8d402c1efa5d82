"""A run folder, fake ranks that execute a script, and their supervisor.

python supervisor_scene.py RUN_DIR    supervises in this process, as `hpcdist run` does; prints the last state
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

import hpcdist.supervisor.local as local_module
import hpcdist.supervisor.supervisor as supervisor_module
import hpcdist.supervisor.watch as watch_module
from hpcdist.config.launch_schema import LaunchConfig, NotifyConfig, TrackingConfig
from hpcdist.config.schema import Config, TrainerConfig
from hpcdist.run.folder import Attempt, RunDir, State, sentence_of
from hpcdist.supervisor.children import ShipperProcess
from hpcdist.supervisor.launcher import NodeChanges
from hpcdist.supervisor.local import LocalLauncher
from hpcdist.supervisor.plan import Plan
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
    ending: bool = False
    end_or_requeue: Callable[[State], State] = lambda state: state
    num_questions: int = 0  #: number of calls of `is_ending`

    def is_ending(self) -> bool:
        self.num_questions += 1
        return self.ending


class Scene:
    """One run with two fake ranks, and a supervisor with a short polling interval."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.report = Recorder()
        self.launch: dict[str, Any] = {}
        self.tracking: dict[str, Any] = {}
        self.trainer: dict[str, Any] = {}
        self.notify: dict[str, Any] = {}
        self.env: dict[str, str] = {"PATH": os.environ["PATH"]}
        self.tracking_uri = "sqlite:////nowhere/mlflow.db"
        #: Command that replaces the shipper.
        self.shipper = ["true"]
        self.num_ranks = 2
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
            roles=self.roles,
            launch=LaunchConfig(**self.launch),
            tracking=TrackingConfig(**self.tracking),
            notify=NotifyConfig(**self.notify),
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

        supervisor = supervisor or self.supervisor()
        with (
            mock.patch.object(watch_module, "POLL_S", 0.02),
            mock.patch.object(watch_module, "PEER_GRACE_S", 0.3),
            mock.patch.object(
                local_module, "rank_command", lambda run_dir: [sys.executable, "-S", str(FAKE_RANK), str(run_dir)]
            ),
            mock.patch.object(supervisor_module, "ShipperProcess", StubShipper),
            self.launcher,
        ):
            return supervisor.run()

    def log(self, rank: int, attempt: int = 1) -> str:
        return self.run.attempt(attempt).log(rank).read_text()


if __name__ == "__main__":
    scene = Scene(RunDir(Path(sys.argv[1])))
    scene.report = Printer()
    scene.launch = {"stop_grace_s": 30.0}
    ended = scene.supervise()
    print(sentence_of(ended.status, ended.reason), flush=True)


# --- A named pipe that processes write lines to and hold open for as long as they live.


WAIT_S = 20.0


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
