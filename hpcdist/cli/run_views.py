"""Output of the commands on runs: the list, the status of one run, and the progress of a run that is followed."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from hpcdist.cli.options import console, exit_code, print_table, wrapped
from hpcdist.cli.render import COLOURS, RunView, format_metrics, print_rows
from hpcdist.errors import HpcdistError, RunFolderError
from hpcdist.host import retry
from hpcdist.host.files import is_mine, open_regular, short_path, stays_inside
from hpcdist.host.log_files import PIECE_BYTES, say
from hpcdist.review.facts import last_beat, read_attempts, read_checkpoints
from hpcdist.run.folder import Attempt, RunDir, State, read_record, sentence_of
from hpcdist.run.lease import holder
from hpcdist.run.lookup import Listing
from hpcdist.run.records import script_files
from hpcdist.run.slurm_job import job_of, update_job_starts
from hpcdist.run.status import RunStatus, StatusWatch, close_if_lost, query_job, query_jobs, status_from

if TYPE_CHECKING:
    from hpcdist.config.schema import Config


# The list of runs and the status of one run, as tables and as JSON.

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
    table: list[list[str | Text]] = []
    for row in rows:
        created = [time.strftime("%Y-%m-%d %H:%M", time.localtime(row.created))] if is_wide else []
        step = "" if row.step is None else str(row.step)
        table.append([row.run, Text(row.status, COLOURS[row.status]), step, str(row.attempts), *created, row.reason])
    if rows:
        head = ("run", "status", "step", "attempts", *(["created"] if is_wide else []), "reason")
        print_table(console, head, table, num_whole=2)
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


# Follow a run until it ends: its log, or its state and progress, on this machine or on Slurm.

POLL_S = 0.3


def follow_to_end(run: RunDir, config: Config, *, progress: bool) -> int:
    """Follow a run until it ends and upload it to MLflow where its job does not. Returns the exit code.

    A run of another user is only shown.
    """
    from hpcdist.cli.render import show_end
    from hpcdist.supervisor import children

    uploads = job_of(run) is not None and is_mine(run.path)
    uploading = children.shipping_from_here(run, config, os.environ) if uploads else nullcontext()
    try:
        with uploading:
            state = follow(console(), run, progress=progress)
    except KeyboardInterrupt:
        say(f"run {run.name} continues: `hpcdist follow {run.name}` shows it again, `hpcdist stop` stops it")
        return 130
    show_end(console(), run, state, config)
    return exit_code(state)


def stream_log(run: RunDir, rank: int | None, attempt: int | None, *, follow: bool) -> Iterator[str]:
    """Yield the text of a rank's log; with `follow`, until the run ends, through all its attempts.

    Args:
        rank: None means the rank that failed first, and rank 0 of an attempt that did not fail.

    Raises RunFolderError if the log does not exist.
    """
    number = attempt or run.read_state().attempt
    path = _log_of(run.attempt(number), rank)
    if os.path.lexists(path) and not stays_inside(path, run.path):
        raise RunFolderError(f"{path} is a symbolic link to a file outside of the run folder: it is not shown")
    if not retry.exists(path) and not follow:
        raise RunFolderError(f"no log of rank {rank or 0} in attempt {number} of {run.name} ({short_path(path)})")
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    waiting = Event()
    watch = StatusWatch() if follow else None
    while True:
        # The status is read before the log: lines written in between are read in the next round.
        ended = watch is None or watch.poll([run])[0].final
        state = run.read_state()
        if retry.retry(path.is_file, path) and stays_inside(path, run.path):
            with retry.retry(lambda path=path: open_regular(path), path) as file:  # type: ignore[misc]
                if os.fstat(file.fileno()).st_size < position:
                    yield "\n[hpcdist: this log was truncated, see launch.log_max_mb]\n"
                    position = os.fstat(file.fileno()).st_size
                file.seek(position)
                while data := file.read(PIECE_BYTES):
                    yield decoder.decode(data)
                position = file.tell()
        if attempt is None and state.attempt > number:
            number, position = number + 1, 0
            decoder.reset()
            path = _log_of(run.attempt(number), rank)
        elif ended:
            return
        else:
            waiting.wait(POLL_S)


def _log_of(attempt: Attempt, rank: int | None) -> Path:
    from hpcdist.review.explain import first_failed_rank

    if rank is None and (rank := first_failed_rank(attempt)):
        say(f"hpcdist: the log of rank {rank}, which failed first", error=True)
    return attempt.log(rank or 0)


def follow(console: Console, run: RunDir, *, progress: bool = True) -> State:
    """Show a run's state changes and, with `progress`, its progress. Returns its last state.

    If the supervisor or the job died without recording a status, the run is closed with the reason that Slurm gives.
    """
    watch = StatusWatch()
    waiting = Event()
    shown_line, shown_error, num_shown = "", "", 0
    with RunView(console) as view, retry.patient(retry.UNATTENDED_S):
        while True:
            (found,) = watch.poll([run])
            if found.final:
                break
            if (line := _status_line(found)) != shown_line:
                view.note(line + _expected_start(found))
                shown_line = line
            if found.slurm_error != shown_error and (shown_error := found.slurm_error):
                view.note(f"Slurm does not report the state of the job ({shown_error})")
            if progress and found.state.attempt and found.name == "running":
                beat = run.attempt(found.state.attempt).read_beat(0)
                if beat is not None:
                    view.progress(beat)
            stragglers = run.attempt(found.state.attempt).straggler_events() if found.state.attempt else []
            for new in stragglers[num_shown:]:
                view.note(new["text"])
            num_shown = len(stragglers)
            waiting.wait(POLL_S)
    if found.name == "lost" and is_mine(run.path):
        close_if_lost(run)
        return run.read_state()
    return found.state


def _status_line(found: RunStatus) -> str:
    """Return the status line; a new one is printed when it changes."""
    facts, name = found.facts, found.name
    parts = [found.reason] if found.reason else []
    if facts is not None and name == "queued" and facts.alive and not facts.waiting:
        name, parts = "starting", []  # the supervisor in the job has not recorded a status
    if facts is not None and (facts.waiting or name != "running"):
        parts += [facts.sentence()] if not found.is_lost else []
    elif facts is not None:
        parts.append(f"job {facts.id} on {facts.nodes}" if facts.nodes else f"job {facts.id}")
    return sentence_of(name, "; ".join(parts))


def _expected_start(found: RunStatus) -> str:
    """Return Slurm's estimate of the start, which changes too often to print a new line for it."""
    facts = found.facts
    if facts is None or not facts.waiting or facts.started is None or facts.started <= time.time():
        return ""
    return f", expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.started))}"
