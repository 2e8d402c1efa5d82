"""A run in MLflow's UI: parameters, tags, description, the parent run of a sweep, views of an experiment."""

import base64
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from mlflow import __version__ as installed

from hpcdist.config.document import flat
from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.redaction import redact_tree
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import ConfigError, HpcdistError, RunFolderError, TrackingError
from hpcdist.host.files import long_lock, read_json, write_atomic, write_json
from hpcdist.review.description import describe
from hpcdist.review.facts import RunFacts, interruptions, read_facts, readable, with_speeds
from hpcdist.review.ledger import Ledger, cost_of, read_ledger, together
from hpcdist.review.sweep import SweepFacts, describe_sweep, read_sweep_facts, sweep_setup
from hpcdist.review.text import run_page
from hpcdist.run import records
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.sweeps import REPETITION, SweepDir, affects_results, label, setting_of, sweep_of, text_of
from hpcdist.tracking.journal import clean_metric_name, clean_name
from hpcdist.tracking.mlflow_client import MAX_TAG, MlflowRun, entities, server_version, translated
from hpcdist.tracking.points import Point, read_series
from hpcdist.tracking.uri import VIEWS, is_server

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

    def update(self, opened: MlflowRun, state: State, own_note: str, sent: str) -> str:
        """Send the page if it has changed. Returns its digest.

        Args:
            own_note: description that the config of the run sets; it precedes the generated one.
            sent: digest of the page in MLflow. If nothing has changed since, no request is made.
        """
        now = time.monotonic()
        status = (state.status, state.reason, state.attempt)
        if status == self._shown and now < self._next:
            return sent
        with _readable():
            facts = read_facts(self._run, state)
            if state.status in ENDED:  # a long journal takes seconds
                facts = with_speeds(facts, read_series(self._run))
            ledger = read_ledger(self._run)
            finding = _cause(self._run, state)
            text = describe(facts, ledger, finding, max_chars=MAX_DESCRIPTION - len(own_note))
        tags = view_tags(facts, ledger)
        shown = json.dumps([own_note, text, [asdict(one) for one in facts.datasets], tags])
        digest = hashlib.sha256(shown.encode()).hexdigest()
        if digest != sent:
            set_note(opened, text, own_note=own_note)
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
def _readable() -> Iterator[None]:
    try:
        yield
    except (RunFolderError, OSError) as error:
        raise TrackingError(str(error)) from error


def set_note(opened: MlflowRun, text: str, *, own_note: str = "") -> None:
    """Set the description of an MLflow run below the text of its user: what is there in MLflow, else `own_note`."""
    whole = below_text_of_user(opened.current().data.tags.get(NOTE_TAG, ""), own_note, text)
    with translated(opened.uri):
        opened.client.set_tag(opened.run_id, NOTE_TAG, whole)


def below_text_of_user(current: str, own_note: str, text: str) -> str:
    """Return a description below the text of its user: what precedes the mark in MLflow, else `own_note`."""
    above = (current.partition(MARK)[0] if current else own_note).strip()
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


def view_tags(facts: RunFacts, ledger: Ledger) -> dict[str, str]:
    """Return the columns of the prepared views: rounded numbers, which MLflow's metrics are not, and their causes."""
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
        """Return the group of a cell in the view `Sweep`: its setting, whose mean over the seeds MLflow shows."""
        if not isinstance(values, dict) or REPETITION not in values:
            return self._sweep.name
        return f"{self._sweep.name} {setting_of(values)}"[:MAX_TAG]

    def _open(self) -> MlflowRun:
        if self._mlflow_run is None:
            # The lock lets one process create the run. Without locks two may create one: all cells use the one that
            # mlflow.json names, at the latest in their next pass.
            with _readable(), long_lock(self._sweep.path / ".mlflow.lock"):
                opened, facts = MlflowRun(self._sweep, self._uri), self._sweep.read()
                axes: dict[str, dict[str, None]] = {key: {} for key in facts["keys"]}
                for cell in facts["cells"]:
                    for key, value in cell["values"].items():
                        axes[key][text_of(value)] = None
                of_cell = fixed_tags(self._cell, read_config(self._cell))
                tags = {key: value for key, value in of_cell.items() if key in _SHARED}
                tags["hpcdist.axes"] = json.dumps({key: list(texts) for key, texts in axes.items()})
                # Under the lock: a database rejects a parameter that two processes log at the same time.
                opened.log_params({key: ", ".join(texts) for key, texts in axes.items()})
                opened.set_tags(tags | {"hpcdist.folder": str(self._sweep.path)})
            self._mlflow_run = opened
        return self._mlflow_run

    def refresh(self) -> None:
        """Set the status and description of the sweep from the folders of its cells."""
        opened = self._open()
        with _readable():
            state = self._sweep.read_state()
        while True:
            with _readable():
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
            with _readable():
                before, state = state, self._sweep.read_state()
            if (before.status, before.reason) == (state.status, state.reason):
                return

    def _upload_report(self, opened: MlflowRun, facts: SweepFacts) -> None:
        from hpcdist.review.report import render_sweep  # other commands that import this module draw nothing

        with _readable():
            # Links to the reports of the cells would be broken in MLflow.
            text = render_sweep(self._sweep, facts, with_links=False)
            write_atomic(self._sweep.report, render_sweep(self._sweep, facts))
        with translated(opened.uri):
            opened.client.log_text(opened.run_id, text, "report.html")


