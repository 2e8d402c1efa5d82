"""The MLflow parent run of a sweep, which the shippers of its cells keep up to date.

All methods are idempotent, and several shippers on several hosts may call them at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from hpcdist.errors import RunFolderError, TrackingError
from hpcdist.files.atomic import read_json
from hpcdist.files.lock import long_lock
from hpcdist.review.sweep_description import describe_sweep, read_sweep_facts
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.sweep import text_of
from hpcdist.run.sweep_folder import SweepDir, sweep_of
from hpcdist.tracking.client.mlflow_run import MlflowRun
from hpcdist.tracking.journal.names import clean_name
from hpcdist.tracking.pages import run_metadata
from hpcdist.tracking.pages.run_page import MAX_DESCRIPTION, set_note

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
            try:
                facts = self._sweep.read()
                # The lock lets one process create the run. Without locks two may create one: all cells use the one
                # that mlflow.json names, at the latest in their next pass.
                with _locked(self._sweep):
                    opened = MlflowRun(self._sweep, self._uri)
                    # A database rejects a parameter that two processes log at the same time.
                    self._describe(opened, facts)
            except RunFolderError as error:
                raise TrackingError(str(error)) from error
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
        opened.set_tags(
            tags | {"hpcdist.folder": str(self._sweep.path), "hpcdist.axes": values[: run_metadata.MAX_TAG]}
        )

    def refresh(self) -> None:
        """Set the status and description of the sweep from the folders of its cells."""
        opened = self._open()
        state = self._read()
        while True:
            ended = state.status in ENDED
            set_note(opened, self._description(state))
            opened.set_tags(
                {
                    "hpcdist.state": state.status,
                    "hpcdist.reason": state.reason[: run_metadata.MAX_TAG],
                }
            )
            status = run_metadata.MLFLOW_STATUS.get(state.status, "RUNNING")
            opened.set_status(status, int((state.ended or 0) * 1000) if ended else None)
            # Concurrent updates may overtake each other: each process repeats its update until the state is unchanged.
            before, state = state, self._read()
            if (before.status, before.reason) == (state.status, state.reason):
                return

    def _description(self, state: State) -> str:
        try:
            return describe_sweep(read_sweep_facts(self._sweep, state), max_chars=MAX_DESCRIPTION)
        except RunFolderError as error:
            raise TrackingError(str(error)) from error

    def _read(self) -> State:
        try:
            return self._sweep.read_state()
        except RunFolderError as error:
            raise TrackingError(str(error)) from error


@contextmanager
def _locked(sweep: SweepDir) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(long_lock(sweep.path / ".mlflow.lock"))
        except OSError as error:
            raise TrackingError(f"{sweep.path} cannot be written ({error.strerror})") from error
        yield
