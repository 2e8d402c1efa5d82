"""The small records of a run folder: times, resources, data, checkpoints, secrets, origin, rank, parameters."""

import itertools
import json
import logging
import os
import re
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from hpcdist.config.redaction import redact_tree
from hpcdist.config.schema import Config, script_name, unused_sections
from hpcdist.config.topology import expand
from hpcdist.config.written import StoredConfig, flat_values, read_stored, run_yaml, secrets_of
from hpcdist.errors import ConfigError, HpcdistError, RunFolderError, TopologyError
from hpcdist.host import files as host_files
from hpcdist.host import retry
from hpcdist.host.files import fill, read_if_valid, read_json, write_atomic, write_json, write_private
from hpcdist.host.machine import cpu_name
from hpcdist.run.folder import Attempt, RunDir, read_record

log = logging.getLogger(__name__)

# The times of an attempt and the resources of its ranks, in `times.json` of its folder. The supervisor writes it.


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    allocated: float  #: number of GPUs or cores
    share: float  #: number of them that each of the ranks below uses
    ranks: list[int]  #: ranks on the node that use them


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of a run by node: GPUs, or cores if it has no GPU."""

    unit: Literal["GPU", "core"] = "core"
    nodes: Mapping[str, NodeShare] = field(default_factory=dict)
    idle: tuple[str, ...] = ()  #: those of `nodes` that run no ranks


#: What the time of a GPU or core is spent on, in the order of the ledger (`review/ledger.py`).
Cause = Literal[
    "start", "compile", "data", "compute", "communication", "checkpoint", "evaluation", "redone", "discarded", "finish",
    "idle", "down", "unknown",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(frozen=True, kw_only=True)
class AttemptTimes:
    """The content of `times.json`. Times are seconds since the epoch."""

    supervised: float  #: when the supervisor of this attempt began
    began: float
    ended: float | None = None  #: None until the end, and if the supervisor was killed
    failed: bool = False
    status: str = ""  #: `finished`, `stopped`, `cancelled` or `failed`; empty until the end
    reason: str = ""  #: one sentence: how and why the attempt ended, without the request to end it
    time_limit: float | None = None  #: end of the allocation; None without a time limit
    reached: int = 0  #: the last step that an earlier attempt had done
    measured: bool = True  #: whether the ranks measure their time; plain scripts report steps at most
    unit: Literal["GPU", "core"] = "core"
    nodes: dict[str, Any] = field(default_factory=dict)  #: see `shares`
    idle: list[str] = field(default_factory=list)  #: nodes of the allocation without ranks

    @property
    def shares(self) -> dict[str, NodeShare]:
        found = {}
        for name, raw in self.nodes.items():
            with suppress(RunFolderError):
                share = host_files.fill(NodeShare, raw if isinstance(raw, dict) else {}, Path())
                are_ranks = all(type(rank) is int and 0 <= rank <= host_files.LARGEST for rank in share.ranks)
                if are_ranks and min(share.allocated, share.share) >= 0:
                    found[name] = share
        return found

    @property
    def num_ranks(self) -> int:
        return sum(len(share.ranks) for share in self.shares.values())


def read_times(attempt: Attempt) -> AttemptTimes | None:
    return read_if_valid(AttemptTimes, attempt.times)


def began_of(run: RunDir) -> float:
    """Return when the supervisor of a run's first attempt began; without attempts, when the run was created."""
    try:
        first = next(iter(run.attempts()), None)
    except RunFolderError:  # a sweep
        first = None
    times = read_times(first) if first is not None else None
    return times.supervised if times is not None else run.read_state().created


def end_of(attempt: Attempt, times: AttemptTimes) -> float:
    """Return when an attempt ended; without a record, the time of its last heartbeat, or its begin."""
    if times.ended is not None:
        return times.ended
    beats = (attempt.read_beat(rank) for share in times.shares.values() for rank in share.ranks)
    return max((float(beat["time"]) for beat in beats if beat is not None), default=times.began)


