"""A run in MLflow's UI: parameters, tags, description, and the parent run of a sweep."""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from hpcdist.config.document import flat
from hpcdist.config.redaction import redact_tree
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import ConfigError, RunFolderError, TrackingError
from hpcdist.host.files import long_lock, read_json, write_atomic
from hpcdist.review.description import describe
from hpcdist.review.facts import RunFacts, interruptions, read_facts, readable, with_speeds
from hpcdist.review.ledger import Ledger, cost_of, read_ledger, together
from hpcdist.review.sweep import SweepFacts, describe_sweep, read_sweep_facts, sweep_setup
from hpcdist.review.text import run_page
from hpcdist.run import records
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.sweeps import REPETITION, SweepDir, affects_results, label, setting_of, sweep_of, text_of
from hpcdist.tracking.journal import MAX_TAG, clean_metric_name
from hpcdist.tracking.mlflow_client import MlflowRun, entities, translated
from hpcdist.tracking.points import Point, read_series

if TYPE_CHECKING:
    from hpcdist.review.explain import Finding

log = logging.getLogger(__name__)

# Config, environment and state of a run as parameters and tags.

MAX_RUN_NAME = 250
#: Overrides in the name of a run.
_NAMED_OVERRIDES = 4
#: MLflow has no status for a stopped run that can be resumed; the tag `hpcdist.state` holds it.
MLFLOW_STATUS = {
    "created": "SCHEDULED",
    "queued": "SCHEDULED",
    "finished": "FINISHED",
    "failed": "FAILED",
    "cancelled": "KILLED",
    "stopped": "KILLED",
}


def read_config(run: RunDir) -> StoredConfig:
    try:
        return read_stored(run.config)
    except ConfigError as error:
        raise TrackingError(f"{error}: a run cannot be uploaded without its config") from error


def params(run: RunDir, stored: StoredConfig) -> dict[str, str]:
    return _texts(records.parameters(run, stored))


def _texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return values as text by their dotted keys; lists are JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in flat(tree).items()
    }


def fixed_tags(run: RunDir, stored: StoredConfig) -> dict[str, str]:
    """Return the tags that do not change: name, source, environment, and the tags of the user."""
    environment = read_json(run.environment) or {}
    trainer = stored.config.trainer
    # `code` is the path that the code was copied from; the commit is a key of its own.
    facts = {key: value for key, value in environment.items() if key != "code" and value is not None}
    if "command" in facts:  # the tag `hpcdist.command` is for commands to the run, see `command_tag.py`
        facts["command_line"] = facts.pop("command")
    if "cores" in facts:  # of the machine on which the run was created, not of its allocation
        facts["host_cores"] = facts.pop("cores")
    if "source_digest" in facts:  # not that of the user's code, which is `code_digest`
        facts["hpcdist_source_digest"] = facts.pop("source_digest")
    if container := {key: value for key, value in (read_json(run.container) or {}).items() if value is not None}:
        facts |= {key: container.pop(key) for key in ("image", "image_digest") if key in container}
        facts["container"] = container
    if rank_environment := read_json(run.rank_environment):
        facts["rank_environment"] = {key: value for key, value in rank_environment.items() if value}
    tags = {f"hpcdist.{key}": text for key, text in _texts(facts).items()} | {
        "hpcdist.folder": str(run.path),
        "mlflow.runName": run_name(run, stored),
        "mlflow.source.name": " ".join(trainer.script or [trainer.target]),
        "mlflow.source.type": "LOCAL",
    }
    for tag, key in (("mlflow.source.git.commit", "git_commit"), ("mlflow.user", "user")):
        if environment.get(key):
            tags[tag] = str(environment[key])
    return tags | stored.config.tracking.tags


def run_name(run: RunDir, stored: StoredConfig) -> str:
    """Return the name of a run in MLflow.

    A generated name is preceded by the overrides that affect the result, and by the arguments of a script that was
    started without a config: `lr=0.01 seed=2 (ddp-20261122-121700-1a2b)`.
    """
    origin = records.read_origin(run) if records.is_generated(run.name) else None
    if origin is None:
        return run.name
    changed = records.overrides(origin, stored.values)
    differing = {key: item.after for key, item in changed.items() if affects_results(key)}
    script = stored.config.trainer.script if origin.config == records.PLAIN_SCRIPT else []
    arguments = redact_tree(records.script_arguments(script))
    named = label({key: differing[key] for key in list(differing)[:_NAMED_OVERRIDES]})
    shown = " ".join(filter(None, [*(f"{name}={text}" for name, text in arguments.items()), named]))
    more = f" +{len(differing) - _NAMED_OVERRIDES}" * (len(differing) > _NAMED_OVERRIDES)
    end = f"{more} ({run.name})"
    return f"{shown[: MAX_RUN_NAME - len(end)]}{end}" if shown else run.name


