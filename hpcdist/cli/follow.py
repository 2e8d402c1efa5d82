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
from hpcdist.run.status import Standing, close_if_dead, job_of, stand
from hpcdist.slurm.job_snapshot import JobRef, JobSnapshot, JobWatch

LOOK_EVERY_S = 0.3


class RunWatch:
    """Tells how a run stands, again and again, without asking Slurm each time."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._job: JobRef | None = None
        self._watch: JobWatch | None = None
        self._first_lost: JobSnapshot | None = None

    def now(self) -> Standing:
        """How it stands. A run of Slurm's counts as lost only when Slurm says so twice, some seconds apart."""
        job = job_of(self._run)
        if job != self._job:  # someone has submitted it anew
            self._job, self._watch = job, JobWatch(job) if job is not None else None
        look = self._watch.snapshot() if self._watch is not None else None
        found = stand(self._run, look)
        if found.name != "lost" or look is None:
            self._first_lost = None
            return found
        self._first_lost = self._first_lost or look
        if self._first_lost is not look:
            return found
        return Standing(name=found.state.status, state=found.state, over=False, reason=found.reason, facts=found.facts)


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
    watch = RunWatch(run) if follow else None
    while True:
        # Before the log is read: what is written later belongs to a later look.
        ended = watch is None or watch.now().over
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
    watch = RunWatch(run)
    waiting = Event()
    said, away, told = "", "", 0
    with RunView(console) as view, retry.patient(retry.UNATTENDED_S):
        while True:
            found = watch.now()
            if found.over:
                break
            if (line := _line(found)) != said:
                view.note(line + _when(found))
                said = line
            if found.away != away and (away := found.away):
                view.note(f"Slurm does not say how the job stands ({away})")
            if progress and found.state.attempt and found.name == "running":
                beat = run.attempt(found.state.attempt).last_beat(0)
                if beat is not None:
                    view.progress(beat)
            lines = run.attempt(found.state.attempt).straggler_lines() if found.state.attempt else []
            for new in lines[told:]:
                view.note(new["text"])
            told = len(lines)
            waiting.wait(LOOK_EVERY_S)
    if found.name == "lost" and is_mine(run.path):
        close_if_dead(run)
        return run.read_state()
    return found.state


def _line(found: Standing) -> str:
    """What is worth a new line when it changes."""
    facts = found.facts
    parts = [found.reason] if found.reason else []
    if facts is not None and (facts.waiting or found.name != "running"):
        parts += [facts.sentence()] if facts.sentence() not in parts else []
    elif facts is not None:
        parts.append(f"job {facts.id} on {facts.nodes}" if facts.nodes else f"job {facts.id}")
    return f"{found.name}: {'; '.join(parts)}" if parts else found.name


def _when(found: Standing) -> str:
    """What changes by itself: told with a new line, but no reason for one."""
    facts = found.facts
    if facts is None or not facts.waiting or facts.started is None or facts.started <= time.time():
        return ""
    return f", expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.started))}"
