"""Facts about a run, read from its folder: setup, attempts, checkpoints and results."""

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from hpcdist.config.document import flat
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import is_unused
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.host.files import read_regular
from hpcdist.host.json_files import LARGEST, read_json
from hpcdist.host.retry import retry
from hpcdist.review.job_ends import cause_by_slurm
from hpcdist.review.known_failures import first_match
from hpcdist.review.markdown import text_of
from hpcdist.review.metric_series import LastValue, common_metric
from hpcdist.review.uncertainty import LARGEST_VALUE, evaluated_on, num_evaluated, share_error, with_error
from hpcdist.review.verdict import Measured
from hpcdist.run import checkpoint_files, config_origin, run_parameters
from hpcdist.run.attempt_times import AttemptTimes, end_of, read_times
from hpcdist.run.checkpoint_files import MANIFEST_FILE, SAMPLES_FILE, complete_checkpoints
from hpcdist.run.config_origin import Override, read_origin
from hpcdist.run.figures import Text
from hpcdist.run.folder import ENDED, Attempt, RunDir, State
from hpcdist.run.job_record import JobStart, all_job_starts, start_at
from hpcdist.run.reached_steps import done_step, lost_steps
from hpcdist.run.samples import HEAD_BYTES, MAX_RESULTS, parse_npy
from hpcdist.run.training_record import DatasetRecord, TrainingRecord, devices_of, read_training

T = TypeVar("T")


def readable(read: Callable[[], T]) -> T | None:
    """Return the result of a function that reads files of a run; None if they are damaged or cannot be read."""
    try:
        return read()
    except (RunFolderError, OSError):
        return None


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """A complete checkpoint, as its manifest describes it."""

    path: Path
    step: int
    created: float | None = None  #: seconds since the epoch
    metrics: Mapping[str, float]  #: finite metrics of an evaluation at this step; empty without one
    sha256: str = ""  #: of the list of the files' hashes, in the format of the command `sha256sum *.pt`


def read_checkpoints(run: RunDir) -> tuple[CheckpointFacts, ...]:
    """Return the checkpoints with a manifest, oldest first; reads no tensors."""
    checkpoints = []
    for step, path in complete_checkpoints(run):
        manifest = readable(partial(read_json, path / MANIFEST_FILE))
        if manifest is not None:
            checkpoints.append(_checkpoint_of(step, path, manifest))
    return tuple(checkpoints)


def _checkpoint_of(step: int, path: Path, manifest: Mapping[str, Any]) -> CheckpointFacts:
    created = finite_number(manifest.get("created"))
    if created is not None and not 0 <= created <= LARGEST:
        created = None
    numbers = {name: finite_number(value) for name, value in _mapping(manifest.get("metrics")).items()}
    metrics = {name: number for name, number in numbers.items() if number is not None}
    files = sorted(_mapping(manifest.get("files")).items())
    hashes = "".join(f"{_mapping(file).get('sha256')}  {name}\n" for name, file in files)
    sha256 = hashlib.sha256(hashes.encode(errors="replace")).hexdigest()
    return CheckpointFacts(path=path, step=step, created=created, metrics=metrics, sha256=sha256)


def best_checkpoint(checkpoints: Iterable[CheckpointFacts], monitor: CheckpointConfig) -> CheckpointFacts | None:
    """Return the checkpoint with the best monitored metric, the newest of equal ones; None if none has the metric."""
    key = monitor.monitor
    sign = -1.0 if monitor.monitor_mode == "min" else 1.0
    evaluated = [checkpoint for checkpoint in checkpoints if key in checkpoint.metrics]
    return max(evaluated, key=lambda checkpoint: (sign * checkpoint.metrics[key], checkpoint.step), default=None)


def finite_number(value: Any) -> float | None:
    """Return a number of a manifest as float; None for NaN, infinity and anything else."""
    if type(value) not in (int, float) or abs(value) > sys.float_info.max or math.isnan(value):
        return None
    return float(value)


#: Cause of an attempt without a recorded end.
UNRECORDED = "the supervisor was killed, or its node failed: no end was recorded"


