"""The run folder, the folders of its attempts, and the folder of runs above.

    runs/<experiment>/<run>/
        config.yaml  environment.json  code/  code.patch  state.json  lease  mlflow.json
        code-files.json                          digests of the copied files, before a rank could write beside them
        secrets.json                             values that config.yaml shows as `***`, until the run finishes
        identity                                 random bytes, by which a replaced folder is noticed
        slurm.json  job.json                     the Slurm job, and its starts
        cell.json                                sweep and values, if the run is a cell of a sweep
        fitted_batch.json                        number of micro-batches that launch.fit_batch has found
        origin.json                              the config of the command line, before its overrides
        script-metrics.log                       output of the process that reads metrics in files of a script
        supervisor.log  shipper.log  sync.log    output of a supervisor in the background, of the shipper, and of the
                                                 upload after a submission
        notifier.log                             failed deliveries of notifications, output of `notify.command`
        container.json                           runtime, image, digest and versions of the ranks' containers
        rank_environment.json                    origin and versions of the ranks' environment (cluster.environment)
        package/                                 links hpcdist for ranks in an environment of their own
        journal/attempt-001.rank-00000.jsonl     metrics, one record per line
        journal/attempt-001.rank-00000.events.jsonl   parameters, tags and models that the code of a rank has logged
        journal/attempt-001.rank-00000.files.jsonl    metrics from event files, csv files and output of a script
        journal/read-files.json                  how much of these files has been read
        journal/last-values.json                 last value of each metric of an ended run, computed from the records
        journal/sent-points.json                 offsets of the records that MLflow has received
        journal/sent-files.json                  artifacts and models that MLflow has received
        journal/sent-facts.json                  tags, parameters and report that MLflow has received
        init_from/                               copy of the weights that `model.init_from` names, and their origin
        checkpoints/step-00000100/               weights, state of the trainer, manifest
        exported/                                program of the final model, until the shipper has made model/ of it
        model/                                   the final model in MLflow's layout
        artifacts/                               files of the trainer, such as plots and samples
        logged_models/m-…/                       models that the code of a rank has logged with MLflow
        report.html                              report of the run as one page, written by the shipper
        attempts/rank-parent.log                 output of the parent process of the ranks, see rank/parent.py
        attempts/job-watchdog.log                output of the process that ends the job if its batch step dies
        attempts/001/                            one per start of the ranks
            key                                  32 random bytes, which authenticate ranks on several machines
            rank-00000.log  rank-00000.beat.json  rank-00000.outcome.json
            rank-00000.written.jsonl             event files and csv files that a script has opened for writing
            request.json                         the request to stop or cancel the attempt
            failure.json                         the first failure
            command-001.json  command-001.rank-00000.json   a command to save or profile, and the answer of a rank
            config.yaml                          config of this attempt and those before, if a resume has changed it
            times.json                           begin and end with its cause, resources of the ranks
            training.json                        first step, devices, datasets and model size
            phases.jsonl                         phases of rank 0: start, evaluations, saves
            preflight.json  preflight.txt        preflight report; in the first attempt of each start of a Slurm job
            srun.log                             output of srun, if the attempt has started the parents of the ranks
            hosts                                nodes of the attempt, for srun
            network.json  nccl.node-00000.log    result of the collective check, and the log of NCCL that it reads
            stacks.txt  rank-00000.flight.json   stack traces and collectives of a hang; the first line of stacks.txt
                                                 is one sentence
            node-NODE.stacks.json                snapshots of the ranks on a node, for the supervisor
            silence.txt                          stack traces of a run that makes no progress, but was not ended
            stragglers.jsonl                     straggler events

Supervisor, ranks and shipper are separate processes, possibly on separate hosts, where they share only these
files. `host/json_files.py` describes the format number in the JSON files.
"""

import errno
import hashlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from hpcdist.errors import RunFolderError
from hpcdist.host import files, ownership, retry
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import LARGEST, fill, read_json, read_json_lines, write_json
from hpcdist.host.ownership import make_private, require_safe, write_private

