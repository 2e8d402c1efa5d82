"""The run folder: where everything about a run lives, and who holds it.

    runs/<experiment>/<run>/
        config.yaml  environment.json  code/  code.patch  state.json  lease  mlflow.json  slurm.json
        container.json                           runtime, image and digest, where ranks stand in containers
        journal/attempt-001.rank-00000.jsonl     metrics, one record a line
        journal/shipped.json                     how far MLflow has them
        checkpoints/step-00000100/               see runtime/checkpoint.py
        model/                                   the final model in MLflow's layout
        artifacts/                               what the trainer leaves for people: plots, samples
        attempts/001/                            one per start of the ranks
            rank-00000.log  rank-00000.beat.json  rank-00000.outcome.json  request.json  failure.json
            preflight.json  preflight.txt        what was found on the nodes; in the first of each life of a job
            network.json                         what the ranks measured between them
            stacks.txt  rank-00000.stacks.txt  rank-00000.flight.json      of ranks that stood still
            stragglers.jsonl                     who held the others up (launch/stragglers.py), if anyone

Supervisor, ranks and shipper are separate processes, perhaps on separate hosts; these files are all that they share.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import RunFolderError
from hpcdist.runs_dir import claim_experiment

Status = Literal["created", "queued", "running", "stopped", "finished", "failed", "cancelled"]
#: States in which no supervisor is at work.
ENDED: frozenset[str] = frozenset({"stopped", "finished", "failed", "cancelled"})
_OUTCOME = re.compile(r"rank-(\d+)\.outcome\.json")


def write_atomic(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    `durable` also waits until both the content and the name are on disk.
    """
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file or it holds no object (yet)."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, kw_only=True)
class State:
    """What `state.json` says. Times are seconds since the epoch."""

    status: Status
    attempt: int = 0  #: the last attempt that was started; 0 before the first
    restarts: int = 0  #: failures that were answered by a restart
    reason: str = ""  #: one sentence: why the run is in this state
    created: float = 0.0
    ended: float | None = None
    world_size: int = 0
    rejected: bool = False  #: failed by the user's mistake, which no restart cures