@dataclass(frozen=True, kw_only=True)
class AttemptFacts:
    """One start of all ranks. Times are seconds since the epoch."""

    number: int
    started: float
    ended: float | None  #: None while the attempt is live; the last sign of life if no end was recorded
    status: str  #: `running`, `finished`, `stopped`, `cancelled` or `failed`
    cause: str  #: one sentence: why the attempt ended; empty while it is live
    nodes: tuple[str, ...] = ()
    time_limit: float | None = None  #: end of the allocation; None without a time limit
    training_began: float | None = None
    #: Step before the first one; None if the attempt did not begin to train, or a script does not report each step.
    first_step: int | None = None
    last_step: int | None = None  #: None if it did not begin to train, or is a script that reports no steps
    steps_lost: int | None = None  #: steps of this attempt that were, or have to be, done again; None if unknown
    failure: str = ""  #: kind of the first failure, see `Failure`; empty if the attempt did not fail
    is_fault: bool = False  #: whether the failure is an exception that comes from a node, device or connection
    failed_nodes: tuple[str, ...] = ()  #: to which its end points, see `_failed_nodes`
    traceback: tuple[str, ...] = ()  #: lines at its end, see `end_of_traceback`

    @property
    def is_bug(self) -> bool:
        """Whether an exit or an error of code or config, also of hpcdist, ended it: no signal, fault or time limit."""
        return self.failure in (*_OF_CODE, "vanished") and not self.is_fault

    @property
    def end(self) -> str:
        """How it ended, for readers: its status, but `interrupted` if it has failed without a bug."""
        if self.status == "failed" and not self.is_bug:
            return "interrupted"
        return self.status


def read_attempts(run: RunDir, state: State, checkpoints: Sequence[CheckpointFacts]) -> tuple[AttemptFacts, ...]:
    """Return the attempts of a run, oldest first.

    Args:
        checkpoints: those of the run, see `read_checkpoints`. The last attempt has lost the steps after the newest one.
    """
    attempts: list[AttemptFacts] = []
    # The step from which the next attempt has continued, or would continue.
    resumed: int | None = checkpoints[-1].step if checkpoints else 0
    ends = ends_by_slurm(run)
    for attempt in reversed(run.attempts()):
        facts = _read_attempt(attempt, state, resumed_at=resumed, start=ends.get(attempt.number))
        if facts.training_began is not None:
            resumed = facts.first_step
        attempts.append(facts)
    return tuple(reversed(attempts))


def interruptions(attempts: Sequence[AttemptFacts], max_chars: int) -> str:
    """Return the causes of the attempts that did not finish; of a longer text the end."""
    interrupted = [attempt for attempt in attempts if attempt.cause and attempt.status != "finished"]
    text = "; ".join(f"{attempt.number}: {attempt.cause}" for attempt in interrupted)
    if len(text) <= max_chars:
        return text
    return "…" + text[len(text) - max_chars + 1 :]


def lost_text(attempts: Sequence[AttemptFacts]) -> str:
    """Return the number of steps that all attempts have lost, as `35` or `at least 35`; empty if none is known."""
    known = [attempt.steps_lost for attempt in attempts if attempt.steps_lost is not None]
    if not known:
        return ""
    is_partial = any(
        attempt.steps_lost is None and attempt.last_step is not None and attempt.status != "running"
        for attempt in attempts
    )
    total = f"{sum(known):,}"
    if is_partial:
        return f"at least {total}"
    return total


def ends_by_slurm(run: RunDir) -> dict[int, JobStart]:
    """Return the starts of the job that Slurm has ended, by their last attempt, unless that finished."""
    starts = readable(lambda: all_job_starts(run)) or []
    last_attempts: dict[JobStart, tuple[int, str]] = {}
    for attempt in run.attempts():
        times = read_times(attempt)
        if times is None:
            continue
        start = start_at(starts, times.supervised)
        if start is not None:
            last_attempts[start] = (attempt.number, times.status)
    ends = {}
    for start, (number, status) in last_attempts.items():
        if start.state and status != "finished":
            ends[number] = start
    return ends


