"""The list of runs and the status of one run, as tables and as JSON."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from hpcdist.cli.render import COLOURS, format_metrics, print_rows
from hpcdist.cli.terminal import wrapped
from hpcdist.errors import HpcdistError, RunFolderError
from hpcdist.files.short_path import short_path
from hpcdist.review.attempts import last_beat, read_attempts
from hpcdist.review.checkpoints import read_checkpoints
from hpcdist.run.folder import RunDir, State, read_record, sentence_of
from hpcdist.run.lease import holder
from hpcdist.run.lookup import Listing
from hpcdist.run.saved_checkpoints import script_files
from hpcdist.run.slurm_job import update_job_starts
from hpcdist.run.status import query_job, query_jobs, status_from

#: Ranks, and attempts that have ended, that `status` shows in a line each.
MAX_SHOWN_RANKS = 32
MAX_SHOWN_ATTEMPTS = 5
#: Checkpoints that `status` names.
MAX_SHOWN_CHECKPOINTS = 10


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run in the list of runs."""

    run: str  #: `experiment/name`
    folder: str
    status: str
    step: int | None
    attempts: int
    created: float  #: seconds since the epoch
    reason: str


def read_rows(listing: Listing, experiment: str | None = None) -> tuple[list[RunRow], list[str]]:
    """Return a row for each run, the newest last, and notes on runs that cannot be read."""
    runs = [run for run in listing.runs if experiment in (None, run.experiment)]
    snapshots = query_jobs(runs, skip_ended=True)
    rows, notes = [], []
    for run in runs:
        try:
            now = status_from(run, snapshots.get(run.path))
            row = RunRow(
                run=f"{run.experiment}/{run.name}",
                folder=str(run.path),
                status=now.name,
                step=last_beat(run).get("step"),
                attempts=now.state.attempt,
                created=now.state.created,
                reason=now.reason or (now.facts.sentence() if now.facts and not now.final else ""),
            )
            rows.append(row)
        except (RunFolderError, OSError) as error:
            notes.append(f"{run.experiment}/{run.name} is not listed: {error}")
    if problem := next((snapshot.error for snapshot in snapshots.values() if snapshot.error), ""):
        notes.append(f"Slurm does not report the states of jobs ({problem})")
    return sorted(rows, key=lambda row: row.created), [*notes, *filter(None, [listing.note])]


def runs_document(rows: list[RunRow], notes: list[str]) -> dict[str, Any]:
    """Return the list of runs as a JSON document."""
    return {"runs": [asdict(row) for row in rows], "notes": notes}


def show_runs(console: Console, rows: list[RunRow], notes: list[str], runs_dir: Path) -> None:
    """Print a table of runs, then the notes."""
    # 80 columns have no room for the date, which is part of most names.
    is_wide = console.width >= 100
    table = Table(Column("run", no_wrap=True), Column("status", no_wrap=True), "step", "attempts")
    for name in ("created", "reason") if is_wide else ("reason",):
        table.add_column(name)
    for row in rows:
        status = f"[{COLOURS[row.status]}]{row.status}[/]"
        cells = [escape(row.run), status, "" if row.step is None else str(row.step), str(row.attempts)]
        if is_wide:
            cells.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created)))
        table.add_row(*cells, escape(row.reason))
    if rows:
        console.print(table)
    else:
        notes = [f"no runs under {runs_dir.absolute()}", *notes]
    for note in notes:
        console.print(escape(wrapped(console, note, 4)), highlight=False, soft_wrap=True)