KEY_BYTES = 32
#: Why an attempt is asked to end. `signal`: the supervisor received a signal, in a job one other than SIGTERM.
#: `preemption`: Slurm ends the job, also for a requeue or a cancellation. `growth`: the ranks restart on more nodes.
#: `idle`: the ranks have done nothing for `launch.idle_timeout_s`.
StopCause = Literal["user", "signal", "time_limit", "preemption", "growth", "idle"]
_SENTENCES: dict[StopCause, str] = {
    "user": "{by}",
    "signal": "{by} to the supervisor",
    "time_limit": "time limit",
    "preemption": "Slurm ends the job",
    "growth": "to restart on more nodes: {by} answers again",
    "idle": "idle: no step, no output, and no use of CPU, GPU or files for {by}",
}
_OUTCOME = re.compile(r"rank-([0-9]{1,9})\.outcome\.json")


@dataclass(frozen=True, kw_only=True)
class StopRequest:
    """A request to end an attempt: `stop` saves first, `cancel` does not."""

    action: Literal["stop", "cancel"] = "stop"
    cause: StopCause  #: decides about restarts and requeues
    by: str = ""  #: for messages only: the command and its user, a signal, or nodes

    @property
    def ends_run(self) -> bool:
        """Whether the run ends with the attempt."""
        return self.cause != "growth"

    @property
    def sentence(self) -> str:
        """The cause, for a message."""
        return _SENTENCES[self.cause].format(by=self.by)

    def after(self, how: str) -> str:
        """Return how an attempt ended, followed by the cause in brackets; only the cause if `how` is empty."""
        if not how:
            return self.sentence
        return f"{how} ({self.sentence})"