def _read_attempt(attempt: Attempt, state: State, *, resumed_at: int | None, start: JobStart | None) -> AttemptFacts:
    """Return the facts of an attempt.

    Args:
        resumed_at: the step from which the next attempt has continued, or would continue; None if it is unknown.
        start: the start of the job that Slurm has ended during the attempt; None if there is none.
    """
    training = read_training(attempt)
    made = (attempt.key if attempt.key.is_file() else attempt.path).stat().st_mtime
    times = read_times(attempt) or AttemptTimes(supervised=made, began=made)
    status, cause, ended = _end_of_attempt(attempt, state, times, cause_by_slurm(start))
    last_step = done_step(attempt)
    is_script = not times.measured
    if is_script and (training is None or training.began is None):
        last_step = None  # it has only logged values without a step
    if is_script and attempt.number >= state.attempt:
        resumed_at = None  # only its next start shows where it continues
    steps_lost = None
    if status == "finished" and last_step is not None:
        steps_lost = 0
    elif status != "running" and last_step is not None and resumed_at is not None:
        steps_lost = lost_steps(last_step, resumed_at)
    failure = _read(attempt.failure)
    where = _text(failure.get("host"))
    if cause == UNRECORDED:
        where = next(iter(times.nodes), "")  # the supervisor runs on the first one
    training_began = None
    first_step = None
    if training is not None:
        training_began = training.began
        if training.began:
            first_step = training.step_before
    return AttemptFacts(
        number=attempt.number,
        started=times.began,
        ended=ended,
        status=status,
        cause=cause,
        nodes=tuple(node for node in times.nodes if node not in times.idle),
        time_limit=times.time_limit,
        training_began=training_began,
        first_step=first_step,
        last_step=last_step,
        steps_lost=steps_lost,
        failure=_text(failure.get("kind")),
        is_fault=failure.get("is_fault") is True,
        failed_nodes=_failed_nodes(failure, where, start),
        traceback=end_of_traceback(map(str, failure.get("traceback") or ())),
    )


def _failed_nodes(failure: Mapping[str, Any], where: str, start: JobStart | None) -> tuple[str, ...]:
    """Return the nodes to which the end of an attempt points: not by an exception of the code or a decision of Slurm.

    An exception for a lost connection has no such node, since the node on its other end may have failed.

    Args:
        failure: the first one; empty without one.
        where: the node of the first failure or of a killed supervisor; empty without one.
        start: see `_read_attempt`.
    """
    if start is not None and start.state == "NODE_FAIL" and start.failed_nodes:
        return tuple(start.failed_nodes.split(","))
    if not where or (start is not None and start.state in _DECISIONS_OF_SLURM):
        return ()
    if failure.get("kind") in _OF_CODE:
        found = first_match(_text(failure.get("error")).splitlines())
        if found is None or found[0].name != _LOST_DEVICE:
            return ()
    return (where,)


#: Name of the known failure that is one of a device.
_LOST_DEVICE = "gpu-lost"
#: States of jobs that Slurm has ended without a failure.
_DECISIONS_OF_SLURM = ("TIMEOUT", "DEADLINE", "PREEMPTED", "CANCELLED")
#: Kinds of failures, see `Failure`, that are exceptions of the code that ran.
_OF_CODE = ("error", "rejected")
#: Innermost calls of a traceback that are shown, and limit of all lines: some errors have hundreds.
_SHOWN_CALLS = 2
_MAX_TRACEBACK = 10
_CALL = '  File "'
#: Calls of Python that start a script.
_STARTS_SCRIPT = '  File "<frozen runpy>"'


def end_of_traceback(pieces: Iterable[str]) -> tuple[str, ...]:
    """Return the innermost calls of a traceback and the error, without the calls that start a script.

    Args:
        pieces: of one or more lines each, as `traceback.format_exception` returns them.
    """
    lines = "".join(pieces).rstrip().splitlines()
    calls: list[int] = []
    for index, line in enumerate(lines):
        if line.startswith(_STARTS_SCRIPT):
            calls = []  # those before it are hpcdist's
        elif line.startswith(_CALL):
            calls.append(index)
    begin = calls[-_SHOWN_CALLS:][0] if calls else 0
    return tuple(lines[begin : begin + _MAX_TRACEBACK])