class Attempt:
    """`attempts/NNN/`: one start of all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    def beat(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.beat.json"

    def outcome(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.outcome.json"

    def stacks(self, rank: int) -> Path:
        """Where a rank of an attempt that hung stood: stacks of all its threads, and its process."""
        return self.path / f"rank-{rank:05d}.stacks.txt"

    def flight(self, rank: int) -> Path:
        """The last collectives of a rank that was asked for them (`runtime/flight.py`)."""
        return self.path / f"rank-{rank:05d}.flight.json"

    def node_stacks(self, node: str) -> Path:
        """What a node has seen of its ranks, on its way to the supervisor (`launch/stacks`)."""
        return self.path / f"node-{node}.stacks.json"

    @property
    def stacks_summary(self) -> Path:
        """Which rank stood elsewhere than the others, its first line a sentence."""
        return self.path / "stacks.txt"

    @property
    def request(self) -> Path:
        """`{"action": "stop"|"cancel", "by": …, "reason": …}`: what someone asks of this attempt."""
        return self.path / "request.json"

    @property
    def failure(self) -> Path:
        """What ended this attempt, if it failed (`launch/policy.py`)."""
        return self.path / "failure.json"

    @property
    def preflight(self) -> Path:
        """What was found on the nodes of a Slurm job before these ranks were started (`launch/job/preflight.py`)."""
        return self.path / "preflight.json"

    @property
    def network(self) -> Path:
        """What the ranks measured between them before they trained (`runtime/flight_check.py`)."""
        return self.path / "network.json"

    @property
    def stragglers(self) -> Path:
        """Who held the others up, a line each time that was told: `text`, and the figures (`launch/stragglers.py`)."""
        return self.path / "stragglers.jsonl"

    def straggler_lines(self) -> list[dict[str, Any]]:
        """All that was told of stragglers, in order."""
        try:
            lines = self.stragglers.read_text().splitlines(keepends=True)
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def straggling(self) -> list[str]:
        """What was told last of those that were stragglers to the end, or are."""
        last = {(line["role"], line["name"]): line for line in self.straggler_lines()}
        return [line["text"] for line in last.values() if line["event"] == "slow"]

    def ask(self, action: Literal["stop", "cancel"], *, by: str, reason: str) -> None:
        """Leave a request. The ranks look at it once a second, the supervisor more often."""
        write_json(self.request, {"action": action, "by": by, "reason": reason, "time": time.time()})

    def outcomes(self, *, besides: Container[int] = ()) -> dict[int, dict[str, Any]]:
        """What the ranks said of their end, by rank; those in `besides` are not read."""
        found = {}
        with os.scandir(self.path) as entries:
            matches = [match for entry in entries if (match := _OUTCOME.fullmatch(entry.name))]
        for rank, name in sorted((int(match[1]), match[0]) for match in matches):
            if rank not in besides and (outcome := read_json(self.path / name)) is not None:
                found[rank] = outcome
        return found


class RunDir:
    """One run's folder. Construct it on an existing folder with `RunDir.open` or make one with `RunDir.create`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def experiment(self) -> str:
        return self.path.parent.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def container(self) -> Path:
        """Runtime, image and digest of the ranks' containers, and what is in them; where ranks have any."""
        return self.path / "container.json"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def artifacts(self) -> Path:
        """Files that a trainer leaves for people; there once it has left one."""
        return self.path / "artifacts"

    @property
    def mlflow(self) -> Path:
        return self.path / "mlflow.json"

    @property
    def lease(self) -> Path:
        return self.path / "lease"

    def snapshot_of(self, path: Path) -> Path | None:
        """The copy of a file in this run's snapshot of the code, or None where there is none."""
        code = (read_json(self.environment) or {}).get("code", {})
        if not code.get("copied") or not path.is_relative_to(code["root"]):
            return None
        copy = self.code / path.relative_to(code["root"])
        return copy if copy.is_file() else None

    @classmethod
    def create(cls, path: Path) -> RunDir:
        """Make the folder (mode 0700: logs and configs are the owner's) and its sub-folders.

        Raises RunFolderError when it exists or cannot be written.
        """
        run = cls(path)
        try:
            claim_experiment(path.parent)
            path.mkdir(mode=0o700)
            for folder in (run.journal, run.checkpoints, path / "attempts"):
                folder.mkdir()
        except OSError as error:
            if isinstance(error, FileExistsError) and path.is_dir():
                raise RunFolderError(
                    f"run folder {path} exists already: choose another `name`, or go on with"
                    f" `hpcdist resume {path.name}`"
                ) from error
            hint = " (a container is started as its owner with `--user $(id -u):$(id -g)`)"
            raise RunFolderError(
                f"run folder {path} cannot be made ({error.strerror}): set `runs_dir` to a folder that you can write"
                + hint * isinstance(error, PermissionError)
            ) from error
        run.write_state(State(status="created", created=time.time()))
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The run in an existing folder. Raises RunFolderError when the folder holds no run."""
        if not (path / "state.json").is_file() or not (path / "config.yaml").is_file():
            raise RunFolderError(f"{path} holds no run (no state.json and config.yaml in it)")
        return cls(path.absolute())

    def read_state(self) -> State:
        raw = read_json(self.path / "state.json")
        if raw is None:
            raise RunFolderError(f"{self.path / 'state.json'} is missing or unreadable")
        return State(**raw)

    def write_state(self, state: State) -> None:
        write_json(self.path / "state.json", state.__dict__, durable=True)

    def ask(self, action: Literal["stop", "cancel"], *, by: str, reason: str) -> None:
        """Leave a request with the attempt under way, and with the next one if that begins at this very moment."""
        asked = None
        while (number := self.read_state().attempt) != asked:
            self.attempt(number).ask(action, by=by, reason=reason)
            asked = number

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        return [Attempt(path) for path in sorted((self.path / "attempts").iterdir()) if path.name.isdigit()]

    def new_attempt(self) -> Attempt:
        number = max((attempt.number for attempt in self.attempts()), default=0) + 1
        path = self.path / "attempts" / f"{number:03d}"
        path.mkdir()
        return Attempt(path)

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / f"{number:03d}")


def find_runs(runs_dir: Path) -> Iterator[RunDir]:
    """All runs below `runs_dir`, in the order of their names."""
    for state in sorted(runs_dir.glob("*/*/state.json")):
        if (state.parent / "config.yaml").is_file():
            yield RunDir(state.parent.absolute())


def resolve_run(text: str, runs_dir: Path) -> RunDir:
    """The run that `text` names: a folder, `experiment/name`, a name, or a unique prefix of a name.

    Raises RunFolderError when nothing or more than one thing matches.
    """
    if (Path(text) / "state.json").is_file():
        return RunDir.open(Path(text))
    runs = list(find_runs(runs_dir))
    exact = [run for run in runs if text in (run.name, f"{run.experiment}/{run.name}")]
    matches = exact or [run for run in runs if run.name.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(f"{run.experiment}/{run.name}" for run in matches[:5])
        raise RunFolderError(f"{text!r} means {len(matches)} runs ({names}): write more of the name, or the folder")
    raise RunFolderError(f"no run {text!r} under {runs_dir.absolute()}: `hpcdist runs` lists them")