class Attempt:
    """`attempts/NNN/`: one start of all ranks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)
        self.key = path / "key"
        self.config = path / "config.yaml"
        self.request = path / "request.json"
        self.failure = path / "failure.json"
        self.preflight = path / "preflight.json"
        self.preflight_text = path / "preflight.txt"
        self.times = path / "times.json"
        self.phases = path / "phases.jsonl"
        self.network = path / "network.json"
        self.stragglers = path / "stragglers.jsonl"
        self.stacks_summary = path / "stacks.txt"
        self.silence = path / "silence.txt"
        self.written = path / "rank-00000.written.jsonl"

    # Files by rank, node and number: see the layout above.

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.log"

    def beat(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.beat.json"

    def outcome(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.outcome.json"

    def flight(self, rank: int) -> Path:
        return self.path / f"rank-{rank:05d}.flight.json"

    def node_stacks(self, node: str) -> Path:
        return self.path / f"node-{node}.stacks.json"

    def command(self, number: int) -> Path:
        return self.path / f"command-{number:03d}.json"

    def command_result(self, number: int, rank: int) -> Path:
        return self.path / f"command-{number:03d}.rank-{rank:05d}.json"

    def read_key(self) -> bytes:
        """Return the content of `key`. Raises RunFolderError if it cannot be read or has another length."""
        try:
            content = retry.retry(self.key.read_bytes, self.key)
        except OSError as error:
            raise RunFolderError(f"{self.key}: the attempt's key cannot be read: {error.strerror}") from error
        if len(content) != KEY_BYTES:
            raise RunFolderError(f"{self.key}: the attempt's key has {len(content)} bytes, not {KEY_BYTES}")
        return content

    def read_beat(self, rank: int) -> dict[str, Any] | None:
        """Return the last heartbeat of a rank; None before the first one, or if it is damaged or half written."""
        path = self.beat(rank)
        if not path.is_file():
            return None
        beat = read_json(path)
        if beat is None or not _is_beat(beat):
            return None
        return beat

    def straggler_events(self) -> list[dict[str, Any]]:
        """Return the events in `stragglers.jsonl`, without damaged lines."""
        texts = ("role", "name", "event", "text")
        events = read_json_lines(self.stragglers)
        return [event for event in events if all(isinstance(event.get(key), str) for key in texts)]

    def current_stragglers(self) -> list[str]:
        """Return the last message about each node or rank that is a straggler now, or was at the end."""
        last = {(event["role"], event["name"]): event for event in self.straggler_events()}
        return [event["text"] for event in last.values() if event["event"] == "slow"]

    def send_request(self, request: StopRequest, *, within_s: float | None = None) -> None:
        """Write a request file. Rank 0 checks for it once a second, the supervisor more often."""
        write_json(self.request, asdict(request) | {"time": time.time()}, within_s=within_s)

    def requested_at(self) -> float:
        """Return when the request was written, in seconds since the epoch; 0 without a request or its time."""
        written = (read_json(self.request) or {}).get("time")
        if isinstance(written, int | float):
            return float(written)
        return 0.0

    def read_request(self, *, within_s: float | None = None) -> StopRequest | None:
        """Return the request; None without one.

        A damaged file counts as a request to stop, because ranks only check whether the file exists.
        """
        if not retry.retry(self.request.exists, self.request, within_s=within_s):
            return None
        try:
            return fill(StopRequest, read_json(self.request, within_s=within_s) or {}, self.request)
        except RunFolderError:
            return StopRequest(cause="user", by="unreadable request file")

    def outcomes(self, *, skip: Container[int] = ()) -> dict[int, dict[str, Any]]:
        """Return the readable outcome files of the ranks by rank, in the order of ranks, without those of `skip`."""
        try:
            names = retry.retry(lambda: os.listdir(self.path), self.path)
        except NotADirectoryError:
            return {}
        numbered = []
        for name in names:
            match = _OUTCOME.fullmatch(name)
            if match is not None:
                numbered.append((int(match[1]), name))
        outcomes = {}
        for rank, name in sorted(numbered):
            if rank in skip:
                continue
            outcome = read_json(self.path / name)
            if outcome is not None:
                outcomes[rank] = outcome
        return outcomes


def _is_beat(beat: Mapping[str, Any]) -> bool:
    """Return whether a heartbeat file has the keys that its readers use, with values of the expected types."""
    metrics = beat.get("metrics")
    if not isinstance(metrics, dict):
        return False
    if not all(type(value) is float or _is_count(value) for value in metrics.values()):
        return False
    metric_steps = beat.get("metric_steps", {})
    if not isinstance(metric_steps, dict) or not all(_is_count(step) for step in metric_steps.values()):
        return False
    total_steps = beat.get("total_steps", 0)
    if total_steps is not None and not _is_count(total_steps):
        return False
    moment = beat.get("time")
    is_time = isinstance(moment, int | float) and not isinstance(moment, bool) and 0 <= moment <= LARGEST
    return is_time and _is_count(beat.get("step"))


def _is_count(value: object) -> bool:
    return type(value) is int and abs(value) <= LARGEST


# The folder of runs and the database in it belong to one user. Two users would lock each other out of the database and
# of the experiments' folders, and a group-writable folder would let each member change the code that other members'
# runs execute. Users share results through a tracking server. Folders of root are accepted, too: container images have
# one that all users can write to, and root can change every file anyway.

DATABASE = "mlflow.db"


def claim(runs_dir: Path) -> None:
    """Create the folder of runs (mode 0700). Raises RunFolderError if others could replace it, or own its database."""
    require_safe(runs_dir)  # nothing is created if it is refused
    # The mode applies to the last folder only.
    retry.retry(lambda: runs_dir.mkdir(mode=0o700, parents=True, exist_ok=True), runs_dir)
    require_safe(runs_dir)
    place = own_place(runs_dir)
    if place != runs_dir:
        make_private(place)
    require_safe(place / DATABASE)


def own_place(runs_dir: Path) -> Path:
    """Return the folder of database and environments: one of this user in `runs_dir` if others may write there."""
    try:
        is_shared = ownership.is_shared(runs_dir.stat())
    except OSError:  # `claim` will make it
        return runs_dir
    if not is_shared:
        return runs_dir
    return runs_dir / f".hpcdist-{os.geteuid()}"


def claim_experiment(folder: Path) -> None:
    """Create the folders of runs and of an experiment, mode 0700, if they are missing. Raises like `claim`."""
    claim(folder.parent)
    retry.retry(lambda: folder.mkdir(mode=0o700, exist_ok=True), folder)
    require_safe(folder)


def make_database(path: Path) -> None:
    """Create an empty sqlite database, or restrict an existing one to its owner: its journals get the same mode.

    Raises RunFolderError if the database belongs to another user, or others may write to its folder.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_safe(path)
    if ownership.is_shared(path.parent.stat()):
        raise RunFolderError(
            f"others may write to {path.parent}, so that they can put a journal beside the database {path.name}:"
            f" `chmod go-w {path.parent}`, or use a database in a folder of your own (tracking.uri)"
        )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:  # MLflow creates it with the umask's mode
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


