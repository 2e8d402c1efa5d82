"""The run that a run repeats, in `rerun.json` of its folder. `hpcdist rerun` writes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from hpcdist.files.atomic import read_if_valid, write_json
from hpcdist.run.folder import RunDir


@dataclass(frozen=True, kw_only=True)
class RerunRecord:
    """The content of `rerun.json`."""

    name: str  #: of the original run
    folder: str = ""  #: its run folder; empty if it was read from MLflow
    run_id: str = ""  #: of MLflow; empty if it was never uploaded
    uri: str = ""  #: the MLflow store that it was read from, without a password; empty if its folder was read
    missing: list[str] = field(default_factory=list)  #: what could not be restored, one sentence each
    result: str = ""  #: result of the comparison, one sentence; empty before it


def write_rerun(run: RunDir, record: RerunRecord) -> None:
    """Write `rerun.json`. Raises OSError if that fails."""
    write_json(run.path / "rerun.json", asdict(record))


def read_rerun(run: RunDir) -> RerunRecord | None:
    """Return the record; None if the run is not a rerun, or the file is damaged."""
    return read_if_valid(RerunRecord, run.path / "rerun.json")
