"""A run in MLflow's UI: description, datasets and metrics, the parent run of a sweep, and prepared views of an
experiment.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from mlflow import __version__ as installed

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.errors import HpcdistError, RunFolderError, TrackingError
from hpcdist.host.files import read_json, write_json
from hpcdist.host.lock import long_lock
from hpcdist.review.description import describe, describe_sweep, read_sweep_facts
from hpcdist.review.facts import RunFacts, interruptions, read_facts
from hpcdist.review.ledger import CAUSES, Ledger, percent, read_ledger
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.records import DatasetRecord
from hpcdist.run.sweeps import SweepDir, sweep_of, text_of
from hpcdist.tracking import run_metadata
from hpcdist.tracking.journal import clean_name
from hpcdist.tracking.links import VIEWS
from hpcdist.tracking.mlflow_client import entities, server_version, translated
from hpcdist.tracking.mlflow_run import MlflowRun
from hpcdist.tracking.run_metadata import MAX_TAG, clean_text
from hpcdist.tracking.uri import is_server

# Description, datasets and primary metric of a run, as MLflow's UI shows them beside its metrics.

log = logging.getLogger(__name__)

NOTE_TAG = "mlflow.note.content"
#: Separates text of the user from the description; MLflow's UI does not show it.
MARK = "<!-- hpcdist: text above this line is kept -->"
#: Maximum length of a description without text of the user.
MAX_DESCRIPTION = MAX_TAG - len(MARK) - 4
#: Minimum time between two changes of the description, unless the state of the run changes.
INTERVAL_S = 60.0
_PRIMARY_METRIC = "mlflow.experiment.primaryMetric.name"
_GREATER_IS_BETTER = "mlflow.experiment.primaryMetric.greaterIsBetter"
_CONTEXT_TAG = "mlflow.data.context"
#: Limits of MLflow for the name and the digest of a dataset.
_MAX_NAME = 500
_MAX_DIGEST = 36


class RunPage:
    """Keeps description, datasets and primary metric of one run current."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._shown: object = None
        self._next = 0.0
        #: What this process has sent.
        self._text = ""
        self._datasets: tuple[DatasetRecord, ...] = ()
        self._tags: dict[str, str] = {}
        self._has_primary_metric = False
        self._is_refused = False

    def update(self, opened: MlflowRun, state: State, own_note: str, sent: str) -> str:
        """Send what has changed. Returns a digest of the page, empty if MLflow has refused a part of it.

        Args:
            own_note: description that the config of the run sets; it precedes the generated one.
            sent: digest of the page in MLflow. If nothing has changed since, no request is made.

        Raises TrackingError if MLflow fails or the run folder cannot be read.
        """
        now = time.monotonic()
        status = (state.status, state.reason, state.attempt)
        if status == self._shown and now < self._next:
            return sent
        with _readable():
            facts = read_facts(self._run, state)
            ledger = read_ledger(self._run)
            text = describe(facts, ledger, max_chars=MAX_DESCRIPTION - len(own_note))
        tags = view_tags(facts, ledger)
        shown = json.dumps([own_note, text, [asdict(one) for one in facts.datasets], tags, _has_primary(facts)])
        digest = hashlib.sha256(shown.encode()).hexdigest()
        if digest != sent:
            self._send(opened, facts, text, own_note, tags)
        self._shown, self._next = status, now + INTERVAL_S
        return "" if self._is_refused else digest

    def _send(self, opened: MlflowRun, facts: RunFacts, text: str, own_note: str, tags: dict[str, str]) -> None:
        if text != self._text:
            set_note(opened, text, own_note=own_note)
            self._text = text
        if facts.datasets != self._datasets:
            with translated(opened.uri):
                opened.client.log_inputs(opened.run_id, [_input(dataset, facts.datasets) for dataset in facts.datasets])
            self._datasets = facts.datasets
        if not self._has_primary_metric and _has_primary(facts):
            self._is_refused = not _set_primary_metric(opened, facts)
            self._has_primary_metric = True
        if tags != self._tags:
            opened.set_tags(tags)
            self._tags = tags


def _has_primary(facts: RunFacts) -> bool:
    return facts.best is not None or facts.monitor in facts.metrics


@contextmanager
def _readable() -> Iterator[None]:
    """Turn a RunFolderError into a TrackingError."""
    try:
        yield
    except RunFolderError as error:
        raise TrackingError(str(error)) from error


