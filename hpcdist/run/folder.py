"""The run folder: its layout and its state file.

    runs/<experiment>/<run>/
        config.yaml  secrets.json  environment.json  code/  code.patch  state.json  lease  mlflow.json
        identity                                 see run/folder_identity.py
        slurm.json  job.json                     the Slurm job, and its starts
        cell.json                                sweep and values, if the run is a cell of a sweep
        origin.json                              the config of the command line, before its overrides
        supervisor.log  shipper.log              output of a supervisor in the background, and of the shipper
        notifier.log                             failed deliveries of notifications, output of `notify.command`
        rerun.json                               the run that this run repeats, and the result of the comparison
        config.next.yaml                         changed config of a resume, until its first completed step
        container.json                           runtime, image and digest of the ranks' containers
        rank_environment.json                    archive and versions of the ranks' environment (cluster.environment)
        journal/attempt-001.rank-00000.jsonl     metrics, one record per line
        journal/attempt-001.rank-00000.events.jsonl   parameters, tags and models that the code of a rank has logged
        journal/shipped.json                     offsets of the records that MLflow has received
        journal/names.json                       original names of renamed metrics, parameters and tags
        checkpoints/step-00000100/               see checkpoint/checkpoint_folder.py
        model/                                   the final model in MLflow's layout
        artifacts/                               files of the trainer, such as plots and samples
        logged_models/m-…/                       models that the code of a rank has logged with MLflow
        report.html                              report of the run as one page, written by the shipper
        attempts/rank-parent.log                 output of the process that forks the ranks, see rank/parent.py
        attempts/rank-parent-NODE.log            the same on a node of a Slurm job; rank-parent.log is that of srun
        attempts/001/                            one per start of the ranks, see run/attempt.py
            key                                  secret of the attempt; readable by the owner alone
            rank-00000.log  rank-00000.beat.json  rank-00000.outcome.json  request.json  failure.json
            command-001.json  command-001.rank-00000.json   a command to save or profile, and what a rank has done
            times.json                           begin and end with its cause, resources of the ranks
            training.json                        first step, datasets and model size
            phases.jsonl                         phases of rank 0: start, evaluations, saves
            preflight.json  preflight.txt        preflight report; in the first attempt of each start of a Slurm job
            srun.log                             output of srun
            network.json                         result of the collective check
            stacks.txt  rank-00000.stacks.txt  rank-00000.flight.json      stack traces and collectives of a hang
            silence.txt                          stack traces of a run that makes no progress, but was not ended
            stragglers.jsonl                     straggler events

Supervisor, ranks and shipper are separate processes, possibly on separate hosts; they share only these files.
`files/formats.py` describes the format number in the JSON files.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import RunFolderError
from hpcdist.files import formats, retry
from hpcdist.files.atomic import read_json, write_json
from hpcdist.run.attempt import KEY_BYTES, Attempt, Request
from hpcdist.run.runs_dir import claim_experiment

Status = Literal["created", "queued", "running", "stopped", "finished", "failed", "cancelled"]
#: Final states: no supervisor is at work.
ENDED: frozenset[str] = frozenset({"stopped", "finished", "failed", "cancelled"})
_ATTEMPT = re.compile(r"[0-9]{1,9}")
#: Repairs that the error message for a damaged file proposes, by file name.
_REPAIRS = {
    "state.json": "restore it, or remove the run folder",
    "sweep.json": "restore it, or remove the folder; its runs remain ordinary runs",
    "environment.json": "restore it, or start a new run",
    "slurm.json": "restore it, or remove it if the run has no Slurm job",
    "mlflow.json": "restore it, or remove it to ship all records again to a new MLflow run",
    "cell.json": "restore it, or remove it; the run then no longer belongs to its sweep",
}


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the object in a file that is always replaced atomically, or None if there is no such file.

    Raises:
        RunFolderError: the file is damaged, unreadable, or written by a newer hpcdist; the message proposes a repair.
    """
    repair = _REPAIRS.get(path.name, "remove it")
    try:
        found = read_json(path)
        if found is None and os.path.lexists(path):
            raise RunFolderError(f"{path} is damaged (it holds no JSON object): {repair}")
    except PermissionError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}): {repair}") from error
    return found


def require_record(path: Path) -> dict[str, Any]:
    """Return the object in a file that must exist. Raises RunFolderError like `read_record`, and if it is missing."""
    found = read_record(path)
    if found is None:
        raise RunFolderError(f"{path} is missing: {_REPAIRS[path.name]}")
    return found


def sentence_of(status: str, reason: str) -> str:
    """Return a status with its reason, if there is one."""
    return f"{status}: {reason}" if reason else status


@dataclass(frozen=True, kw_only=True)
class State:
    """The content of `state.json`. Times are seconds since the epoch."""

    status: Status
    attempt: int = 0  #: number of the last attempt; 0 before the first
    restarts: int = 0  #: number of failures that a restart answered
    reason: str = ""  #: one sentence: the cause of this status
    created: float = 0.0
    ended: float | None = None
    world_size: int = 0
    rejected: bool = False  #: failed because of a user error, which a restart cannot fix
    lost: bool = False  #: the supervisor or the job died, and another process recorded this end

    @property
    def sentence(self) -> str:
        """Status and reason."""
        return sentence_of(self.status, self.reason)


