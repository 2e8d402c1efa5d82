"""A sweep's folder: what holds its cells together.

    runs/<experiment>/<sweep>/
        sweep.json  mlflow.json  lease
        request.json                       what was asked of a sweep that runs its cells one by one
        submitit/                          batch script and logs of its job arrays
    runs/<experiment>/<sweep>-<cell>/      an ordinary run, with `cell.json` beside its files

The cells' own folders say how they stand; the sweep's state is derived from them and stored nowhere.
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
from hpcdist.run.folder import RunDir, State, read_record
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
    """A folder with a name, a lease and an MLflow run like a run's. It has no config, so nobody takes it for one."""

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    @property
    def request(self) -> Path:
        return self.path / "request.json"

    def read(self) -> dict[str, Any]:
        """`sweep.json`: uid, created, keys, base, and `cells` with name, label and values of each."""
        found = read_record(self.file)
        if found is None:
            raise RunFolderError(f"{self.file} is missing")
        fill(_Saved, found, self.file)
        for cell in found["cells"]:
            known = isinstance(cell, dict) and isinstance(cell.get("values"), dict)
            if not known or not all(isinstance(cell.get(key), str) for key in ("name", "label")):
                raise RunFolderError(f"{self.file} is damaged: {str(cell)[:40]!r} is no cell")
            if Path(cell["name"]).name != cell["name"] or cell["name"] in ("", "..", "."):
                raise RunFolderError(f"{self.file} is damaged: {cell['name'][:40]!r} is no name of a run")
        return found

    def cells(self) -> list[RunDir]:
        """Every cell that was ever asked for; its folder may not be there yet."""
        return [RunDir(self.path.parent / cell["name"]) for cell in self.read()["cells"]]

    def read_state(self) -> State:
        """Return the sweep's state, see `status.sweep_state`."""
        return sweep_state(self.cells(), active=holder(self) is not None, created=float(self.read()["created"]))


def sweep_of(run: RunDir) -> SweepDir | None:
    """The sweep that a run is a cell of; None for an ordinary run, or when the sweep's folder is gone."""
    name = (read_json(run.path / "cell.json") or {}).get("sweep")
    if not isinstance(name, str) or Path(name).name != name:
        return None
    found = SweepDir(run.path.parent / name)
    return found if found.file.is_file() else None


def mark(run: RunDir, sweep: SweepDir, cell: Cell) -> None:
    """Say in a run's folder which sweep it is a cell of."""
    write_json(run.path / "cell.json", {"sweep": sweep.name, "label": cell.label, "values": cell.values})


def match(sweep: Sweep) -> Sweep:
    """The same sweep with its cells under the names that they had before, if any. Reads, writes nothing.

    Raises RunFolderError when the folder holds something else: a run, or a sweep over other keys or of another config.
    """
    there = SweepDir(sweep.folder)
    if there.path.exists():
        require_trusted(there.path, "run --sweep")
    if not there.file.is_file():
        if (there.path / "state.json").exists():
            raise RunFolderError(f"{there.path} is a run, no sweep: choose another `name`")
        return sweep
    old = there.read()
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
    """Make the sweep's folder, or add new cells to it; returns it. Call `match` first."""
    there = SweepDir(sweep.folder)
    claim_experiment(there.path.parent)
    there.path.mkdir(mode=0o700, exist_ok=True)
    known = read_record(there.file) or {
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
    if not there.mlflow.exists():
        # Whoever ships first creates the MLflow run; everyone finds it by this.
        write_json(there.mlflow, {"run_uid": known["uid"]}, durable=True)
    base = sweep.base | known.get("base", {})
    write_json(there.file, known | {"base": base, "cells": [*known["cells"], *added]}, durable=True)
    return there
