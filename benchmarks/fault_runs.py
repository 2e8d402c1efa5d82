"""Contenders of `goodput.py` and `recovery.py`: commands that train `baselines/fault_task.py`, and their marks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from baselines.fault_task import Task
from harness import BASELINES, HPCDIST, clean_env, commit_all, signal_tree

NUM_RANKS = 2
#: More restarts than a measurement needs.
MAX_RESTARTS = 10_000
#: Without it, restarted gloo ranks read the addresses of killed ones from the agent's store, and wait for each other.
OF_TORCHRUN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: Restarts without a step between them after which a contender has a failure of its own.
MAX_FRUITLESS_STARTS = 5
POLL_S = 0.01

CONFIG = """\
experiment: faults
trainer: fault_trainer:train
launch: {{device: cpu, num_ranks: {num_ranks}, num_threads: 1, max_restarts: {max_restarts}}}
"""


@dataclass(frozen=True)
class Mark:
    """One line of the file of `fault_task.Marks`."""

    event: str
    rank: int
    pid: int
    step: int
    time: float
    value: float


class MarkReader:
    """Reads the marks of a contender while it runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.marks: list[Mark] = []

    def update(self) -> list[Mark]:
        """Read the new complete lines; return all marks."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._position)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._position += len(text)
            self.marks += [Mark(*json.loads(line)) for line in text.splitlines()]
        return self.marks

    def newest_ranks(self) -> dict[int, int]:
        """Return the newest process of each rank."""
        return {mark.rank: mark.pid for mark in self.marks if mark.event == "entered"}


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is not a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def torchrun(script: str) -> Callable[[Path, Path], Sequence[str]]:
    """Return a function that makes the command of a script of baselines/."""

    def command(task_path: Path, folder: Path) -> Sequence[str]:
        options = [f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={MAX_RESTARTS}", "--standalone"]
        return [sys.executable, "-m", "torch.distributed.run", *options, str(BASELINES / script), str(task_path)]

    return command


def hpcdist(*overrides: str) -> Callable[[Path, Path], Sequence[str]]:
    """Return a function that makes a user's repository and the command of hpcdist in it."""

    def command(task_path: Path, folder: Path) -> Sequence[str]:
        task = json.loads(task_path.read_text())
        for name in ("fault_task.py", "fault_training.py", "fault_trainer.py"):
            shutil.copy(BASELINES / name, folder)
        (folder / "config.yaml").write_text(CONFIG.format(num_ranks=NUM_RANKS, max_restarts=MAX_RESTARTS))
        commit_all(folder)
        settings = [
            f"runs_dir={task['folder']}/runs",
            "name=ours",
            f"params.task={task_path}",
            f"checkpoint.every_steps={task['save_every']}",
        ]
        return [*HPCDIST, "run", "config.yaml", *settings, *overrides]

    return command


#: Functions of the path of a task and of an empty working directory that return a command.
CONTENDERS: Mapping[str, Callable[[Path, Path], Sequence[str]]] = {
    "torchrun, torch.save": torchrun("fault_torchrun.py"),
    "Lightning, ModelCheckpoint": torchrun("fault_lightning.py"),
    "hpcdist": hpcdist(),
}
#: Packages of contenders that the extra `bench` installs.
PACKAGES = {"Lightning, ModelCheckpoint": "lightning"}


@dataclass(frozen=True)
class Running:
    """A contender that has been started."""

    process: subprocess.Popen[bytes]
    began: float
    reader: MarkReader
    log: Path
    task: Task

    def require_alive(self) -> None:
        """End the benchmark if the contender has ended before its last step, or restarts without a step."""
        since_step = takewhile(lambda mark: mark.event != "step", reversed(self.reader.marks))
        starts = sum(mark.event == "entered" and mark.rank == 0 for mark in since_step)
        if starts > MAX_FRUITLESS_STARTS:
            sys.exit(f"{starts} starts without a step:\n{self.log.read_text()[-4000:]}")
        if self.process.poll() is None:
            return
        if not any(mark.event == "step" and mark.step >= self.task.steps for mark in self.reader.update()):
            sys.exit(f"exited with {self.process.returncode} before its last step:\n{self.log.read_text()[-4000:]}")

    def wait_for(self, found: Callable[[Sequence[Mark]], bool], limit_s: float) -> bool:
        """Wait until the marks fulfil a condition; return False after the limit."""
        end = time.time() + limit_s
        while not found(self.reader.update()):
            if time.time() > end:
                return False
            self.require_alive()
            time.sleep(POLL_S)
        return True


@contextmanager
def started(name: str, task: Task) -> Iterator[Running]:
    """Start a contender in a new folder beside the task's; kill what is left of it at the end of the block."""
    folder = Path(task.folder)
    project = folder / "project"
    project.mkdir(parents=True)
    command = CONTENDERS[name](task.write(), project)
    env = {**clean_env(), "OMP_NUM_THREADS": "1", **OF_TORCHRUN}
    log = folder / "output.log"
    with open(log, "wb") as file:
        began = time.time()
        process = subprocess.Popen(command, cwd=project, env=env, stdout=file, stderr=file, start_new_session=True)
    try:
        yield Running(process, began, MarkReader(folder / "marks.jsonl"), log, task)
    finally:
        with suppress(ProcessLookupError):
            signal_tree(process.pid, signal.SIGKILL)
        process.wait()


def data_settings() -> dict[str, Any]:
    """Return the data of a task: MNIST in $HPCDIST_DATA_DIR, or the digits that scikit-learn contains."""
    root = os.environ.get("HPCDIST_DATA_DIR", "")
    return {"data": "mnist" if root else "digits", "root": root}