def write_times(attempt: Attempt, times: AttemptTimes) -> None:
    """Write the times of an attempt. A failure is logged: the training does not depend on this file."""
    try:
        write_json(attempt.times, times.__dict__)
    except OSError as error:
        log.warning("%s cannot be written: %s", attempt.times, error.strerror)


def begin(attempt: Attempt, resources: Resources, times: AttemptTimes) -> AttemptTimes:
    nodes = {name: asdict(share) for name, share in resources.nodes.items()}
    times = replace(times, unit=resources.unit, nodes=nodes, idle=list(resources.idle))
    write_times(attempt, times)
    return times


def reached_before(attempt: Attempt) -> int:
    times = read_times(attempt)
    return 0 if times is None else times.reached


def done_step(attempt: Attempt) -> int | None:
    """Return the largest step that a rank of an attempt has done; None if it is unknown.

    A killed rank has no outcome, and its heartbeat may be some seconds older than its end: other ranks know more.
    """
    times = read_times(attempt)
    steps: list[int] = []
    try:
        steps += [step for outcome in attempt.outcomes().values() if type(step := outcome.get("step")) is int]
        if times is None or times.failed or not steps:  # else rank 0 has reported its last step
            num_ranks = min(times.num_ranks if times is not None else 1, 64)  # whose heartbeats show the last step
            beats = (attempt.read_beat(rank) for rank in range(num_ranks))
            steps += [int(beat["step"]) for beat in beats if beat is not None]
    except (RunFolderError, OSError) as error:
        log.warning("the last step of attempt %d may be incomplete: %s", attempt.number, error)
    return max(steps, default=None)


def reached_step(attempt: Attempt) -> int:
    """Return the largest step that an attempt and those before it have done, or 0."""
    return max(reached_before(attempt), done_step(attempt) or 0)


def lost_steps(done: int | None, resumed_at: int) -> int | None:
    """Return how many of the steps that an attempt has done are done again from step `resumed_at`; None if unknown."""
    return None if done is None else max(0, done - resumed_at)


# The starts of the Slurm jobs of a run, in `job.json`. A job records its own start, accounting completes the record
# (`status.py`).

#: Slurm's controller and its accounting report the begin of a job to the second.
SAME_START_S = 2.0
JOB_ID = re.compile(r"[0-9]{1,20}([_+][0-9]{1,10})?")


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """One start of a job, as `job.json` records it. Times are seconds since the epoch."""

    began: float
    nodes: str = ""
    queue_s: float = 0.0  #: time in the queue before this start
    ended: float | None = None  #: None while the job runs, and until accounting has reported the end
    cores: int = 0  #: number of allocated cores; 0 if accounting has not reported it
    gpus: int = 0
    energy_j: float | None = None
    state: str = ""  #: of this start in accounting, such as PREEMPTED or NODE_FAIL; empty if it is not known
    resized: float | None = None  #: time since which it has had `last_nodes`, if it has lost nodes or given some back
    last_nodes: str = ""
    failed_nodes: str = ""  #: names of the nodes whose failure ended this start, with commas; empty if unknown

    def contains(self, moment: float) -> bool:
        return self.began - SAME_START_S <= moment and (self.ended is None or moment <= self.ended + SAME_START_S)


@dataclass(kw_only=True)
class JobRecord:
    """The content of `job.json`: the starts of all jobs of a run, by job id and restart count, without damaged ones."""

    job_id: str = ""  #: the job that the run was last submitted as, or the one before it
    jobs: dict[str, dict[str, dict[str, Any]]]


def all_job_starts(run: RunDir) -> list[JobStart]:
    starts = [start for starts in read_jobs(run).jobs.values() for start in starts.values()]
    return sorted((fill(JobStart, one, run.path / "job.json") for one in starts), key=lambda one: one.began)


