"""The folder of a sweep, and its relation to the folders of its cells.

    runs/<experiment>/<sweep>/
        sweep.json  mlflow.json  lease
        request.json                       request to stop or cancel a sweep that runs its cells one after the other
        submitit/                          batch script and logs of its job arrays
    runs/<experiment>/<sweep>-<cell>/      an ordinary run, with a file `cell.json`

The state of a sweep is derived from the states of its cells and not stored.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.formats import fill
from hpcdist.files.ownership import require_trusted
from hpcdist.run.folder import RunDir, State, read_record, require_record
from hpcdist.run.lease import holder
from hpcdist.run.runs_dir import claim_experiment
from hpcdist.run.status import sweep_state
from hpcdist.run.sweep import Cell, Sweep, changes, reordered


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """The content of `sweep.json`."""

    uid: str
    created: float
    keys: list[str]
    base: dict[str, Any]
    cells: list[dict[str, Any]]


class SweepDir(RunDir):
    """The folder of a sweep: like a run's folder, but without a config and a state file."""

    kind = "sweep"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path / "sweep.json"
        self.request = path / "request.json"

    def read(self) -> dict[str, Any]:
        """Return the content of `sweep.json`. Raises RunFolderError if it is missing or damaged."""
        found = require_record(self.file)
        fill(_Saved, found, self.file)
        for cell in found["cells"]:
            known = isinstance(cell, dict) and isinstance(cell.get("values"), dict)
            if not known or not all(isinstance(cell.get(key), str) for key in ("name", "label")):
                raise RunFolderError(f"{self.file} is damaged: {str(cell)[:40]!r} is not a cell")
            if Path(cell["name"]).name != cell["name"] or cell["name"] in ("", "..", "."):
                raise RunFolderError(f"{self.file} is damaged: {cell['name'][:40]!r} is not a name of a run")
        return found

    def cells(self) -> list[RunDir]:
        """Return all cells, also those without a folder yet."""
        return [RunDir(self.path.parent / cell["name"]) for cell in self.read()["cells"]]

    def read_state(self) -> State:
        """Return the sweep's state, see `status.sweep_state`."""
        return sweep_state(self.cells(), active=holder(self) is not None, created=float(self.read()["created"]))


def sweep_of(run: RunDir) -> SweepDir | None:
    """Return the sweep of a cell; None for an ordinary run, or if the sweep's folder is missing."""
    name = (read_json(run.path / "cell.json") or {}).get("sweep")
    if not isinstance(name, str) or Path(name).name != name:
        return None
    found = SweepDir(run.path.parent / name)
    return found if found.file.is_file() else None


def mark(run: RunDir, sweep: SweepDir, cell: Cell) -> None:
    """Record in a run's folder that the run is a cell of a sweep."""
    write_json(run.path / "cell.json", {"sweep": sweep.name, "label": cell.label, "values": cell.values})


def match(sweep: Sweep) -> Sweep:
    """Return a sweep with the names that its existing cells already have. Writes nothing.

    Raises:
        RunFolderError: the folder holds a run, or a sweep with other keys or another config.
    """
    folder = SweepDir(sweep.folder)
    if folder.path.exists():
        require_trusted(folder.path, "run --sweep")
    if not folder.file.is_file():
        if (folder.path / "state.json").exists():
            raise RunFolderError(f"{folder.path} is a run, not a sweep: choose another `name`")
        return sweep
    old = folder.read()
    if set(old["keys"]) != set(sweep.keys):
        raise RunFolderError(
            f"sweep {sweep.name} is over {', '.join(old['keys'])}, not over {', '.join(sweep.keys)}: values can be"
            " added to it, keys cannot; choose another `name`"
        )
    if differences := changes(old["base"], sweep.base):
        raise RunFolderError(
            f"sweep {sweep.name} was started with another config ({'; '.join(differences[:3])}): its cells could not be"
            " compared; choose another `name`"
        )
    return _renamed(reordered(sweep, old["keys"]), old["cells"])


def _renamed(sweep: Sweep, old: Iterable[dict[str, Any]]) -> Sweep:
    known = [(cell["values"], cell) for cell in old]
    cells = []
    for cell in sweep.cells:
        before = next((stored for values, stored in known if values == cell.values), None)
        if before is not None:
            config = replace(cell.config, name=before["name"])
            cell = replace(cell, name=before["name"], label=before["label"], config=config)
        cells.append(cell)
    return replace(sweep, cells=tuple(cells))


def write_sweep(sweep: Sweep) -> SweepDir:
    """Create the sweep's folder, or add new cells to it. Call `match` first."""
    folder = SweepDir(sweep.folder)
    claim_experiment(folder.path.parent)
    folder.path.mkdir(mode=0o700, exist_ok=True)
    known = read_record(folder.file) or {
        "uid": uuid.uuid4().hex,
        "created": time.time(),
        "keys": list(sweep.keys),
        "cells": [],
    }
    names = {cell["name"] for cell in known["cells"]}
    added = [
        {"name": cell.name, "label": cell.label, "values": cell.values}
        for cell in sweep.cells
        if cell.name not in names
    ]
    if not folder.mlflow.exists():
        # The first shipper creates the MLflow run; all others find it by this id.
        write_json(folder.mlflow, {"run_uid": known["uid"]}, durable=True)
    base = sweep.base | known.get("base", {})
    write_json(folder.file, known | {"base": base, "cells": [*known["cells"], *added]}, durable=True)
    return folder