def state_tags(run: RunDir, state: State) -> dict[str, str]:
    """Return the tags of the state, the devices and the nodes of the run, and those of its Slurm job."""
    tags = {
        "hpcdist.attempts": str(state.attempt),
        "hpcdist.restarts": str(state.restarts),
        "hpcdist.reason": state.reason,
        "hpcdist.state": state.status,
        "hpcdist.world_size": str(state.world_size),
    }
    known = zip(("hpcdist.devices", "hpcdist.cpu"), records.devices_of(run), strict=True)
    tags |= {name: text for name, text in known if text}
    job, starts = read_json(run.path / "slurm.json") or {}, records.job_starts(run)
    # The same tag for runs with and without Slurm, for a column in the list of runs.
    if not job.get("job_id"):
        host = (read_json(run.environment) or {}).get("host")
        return tags | ({"hpcdist.nodes": str(host)} if host else {})
    nodes = dict.fromkeys(start["nodes"] for start in starts if start.get("nodes"))
    facts = {"nodes": ",".join(nodes), "slurm.job_id": job["job_id"], "slurm.cluster": job.get("cluster")}
    if starts:
        facts |= {"slurm.nodes": starts[-1].get("nodes"), "slurm.starts": len(starts)}
        facts["slurm.queue_s"] = str(round(sum(float(start.get("queue_s", 0.0)) for start in starts)))
    return tags | {f"hpcdist.{key}": str(value) for key, value in facts.items() if value}


# Description and datasets of a run, as MLflow's UI shows them beside its metrics.

NOTE_TAG = "mlflow.note.content"
#: Separates text of the user from the description; MLflow's UI does not show it.
MARK = "<!-- hpcdist: text above this line is kept -->"
#: Maximum length of a description without text of the user.
MAX_DESCRIPTION = MAX_TAG - len(MARK) - 4
#: Minimum time between two changes of the description, unless the state of the run changes.
INTERVAL_S = 60.0
#: Metric with the best value of the primary metric, whose name follows; the charts of `usage/` are the last ones.
BEST_PREFIX = "usage/best/"
_CONTEXT_TAG = "mlflow.data.context"
#: Limits of MLflow for the name and the digest of a dataset.
_MAX_NAME = 500
_MAX_DIGEST = 36


class RunPage:
    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._shown: object = None
        self._next = 0.0

    def update(self, opened: MlflowRun, state: State, sent: str) -> str:
        """Send the page if it has changed. Returns its digest.

        Args:
            sent: digest of the page in MLflow. If nothing has changed since, no request is made.
        """
        now = time.monotonic()
        # An earlier pass may have failed to write the final model.
        has_model = state.status == "finished" and (self._run.model / "MLmodel").is_file()
        status = (state.status, state.reason, state.attempt, has_model)
        if status == self._shown and now < self._next:
            return sent
        with as_tracking_error():
            facts = read_facts(self._run, state)
            if state.status in ENDED:  # a long journal takes seconds
                facts = with_speeds(facts, read_series(self._run))
            ledger = read_ledger(self._run)
            finding = _cause(self._run, state)
            text = describe(facts, ledger, finding, max_chars=MAX_DESCRIPTION)
        tags = summary_tags(facts, ledger)
        shown = json.dumps([text, [asdict(one) for one in facts.datasets], tags])
        digest = hashlib.sha256(shown.encode()).hexdigest()
        if digest != sent:
            set_note(opened, text)
            if facts.datasets:
                with translated(opened.uri):
                    opened.client.log_inputs(opened.run_id, [_input(one, facts.datasets) for one in facts.datasets])
            opened.set_tags(tags)
            if facts.best is not None:
                time_ms = int(1000 * (facts.best.created or 0.0))  # the same in each request: it is stored once
                opened.log_points([Point(best_metric(facts.monitor), facts.best_value, time_ms, facts.best.step)])
        self._shown, self._next = status, now + INTERVAL_S
        return digest