def set_note(opened: MlflowRun, text: str, *, own_note: str = "") -> None:
    """Set the description of an MLflow run below the text that a user has written there.

    Args:
        own_note: text above the description if the run has none yet.
    """
    current = opened.current().data.tags.get(NOTE_TAG, "")
    above = (current.partition(MARK)[0] if current else own_note).strip()
    whole = f"{above}\n\n{MARK}\n\n{text}" if above else f"{MARK}\n\n{text}"
    # A long text of the user is kept, and the end of the description is left out.
    opened.set_tags({NOTE_TAG: whole.encode(errors="replace").decode()[:MAX_TAG]})


def _input(dataset: DatasetRecord, datasets: Iterable[DatasetRecord]) -> entities.DatasetInput:
    # MLflow identifies a dataset by name and digest and requires both. Splits of one file may have the same digest.
    digest = dataset.digest or hashlib.sha256(json.dumps(asdict(dataset)).encode()).hexdigest()[:8]
    if any((one.name, one.digest) == (dataset.name, dataset.digest) and one.split != dataset.split for one in datasets):
        digest = f"{digest[: _MAX_DIGEST // 2]}-{dataset.split}"
    profile = {} if dataset.num_samples is None else {"num_rows": dataset.num_samples}
    source = dataset.source or dataset.name
    found = entities.Dataset(
        name=dataset.name[:_MAX_NAME],
        digest=digest[:_MAX_DIGEST],
        source_type="hpcdist",
        source=json.dumps({"uri": source}),
        profile=json.dumps(profile),
    )
    return entities.DatasetInput(found, [entities.InputTag(_CONTEXT_TAG, dataset.split[:_MAX_NAME])])


def _set_primary_metric(opened: MlflowRun, facts: RunFacts) -> bool:
    """Make the monitored metric the primary one of the experiment, unless it has one. Returns False if refused."""
    tags = {_PRIMARY_METRIC: facts.monitor, _GREATER_IS_BETTER: str(facts.monitor_mode == "max")}
    try:
        with translated(opened.uri):
            existing = opened.client.get_experiment(opened.experiment_id).tags
            if _PRIMARY_METRIC not in existing:
                for key, value in tags.items():
                    opened.client.set_experiment_tag(opened.experiment_id, key, value)
    except TrackingError as error:
        if error.code != "PERMISSION_DENIED":
            raise
        log.warning("the primary metric of the experiment is not set: %s", error)
        return False
    return True


def view_tags(facts: RunFacts, ledger: Ledger) -> dict[str, str]:
    """Return the tags that the prepared views show as columns: texts with rounded numbers, and facts of all attempts.

    MLflow's list of runs shows the last value of a metric, with all digits of the number.
    """
    tags = {}
    if facts.best is not None and facts.best_value is not None:
        tags["hpcdist.best"] = f"{facts.best_value:.6g} at step {facts.best.step:,}"
    if ledger.entries:
        hours = ledger.allocated_s / 3600
        tags["hpcdist.cost"] = f"{hours:.3g} {ledger.unit}-hours, goodput {percent(ledger.goodput)}"
    if causes := interruptions(facts.attempts, MAX_TAG):
        tags["hpcdist.interruptions"] = clean_text(causes)[:MAX_TAG]
    if known := [attempt.steps_lost for attempt in facts.attempts if attempt.steps_lost is not None]:
        tags["hpcdist.lost_steps"] = str(sum(known))
    return tags


# The MLflow parent run of a sweep, which the shippers of its cells keep up to date.
#
# All methods are idempotent, and several shippers on several hosts may call them at once.

_PARENT_TAG = "mlflow.parentRunId"
#: Tags of a cell that apply to the whole sweep.
_SHARED = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")