def job_starts(run: RunDir) -> list[dict[str, Any]]:
    """Return the records of all starts of the run's current job, oldest first."""
    starts = read_jobs(run).jobs.get(str((read_record(run.slurm) or {}).get("job_id")), {})
    return [starts[number] for number in sorted(starts, key=int)]


def read_jobs(run: RunDir) -> JobRecord:
    noted = read_json(run.path / "job.json") or {}
    earlier, job_id = noted.get("earlier"), noted.get("job_id")
    jobs = dict(earlier) if isinstance(earlier, dict) else {}
    if isinstance(job_id, str) and job_id:
        jobs[job_id] = noted.get("starts")
    return JobRecord(
        job_id=job_id if isinstance(job_id, str) else "",
        jobs={
            one: {number: start for number, start in starts.items() if number.isdecimal() and _is_start(start)}
            for one, starts in jobs.items()
            # The id becomes an argument of Slurm's commands.
            if isinstance(starts, dict) and JOB_ID.fullmatch(one)
        },
    )


def _is_start(start: object) -> bool:
    try:
        if not isinstance(start, dict):
            return False
        parsed = fill(JobStart, start, Path())
        if parsed.resized is not None:
            expand(parsed.last_nodes)
    except (RunFolderError, TopologyError):
        return False
    return all(value >= 0 for value in asdict(parsed).values() if isinstance(value, int | float))


# The devices, the datasets, the model size and the first step of an attempt, in `training.json` of its folder. Rank 0
# writes it.


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    name: str
    split: str = "train"
    num_samples: int | None = None
    digest: str = ""  #: at most 36 characters, equal for equal content
    source: str = ""  #: where the data comes from, such as a folder or a URL


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    first_step: int = 0  #: steps done when the attempt began: that of the restored checkpoint
    began: float | None = None  #: when training began, in seconds since the epoch
    num_parameters: int | None = None  #: trainable parameters of the whole model
    datasets: tuple[DatasetRecord, ...] = ()
    cpu: str = ""  #: of the node of rank 0: `AMD EPYC 7B13, 8 logical CPUs`
    devices: str = ""  #: `2 × NVIDIA H100 80GB HBM3`, or `CPU`: of all ranks; of a script those that rank 0 sees


def write_training(attempt: Attempt, record: TrainingRecord) -> None:
    write_json(attempt.path / "training.json", asdict(record))


def read_training(attempt: Attempt) -> TrainingRecord | None:
    path = attempt.path / "training.json"
    try:
        if (raw := read_json(path)) is None:
            return None
        found = raw.pop("datasets", None)
        entries = [entry for entry in found if isinstance(entry, Mapping)] if isinstance(found, list) else []
        datasets = tuple(fill(DatasetRecord, entry, path) for entry in entries)
        return replace(fill(TrainingRecord, raw, path), datasets=datasets)
    except (RunFolderError, OSError):
        return None


def devices_of(run: RunDir) -> tuple[str, str]:
    """Return the devices of the ranks, and the CPU of rank 0; empty if they are unknown."""
    records = map(read_training, reversed(run.attempts()))
    return next(((one.devices, one.cpu) for one in records if one is not None and one.devices), ("", ""))


class TrainingNotes:
    """Writes `training.json` of an attempt at each change, on rank 0."""

    def __init__(self, attempt: Attempt, *, is_main: bool) -> None:
        self._attempt = attempt
        self._is_main = is_main
        self._record = TrainingRecord()

    def begin(self, first_step: int) -> None:
        self._write(replace(self._record, first_step=first_step, began=time.time()))

    def add_dataset(self, dataset: DatasetRecord) -> None:
        others = [one for one in self._record.datasets if (one.name, one.split) != (dataset.name, dataset.split)]
        self._write(replace(self._record, datasets=(*others, dataset)))

    def set_num_parameters(self, num_parameters: int) -> None:
        self._write(replace(self._record, num_parameters=num_parameters))

    def set_devices(self, devices: str) -> None:
        self._write(replace(self._record, devices=devices, cpu=cpu_name()))

    def _write(self, record: TrainingRecord) -> None:
        if not self._is_main or record == self._record:
            return
        self._record = record
        try:
            write_training(self._attempt, record)
        except OSError as error:
            log.warning("training.json of attempt %d cannot be written: %s", self._attempt.number, error.strerror)


