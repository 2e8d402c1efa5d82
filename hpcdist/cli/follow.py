"""Staying with a run until it is over: its log, or its state and progress, wherever it runs."""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Iterator
from threading import Event

from rich.console import Console

from hpcdist.cli.render import RunView
from hpcdist.errors import RunFolderError
from hpcdist.files import retry
from hpcdist.files.log_text import PIECE_BYTES
from hpcdist.files.ownership import is_mine, stays_inside
from hpcdist.run.folder import RunDir, State
from hpcdist.run.status import RunStatus, StatusWatch, close_if_lost

LOOK_EVERY_S = 0.3


def stream_log(run: RunDir, rank: int, attempt: int | None, *, follow: bool) -> Iterator[str]:
    """The text of a rank's log; with `follow` also what comes until the run ends, through all its attempts.

    Raises RunFolderError when there is no such log.
    """
    number = attempt or run.read_state().attempt
    path = run.attempt(number).log(rank)
    if os.path.lexists(path) and not stays_inside(path, run.path):
        raise RunFolderError(f"{path} is a symbolic link to a file outside of the run folder: it is not shown")
    if not retry.exists(path) and not follow:
        raise RunFolderError(f"no log of rank {rank} in attempt {number} of {run.name} ({path})")
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    waiting = Event()
    watch = StatusWatch() if follow else None
    while True:
        # Before the log is read: what is written later belongs to a later look.
        ended = watch is None or watch.poll([run])[0].final
        state = run.read_state()
        if retry.retry(path.is_file, path) and stays_inside(path, run.path):
            with retry.retry(lambda path=path: open(path, "rb", buffering=0), path) as file:  # type: ignore[misc]
                if os.fstat(file.fileno()).st_size < position:
                    yield "\n[hpcdist: this log was shortened meanwhile, see launch.log_max_mb]\n"
                    position = os.fstat(file.fileno()).st_size
                file.seek(position)
                while data := file.read(PIECE_BYTES):
                    yield decoder.decode(data)
                position = file.tell()
        if attempt is None and state.attempt > number:
            number, position = number + 1, 0
            decoder.reset()
            path = run.attempt(number).log(rank)
        elif ended:
            return
        else:
            waiting.wait(LOOK_EVERY_S)


def follow(console: Console, run: RunDir, *, progress: bool = True) -> State:
    """Show a run's state as it changes and, unless it is only waited for, its progress; returns its last state.

    A run whose supervisor or job died without a word is closed in its folder, with what Slurm says of the job.
    """
    watch = StatusWatch()
    waiting = Event()
    said, away, told = "", "", 0
    with RunView(console) as view, retry.patient(retry.UNATTENDED_S):
        while True:
            (found,) = watch.poll([run])
            if found.final:
                break
            if (line := _line(found)) != said:
                view.note(line + _when(found))
                said = line
            if found.slurm_error != away and (away := found.slurm_error):
                view.note(f"job status may be outdated: Slurm does not answer ({away})")
            if progress and found.state.attempt and found.name == "running":
                beat = run.attempt(found.state.attempt).read_beat(0)
                if beat is not None:
                    view.progress(beat)
            lines = run.attempt(found.state.attempt).straggler_events() if found.state.attempt else []
            for new in lines[told:]:
                view.note(new["text"])
            told = len(lines)
            waiting.wait(LOOK_EVERY_S)
    if found.name == "lost" and is_mine(run.path):
        close_if_lost(run)
        return run.read_state()
    return found.state


def _line(found: RunStatus) -> str:
    """What is worth a new line when it changes."""
    facts = found.facts
    parts = [found.reason] if found.reason else []
    if facts is not None and (facts.waiting or found.name != "running"):
        parts += [facts.sentence()] if facts.sentence() not in parts else []
    elif facts is not None:
        parts.append(f"job {facts.id} on {facts.nodes}" if facts.nodes else f"job {facts.id}")
    return f"{found.name}: {'; '.join(parts)}" if parts else found.name


def _when(found: RunStatus) -> str:
    """What changes by itself: told with a new line, but no reason for one."""
    facts = found.facts
    if facts is None or not facts.waiting or facts.started is None or facts.started <= time.time():
        return ""
    return f", expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.started))}"