def read_status(run: RunDir) -> dict[str, Any]:
    """Return the status of a run as a JSON document; facts that a run does not have are None."""
    snapshot = query_job(run)
    now = status_from(run, snapshot)
    state = now.state
    slurm = None
    if snapshot is not None:
        unknown = f"not available: {snapshot.error}" if snapshot.error else "the job is no longer known"
        slurm = snapshot.info.describe(time.time()) if snapshot.info else unknown
    if snapshot is not None and now.name != "running":
        with suppress(HpcdistError, OSError):  # the folder of another user
            update_job_starts(run)  # for the causes of the attempts
    held = holder(run)
    attempt = run.attempt(state.attempt) if state.attempt else None
    ranks = []
    for rank in range(min(state.world_size, MAX_SHOWN_RANKS) if attempt else 0):
        if attempt and (beat := attempt.read_beat(rank)) is not None:
            ranks.append({"rank": rank} | {key: beat[key] for key in ("step", "total_steps", "time", "metrics")})
    mlflow = read_record(run.mlflow) or {}
    return {
        "run": f"{run.experiment}/{run.name}",
        "folder": str(run.path),
        "status": now.name,
        "reason": now.reason,
        "attempt": state.attempt,
        "ended_attempts": _ended_attempts(run, state) if state.attempt else [],
        "restarts": state.restarts,
        "world_size": state.world_size,
        "slurm": slurm,
        "held_by": f"process {held['pid']} of {held['user']} on {held['host']}" if held is not None else None,
        "ranks": ranks,
        "stragglers": attempt.current_stragglers() if attempt else [],
        "checkpoints": sorted(path.name for path in run.checkpoints.glob("step-*")) or script_files(run),
        "mlflow_run_id": mlflow.get("run_id") or None,
    }


def _ended_attempts(run: RunDir, state: State) -> list[dict[str, Any]]:
    """Return number, status, nodes and cause of the end of the last MAX_SHOWN_ATTEMPTS attempts that have ended."""
    try:
        attempts = read_attempts(run, state, read_checkpoints(run))
    except (RunFolderError, OSError):
        return []
    ended = [one for one in attempts if one.status != "running"]
    return [
        {"attempt": one.number, "status": one.status, "nodes": list(one.nodes), "cause": one.cause}
        for one in ended[-MAX_SHOWN_ATTEMPTS:]
    ]


def show_status(console: Console, run: RunDir) -> None:
    """Print the status of a run."""
    found = read_status(run)
    status, restarts = found["status"], found["restarts"]
    rows = {
        "status": sentence_of(status, found["reason"] or ""),
        "folder": short_path(found["folder"]),
        "attempt": f"{found['attempt']}, {restarts} restart{'s' * (restarts != 1)} after failures",
    }
    # The cause of the last attempt is often the reason of the status.
    for ended in found["ended_attempts"]:
        if ended["cause"] != found["reason"]:
            rows[f"attempt {ended['attempt']}"] = sentence_of(ended["status"], ended["cause"])
    if found["slurm"]:
        rows["Slurm"] = found["slurm"]
    if found["held_by"]:
        rows["supervisor"] = found["held_by"]
    if status == "lost":
        rows["next"] = "the supervisor died: `hpcdist resume` continues the run, `hpcdist sync` closes it in MLflow"
    for beat in found["ranks"]:
        total = f" of {beat['total_steps']}" if beat["total_steps"] else ""
        age_s = max(0, int(time.time() - beat["time"]))
        metrics = format_metrics(beat["metrics"])
        rows[f"rank {beat['rank']}"] = f"step {beat['step']}{total}, {age_s} s ago  {metrics}"
    if found["attempt"] and found["world_size"] > MAX_SHOWN_RANKS:
        others = found["world_size"] - MAX_SHOWN_RANKS
        rows["more ranks"] = f"{others}, see {short_path(run.attempt(found['attempt']).path)}"
    if found["stragglers"]:
        rows["straggler"] = "\n".join(found["stragglers"])
    shown = found["checkpoints"][-MAX_SHOWN_CHECKPOINTS:]
    left_out = len(found["checkpoints"]) - len(shown)
    rows["checkpoints"] = f"{left_out} more, " * (left_out > 0) + ", ".join(shown) or "none yet"
    if run.report.is_file():
        rows["report"] = short_path(run.report)
    if found["mlflow_run_id"]:
        rows["MLflow run"] = str(found["mlflow_run_id"])
    print_rows(console, rows, {"status": COLOURS[status]})