# The run folder and its state file.

Status = Literal["created", "queued", "running", "stopped", "finished", "failed", "cancelled"]
#: Final states: no supervisor is at work.
ENDED: frozenset[str] = frozenset({"stopped", "finished", "failed", "cancelled"})
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
    """Return the object in a file that is always replaced atomically; None if the file is missing.

    Raises RunFolderError, which proposes a repair, if the file is damaged or cannot be read.
    """
    repair = _REPAIRS.get(path.name, "remove it")
    try:
        record = read_json(path)
        if record is None and os.path.lexists(path):
            raise RunFolderError(f"{path} is damaged (it holds no JSON object): {repair}")
    except PermissionError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror}): {repair}") from error
    return record


def require_record(path: Path) -> dict[str, Any]:
    """Return the object in a file that must exist. Raises RunFolderError like `read_record`, and if it is missing."""
    record = read_record(path)
    if record is None:
        raise RunFolderError(f"{path} is missing: {_REPAIRS[path.name]}")
    return record


def sentence_of(status: str, reason: str) -> str:
    """Return `status: reason`, or the status alone if there is no reason."""
    if not reason:
        return status
    return f"{status}: {reason}"


@dataclass(frozen=True, kw_only=True)
class State:
    """The content of `state.json`. Times are seconds since the epoch."""

    status: Status
    attempt: int = 0  #: number of the last attempt; 0 before the first
    restarts: int = 0  #: number of restarts of the ranks: after failures, and on other or more nodes
    reason: str = ""  #: one sentence: the cause of this status
    created: float = 0.0
    ended: float | None = None
    world_size: int = 0
    rejected: bool = False  #: failed because of a user error, which a restart cannot fix
    lost: bool = False  #: the supervisor or the job died, and another process recorded this end

    @property
    def sentence(self) -> str:
        """The status and its reason."""
        return sentence_of(self.status, self.reason)