class RunDir:
    """One run's folder. Open an existing one with `RunDir.open`, make a new one with `RunDir.create`."""

    kind = "run"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.experiment = path.parent.name
        self.config = path / "config.yaml"
        #: Values that `config.yaml` shows as `***`; removed when the run is finished or cancelled.
        self.secrets = path / "secrets.json"
        #: The config of a resume that changes keys, until its first step (`run/pending_config.py`).
        self.next_config = path / "config.next.yaml"
        self.environment = path / "environment.json"
        #: Runtime, image, digest and versions of the ranks' containers; only for runs in containers.
        self.container = path / "container.json"
        self.rank_environment = path / "rank_environment.json"
        self.slurm = path / "slurm.json"
        self.mlflow = path / "mlflow.json"
        self.lease = path / "lease"
        self.code = path / "code"
        self.journal = path / "journal"
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        #: Models that the code of a rank has logged with MLflow, by id; exists once there is one.
        self.logged_models = path / "logged_models"
        #: The page that `review/html_report.py` writes.
        self.report = path / "report.html"
        #: Files of the trainer for the user; exists once the trainer has written one.
        self.artifacts = path / "artifacts"

    @property
    def effective_config(self) -> Path:
        """The config of the current attempt, or of the next one."""
        return self.next_config if retry.exists(self.next_config) else self.config

    def snapshot_of(self, path: Path) -> Path | None:
        """Return the copy of a file in this run's code snapshot, or None if there is none."""
        root = self._copied_root()
        return self.copy_in(root, path) if root else None

    def copy_in(self, root: str, path: Path) -> Path | None:
        """Return the copy of a file, or None if there is none; `root` is the top of the code that was copied."""
        for one in (path, path.parent.resolve() / path.name):  # `root` contains no symbolic links
            if one.is_relative_to(root) and (copy := self.code / one.relative_to(root)).is_file():
                return copy
        return None

    def with_original_paths(self, text: str) -> str:
        """Return a text in which files of this run's code snapshot have the paths from which they were copied."""
        root = self._copied_root()
        return text.replace(f"{self.code}/", f"{root.rstrip('/')}/") if root else text

    def _copied_root(self) -> str:
        """Return the top of the code that was copied; empty if there is no copy."""
        code = (read_json(self.environment) or {}).get("code")
        return str(code["root"]) if isinstance(code, dict) and code.get("copied") else ""

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """Make the folder and its subfolders, mode 0700 because logs and configs are private.

        Raises:
            RunFolderError: the folder exists or cannot be written.
        """
        run = cls(path)
        try:
            claim_experiment(path.parent)
            retry.make_folder(path, 0o700)
            for folder in (run.journal, run.checkpoints, path / "attempts"):
                retry.make_folder(folder)
        except OSError as error:
            if isinstance(error, FileExistsError) and path.is_dir():
                raise RunFolderError(
                    f"run folder {path} exists already: choose another `name`, or continue that run with"
                    f" `hpcdist resume {path.name}`"
                ) from error
            hint = (
                " (in a container, start it as the folder's owner with `--user $(id -u):$(id -g)`, or with `--user 0:0`"
                " if docker is rootless)"
            )
            raise RunFolderError(
                f"run folder {path} cannot be created ({error.strerror}): set `runs_dir` to a folder that you can write"
                + hint * isinstance(error, PermissionError)
            ) from error
        run.write_state(State(status="created", created=time.time()))
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """Return the run in an existing folder. Raises RunFolderError if the folder holds no run."""
        if not all(retry.retry(file.is_file, file) for file in (path / "state.json", path / "config.yaml")):
            raise RunFolderError(f"{path} holds no run (no state.json and config.yaml in it)")
        return cls(path.absolute())

    def read_state(self) -> State:
        """Return the content of `state.json`. Raises RunFolderError, with a repair, if it cannot be read."""
        path = self.path / "state.json"
        found = formats.fill(State, require_record(path), path)
        # A reason may quote file names with bytes that terminals reject.
        return replace(found, reason=found.reason.encode(errors="replace").decode())

    def write_state(self, state: State) -> None:
        """Write the state durably; a run that has ended loses its secrets."""
        write_json(self.path / "state.json", state.__dict__, durable=True)
        if state.status in ("finished", "cancelled"):
            retry.retry(lambda: self.secrets.unlink(missing_ok=True), self.secrets)

    def send_request(self, request: Request) -> None:
        """Send a request to the current attempt, and to the next one if that starts during this call."""
        requested = None
        while (number := self.read_state().attempt) != requested:
            self.attempt(number).send_request(request)
            requested = number

    def attempts(self) -> list[Attempt]:
        """Return all attempts, oldest first."""
        folder = self.path / "attempts"
        try:
            names = retry.retry(lambda: os.listdir(folder), folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunFolderError(f"{folder} is missing: restore it, or make an empty folder") from error
        found = [folder / name for name in sorted(names) if _ATTEMPT.fullmatch(name)]
        return [Attempt(path) for path in found if path.is_dir()]

    def new_attempt(self) -> Attempt:
        """Create the folder of the next attempt, with its key."""
        # Retried as a whole: a file server may create the folder and still answer with an error.
        attempt = retry.retry(self._make_attempt, self.path / "attempts")
        key = secrets.token_bytes(KEY_BYTES)
        retry.retry(lambda: attempt.write_key(key), attempt.key)
        return attempt

    def _make_attempt(self) -> Attempt:
        number = max((attempt.number for attempt in self.attempts()), default=0) + 1
        path = self.path / "attempts" / f"{number:03d}"
        path.mkdir()
        return Attempt(path)

    def attempt(self, number: int) -> Attempt:
        """Return an attempt, which may not exist."""
        return Attempt(self.path / "attempts" / f"{number:03d}")
