"""The run folder: where everything about a run lives, and who holds it.

    runs/<experiment>/<run>/
        config.yaml  secrets.json  environment.json  code/  code.patch  state.json  lease  mlflow.json  slurm.json
        config.next.yaml                         the config of a resume until its first step
        container.json                           runtime, image and digest, where ranks stand in containers
        journal/attempt-001.rank-00000.jsonl     metrics, one record a line
        journal/shipped.json                     how far MLflow has them
        journal/names.json                       the originals of names that MLflow does not accept
        checkpoints/step-00000100/               see checkpoint/saver.py
        model/                                   the final model in MLflow's layout
        artifacts/                               what the trainer leaves for people: plots, samples
        attempts/001/                            one per start of the ranks
            key                                  what its ranks know each other by; readable by the owner alone
            rank-00000.log  rank-00000.beat.json  rank-00000.outcome.json  request.json  failure.json
            preflight.json  preflight.txt        what was found on the nodes; in the first of each life of a job
            network.json                         what the ranks measured between them
            stacks.txt  rank-00000.stacks.txt  rank-00000.flight.json      of ranks that stood still
            stragglers.jsonl                     who held the others up (supervisor/stragglers.py), if anyone

Supervisor, ranks and shipper are separate processes, perhaps on separate hosts; these files are all that they share.
`files/formats.py` describes the format number in them.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcdist.errors import RunFolderError
from hpcdist.files import formats, retry
from hpcdist.files.bounded_json import read_json_value
from hpcdist.run.runs_dir import claim_experiment

Status = Literal["created", "queued", "running", "stopped", "finished", "failed", "cancelled"]
#: States in which no supervisor is at work.
ENDED: frozenset[str] = frozenset({"stopped", "finished", "failed", "cancelled"})
KEY_BYTES = 32
_OUTCOME = re.compile(r"rank-([0-9]{1,9})\.outcome\.json")
_ATTEMPT = re.compile(r"[0-9]{1,9}")
#: What a user can do about a damaged file, by its name.
_REPAIRS = {
    "state.json": "restore it, or remove the run folder",
    "sweep.json": "restore it, or remove the folder; the cells stay runs of their own",
    "environment.json": "restore it, or start a new run",
    "slurm.json": "restore it, or remove it if the run has no job in Slurm",
    "mlflow.json": "restore it, or remove it to ship everything again as a new MLflow run",
    "cell.json": "restore it, or remove it, which makes the cell a run of its own",
}


def write_atomic(path: Path, data: bytes | str, *, durable: bool = False, within_s: float | None = None) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    `durable` also waits until both the content and the name are on disk. Transient errors are retried `within_s`, see
    `file_retry.retry`.
    """
    raw = data.encode() if isinstance(data, str) else data
    retry.retry(lambda: _write_once(path, raw, durable=durable), path, within_s=within_s)


def _write_once(path: Path, raw: bytes, *, durable: bool) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        retry.discard(temporary)
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


def write_json(path: Path, value: Mapping[str, Any], *, durable: bool = False, within_s: float | None = None) -> None:
    """Write a file of a run folder, with the present format in it."""
    text = json.dumps(formats.stamped(value), indent=2, sort_keys=True) + "\n"
    write_atomic(path, text, durable=durable, within_s=within_s)