# Prepared views of an experiment, stored like views that users save in MLflow's UI.
#
# A saved view is the experiment tag `mlflow.sharedViewState.<id>`: JSON with the keys `name`, `createdAt`, `updatedAt`
# (ms since the epoch) and `state`, which is `deflate;` and the base64 text of compressed JSON. This format is private
# to MLflow. It was taken from views that the UI of the versions in TESTED had saved; other versions get no views.

#: Versions of MLflow whose UI saved and opened views of this format.
TESTED = ("3.17", "3.18")
_TAG = "mlflow.sharedViewState."
_PREFIX = "deflate;"
#: Columns that the list of runs always has, by their ids in the UI.
_NAME, _CREATED, _DURATION = "attributes.`Run Name`", "runDateAndNestInfo", "duration"
#: Width in pixels at which a float is shown with all of its digits: MLflow rounds none, and would cut the exponent off.
_NUMBER_PX = 190
#: Limit for each kind of column that depends on the runs of an experiment. MLflow's limit is 20,000 characters a view.
_MAX_KEYS = 30


def _view(
    *columns: str,
    order_by: str = "attributes.start_time",
    ascending: bool = False,
    group_by_tag: str = "",
    search: str = "",
    widths: Mapping[str, int],
) -> dict[str, Any]:
    """Return the state of a view as MLflow's UI saves it; the UI completes omitted keys with its defaults.

    Args:
        columns: ids of columns in MLflow's UI.
        widths: pixels of columns whose values are wider than their names.
    """
    names = {column: 8 * len(column.partition("`")[2].rstrip("`")) + 30 for column in columns}
    return {
        "searchFilter": search,
        "orderByKey": order_by,
        "orderByAsc": ascending,
        "selectedColumns": [column for column in columns if column != _DURATION],
        "columnOrder": [_NAME, _CREATED, *columns],
        "columnWidths": {column: max(90, width) for column, width in names.items()} | dict(widths),
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": group_by_tag}]}
        if group_by_tag
        else None,
    }


_metric, _tag = "metrics.`{}`".format, "tags.`{}`".format


def _widths(**pixels: int) -> dict[str, int]:
    return {_tag(f"hpcdist.{name}"): width for name, width in pixels.items()}