def _end_of_attempt(
    attempt: Attempt, state: State, times: AttemptTimes, by_slurm: str
) -> tuple[str, str, float | None]:
    """Return status, cause and time of the end of an attempt, see `AttemptFacts`."""
    status: str = times.status
    cause = times.reason
    ended = times.ended
    request = readable(attempt.read_request) if status in ("stopped", "cancelled") else None
    # For a preemption, the state in Slurm's accounting is more specific than the request.
    if request is not None and request.ends_run and not (by_slurm and request.cause == "preemption"):
        cause = request.after(cause)
    is_last = attempt.number >= state.attempt
    if not status and is_last and state.status in ENDED:
        status = state.status
        cause = state.reason
        ended = ended or state.ended
    elif not status and is_last and state.status == "running":
        status = "running"
    elif not status:
        status = "failed"
        cause = ""
        ended = max(times.began, readable(lambda: end_of(attempt, times)) or 0.0)
    if by_slurm and status not in ("running", "finished"):
        cause = f"{by_slurm}: {cause}" if cause else by_slurm
    if not cause and status == "failed":
        cause = UNRECORDED
    return status, cause, ended


def newest_beat(attempt: Attempt) -> dict[str, Any]:
    """Return rank 0's last heartbeat; empty if there is none or it cannot be read."""
    return readable(lambda: attempt.read_beat(0)) or {}


def last_beat(run: RunDir) -> dict[str, Any]:
    """Return rank 0's last heartbeat in the newest attempt of a run; empty if there is none or it cannot be read."""
    attempts = readable(run.attempts)
    return newest_beat(attempts[-1]) if attempts else {}


#: Where the ranks have a Python of their own; empty if they use that of `host`.
RankPython = Literal["", "container", "environment"]


@dataclass(frozen=True, kw_only=True)
class LiveProgress:
    """Progress of a live run. Times are seconds since the epoch."""

    step: int
    total_steps: int | None = None  #: None if the trainer does not know it
    seen: float  #: time of the last heartbeat
    steps_per_s: float | None = None  #: since the start of this attempt, evaluations and saves included
    time_limit: float | None = None  #: end of the allocation; None without a time limit

    @property
    def eta(self) -> float | None:
        """The time at which training ends at this speed; None if it is unknown."""
        if not self.steps_per_s or not self.total_steps:
            return None
        return self.seen + max(0, self.total_steps - self.step) / self.steps_per_s