class ParentRun:
    """The parent run of one cell. All methods raise TrackingError if MLflow fails or rejects a request."""

    def __init__(self, cell: RunDir, sweep: SweepDir, uri: str) -> None:
        self._cell = cell
        self._sweep = sweep
        self._uri = uri
        self._mlflow: MlflowRun | None = None

    @classmethod
    def of(cls, run: RunDir, uri: str) -> ParentRun | None:
        """Return the parent run of a cell; None for a run that is not part of a sweep."""
        sweep = sweep_of(run)
        return cls(run, sweep, uri) if sweep is not None else None

    def cell_tags(self) -> dict[str, str]:
        """Return the tags that make the MLflow run of the cell a child run, named by its values."""
        cell = read_json(self._cell.path / "cell.json") or {}
        return {
            _PARENT_TAG: self._open().run_id,
            "mlflow.runName": str(cell.get("label", self._cell.name))[:250],
            "hpcdist.run.sweep": self._sweep.name,
        }

    def _open(self) -> MlflowRun:
        if self._mlflow is None:
            # The lock lets one process create the run. Without locks two may create one: all cells use the one that
            # mlflow.json names, at the latest in their next pass.
            with _readable(), _locked(self._sweep):
                opened = MlflowRun(self._sweep, self._uri)
                # A database rejects a parameter that two processes log at the same time.
                self._describe(opened, self._sweep.read())
            self._mlflow = opened
        return self._mlflow

    def _describe(self, opened: MlflowRun, facts: Mapping[str, Any]) -> None:
        axes: dict[str, dict[str, None]] = {key: {} for key in facts["keys"]}
        for cell in facts["cells"]:
            for key, value in cell["values"].items():
                axes[key][text_of(value)] = None
        opened.log_params({clean_name(key): ", ".join(texts)[: run_metadata.MAX_PARAM] for key, texts in axes.items()})
        of_cell = run_metadata.fixed_tags(self._cell, run_metadata.read_config(self._cell))
        tags = {key: value for key, value in of_cell.items() if key in _SHARED}
        values = json.dumps({key: list(texts) for key, texts in axes.items()})
        opened.set_tags(tags | {"hpcdist.folder": str(self._sweep.path), "hpcdist.axes": values[:MAX_TAG]})

    def refresh(self) -> None:
        """Set the status and description of the sweep from the folders of its cells."""
        opened = self._open()
        state = self._read()
        while True:
            ended = state.status in ENDED
            with _readable():
                text = describe_sweep(read_sweep_facts(self._sweep, state), max_chars=MAX_DESCRIPTION)
            set_note(opened, text)
            opened.set_tags({"hpcdist.state": state.status, "hpcdist.reason": state.reason[:MAX_TAG]})
            status = run_metadata.MLFLOW_STATUS.get(state.status, "RUNNING")
            opened.set_status(status, int((state.ended or 0) * 1000) if ended else None)
            # Concurrent updates may overtake each other: each process repeats its update until the state is unchanged.
            before, state = state, self._read()
            if (before.status, before.reason) == (state.status, state.reason):
                return

    def _read(self) -> State:
        with _readable():
            return self._sweep.read_state()


@contextmanager
def _locked(sweep: SweepDir) -> Iterator[None]:
    with ExitStack() as stack:
        try:  # of the lock only, not of the block
            stack.enter_context(long_lock(sweep.path / ".mlflow.lock"))
        except OSError as error:
            raise TrackingError(f"{sweep.path} cannot be written ({error.strerror})") from error
        yield


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


@dataclass(frozen=True, kw_only=True)
class View:
    """The columns, order and grouping of a list of runs, with the column ids of MLflow's UI."""

    columns: tuple[str, ...]
    order_by: str = "attributes.start_time"
    ascending: bool = False
    group_by_tag: str = ""
    search: str = ""
    #: Pixels of columns whose values are wider than their names.
    widths: Mapping[str, int] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return the state as MLflow's UI saves it; the UI completes omitted keys with its defaults."""
        group = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": self.group_by_tag}]}
        return {
            "searchFilter": self.search,
            "orderByKey": self.order_by,
            "orderByAsc": self.ascending,
            "selectedColumns": [column for column in self.columns if column != _DURATION],
            "columnOrder": [_NAME, _CREATED, *self.columns],
            "columnWidths": {column: _width(column) for column in self.columns} | dict(self.widths),
            "groupBy": group if self.group_by_tag else None,
        }


def _metric(key: str) -> str:
    return f"metrics.`{key}`"


def _tag(key: str) -> str:
    return f"tags.`{key}`"


def _width(column: str) -> int:
    """Return the width in pixels at which the name of a column is shown in full."""
    return max(90, 8 * len(column.partition("`")[2].rstrip("`")) + 30)


def _widths(**pixels: int) -> dict[str, int]:
    return {_tag(f"hpcdist.{name}"): width for name, width in pixels.items()}