def prepared(monitors: Mapping[str, str], axes: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the states of an experiment's views by id. Columns that no run has do not appear in the UI.

    Args:
        monitors: Primary metrics of the runs (`checkpoint.monitor`, `checkpoint.monitor_mode`), the newest one last.
        axes: Keys that sweeps vary. Without any there is no view of sweeps.
    """
    state, nodes = _tag("hpcdist.state"), _tag("hpcdist.nodes")
    primary, bests = [_metric(key) for key in monitors], [_metric(best_metric(key)) for key in monitors]
    throughput = [_metric("train/samples_per_s"), _metric("train/env_steps_per_s")]
    loss, allocated, cost = _metric("train/loss"), _metric("usage/allocated_hours"), _tag("hpcdist.cost")
    causes = [_metric(f"usage/{cause}_hours") for cause in (*records.CAUSES, "queue")]
    dataset, ranks, attempts = "attributes.`Dataset`", _tag("hpcdist.world_size"), _tag("hpcdist.attempts")
    lost, interruptions = _tag("hpcdist.lost_steps"), _tag("hpcdist.interruptions")
    measured = dict.fromkeys([*bests, *primary, loss, *throughput], _NUMBER_PX)
    best, mode = [("train/loss", "min"), *((best_metric(key), mode) for key, mode in monitors.items())][-1]
    views = {
        "hpcdist-overview": _view(
            *(_tag("hpcdist.best"), state, cost, _DURATION, *bests, loss, *throughput),
            *(nodes, ranks, dataset, *primary),
            order_by=_metric(best),
            ascending=mode == "min",
            widths=measured | _widths(best=215, state=100, cost=250) | {dataset: 300},
        ),
        "hpcdist-failures": _view(
            *(interruptions, lost, attempts, state, nodes, _DURATION, _tag("hpcdist.reason")),
            order_by=state,  # cancelled and failed runs come first
            ascending=True,
            group_by_tag="hpcdist.state",
            search="tags.hpcdist.interruptions LIKE '%'",
            widths=_widths(reason=400, interruptions=430, lost_steps=150),
        ),
        "hpcdist-cost": _view(
            *(cost, *causes, _metric("usage/energy_kwh"), _DURATION, allocated, _metric("usage/goodput")),
            order_by=allocated,
            widths=_widths(cost=250) | dict.fromkeys(causes, 160),
        ),
    }
    if keys := list(axes):
        views["hpcdist-sweep"] = _view(
            *(*(f"params.`{key}`" for key in keys), *bests, *primary, loss, state, _DURATION),
            order_by=_metric(best),
            ascending=mode == "min",
            group_by_tag="hpcdist.setting",  # the name of the sweep, unless it repeats settings with several seeds
            search="tags.hpcdist.run.sweep LIKE '%'",
            widths=measured,
        )
    return views


def write(mlflow_run: MlflowRun, run: RunDir, monitored: CheckpointConfig) -> None:
    """Write the views of the run's experiment that are missing or have changed, and note their ids in `mlflow.json`.

    Views of users are not touched. Nothing but a debug message happens if MLflow has another version or rejects them.
    """
    try:
        with translated(mlflow_run.uri):
            # Of what shows the store: of the server, or of this installation for a database.
            version = (server_version(mlflow_run.uri) or "unknown") if is_server(mlflow_run.uri) else installed
            if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
                log.debug("no views are written: MLflow %s is not one of the tested versions %s", version, TESTED)
                return
            views = _update(mlflow_run, run, monitored)
    except (HpcdistError, OSError) as error:
        log.debug("no views are written: %s", error)
        return
    saved = read_json(run.mlflow) or {}
    if saved.get("views") != views:
        write_json(run.mlflow, saved | {"views": views}, durable=True)


def _update(mlflow_run: MlflowRun, run: RunDir, monitored: CheckpointConfig) -> list[str]:
    tags = mlflow_run.client.get_experiment(mlflow_run.experiment_id).tags
    known = [_read(tags.get(_TAG + id_, "")) for id_ in VIEWS]
    own = {clean_name(monitored.monitor): monitored.monitor_mode} if monitored.monitor else {}
    sweep = sweep_of(run)
    axes = [clean_name(key) for key in sweep.read()["keys"]] if sweep is not None else []
    # The columns of other runs in the experiment stay: views are shared by all its runs.
    monitors = _newest({key: mode for view in known for key, mode in view["monitors"].items()} | own, own)
    all_axes = list(_newest(dict.fromkeys([*(key for view in known for key in view["axes"]), *axes]), axes))
    views = prepared(monitors, all_axes)
    for (id_, name), old in zip(VIEWS.items(), known, strict=True):
        if id_ not in views or (state := views[id_]) == old["state"]:
            continue
        now = int(time.time() * 1000)
        packed = _PREFIX + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
        view = {"name": name, "createdAt": old["createdAt"] or now, "updatedAt": now, "state": packed}
        text = json.dumps(view | {"hpcdist": {"monitors": monitors, "axes": all_axes}})
        mlflow_run.client.set_experiment_tag(mlflow_run.experiment_id, _TAG + id_, text)
    return list(views)


def _newest(keys: Mapping[str, str | None], own: Iterable[str]) -> dict[str, Any]:
    """Return at most _MAX_KEYS of `keys`, the own ones last and never left out."""
    last = dict.fromkeys(own)
    return {key: keys[key] for key in [*(key for key in keys if key not in last), *last][-_MAX_KEYS:]}


def _read(text: str) -> dict[str, Any]:
    """Return the content of one of hpcdist's views, with defaults for a missing or damaged one, which is replaced."""
    try:
        found = json.loads(text)
        state = json.loads(zlib.decompress(base64.b64decode(found["state"].removeprefix(_PREFIX))))
        own = found["hpcdist"]
        return {
            "state": state,
            "createdAt": int(found["createdAt"]),
            "monitors": {str(key): str(mode) for key, mode in own["monitors"].items()},
            "axes": [str(key) for key in own["axes"]],
        }
    except (ValueError, TypeError, KeyError, AttributeError, zlib.error, RecursionError):
        return {"state": None, "createdAt": None, "monitors": {}, "axes": []}