class LoggedResult(NamedTuple):
    """The last value that a run has logged of a metric with a known best direction."""

    metric: str
    mode: str  #: `max` or `min`
    last: LastValue

    @property
    def text(self) -> str:
        """The value and its step, as `last eval/loss 0.25 at step 138`."""
        return f"last {self.metric} {self.last.value:.6g} at step {self.last.step:,}"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Setup, result, attempts and progress of a run. Texts are those of the user, not escaped."""

    name: str
    experiment: str
    folder: Path
    run_id: str = ""  #: of MLflow; empty before the run is uploaded
    experiment_id: str = ""  #: of MLflow
    tracking_uri: str = ""  #: of MLflow, without a password; empty before the run is uploaded
    state: State  #: status, cause, number of attempts and restarts, world size, creation and end
    user: str = ""
    host: str = ""  #: the machine on which the run was created
    launcher: str = ""  #: `local` or `slurm`
    job_id: str = ""  #: of Slurm
    command: str = ""  #: the command that created the run
    cwd: str = ""  #: the folder in which that command was started
    versions: Mapping[str, str] = field(default_factory=dict)  #: by package, on `host`
    rank_python: RankPython = ""
    rank_versions: Mapping[str, str] = field(default_factory=dict)  #: by package, of `rank_python`; empty if unknown
    git_commit: str = ""
    no_commit: str = ""  #: why it is empty, if this is known
    code_copied: bool = False
    code_digest: str = ""  #: of the names and contents of the copied files
    git_dirty: bool = False  #: whether there were uncommitted changes
    changed_files: tuple[str, ...] = ()  #: files with uncommitted changes
    has_patch: bool = False  #: whether MLflow receives `code.patch`, which holds them
    num_untracked: int = 0  #: files of the copied code that are not in git
    live_code: tuple[str, ...] = ()  #: folders of code that the ranks import without a copy
    image: str = ""  #: container image of the ranks; empty without containers
    image_digest: str = ""
    image_build: str = ""  #: hash of the inputs of an image of hpcdist
    trainer: str = ""  #: a shipped trainer, `module:function`, or the words of a script
    stored: StoredConfig = field(default_factory=StoredConfig)
    effective_values: Mapping[str, Any] = field(default_factory=dict)  #: of the config, with a script's arguments
    config_name: str = ""  #: the config as given; empty if it is not recorded
    cluster_name: str = ""  #: the site profile as given; empty without one
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """Keys with other values than the config as given."""
    like: str = ""  #: the run that has given its config and code
    like_run_id: str = ""  #: its id in MLflow; empty if it was not uploaded
    sweep: str = ""  #: name of the sweep that this run is a cell of
    model: str = ""  #: `model.name` of a trainer that reads it; else empty
    num_parameters: int | None = None
    devices: str = ""  #: of the ranks, see `TrainingRecord`
    cpu: str = ""  #: of rank 0, see `TrainingRecord`
    datasets: tuple[DatasetRecord, ...] = ()
    monitor: str = ""  #: the primary metric, `checkpoint.monitor`
    monitor_mode: str = "max"
    speeds: Mapping[str, float] = field(default_factory=dict)  #: see `median_speeds`
    texts: tuple[Text, ...] = ()  #: the newest ones that the trainer has written, such as a sample of a language model
    checkpoints: tuple[CheckpointFacts, ...] = ()  #: oldest first
    best: CheckpointFacts | None = None
    logged: LoggedResult | None = None  #: see `logged_result`
    script_files: tuple[str, ...] = ()  #: names of a script's files in the checkpoint folder, the newest last
    has_model: bool = False  #: whether the final model is exported in MLflow's format
    attempts: tuple[AttemptFacts, ...] = ()
    progress: LiveProgress | None = None  #: None unless the run is live

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of the newest attempt; empty before the first one."""
        if not self.attempts:
            return ()
        return self.attempts[-1].nodes

    @property
    def last_traceback(self) -> tuple[str, ...]:
        """The end of the traceback that ended the last attempt; empty without one."""
        if not self.attempts:
            return ()
        return self.attempts[-1].traceback

    @property
    def is_live(self) -> bool:
        """Whether the run has not ended: it waits, or it is running."""
        return self.state.status not in ENDED

    @property
    def is_script(self) -> bool:
        """Whether the run trains with a script of the user instead of a trainer."""
        return bool(self.stored.config.trainer.script)

    @property
    def primary_metric(self) -> str:
        """The metric of the result; empty if neither the config nor what the run has logged gives one."""
        if self.logged is not None:
            return self.logged.metric
        return self.monitor

    @property
    def has_uploaded_best(self) -> bool:
        """Whether MLflow has the files of the best checkpoint: they are uploaded at the end of a run."""
        return self.best is not None and bool(self.run_id) and not self.is_live and self.state.status != "stopped"

    @property
    def best_value(self) -> float:
        """The value of the primary metric at the best checkpoint, which the run must have."""
        assert self.best is not None, "the caller has checked it"
        return self.best.metrics[self.monitor]

    @property
    def num_evaluated(self) -> int | None:
        """The number of samples that the best value is a proportion of; None if it is none, or unknown."""
        return num_evaluated(self.monitor, self.best_value, self.datasets)

    @property
    def best_text(self) -> str:
        """The best value with its error if that is known, as `0.978 ± 0.008`."""
        return with_error(self.best_value, share_error(self.best_value, self.num_evaluated), f"{self.best_value:.6g}")

    @property
    def best_at_step(self) -> str:
        """The best value and its step, as `0.978 ± 0.008 at step 138`."""
        assert self.best is not None, "the caller has checked it"
        return f"{self.best_text} at step {self.best.step:,}"

    def measured(self) -> Measured:
        """Return the best value with its per-sample results, if there are some."""
        assert self.best is not None, "the caller has checked it"
        data = evaluated_on(self.monitor, self.datasets)
        samples: Sequence[float] | None = None
        path = self.best.path / SAMPLES_FILE
        with suppress(OSError, ValueError):
            raw = retry(lambda: read_regular(path, 4 * MAX_RESULTS + HEAD_BYTES), path)
            samples = parse_npy(raw, self.best_value)
        if samples is None or data is None or len(samples) != data.num_samples:
            samples = ()
        return Measured(values=(self.best_value,), mode=self.monitor_mode, data=data, samples=samples)