# The checkpoints of a run, and the step at which a resume continues, without tensors and torch. Of the files of a plain
# script, hpcdist knows the folder only.

#: Written last: a checkpoint without it is incomplete.
MANIFEST_FILE = "manifest.json"
#: Per-sample results of the evaluation at a checkpoint, if the trainer calls `ReportData.log_samples`.
SAMPLES_FILE = "samples.npy"
#: In `exported/`: the program of torch.export, and its example with the arrays `inputs`, `outputs` and torch's version
#: (`torch`).
PROGRAM_FILE = "model.pt2"  #: the name by which mlflow.pytorch finds it
EXAMPLE_FILE = "example.npz"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    match = re.fullmatch(r"step-([0-9]{8,18})", folder.name)
    return int(match[1]) if match else None


def complete_checkpoints(run: RunDir) -> list[tuple[int, Path]]:
    manifests = retry.retry(lambda: list(run.checkpoints.glob(f"step-*/{MANIFEST_FILE}")), run.checkpoints)
    return sorted((step, path.parent) for path in manifests if (step := step_of(path.parent)) is not None)


def script_files(run: RunDir) -> list[str]:
    found = []
    for path in run.checkpoints.glob("[!.]*"):
        with suppress(FileNotFoundError):  # the script has just removed it
            found += [(path.lstat().st_mtime_ns, path.name)] if step_of(path) is None else []
    return [name for _, name in sorted(found)]


def newest_step(run: RunDir) -> int | None:
    for step, folder in reversed(complete_checkpoints(run)):
        if read_json(folder / MANIFEST_FILE) is not None:
            return step
    return None


def resume_point(run: RunDir, before: Attempt, script: Sequence[str] = ()) -> str:
    """Return a sentence on where the attempt after `before` continues, with the steps of `before` that are lost."""
    if script:
        return _start(script_name(script), script_files(run))
    newest = newest_step(run)
    at = "starting at step 0, since there is no checkpoint" if newest is None else f"resuming at step {newest}"
    first = newest or 0
    lost = lost_steps(done_step(before), first)
    if not lost:
        return at
    # The range, because the last heartbeat of a killed rank may be older.
    if lost == 1:
        return f"{at}, 1 step lost (step {first + 1})"
    return f"{at}, {lost} steps lost ({first + 1} to {first + lost})"


def script_of(run: RunDir) -> str:
    """Return the name of the run's plain script; empty if the run has a trainer, or its config cannot be read."""
    try:
        return read_stored(run.config).config.trainer.script_name
    except (ConfigError, RunFolderError):
        return ""


def continuation(run: RunDir) -> str:
    if not (script := script_of(run)):
        return f"`{run.resume_command}` continues from the newest checkpoint"
    return f"`{run.resume_command}` {_start(script, script_files(run))}"


def how_stopped(run: RunDir, attempt: Attempt, script: Sequence[str], began: float) -> str:
    """Return how a run has stopped; of a script also what it has saved since `began`, and the effect of a resume."""
    if not script:
        return "everything saved"
    ended = attempt.outcomes().get(0, {}).get("reason") or f"{script_name(script)} was ended by SIGTERM"
    saved = "saved nothing in hpcdist.checkpoint_dir()"
    files = retry.retry(lambda: script_files(run), run.checkpoints)
    if files and (newest := run.checkpoints / files[-1]).lstat().st_mtime >= began:
        saved = f"saved {run.checkpoints.name}/{newest.name}"
    return f"{ended} and {saved}; a resume {_start('it', files)}"


