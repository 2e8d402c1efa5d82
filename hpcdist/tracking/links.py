"""Links to the pages of MLflow's UI: a run, an experiment, and the prepared views of an experiment.

Imports no MLflow, since commands on a login node print these links.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError
from hpcdist.host.files import read_json
from hpcdist.review.text import TRAINING_PAGES, run_page
from hpcdist.run.folder import RunDir
from hpcdist.tracking.uri import is_server

#: Id of each prepared view and its name in the UI, see `tracking/pages.py`.
VIEWS = {
    "hpcdist-overview": "Overview",
    "hpcdist-failures": "Failures",
    "hpcdist-cost": "Cost",
    "hpcdist-sweep": "Sweep",
}


def web_address(uri: str) -> str:
    """Return the address of a server's UI: its tracking URI without user name, password and final slash."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")


def experiments_page(address: str) -> str:
    """Return the link to the list of experiments; without it MLflow opens its pages for LLM applications."""
    return f"{address}#/experiments?{TRAINING_PAGES}"


def experiment_page(address: str, experiment_id: str, view: str = "") -> str:
    """Return the link to an experiment's list of runs, in a prepared view if its id is given."""
    key = f"&viewStateShareKey={view}" if view else ""
    return f"{address}#/experiments/{experiment_id}/runs?{TRAINING_PAGES}{key}"


def end_of_run(run: RunDir) -> list[str]:
    """Return lines with the links to a run and to the views of its experiment; none if the store has no address."""
    ids = _ids(run)
    experiment_id, run_id = ids.get("experiment_id"), ids.get("run_id")
    if not is_server(uri := ids.get("uri", "")) or not experiment_id or not run_id:
        return []
    address = web_address(uri)
    lines = [f"review in MLflow: {address}/{run_page(experiment_id, run_id)}"]
    return lines + _view_lines(f"{address}/", experiment_id, ids["views"])


def of_newest(runs: Iterable[RunDir], store: str, address: str) -> str:
    """Return the link to the experiment of the newest run in `store`, else to the list of experiments."""
    found: dict[float, dict[str, Any]] = {}
    for run in runs:
        ids = _ids(run)
        with suppress(RunFolderError, OSError):
            if ids.get("experiment_id") and ids.get("uri") == redact_text(store):
                found[run.read_state().created] = ids
    if not found:
        return experiments_page(address)
    ids = found[max(found)]
    overview = next(iter(VIEWS))
    return experiment_page(address, ids["experiment_id"], overview if overview in ids["views"] else "")


def of_experiments(runs: Iterable[RunDir], store: str, address: str) -> list[str]:
    """Return lines with the links to the experiments of the runs in `store`, and to their views, at `address`."""
    views: dict[tuple[str, str], set[str]] = {}
    for run in runs:
        ids = _ids(run)
        if ids.get("experiment_id") and ids.get("uri") == redact_text(store):
            views.setdefault((run.experiment, ids["experiment_id"]), set()).update(ids["views"])
    lines = []
    for (name, number), known in sorted(views.items()):
        lines.append(f"{name}: {experiment_page(address, number)}")
        lines += _view_lines(address, number, known)
    return lines


def _view_lines(address: str, experiment_id: str, views: Container[str]) -> list[str]:
    """Return a line for each view, in the order of VIEWS."""
    pages = {name: experiment_page(address, experiment_id, id_) for id_, name in VIEWS.items() if id_ in views}
    return [f"  {name}: {page}" for name, page in pages.items()]


def _ids(run: RunDir) -> dict[str, Any]:
    """Return the strings of `mlflow.json` and its list `views`; a damaged file counts as empty."""
    try:
        found = read_json(run.mlflow) or {}
    except (RunFolderError, OSError):
        found = {}
    views = found.get("views")
    return {key: value for key, value in found.items() if isinstance(value, str)} | {
        "views": [view for view in views if isinstance(view, str)] if isinstance(views, list) else []
    }