def best_metric(monitor: str) -> str:
    """Return the metric with the best value, by which MLflow can sort runs: its other metrics are last values."""
    return clean_metric_name(f"{BEST_PREFIX}{monitor}")


def _cause(run: RunDir, state: State) -> "Finding | None":
    if state.status != "failed":
        return None
    from hpcdist.review.explain import explain_failure  # only failures need it

    try:
        return explain_failure(run, state)
    except Exception:  # a damaged file of a rank must not stop the upload of the metrics
        log.warning("the failure of %s cannot be explained", run.name, exc_info=True)
        return None


@contextmanager
def as_tracking_error() -> Iterator[None]:
    """Raise a TrackingError for files of a run that are damaged or cannot be read."""
    try:
        yield
    except (RunFolderError, OSError) as error:
        raise TrackingError(str(error)) from error


def set_note(opened: MlflowRun, text: str) -> None:
    """Set the description of an MLflow run below the text of its user."""
    whole = below_text_of_user(opened.current().data.tags.get(NOTE_TAG, ""), text)
    with translated(opened.uri):
        opened.client.set_tag(opened.run_id, NOTE_TAG, whole)


def below_text_of_user(current: str, text: str) -> str:
    """Return a description below the text of its user, which precedes the mark in the current description."""
    above = current.partition(MARK)[0].strip()
    whole = f"{above}\n\n{MARK}\n\n{text}" if above else f"{MARK}\n\n{text}"
    # A long text of the user is kept unchanged, and the end of the description left out.
    return whole.encode(errors="replace").decode()[:MAX_TAG]


def _input(dataset: records.DatasetRecord, datasets: Iterable[records.DatasetRecord]) -> entities.DatasetInput:
    # MLflow identifies a dataset by name and digest and requires both. Splits of one file may have the same digest.
    digest = dataset.digest or hashlib.sha256(json.dumps(asdict(dataset)).encode()).hexdigest()[:8]
    if any((one.name, one.digest) == (dataset.name, dataset.digest) and one.split != dataset.split for one in datasets):
        digest = f"{digest[: _MAX_DIGEST // 2]}-{dataset.split}"
    profile = {} if dataset.num_samples is None else {"num_rows": dataset.num_samples}
    found = entities.Dataset(
        name=dataset.name[:_MAX_NAME],
        digest=digest[:_MAX_DIGEST],
        source_type="hpcdist",
        source=json.dumps({"uri": dataset.source or dataset.name}),
        profile=json.dumps(profile),
    )
    return entities.DatasetInput(found, [entities.InputTag(_CONTEXT_TAG, dataset.split[:_MAX_NAME])])


def summary_tags(facts: RunFacts, ledger: Ledger) -> dict[str, str]:
    """Return the result, cost and interruptions of a run as text, for columns in MLflow's list of runs."""
    tags = {}
    if facts.best is not None:
        tags["hpcdist.best"] = f"{facts.best_text(f'{facts.best_value:.6g}')} at step {facts.best.step:,}"
    if ledger.entries:
        tags["hpcdist.cost"] = f"{cost_of([ledger])}, goodput {ledger.goodput_text}"
    # A run may fail before its first attempt.
    if causes := interruptions(facts.attempts, MAX_TAG) or facts.state.reason * (facts.state.status == "failed"):
        tags["hpcdist.interruptions"] = causes
    if known := [attempt.steps_lost for attempt in facts.attempts if attempt.steps_lost is not None]:
        tags["hpcdist.lost_steps"] = str(sum(known))
    return tags


# The MLflow parent run of a sweep, which the shippers of its cells keep up to date, several of them at once.

PARENT_TAG = "mlflow.parentRunId"
#: Tags of a cell that apply to the whole sweep.
_SHARED = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")