def _start(script: str, files: Sequence[str]) -> str:
    again, anew = "again, with its files in the run's checkpoints/", "from the beginning, unless it has saved elsewhere"
    return f"starts {script} {again if files else anew}"


# `secrets.json` in a run folder: values that `config.yaml` shows as `***`, readable by the owner only.
#
# Each start writes the file. A detached supervisor, the batch step of a job, a task of a job array and `resume` read
# it. It is removed when the run is finished or cancelled; a failed or stopped run keeps it for `resume`.


def keep(run: RunDir, values: Mapping[str, str]) -> None:
    if values:
        write_private(run.secrets, json.dumps(host_files.stamped({"values": dict(values)})))
    else:
        retry.remove(run.secrets)


def kept(run: RunDir) -> dict[str, str]:
    """Return the secrets by variable name; empty if there is no such file or it belongs to another user."""

    def read() -> tuple[os.stat_result, bytes]:
        # Without O_NONBLOCK, a pipe that nobody writes to would block.
        with open(os.open(run.secrets, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            about = os.fstat(file.fileno())
            is_mine = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()
            return about, file.read() if is_mine else b""

    try:
        about, raw = retry.retry(read, run.secrets)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunFolderError(f"{run.secrets} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(about.st_mode):
        raise RunFolderError(f"{run.secrets} is not a regular file: remove it")
    if about.st_uid != os.geteuid():
        return {}
    if (mode := stat.S_IMODE(about.st_mode)) & 0o077:
        raise RunFolderError(
            f"{run.secrets} has mode {mode:04o}, so other users may have read its secrets: replace them, then `chmod"
            " 600` the file"
        )
    values = None
    with suppress(ValueError):
        values = host_files.unstamped(host_files.parse_object(raw), run.secrets).get("values")
    if not isinstance(values, dict) or not all(isinstance(value, str) for value in values.values()):
        raise RunFolderError(f"{run.secrets} is damaged: remove it, and set its variables in the environment")
    return values


# Origin of a run's config, in `origin.json`: the config that the run was started with, before its overrides.

#: The shipped config of `hpcdist run train.py --lr 0.1`; the script is no override of it.
PLAIN_SCRIPT = "plain_script"
#: Keys for the place of a run, without effect on its training.
LOCATION = ("name", "runs_dir", "tracking.uri")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The config of a command line without its overrides."""

    config: str  #: as given: the name of a shipped config, or a path
    cluster: str = ""  #: the site profile as given, if there was one
    values: dict[str, Any] = field(default_factory=dict)
    """Resolved values by dotted key, redacted; empty if the config is not valid without overrides."""
    written: list[str] = field(default_factory=list)  #: keys that the YAML, the site profile or an override has set


@dataclass(frozen=True, kw_only=True)
class Override:
    before: Any
    after: Any


def load_origin(source: str, overrides: Sequence[str] = (), cluster: str | None = None) -> Origin:
    from hpcdist.config.loading import load_config, written_keys

    try:
        values = flat_values(load_config(source, cluster=cluster))
    except HpcdistError:  # it needs an override
        values = {}
    written = written_keys(source, overrides, cluster=cluster)
    return Origin(config=str(source), cluster=str(cluster or ""), values=values, written=written)


def write_origin(run: RunDir, origin: Origin) -> None:
    write_json(run.path / "origin.json", asdict(origin))


def is_generated(name: str) -> bool:
    """Return whether a run's name ends with date, time and random characters, as `with_name` makes it."""
    return re.search(r"-\d{8}-\d{6}-[0-9a-f]{4}$", name) is not None


def read_origin(run: RunDir) -> Origin | None:
    return read_if_valid(Origin, run.path / "origin.json")


def overrides(origin: Origin, values: Mapping[str, Any]) -> dict[str, Override]:
    """Return the keys whose values differ from the config of origin, without those that only locate the run."""
    if not origin.values:
        return {}
    return {
        key: Override(before=origin.values.get(key), after=value)
        for key, value in values.items()
        if key not in LOCATION
        and value != origin.values.get(key)
        and not (origin.config == PLAIN_SCRIPT and key in ("experiment", "trainer.script"))
    }


# A resume with changed keys replaces `config.yaml` and keeps the old config in the folder of the last attempt, which
# ran with it.


def check(run: RunDir, config: Config) -> None:
    step, stored = newest_step(run), read_stored(run.config)
    if step is None or config.trainer.script or stored.trainer is None or not stored.trainer.fixed_keys:
        return
    before, after = stored.values, flat_values(config)
    is_same = stored.config.trainer.target == config.trainer.target
    fixed = ("trainer.target", *stored.trainer.fixed_keys) if is_same else ("trainer.target",)
    problems = [
        f"{key} was {before.get(key)!r} when the checkpoint of step {step} was written and cannot be {after.get(key)!r}"
        " now: leave it out, or start a new run"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key) and any(key == one or key.startswith(f"{one}.") for one in fixed)
    ]
    if problems:
        raise ConfigError(*problems, source=f"resume {run.name}")


def change_config(run: RunDir, config: Config) -> None:
    """Make `config` the config of the next attempt. The caller holds the run's lease."""
    keep(run, {**kept(run), **secrets_of(config)})  # a crash may keep the old config
    if read_stored(run.config).values == flat_values(config):
        return
    if (attempts := run.attempts()) and not retry.exists(attempts[-1].config):
        write_atomic(attempts[-1].config, run.config.read_bytes(), durable=True)
    write_atomic(run.config, run_yaml(config), durable=True)


# The parameters of a run: the keys of its config that its trainer reads, and the arguments of its script.

_OPTION = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
#: An override of Hydra: `lr=0.1`, `+lr=0.1`.
_ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)


def parameters(run: RunDir, stored: StoredConfig) -> dict[str, Any]:
    """Return the redacted parameters of a run by dotted key.

    Of a shipped trainer, they are all keys but those without effect, as of other trainers' sections. Of the user's own
    code, they are `params`, the seed, the keys that its YAML or an override has set, and the arguments of a script;
    without a readable `origin.json`, all keys.
    """
    script, values, origin = stored.config.trainer.script, stored.values, read_origin(run)
    if stored.trainer is not None:
        unused = unused_sections(stored.config.trainer.target)
        no_effect = {"optim.momentum"} if stored.config.optim.name != "sgd" else set()
        return {k: value for k, value in values.items() if k.partition(".")[0] not in unused and k not in no_effect}
    if origin is not None:
        always = ("params", *(["trainer.script"] if script else ["trainer.target", "seed"]), *origin.written)
        values = {
            key: value
            for key, value in values.items()
            if value != {}
            and key not in (*LOCATION, "experiment")
            # A resume may have changed further keys.
            and (f"{key}.".startswith(tuple(f"{one}." for one in always)) or value != origin.values.get(key, value))
        }
    return {**values, **redact_tree(script_arguments(script))}


def script_arguments(command: Sequence[str]) -> dict[str, str]:
    """Return the arguments in `[script, argument, …]` by name, as argparse would name them.

    A word after an option without `=` is its value; an option before another option is a flag, which is `true`. Other
    words are `arg1`, `arg2`, …
    """
    found: dict[str, str] = {}
    numbers, flag = itertools.count(1), ""
    for word in command[2 if command[:1] == ["-m"] else 1 :]:
        option, assignment = _OPTION.fullmatch(word), _ASSIGNMENT.fullmatch(word)
        if option:
            name = option[1].replace("-", "_")
            found[name] = "true" if option[2] is None else option[2]
            flag = name if option[2] is None else ""
        elif word == "--":
            flag = ""
        else:
            name, value = (assignment[1], assignment[2]) if assignment and not flag else (flag, word)
            found[name or f"arg{next(numbers)}"] = value
            flag = ""
    return found
