"""The alias `best` of a registered model: the version with the best monitored metric.

MLflow has no compare-and-set for an alias, and several runs may register versions at once. Each process therefore
writes the metric of its version first, then sets the alias to the best of all versions, and repeats the comparison
until the alias needs no change. The last process that sets the alias has compared it with every metric that was written
before, and a metric that is written later is compared with the alias by its own process. Hence, once all processes have
finished, the alias is at the best version. Between two requests it may be at a worse one for a moment.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from hpcdist.config.monitor import Monitor
from hpcdist.errors import TrackingError
from hpcdist.tracking.client.mlflow_client import MlflowException, all_pages, is_unsupported, translated
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.names import clean_metric_name

log = logging.getLogger(__name__)

ALIAS = "best"
#: Tags of a version.
METRIC_TAG = "hpcdist.monitor"
VALUE_TAG = "hpcdist.monitor_value"
#: Each repetition means that another process has moved the alias in the same fraction of a second.
_MAX_MOVES = 20
_PAGE = 200


def move_best(run: MlflowRun, name: str, version: str, monitor: Monitor) -> None:
    """Record the metric of a run's version, and set the alias `best` to the best version of the registered model.

    A version with an equal metric does not replace the one that has the alias. Without the metric in the run, or on a
    server without aliases, the alias is left as it is.

    Args:
        version: number of the version that `run` has registered.

    Raises TrackingError if MLflow fails or rejects a request.
    """
    try:
        with translated(run.uri):
            metric = clean_metric_name(monitor.metric)
            value = _run_value(run, run.run_id, metric)
            if value is None:
                log.debug("%s/%s has no metric %s: the alias %s is not moved", name, version, metric, ALIAS)
                return
            run.client.set_model_version_tag(name, version, METRIC_TAG, metric)
            run.client.set_model_version_tag(name, version, VALUE_TAG, repr(value))
            for _ in range(_MAX_MOVES):
                if not _move_once(run, name, metric, -1.0 if monitor.mode == "min" else 1.0):
                    return
            log.warning("the alias %s of %s is moved by other processes all the time", ALIAS, name)
    except TrackingError as error:
        cause = error.__cause__
        if not isinstance(cause, MlflowException) or not is_unsupported(cause):
            raise
        log.debug("the alias %s is not moved, which this MLflow does not support: %s", ALIAS, error)


def _move_once(run: MlflowRun, name: str, metric: str, sign: float) -> bool:
    """Set the alias to the best version if that is better than the version that has it. Returns whether it was set."""
    # The alias is read before the versions: a metric that is written in between is compared.
    holder = str((run.client.get_registered_model(name).aliases or {}).get(ALIAS, ""))
    values = {}
    for version in all_pages(run.client.search_model_versions, f"name = '{name}'", max_results=_PAGE):
        value = _tagged_value(version, metric)
        number = str(version.version)
        if value is None and number == holder and version.run_id:  # registered without hpcdist
            value = _run_value(run, version.run_id, metric)
        if value is not None:
            values[number] = sign * value
    if not values:
        return False
    best = max(values, key=lambda number: (values[number], -int(number)))  # the oldest of equal ones
    if holder in values and values[holder] >= values[best]:
        return False
    run.client.set_registered_model_alias(name, ALIAS, best)
    return True


def _tagged_value(version: Any, metric: str) -> float | None:
    tags = version.tags or {}
    if tags.get(METRIC_TAG) != metric:
        return None
    try:
        return _finite(float(tags[VALUE_TAG]))
    except (KeyError, ValueError):
        return None


def _run_value(run: MlflowRun, run_id: str, metric: str) -> float | None:
    """Return the last value of a metric of an MLflow run; None if there is none, or the run is removed."""
    try:
        return _finite(run.client.get_run(run_id).data.metrics.get(metric, math.nan))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