class ParentRun:
    def __init__(self, cell: RunDir, sweep: SweepDir, uri: str) -> None:
        self._cell = cell
        self._sweep = sweep
        self._uri = uri
        self._mlflow_run: MlflowRun | None = None

    @classmethod
    def of(cls, run: RunDir, uri: str) -> Self | None:
        """Return the parent run of a cell; None for a run that is not part of a sweep."""
        sweep = sweep_of(run)
        return cls(run, sweep, uri) if sweep is not None else None

    def cell_tags(self) -> dict[str, str]:
        """Return the tags that make the MLflow run of the cell a child run, named by its values."""
        cell = read_json(self._cell.path / "cell.json") or {}
        return {
            PARENT_TAG: self._open().run_id,
            "mlflow.runName": str(cell.get("label", self._cell.name))[:MAX_RUN_NAME],
            "hpcdist.run.sweep": self._sweep.name,
            "hpcdist.setting": self._setting(cell.get("values")),
        }

    def _setting(self, values: Any) -> str:
        """Return the setting of a cell: the name of the sweep, and the values other than the seed if it is swept."""
        if not isinstance(values, dict) or REPETITION not in values:
            return self._sweep.name
        return f"{self._sweep.name} {setting_of(values)}"[:MAX_TAG]

    def _open(self) -> MlflowRun:
        if self._mlflow_run is None:
            # The lock lets one process create the run. Without locks two may create one: all cells use the one that
            # mlflow.json names, at the latest in their next pass.
            with as_tracking_error(), long_lock(self._sweep.path / ".mlflow.lock"):
                opened, facts = MlflowRun(self._sweep, self._uri), self._sweep.read()
                # A dict keeps the order of the values.
                axes: dict[str, dict[str, None]] = {key: {} for key in facts["keys"]}
                for cell in facts["cells"]:
                    for key, value in cell["values"].items():
                        axes[key][text_of(value)] = None
                of_cell = fixed_tags(self._cell, read_config(self._cell))
                tags = {key: value for key, value in of_cell.items() if key in _SHARED}
                # Under the lock: a database rejects a parameter that two processes log at the same time.
                opened.log_params({key: ", ".join(texts) for key, texts in axes.items()})
                opened.set_tags(tags | {"hpcdist.folder": str(self._sweep.path)})
            self._mlflow_run = opened
        return self._mlflow_run

    def refresh(self) -> None:
        """Set the status and description of the sweep from the folders of its cells."""
        opened = self._open()
        with as_tracking_error():
            state = self._sweep.read_state()
        while True:
            with as_tracking_error():
                facts = read_sweep_facts(self._sweep, state)
                setup = sweep_setup(facts, self._sweep)
                tags = {"hpcdist.state": state.status, "hpcdist.reason": state.reason}
                ledgers = [one for cell in self._sweep.cells() if (one := readable(partial(read_ledger, cell)))]
                if spent := cost_of(ledgers):
                    tags["hpcdist.cost"] = spent
            report = ""
            if state.status in ENDED:
                report = run_page(opened.experiment_id, opened.run_id, "report.html")
                self._upload_report(opened, facts)
            cost = f"{tags.get('hpcdist.cost', '')}; `hpcdist cost {self._sweep.name}` lists it by run".strip("; ")
            options = {"cost": cost, "report": report}
            set_note(opened, describe_sweep(facts, together(ledgers), setup, **options, max_chars=MAX_DESCRIPTION))
            if facts.is_best and facts.best is not None:
                beside = f", {facts.beside_next}" if facts.beside_next else ""
                tags["hpcdist.best"] = f"{facts.best.text.removesuffix(' (n=1)')}: {facts.best.label}{beside}"
                mean, num_values = fmean(facts.best.values), sum(cell.metric is not None for cell in facts.cells)
                opened.log_points([Point(best_metric(facts.monitor), mean, int(time.time() * 1000), num_values)])
            opened.set_tags(tags)
            status = MLFLOW_STATUS.get(state.status, "RUNNING")
            opened.set_status(status, int((state.ended or 0) * 1000) if state.status in ENDED else None)
            # Concurrent updates may overtake each other: each process repeats its update until the state is unchanged.
            with as_tracking_error():
                before, state = state, self._sweep.read_state()
            if (before.status, before.reason) == (state.status, state.reason):
                return

    def _upload_report(self, opened: MlflowRun, facts: SweepFacts) -> None:
        from hpcdist.review.report import render_sweep  # other commands that import this module draw nothing

        with as_tracking_error():
            # Links to the reports of the cells would be broken in MLflow.
            text = render_sweep(self._sweep, facts, with_links=False)
            write_atomic(self._sweep.report, render_sweep(self._sweep, facts))
        with translated(opened.uri):
            opened.client.log_text(opened.run_id, text, "report.html")
