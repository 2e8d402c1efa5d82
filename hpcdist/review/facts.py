"""The facts of a run that its reviewers ask for, read from the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hpcdist.config.monitor import monitor_of
from hpcdist.config.schema import find_trainer
from hpcdist.config.tree import flat
from hpcdist.config.written import plain_tree
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.files.atomic import read_json
from hpcdist.review.attempts import AttemptFacts, newest_beat, read_attempts
from hpcdist.review.causes import Cause
from hpcdist.review.checkpoints import CheckpointFacts, best_checkpoint, read_checkpoints
from hpcdist.review.rank_times import read_account
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.origin import Override, overrides, read_origin
from hpcdist.run.parameters import parameters
from hpcdist.run.rerun_record import RerunRecord, read_rerun
from hpcdist.run.saved_checkpoints import script_files
from hpcdist.run.slurm_job import all_job_starts
from hpcdist.run.training_record import Dataset, TrainingRecord, read_training

#: Where the ranks have a Python of their own; empty if they use that of `host`.
RankPython = Literal["", "container", "environment"]


@dataclass(frozen=True, kw_only=True)
class Progress:
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
    num_job_starts: int = 0  #: how often Slurm has started the jobs of the run
    command: str = ""  #: the command that created the run
    cwd: str = ""  #: the folder in which that command was started
    versions: Mapping[str, str] = field(default_factory=dict)  #: by package, on `host`
    rank_python: RankPython = ""
    rank_versions: Mapping[str, str] = field(default_factory=dict)  #: by package, of `rank_python`; empty if unknown
    git_commit: str = ""
    code_copied: bool = False
    git_dirty: bool = False  #: whether there were uncommitted changes
    has_patch: bool = False  #: whether `code.patch` holds them, likely secrets excepted
    num_untracked: int = 0  #: files of the copied code that are not in git
    live_code: tuple[str, ...] = ()  #: folders of code that the ranks import without a copy
    image: str = ""  #: container image of the ranks; empty without containers
    image_digest: str = ""
    image_build: str = ""  #: hash of the inputs of an image of hpcdist
    image_base: str = ""  #: digest, id or name of the image on which an image of hpcdist is based
    container_runtime: str = ""  #: of the container in which a local run was started; empty without one
    trainer: str = ""  #: a shipped trainer, `module:function`, or the words of a script
    config: Mapping[str, Any] = field(default_factory=dict)  #: redacted values of all keys by dotted key
    parameters: Mapping[str, Any] = field(default_factory=dict)  #: what applies to this run, with a script's arguments
    config_name: str = ""  #: the config as given; empty if it is not recorded
    cluster_name: str = ""  #: the site profile as given; empty without one
    overrides: Mapping[str, Override] = field(default_factory=dict)
    """Keys whose values differ from the config as given."""
    overrides_known: bool = False  #: whether the config as given is recorded
    rerun: RerunRecord | None = None  #: the run that this run repeats
    sweep: str = ""  #: name of the sweep that this run is a cell of
    model: str = ""  #: `model.name` of a trainer that uses that section; else empty
    num_parameters: int | None = None
    datasets: tuple[Dataset, ...] = ()
    monitor: str = ""  #: the primary metric, `checkpoint.monitor`
    monitor_mode: str = "max"
    metrics: Mapping[str, float] = field(default_factory=dict)  #: last values of the metrics of rank 0
    metric_steps: Mapping[str, int] = field(default_factory=dict)  #: steps of these values, where they are recorded
    samples_per_s: float | None = None  #: mean over the time of training steps; None without the metric `samples`
    checkpoints: tuple[CheckpointFacts, ...] = ()  #: oldest first
    best: CheckpointFacts | None = None
    script_files: tuple[str, ...] = ()  #: names of what a script has saved in the checkpoint folder, the newest last
    has_model: bool = False  #: whether the final model is exported in MLflow's format
    registered_as: str = ""  #: name of the registered model of the config; empty without one
    attempts: tuple[AttemptFacts, ...] = ()
    progress: Progress | None = None  #: None unless the run is live

    @property
    def is_live(self) -> bool:
        """Whether the run has not ended."""
        return self.state.status not in ENDED

    @property
    def is_script(self) -> bool:
        """Whether a plain script is the trainer."""
        return bool(self.config.get("trainer.script"))

    @property
    def has_uploaded_best(self) -> bool:
        """Whether MLflow has the files of the best checkpoint: they are uploaded at the end of a run."""
        return self.best is not None and bool(self.run_id) and not self.is_live and self.state.status != "stopped"

    @property
    def best_value(self) -> float | None:
        """The value of the primary metric at the best checkpoint."""
        return None if self.best is None else self.best.metrics[self.monitor]


def read_facts(run: RunDir, state: State | None = None) -> RunFacts:
    """Return the facts of a run. Missing, damaged and older files give empty values.

    Args:
        state: the state to report; by default that of `state.json`.

    Raises RunFolderError if `state.json` or the list of attempts cannot be read, OSError if the file system fails.
    """
    state, tree = state or run.read_state(), _config(run)
    monitor = monitor_of(tree)
    checkpoints = read_checkpoints(run)
    attempts = read_attempts(run, state, checkpoints)
    training = _training(run)
    metrics = _last_logged(run, attempts, "metrics")
    steps = _last_logged(run, attempts, "metric_steps")
    return replace(
        _setup(run, state, flat(tree)),
        parameters=parameters(run, tree),
        num_job_starts=_num_job_starts(run),
        num_parameters=training.num_parameters,
        datasets=training.datasets,
        monitor=monitor.metric,
        monitor_mode=monitor.mode,
        metrics=metrics,
        metric_steps={key: step for key, step in steps.items() if type(step) is int},
        samples_per_s=_samples_per_s(run, attempts, metrics.get("samples")),
        checkpoints=checkpoints,
        script_files=tuple(script_files(run)),
        best=best_checkpoint(checkpoints, monitor),
        has_model=(run.model / "MLmodel").is_file(),
        attempts=attempts,
        progress=_progress(run, attempts) if state.status == "running" else None,
    )


def _setup(run: RunDir, state: State, config: Mapping[str, Any]) -> RunFacts:
    """Return the facts about who created a run, where, from which config and code; the others have their defaults."""
    environment, container, mlflow = _read(run.environment), _read(run.container), _read(run.mlflow)
    image = container or environment  # the ranks' containers, else the container of the whole run
    code, origin = _mapping(environment.get("code")), read_origin(run)
    rank_python = _rank_python(environment, container, config)
    return RunFacts(
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
        git_dirty=environment.get("git_dirty") is True,
        has_patch=any(path.stat().st_size for path in run.path.glob("code.patch")),
        num_untracked=code["num_untracked"] if isinstance(code.get("num_untracked"), int) else 0,
        live_code=tuple(map(str, code["live"])) if isinstance(code.get("live"), list) else (),
        code_copied=code.get("copied") is True,
        image=_text(image.get("image")),
        image_digest=_text(image.get("image_digest")),
        image_build=_text(image.get("image_build")),
        image_base=_text(image.get("image_base")),
        container_runtime=_text(image.get("container_runtime")),
        trainer=_trainer(config),
        config=config,
        config_name=origin.config if origin else "",
        cluster_name=origin.cluster if origin else "",
        overrides=overrides(origin, config) if origin else {},
        overrides_known=origin is not None and bool(origin.values),
        rerun=read_rerun(run),
        sweep=_text(_read(run.path / "cell.json").get("sweep")),
        model=_model(config),
        registered_as=_text(config.get("tracking.register_as")),
    )


def _progress(run: RunDir, attempts: tuple[AttemptFacts, ...]) -> Progress | None:
    if not attempts or (beat := newest_beat(run.attempt(attempts[-1].number))) is None:
        return None
    current = attempts[-1]
    began, elapsed_s = current.first_step or 0, beat["time"] - (current.training_began or current.started)
    speed = (beat["step"] - began) / elapsed_s if elapsed_s > 0 and beat["step"] > began else None
    return Progress(
        step=beat["step"],
        total_steps=beat.get("total_steps"),
        seen=beat["time"],
        steps_per_s=speed,
        time_limit=current.time_limit,
    )


def _last_logged(run: RunDir, attempts: tuple[AttemptFacts, ...], part: str) -> dict[str, Any]:
    """Return a part of the heartbeats of rank 0 by metric; a resumed attempt may not have logged all metrics yet."""
    found: dict[str, Any] = {}
    for attempt in attempts:
        found |= _mapping((newest_beat(run.attempt(attempt.number)) or {}).get(part))
    return found


def _samples_per_s(run: RunDir, attempts: tuple[AttemptFacts, ...], samples: float | None) -> float | None:
    """Return the samples per second of the steps, without start, saves, evaluations and repeated steps."""
    try:
        accounts = [read_account(run.attempt(attempt.number), 0) for attempt in attempts]
    except (RunFolderError, OSError):
        return None
    causes: tuple[Cause, ...] = ("data", "compute", "communication")
    spent_s = sum(account.seconds.get(cause, 0.0) for account in accounts if account is not None for cause in causes)
    return samples / spent_s if samples and spent_s > 0 else None


def _num_job_starts(run: RunDir) -> int:
    try:
        return len(all_job_starts(run))
    except (RunFolderError, OSError):
        return 0


def _training(run: RunDir) -> TrainingRecord:
    """Return the newest record of the model and the datasets."""
    records = [record for attempt in reversed(run.attempts()) if (record := read_training(attempt)) is not None]
    full = next((record for record in records if record.datasets or record.num_parameters is not None), None)
    return full or TrainingRecord()


def _rank_python(environment: Mapping[str, Any], container: Mapping[str, Any], config: Mapping[str, Any]) -> RankPython:
    if container:
        return "container"
    if environment.get("launcher") != "slurm":
        return ""
    if config.get("container.runtime", "none") != "none":
        return "container"
    return "environment" if config.get("cluster.environment.kind", "none") != "none" else ""


def _rank_versions(run: RunDir, rank_python: RankPython) -> dict[str, str]:
    if not rank_python:
        return {}
    record = _read(run.container if rank_python == "container" else run.rank_environment)
    return _texts({name: record.get(name) for name in ("python", "torch", "cuda", "hpcdist")})


def _config(run: RunDir) -> dict[str, Any]:
    try:
        return plain_tree(run.config)
    except (ConfigError, RunFolderError):
        return {}


def _trainer(config: Mapping[str, Any]) -> str:
    script = config.get("trainer.script")
    return " ".join(map(str, script)) if isinstance(script, list) and script else _text(config.get("trainer.target"))


def _model(config: Mapping[str, Any]) -> str:
    """Return the name of the model; empty for a trainer that does not read the section `model`."""
    target = _text(config.get("trainer.target"))
    declared = None if config.get("trainer.script") else find_trainer(target)
    uses_section = declared is not None and "model" in declared.shared_sections
    return _text(config.get("model.name")) if uses_section else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) or {}
    except (RunFolderError, OSError):
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: value for key, value in values.items() if isinstance(value, str) and value}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