def prepared(monitors: Mapping[str, str], axes: Iterable[str]) -> dict[str, View]:
    """Return the views of an experiment by id. Columns that no run of the experiment has do not appear in the UI.

    Args:
        monitors: Primary metrics of the runs (`checkpoint.monitor`, `checkpoint.monitor_mode`), the newest one last.
        axes: Keys that sweeps vary. Without any there is no view of sweeps.
    """
    state, nodes = _tag("hpcdist.state"), _tag("hpcdist.nodes")
    primary = [_metric(key) for key in monitors]
    throughput = [_metric("train/samples_per_s"), _metric("train/env_steps_per_s")]
    loss, allocated, cost = _metric("train/loss"), _metric("usage/allocated"), _tag("hpcdist.cost")
    causes = [_metric(f"usage/{cause}") for cause in (*CAUSES, "queue")]
    dataset, ranks, attempts = "attributes.`Dataset`", _tag("hpcdist.world_size"), _tag("hpcdist.attempts")
    lost, interruptions = _tag("hpcdist.lost_steps"), _tag("hpcdist.interruptions")
    measured = dict.fromkeys([*primary, loss, *throughput], _NUMBER_PX)
    views = {
        "hpcdist-overview": View(
            columns=(
                *(state, _tag("hpcdist.best"), _DURATION, cost, *primary, loss, *throughput),
                *(nodes, ranks, dataset),
            ),
            widths=measured | _widths(best=200, cost=250) | {dataset: 300},
        ),
        "hpcdist-failures": View(
            columns=(state, interruptions, attempts, lost, nodes, _DURATION, _tag("hpcdist.reason")),
            order_by=state,  # cancelled and failed runs come first
            ascending=True,
            group_by_tag="hpcdist.state",
            widths=_widths(reason=400, interruptions=600),
        ),
        "hpcdist-cost": View(
            columns=(cost, allocated, _metric("usage/goodput"), *causes, _metric("usage/energy_kwh"), _DURATION),
            order_by=allocated,
            widths=_widths(cost=250),
        ),
    }
    if keys := list(axes):
        best, mode = [("train/loss", "min"), *monitors.items()][-1]
        views["hpcdist-sweep"] = View(
            columns=(*(f"params.`{key}`" for key in keys), *primary, loss, state, _DURATION),
            order_by=_metric(best),
            ascending=mode == "min",
            group_by_tag="hpcdist.run.sweep",
            search="tags.hpcdist.run.sweep LIKE '%'",
            widths=measured,
        )
    return views


def write(mlflow: MlflowRun, run: RunDir, monitored: CheckpointConfig) -> None:
    """Write the views of the run's experiment that are missing or have changed, and note their ids in `mlflow.json`.

    Views of users are not touched. Nothing but a debug message happens if MLflow has another version or rejects them.
    """
    try:
        with translated(mlflow.uri):
            version = _version(mlflow.uri)
            if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
                log.debug("no views are written: MLflow %s is not one of the tested versions %s", version, TESTED)
                return
            views = _update(mlflow, run, monitored)
    except (HpcdistError, OSError) as error:
        log.debug("no views are written: %s", error)
        return
    saved = read_json(run.mlflow) or {}
    if saved.get("views") != views:
        write_json(run.mlflow, saved | {"views": views}, durable=True)


def _version(uri: str) -> str:
    """Return the version of MLflow that shows a store: of the server, or of this installation for a database."""
    return (server_version(uri) or "unknown") if is_server(uri) else str(installed)


def _update(mlflow: MlflowRun, run: RunDir, monitored: CheckpointConfig) -> list[str]:
    tags = mlflow.client.get_experiment(mlflow.experiment_id).tags
    known = [_read(tags.get(_TAG + id_, "")) for id_ in VIEWS]
    own = {clean_name(monitored.monitor): monitored.monitor_mode} if monitored.monitor else {}
    sweep = sweep_of(run)
    axes = [clean_name(key) for key in sweep.read()["keys"]] if sweep is not None else []
    # The columns of other runs in the experiment stay: views are shared by all its runs.
    monitors = _newest({key: mode for view in known for key, mode in view["monitors"].items()} | own, own)
    all_axes = list(_newest(dict.fromkeys([*(key for view in known for key in view["axes"]), *axes]), axes))
    views = prepared(monitors, all_axes)
    for (id_, name), old in zip(VIEWS.items(), known, strict=True):
        if id_ not in views or (state := views[id_].state()) == old["state"]:
            continue
        now = int(time.time() * 1000)
        view = {"name": name, "createdAt": old["createdAt"] or now, "updatedAt": now, "state": _packed(state)}
        text = json.dumps(view | {"hpcdist": {"monitors": monitors, "axes": all_axes}})
        mlflow.client.set_experiment_tag(mlflow.experiment_id, _TAG + id_, text)
    return list(views)


def _newest(keys: Mapping[str, str | None], own: Iterable[str]) -> dict[str, Any]:
    """Return at most _MAX_KEYS of `keys`, the own ones last and never left out."""
    last = dict.fromkeys(own)
    return {key: keys[key] for key in [*(key for key in keys if key not in last), *last][-_MAX_KEYS:]}


def _packed(state: Mapping[str, Any]) -> str:
    return _PREFIX + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def _read(text: str) -> dict[str, Any]:
    """Return the content of one of hpcdist's views, with defaults for a missing or damaged one, which is replaced."""
    empty: dict[str, Any] = {"state": None, "createdAt": None, "monitors": {}, "axes": []}
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
        return empty