class RunDir:
    """One run's folder. Open an existing one with `RunDir.open`, make a new one with `RunDir.create`."""

    kind = "run"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.experiment = path.parent.name
        self.config = path / "config.yaml"
        self.secrets = path / "secrets.json"
        self.environment = path / "environment.json"
        self.container = path / "container.json"
        self.rank_environment = path / "rank_environment.json"
        self.package = path / "package"
        self.fitted_batch = path / "fitted_batch.json"
        self.slurm = path / "slurm.json"
        self.mlflow = path / "mlflow.json"
        self.lease = path / "lease"
        self.code = path / "code"
        self.code_files = path / "code-files.json"
        self.patch = path / "code.patch"
        self.journal = path / "journal"
        self.init_from = path / "init_from"
        self.checkpoints = path / "checkpoints"
        self.exported = path / "exported"
        self.model = path / "model"
        self.logged_models = path / "logged_models"
        self.report = path / "report.html"
        self.artifacts = path / "artifacts"

    @property
    def resume_command(self) -> str:
        """The command that resumes the run from a shell in the current folder.

        It contains the name of a run in the folder `runs` there, and the path of any other run.
        """
        path = files.short_path(self.path)
        if Path(path).parts[:-2] == ("runs",):
            return f"hpcdist resume {self.name}"
        return f"hpcdist resume {shlex.quote(path)}"

    def snapshot_of(self, path: Path) -> Path | None:
        """Return the copy of a file in the run's code snapshot; None if there is none."""
        root = self._copied_root()
        if not root:
            return None
        return self.copy_in(root, path)

    def copy_in(self, root: str, path: Path) -> Path | None:
        """Return the copy of a file, or None if there is none; `root` is the top of the code that was copied."""
        # `root` contains no symbolic links, the path of the file may.
        for original in (path, path.parent.resolve() / path.name):
            if original.is_relative_to(root):
                copy = self.code / original.relative_to(root)
                if copy.is_file():
                    return copy
        return None

    def with_original_paths(self, text: str) -> str:
        """Return a text in which files of this run's code snapshot have the paths from which they were copied."""
        root = self._copied_root()
        if not root:
            return text
        return text.replace(f"{self.code}/", f"{root.rstrip('/')}/")

    def _copied_root(self) -> str:
        """Return the top of the code that was copied; empty if no code was."""
        code = (read_json(self.environment) or {}).get("code")
        if not isinstance(code, dict) or not code.get("copied"):
            return ""
        return str(code["root"])

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the folder, mode 0700 because logs and configs are private, and its subfolders."""
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
            hint = ""
            if isinstance(error, PermissionError):
                hint = " (in a container, run as the folder's owner: `--user $(id -u):$(id -g)`, rootless `--user 0:0`)"
            raise RunFolderError(
                f"run folder {path} cannot be created ({error.strerror}): set `runs_dir` to a folder that you can"
                f" write{hint}"
            ) from error
        run.write_state(State(status="created", created=time.time()))
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Return the run in a folder. Raises RunFolderError if the folder holds none."""
        for file in (path / "state.json", path / "config.yaml"):
            if not retry.retry(file.is_file, file):
                raise RunFolderError(f"{path} holds no run (no state.json and config.yaml in it)")
        return cls(path.absolute())

    def read_state(self) -> State:
        """Return the content of `state.json`. Raises RunFolderError, with a repair, if it cannot be read."""
        path = self.path / "state.json"
        state = fill(State, require_record(path), path)
        # A reason may quote file names with bytes that terminals reject.
        return replace(state, reason=state.reason.encode(errors="replace").decode())

    def write_state(self, state: State) -> None:
        """Write the state durably; a run that has finished or is cancelled loses its secrets."""
        write_json(self.path / "state.json", state.__dict__, durable=True)
        if state.status in ("finished", "cancelled"):
            retry.retry(lambda: self.secrets.unlink(missing_ok=True), self.secrets)

    def send_request(self, request: StopRequest) -> None:
        """Send a request to the current attempt, and to the next one if that starts during this call."""
        requested = None
        while True:
            number = self.read_state().attempt
            if number == requested:
                return
            self.attempt(number).send_request(request)
            requested = number

    def attempts(self) -> list[Attempt]:
        """Return the attempts in the order of their numbers. Raises RunFolderError if their folder is missing."""
        folder = self.path / "attempts"
        try:
            names = retry.retry(lambda: os.listdir(folder), folder)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise RunFolderError(f"{folder} is missing: restore it, or make an empty folder") from error
        paths = [folder / name for name in sorted(names) if re.fullmatch(r"[0-9]{1,9}", name)]
        return [Attempt(path) for path in paths if path.is_dir()]

    def new_attempt(self) -> Attempt:
        """Make the folder of the next attempt, with a new key."""

        def make() -> Attempt:
            last = max((attempt.number for attempt in self.attempts()), default=0)
            attempt = self.attempt(last + 1)
            attempt.path.mkdir()
            return attempt

        # Retried as a whole: a file server may create the folder and still answer with an error.
        attempt = retry.retry(make, self.path / "attempts")
        write_atomic(attempt.key, secrets.token_bytes(KEY_BYTES), mode=0o600)
        return attempt

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / f"{number:03d}")


# The identity of a run folder, by which processes notice that the folder has been replaced by another one. The file
# `identity` holds random bytes, which only the owner of the folder can read; the supervisor passes their SHA-256 to its
# processes. Another user cannot give a folder this file, and links are not followed. Unlike device, inode and owner, it
# is the same on all nodes, in containers, in user namespaces and after a move of the folder.

