"""The MLflow parent run of a sweep, which the shippers of its cells keep up to date, several of them at once."""

import time
from collections.abc import Mapping
from typing import Self

from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import read_json
from hpcdist.host.locks import long_lock
from hpcdist.review.ledger import Ledger, cost_of, ledgers_of
from hpcdist.review.markdown import run_page
from hpcdist.review.sweep_facts import SweepFacts, describe_sweep, read_sweep_facts, sweep_setup
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.run.mlflow_limits import MAX_TAG
from hpcdist.run.sweeps import SweepDir, named_setting, sweep_of, text_of
from hpcdist.tracking.metric_point import Point
from hpcdist.tracking.mlflow_client import MlflowRun, translated
from hpcdist.tracking.run_page import MAX_DESCRIPTION, as_tracking_error, best_metric, set_note
from hpcdist.tracking.run_tags import MAX_RUN_NAME, MLFLOW_STATUS, fixed_tags, read_config
from hpcdist.tracking.series import read_last_values, read_series

PARENT_TAG = "mlflow.parentRunId"
#: Tags of a cell that apply to the whole sweep.
_SHARED = ("mlflow.user", "mlflow.source.name", "mlflow.source.type", "mlflow.source.git.commit")


class ParentRun:
    """The MLflow run of a sweep, seen from one of its cells.

    Its methods raise TrackingError, and may then be called again.
    """

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
            "hpcdist.setting": (named_setting(self._sweep, cell.get("values")) or self._sweep.name)[:MAX_TAG],
        }

    def _open(self) -> MlflowRun:
        if self._mlflow_run is None:
            # The lock lets one process create the run. Without locks two may create one: all cells use the one that
            # mlflow.json names, at the latest in their next pass.
            with as_tracking_error(), long_lock(self._sweep.path / ".mlflow.lock"):
                opened = MlflowRun(self._sweep, self._uri)
                facts = self._sweep.read()
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
                facts = read_sweep_facts(self._sweep, state, read_last_values)
                setup = sweep_setup(facts, self._sweep)
                tags = {"hpcdist.state": state.status, "hpcdist.reason": state.reason}
                spent = ledgers_of(self._sweep.cells())
                total = cost_of(spent.values())
                if total:
                    tags["hpcdist.cost"] = total
            report = ""
            if state.status in ENDED:
                report = run_page(opened.experiment_id, opened.run_id, "report.html")
                self._upload_report(opened, facts, spent)
            cost = f"`hpcdist cost {self._sweep.name}` lists it by run"
            if total:
                cost = f"{total}; {cost}"
            text = describe_sweep(facts, setup, cost=cost, report=report, max_chars=MAX_DESCRIPTION)
            set_note(opened, text)
            if facts.best is not None and not facts.is_last:
                best = f"{facts.best.value_text}: {facts.best.name}"
                if facts.beside_next:
                    best += f", {facts.beside_next}"
                tags["hpcdist.best"] = best
                mean = facts.best.measured.mean
                num_values = sum(cell.value is not None for cell in facts.cells)
                opened.log_points([Point(best_metric(facts.monitor), mean, int(time.time() * 1000), num_values)])
            opened.set_tags(tags)
            ended_ms = None
            if state.status in ENDED:
                ended_ms = int((state.ended or 0) * 1000)
            opened.set_status(MLFLOW_STATUS.get(state.status, "RUNNING"), ended_ms)
            # Concurrent updates may overtake each other: each process repeats its update until the state is unchanged.
            with as_tracking_error():
                now = self._sweep.read_state()
            if (now.status, now.reason) == (state.status, state.reason):
                return
            state = now

    def _upload_report(self, opened: MlflowRun, facts: SweepFacts, spent: Mapping[str, Ledger]) -> None:
        """Upload the report, and its charts as images."""
        # Other commands that import this module draw nothing.
        from hpcdist.review.report import as_image, charts_of, render_sweep

        with as_tracking_error():
            drawn = charts_of(self._sweep, facts, spent, read_series)
            # Links to the reports of the cells would be broken in MLflow.
            files = {"report.html": render_sweep(self._sweep, facts, spent, drawn, with_links=False)}
            for name, chart in drawn.items():
                files[f"charts/{name}.svg"] = as_image(chart)
            write_atomic(self._sweep.report, render_sweep(self._sweep, facts, spent, drawn))
        with translated(opened.uri):
            for name, text in files.items():
                opened.client.log_text(opened.run_id, text, name)
