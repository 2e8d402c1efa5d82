"""Prepared views of an experiment, stored like views that users save in MLflow's UI.

A saved view is the experiment tag `mlflow.sharedViewState.<id>`: JSON with the keys `name`, `createdAt`, `updatedAt`
(ms since the epoch) and `state`, which is `deflate;` and the base64 text of compressed JSON. This format is private to
MLflow. It was taken from views that the UI of the versions in TESTED had saved; other versions get no views.
"""

from __future__ import annotations

import base64
import json
import logging
import time
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlflow import __version__ as installed

from hpcdist.config.monitor import monitor_of
from hpcdist.errors import HpcdistError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.review.causes import CAUSES
from hpcdist.run.folder import RunDir
from hpcdist.run.sweep_folder import sweep_of
from hpcdist.tracking.client.mlflow_client import translated
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.client.server_errors import server_version
from hpcdist.tracking.client.uri import is_server
from hpcdist.tracking.journal.names import clean_name
from hpcdist.tracking.pages.links import VIEWS

log = logging.getLogger(__name__)

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
    widths: Mapping[str, int] = field(
        default_factory=dict
    )  #: pixels of columns whose values are wider than their names

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


def write(mlflow: MlflowRun, run: RunDir, config: Mapping[str, Any]) -> None:
    """Write the views of the run's experiment that are missing or have changed, and note their ids in `mlflow.json`.

    Views of users are not touched. Nothing but a debug message happens if MLflow has another version or rejects them.
    """
    try:
        with translated(mlflow.uri):
            version = _version(mlflow.uri)
            if not version.startswith(tuple(f"{tested}." for tested in TESTED)):
                log.debug("no views are written: MLflow %s is not one of the tested versions %s", version, TESTED)
                return
            views = _update(mlflow, run, config)
    except (HpcdistError, OSError) as error:
        log.debug("no views are written: %s", error)
        return
    saved = read_json(run.mlflow) or {}
    if saved.get("views") != views:
        write_json(run.mlflow, saved | {"views": views}, durable=True)


def _version(uri: str) -> str:
    """Return the version of MLflow that shows a store: of the server, or of this installation for a database."""
    if not is_server(uri):
        return str(installed)
    return server_version(uri) or "unknown"


def _update(mlflow: MlflowRun, run: RunDir, config: Mapping[str, Any]) -> list[str]:
    tags = mlflow.client.get_experiment(mlflow.experiment_id).tags
    known = [_read(tags.get(_TAG + id_, "")) for id_ in VIEWS]
    monitor = monitor_of(config)
    own = {clean_name(monitor.metric): monitor.mode} if monitor.metric else {}
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