IDENTITY_VARIABLE = "HPCDIST_FOLDER_IDENTITY"
#: Random bytes of an identity, which the file holds as hexadecimal digits.
_IDENTITY_BYTES = 32
_IDENTITY_LENGTH = 2 * _IDENTITY_BYTES


def identity(folder: Path) -> str:
    """Return the identity of a run folder, for IDENTITY_VARIABLE; make the file `identity` if it is missing."""
    if not _read(folder):
        write_private(folder / "identity", secrets.token_hex(_IDENTITY_BYTES))
    return _read(folder)


def require_same(folder: Path, env: Mapping[str, str]) -> None:
    """Raise RunFolderError if a folder has another identity than the environment of this process names."""
    if IDENTITY_VARIABLE in env and _read(folder) != env[IDENTITY_VARIABLE]:
        if not os.path.lexists(folder):
            raise RunFolderError(
                f"the run folder {folder} has been moved or deleted since this run was started: move it back, and"
                " continue with `hpcdist resume`"
            )
        raise RunFolderError(
            f"the run folder {folder} has been replaced by another one since this run was started: find out who may"
            " write to the folders above it, move the right one back, and continue with `hpcdist resume`"
        )


@contextmanager
def explain_replacement(folder: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Raise the error of `require_same` if the block fails because the run folder was replaced.

    Without it, the user would see the error of a missing or unreadable file.
    """
    try:
        yield
    except (OSError, RunFolderError):
        require_same(folder, env)
        raise


def _read(folder: Path) -> str:
    """Return the digest of the random bytes; empty if the file is missing, damaged or another user's."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(retry.retry(lambda: os.open(folder / "identity", flags), folder), "rb") as file:
            content = file.read(_IDENTITY_LENGTH + 1)  # one more shows that the file is too long
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP):
            raise
        return ""
    if len(content) != _IDENTITY_LENGTH:
        return ""
    return hashlib.sha256(content).hexdigest()


# Intervals of reads and writes in a run folder, which limit the load of the shared file system at any scale. They are
# exceeded only if hangs could not be detected otherwise: with more ranks than a quarter of `launch.hang_timeout_s` ×
# WRITES_PER_S, 28,800 by default. `benchmarks/scale.py` measures the resulting load.

#: Heartbeats of all ranks together; also system metrics of all nodes together.
WRITES_PER_S = 64.0
#: Step-time points of all nodes together.
TIMES_PER_S = 8.0
#: Files that the supervisor, or the shipper, checks.
CHECKS_PER_S = 64.0
BEAT_EVERY_S = 1.0
#: Limit of the heartbeat interval, as a share of the hang timeout.
_SHARE_OF_HANG = 0.25


def beat_interval_s(rank: int, num_ranks: int, hang_timeout_s: float) -> float:
    """Return the seconds between heartbeats of a rank. Rank 0, which shows the progress, keeps the short interval."""
    interval_s = BEAT_EVERY_S
    if rank != 0:
        interval_s = max(BEAT_EVERY_S, num_ranks / WRITES_PER_S)
    return min(interval_s, _SHARE_OF_HANG * hang_timeout_s)


def num_due_ranks(num_ranks: int, since_last_s: float, hang_timeout_s: float) -> int:
    """Return the number of ranks to check, `since_last_s` seconds after the last check."""
    per_s = max(CHECKS_PER_S, num_ranks / (_SHARE_OF_HANG * hang_timeout_s))
    return min(num_ranks, max(1, round(per_s * since_last_s)))


def system_interval_s(configured_s: float, num_nodes: int) -> float:
    """Return the seconds between system metrics of a node; 0 means none."""
    if configured_s <= 0:
        return 0.0
    return max(configured_s, num_nodes / WRITES_PER_S)


def times_interval_s(num_nodes: int) -> float:
    """Return the minimum seconds between step times of a node; 0 for few nodes, which log at each interval."""
    if num_nodes <= TIMES_PER_S:
        return 0.0
    return num_nodes / TIMES_PER_S
