"""Follow a run until it ends: its log, or its state and progress, on this machine or on Slurm."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from rich.console import Console

from hpcdist.cli.render import RunView
from hpcdist.cli.terminal import console, exit_code
from hpcdist.errors import RunFolderError
from hpcdist.files import retry
from hpcdist.files.log_text import PIECE_BYTES
from hpcdist.files.ownership import is_mine, stays_inside
from hpcdist.files.regular_file import open_regular
from hpcdist.files.short_path import short_path
from hpcdist.logs import say
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir, State, sentence_of
from hpcdist.run.slurm_job import job_of
from hpcdist.run.status import RunStatus, StatusWatch, close_if_lost

if TYPE_CHECKING:
    from hpcdist.config.schema import Config

POLL_S = 0.3


def follow_to_end(run: RunDir, config: Config, *, progress: bool) -> int:
    """Follow a run until it ends and upload it to MLflow where its job does not. Returns the exit code.

    A run of another user is only shown.
    """
    from hpcdist.cli.render import show_end
    from hpcdist.supervisor import shipper_process

    uploads = job_of(run) is not None and is_mine(run.path)
    uploading = shipper_process.shipping_from_here(run, config, os.environ) if uploads else nullcontext()
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
    from hpcdist.diagnostics.explain import first_failed_rank

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