def read_json(path: Path, *, within_s: float | None = None) -> dict[str, Any] | None:
    """The object in a JSON file, or None where there is no such file or it holds no object (yet).

    Transient errors are retried `within_s`, see `file_retry.retry`.
    Raises RunFolderError when a newer hpcdist has written it.
    """
    try:
        value = retry.retry(lambda: read_json_value(path), path, within_s=within_s)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return formats.unstamped(value, path) if isinstance(value, dict) else None


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a file that is always replaced as a whole; None only where there is no such file.

    Raises RunFolderError, with a repair, when it is damaged, cannot be read, or a newer hpcdist has written it.
    """
    repair = _REPAIRS.get(path.name, "remove it")
    try:
        found = read_json(path)
        if found is None and os.path.lexists(path):
            raise RunFolderError(f"{path} is damaged (it holds no JSON object): {repair}")
    except PermissionError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}): {repair}") from error
    return found


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


@dataclass(frozen=True, kw_only=True)
class Request:
    """What someone asks of an attempt."""

    action: Literal["stop", "cancel"] = "stop"
    by: str = "unknown"
    reason: str = "a request that cannot be read"


class Attempt:
    """`attempts/NNN/`: one start of all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    @property
    def key(self) -> Path:
        """32 random bytes that prove that a process belongs to this attempt (`rank/network/store_gate.py`)."""
        return self.path / "key"

    def read_key(self) -> bytes:
        """Return the content of `key`. Raises RunFolderError where it cannot be read or is not whole."""
        try:
            content = retry.retry(self.key.read_bytes, self.key)
        except OSError as error:
            raise RunFolderError(f"{self.key}: the attempt's key cannot be read: {error.strerror}") from error
        if len(content) != KEY_BYTES:
            raise RunFolderError(f"{self.key}: the attempt's key has {len(content)} bytes, not {KEY_BYTES}")
        return content

    def beat(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.beat.json"

    def last_beat(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's last sign of life; None before the first, and where it is damaged or half written."""
        found = read_json(self.beat(rank)) if self.beat(rank).is_file() else None
        return found if found is not None and _is_beat(found) else None

    def outcome(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.outcome.json"

    def stacks(self, rank: int) -> Path:
        """Where a rank of an attempt that hung stood: stacks of all its threads, and its process."""
        return self.path / f"rank-{rank:05d}.stacks.txt"

    def flight(self, rank: int) -> Path:
        """The last collectives of a rank that was asked for them (`rank/telemetry/flight_recorder.py`)."""
        return self.path / f"rank-{rank:05d}.flight.json"

    def node_stacks(self, node: str) -> Path:
        """What a node has seen of its ranks, on its way to the supervisor (`supervisor/hang`)."""
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
        """What ended this attempt, if it failed (`supervisor/restart_policy.py`)."""
        return self.path / "failure.json"

    @property
    def preflight(self) -> Path:
        """Result of the preflight check on the nodes of a Slurm job (`slurm/job/preflight_step.py`)."""
        return self.path / "preflight.json"

    @property
    def network(self) -> Path:
        """What the ranks measured between them before they trained (`rank/collective_check.py`)."""
        return self.path / "network.json"

    @property
    def stragglers(self) -> Path:
        """Detected stragglers, one JSON line each: `text` and the figures (`supervisor/stragglers.py`)."""
        return self.path / "stragglers.jsonl"

    def straggler_lines(self) -> list[dict[str, Any]]:
        """All that was told of stragglers, in order; damaged lines are left out."""
        try:
            lines = retry.retry(self.stragglers.read_bytes, self.stragglers).split(b"\n")[:-1]
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return []
        return [found for line in lines if (found := _straggler(line)) is not None]

    def straggling(self) -> list[str]:
        """What was told last of those that were stragglers to the end, or are."""
        last = {(line["role"], line["name"]): line for line in self.straggler_lines()}
        return [line["text"] for line in last.values() if line["event"] == "slow"]

    def ask(self, action: Literal["stop", "cancel"], *, by: str, reason: str, within_s: float | None = None) -> None:
        """Leave a request. The ranks look at it once a second, the supervisor more often."""
        request = {"action": action, "by": by, "reason": reason, "time": time.time()}
        write_json(self.request, request, within_s=within_s)

    def asked(self, *, within_s: float | None = None) -> Request | None:
        """Return what was asked of this attempt, None when nothing was.

        A damaged request is one to stop: the ranks look at no more than whether the file exists. Transient errors are
        retried `within_s`, see `file_retry.retry`.
        """
        if not retry.retry(self.request.exists, self.request, within_s=within_s):
            return None
        try:
            return formats.fill(Request, read_json(self.request, within_s=within_s) or {}, self.request)
        except RunFolderError:
            return Request()

    def outcomes(self, *, besides: Container[int] = ()) -> dict[int, dict[str, Any]]:
        """What the ranks said of their end, by rank; those in `besides` are not read."""
        found = {}
        try:
            names = retry.retry(lambda: os.listdir(self.path), self.path)
        except NotADirectoryError:
            return {}
        matches = [match for name in names if (match := _OUTCOME.fullmatch(name))]
        for rank, name in sorted((int(match[1]), match[0]) for match in matches):
            if rank not in besides and (outcome := read_json(self.path / name)) is not None:
                found[rank] = outcome
        return found


def _is_beat(found: Mapping[str, Any]) -> bool:
    metrics, total = found.get("metrics"), found.get("total_steps", 0)
    return (
        isinstance(metrics, dict)
        and all(type(value) is float or _is_count(value) for value in metrics.values())
        and _is_count(found.get("step"))
        and (total is None or _is_count(total))
        and type(found.get("time")) in (int, float)
        and 0 <= found["time"] <= formats.LARGEST
    )


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= formats.LARGEST


def _straggler(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = isinstance(found, dict) and all(
        isinstance(found.get(key), str) for key in ("role", "name", "event", "text")
    )
    return found if known else None


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
    def secrets(self) -> Path:
        """Values that `config.yaml` shows as `***`, until the run is finished or cancelled."""
        return self.path / "secrets.json"

    @property
    def next_config(self) -> Path:
        """The config of a resume that changes keys, until its first step (`supervisor/pending_config.py`)."""
        return self.path / "config.next.yaml"

    @property
    def effective_config(self) -> Path:
        """The config that the next attempt, or the present one, uses."""
        return self.next_config if self.next_config.is_file() else self.config

    @property
    def slurm(self) -> Path:
        return self.path / "slurm.json"

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
        code = (read_json(self.environment) or {}).get("code")
        if not isinstance(code, dict) or not code.get("copied") or not path.is_relative_to(str(code.get("root"))):
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
        if not all(retry.retry(file.is_file, file) for file in (path / "state.json", path / "config.yaml")):
            raise RunFolderError(f"{path} holds no run (no state.json and config.yaml in it)")
        return cls(path.absolute())

    def read_state(self) -> State:
        """Raises RunFolderError, which names the file and a repair, when `state.json` cannot be read."""
        path = self.path / "state.json"
        raw = read_record(path)
        if raw is None:
            raise RunFolderError(f"{path} is missing: {_REPAIRS['state.json']}")
        found = formats.fill(State, raw, path)
        # A reason may quote file names with bytes that no terminal takes.
        return replace(found, reason=found.reason.encode(errors="replace").decode())

    def write_state(self, state: State) -> None:
        write_json(self.path / "state.json", state.__dict__, durable=True)
        if state.status in ("finished", "cancelled"):
            retry.retry(lambda: self.secrets.unlink(missing_ok=True), self.secrets)

    def ask(self, action: Literal["stop", "cancel"], *, by: str, reason: str) -> None:
        """Leave a request with the attempt under way, and with the next one if that begins at this very moment."""
        asked = None
        while (number := self.read_state().attempt) != asked:
            self.attempt(number).ask(action, by=by, reason=reason)
            asked = number

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        folder = self.path / "attempts"
        try:
            names = retry.retry(lambda: os.listdir(folder), folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunFolderError(f"{folder} is missing: restore it, or make an empty folder") from error
        found = [folder / name for name in sorted(names) if _ATTEMPT.fullmatch(name)]
        return [Attempt(path) for path in found if path.is_dir()]

    def new_attempt(self) -> Attempt:
        # As a whole: a server that has made the folder may still have answered with an error.
        attempt = retry.retry(self._make_attempt, self.path / "attempts")
        key = secrets.token_bytes(KEY_BYTES)
        retry.retry(lambda: self._write_key(attempt, key), attempt.key)
        return attempt

    def _make_attempt(self) -> Attempt:
        number = max((attempt.number for attempt in self.attempts()), default=0) + 1
        path = self.path / "attempts" / f"{number:03d}"
        path.mkdir()
        return Attempt(path)

    def _write_key(self, attempt: Attempt, key: bytes) -> None:
        """Write the key of an attempt; a repeated write replaces one that failed half-way."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(attempt.key, flags, 0o600), "wb") as file:
            file.write(key)

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / f"{number:03d}")