def read_facts(run: RunDir, state: State | None = None) -> RunFacts:
    """Return the facts of a run, or of a given state of it. Missing, damaged and older files give empty values.

    Raises RunFolderError if `state.json` or the list of attempts cannot be read, OSError if the file system fails.
    """
    state = state or run.read_state()
    try:
        stored = read_stored(run.config)
    except (ConfigError, RunFolderError) as error:
        stored = StoredConfig(problem=str(error))
    monitor = stored.config.checkpoint
    checkpoints = read_checkpoints(run)
    attempts = read_attempts(run, state, checkpoints)
    training = _newest_training(run)
    devices, cpu = devices_of(run)
    return replace(
        _setup(run, state, stored),
        effective_values=run_parameters.effective_values(run, stored),
        num_parameters=training.num_parameters,
        devices=devices,
        cpu=cpu,
        datasets=training.datasets,
        monitor=monitor.monitor,
        monitor_mode=monitor.monitor_mode,
        checkpoints=checkpoints,
        script_files=tuple(checkpoint_files.script_files(run)),
        best=best_checkpoint(checkpoints, monitor),
        has_model=(run.model / "MLmodel").is_file(),
        attempts=attempts,
        progress=_progress(run, attempts) if state.status == "running" else None,
    )


def _newest_training(run: RunDir) -> TrainingRecord:
    """Return the newest record of training with datasets or a number of parameters; an empty one without any."""
    trainings = [read_training(attempt) for attempt in reversed(run.attempts())]
    for training in trainings:
        if training is not None and (training.datasets or training.num_parameters is not None):
            return training
    return TrainingRecord()


def _setup(run: RunDir, state: State, stored: StoredConfig) -> RunFacts:
    """Return the facts about the command, the code, the environment and the config of a run."""
    environment = _read(run.environment)
    container = _read(run.container)
    mlflow = _read(run.mlflow)
    image = container or environment  # the ranks' containers, else the container of the whole run
    code = _mapping(environment.get("code"))
    origin = read_origin(run)
    config = stored.config
    like = _mapping(environment.get("like"))
    rank_python = _rank_python(environment, container, stored)
    facts = RunFacts(
        name=run.name,
        experiment=run.experiment,
        folder=run.path,
        run_id=_text(mlflow.get("run_id")),
        experiment_id=_text(mlflow.get("experiment_id")),
        tracking_uri=_text(mlflow.get("uri")),
        state=state,
        user=_text(environment.get("user")),
        host=_text(environment.get("host")),
        launcher=_text(environment.get("launcher")),
        job_id=_text(_read(run.slurm).get("job_id")),
        command=_text(environment.get("command")),
        cwd=_text(code.get("cwd")),
        versions=_texts({"python": environment.get("python"), **_mapping(environment.get("versions"))}),
        rank_python=rank_python,
        rank_versions=_rank_versions(run, rank_python),
        git_commit=_text(environment.get("git_commit")),
        no_commit=_text(code.get("no_commit")),
        code_copied=code.get("copied") is True,
        code_digest=_text(environment.get("code_digest")),
        git_dirty=environment.get("git_dirty") is True,
        changed_files=_list_of_texts(code.get("changed")),
        has_patch=config.tracking.patch and run.patch.is_file(),
        num_untracked=code["num_untracked"] if isinstance(code.get("num_untracked"), int) else 0,
        live_code=_list_of_texts(code.get("live")),
        image=_text(image.get("image")),
        image_digest=_text(image.get("image_digest")),
        image_build=_text(image.get("image_build")),
        trainer=_trainer(stored),
        stored=stored,
        like=_text(like.get("run")),
        like_run_id=_text(like.get("run_id")),
        sweep=_text(_read(run.path / "cell.json").get("sweep")),
        model=_model(stored),
    )
    if origin is None:
        return facts
    return replace(
        facts,
        config_name=origin.config,
        cluster_name=origin.cluster,
        overrides=config_origin.overrides(origin, stored.values),
    )


def _trainer(stored: StoredConfig) -> str:
    if not stored.values:
        return ""
    trainer = stored.config.trainer
    return " ".join(trainer.script or [trainer.target])


def _model(stored: StoredConfig) -> str:
    """Return `model.name`; empty if the code of the run is no shipped trainer that reads it."""
    if stored.trainer is None or is_unused(stored.config.trainer.target, "model.name"):
        return ""
    return stored.config.model.name


def _rank_python(environment: Mapping[str, Any], container: Mapping[str, Any], stored: StoredConfig) -> RankPython:
    config = stored.config
    is_job = environment.get("launcher") == "slurm"
    if container or (is_job and config.container.runtime != "none"):
        return "container"
    if is_job and config.cluster.environment.kind != "none":
        return "environment"
    return ""


def _rank_versions(run: RunDir, rank_python: RankPython) -> dict[str, str]:
    record: dict[str, Any] = {}
    if rank_python == "container":
        record = _read(run.container)
    elif rank_python == "environment":
        record = _read(run.rank_environment)
    return _texts({name: record.get(name) for name in ("python", "torch", "cuda", "driver", "hpcdist")})


def _progress(run: RunDir, attempts: tuple[AttemptFacts, ...]) -> LiveProgress | None:
    if not attempts:
        return None
    current = attempts[-1]
    beat = newest_beat(run.attempt(current.number))
    if not beat:
        return None
    elapsed_s = beat["time"] - (current.training_began or current.started)
    steps_per_s = None
    if current.first_step is not None and beat["step"] > current.first_step and elapsed_s > 0:
        steps_per_s = (beat["step"] - current.first_step) / elapsed_s
    return LiveProgress(
        step=beat["step"],
        total_steps=beat.get("total_steps"),
        seen=beat["time"],
        steps_per_s=steps_per_s,
        time_limit=current.time_limit,
    )


def read_environment(run: RunDir) -> dict[str, str]:
    """Return the recorded environments of a run and its ranks, and its job, as texts by flat key; without nulls.

    Raises RunFolderError if a file is damaged, OSError if the file system fails.
    """
    files = {
        "": run.environment,
        "container.": run.container,
        "rank_environment.": run.rank_environment,
        "slurm.": run.slurm,
    }
    texts = {}
    for prefix, path in files.items():
        for key, text in flat_texts(read_json(path) or {}).items():
            if text != "null":
                texts[prefix + key] = text
    return texts


def flat_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a nested mapping as texts, by keys such as `model.name`."""
    return {key: text_of(value) for key, value in flat(tree).items()}


def _read(path: Path) -> dict[str, Any]:
    return readable(lambda: read_json(path)) or {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in values.items() if isinstance(value, str) and value}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _list_of_texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def logged_result(facts: RunFacts, read_last: Callable[[], Mapping[str, LastValue]]) -> LoggedResult | None:
    """Return the result of a finished run without evaluated checkpoints, as of most scripts; None for other runs.

    Only of a finished run, since another one may have ended anywhere, and of a metric with a known best direction.

    Args:
        read_last: returns the last values of the run by metric; called only if they are needed.
    """
    if facts.best is not None or facts.state.status != "finished":
        return None
    last_values = read_last()
    metric, mode = common_metric([last_values], facts.monitor, facts.monitor_mode)
    if not mode:
        return None
    last = last_values[metric]
    if not abs(last.value) <= LARGEST_VALUE:  # NaN included
        return None
    return LoggedResult(metric, mode, last)
