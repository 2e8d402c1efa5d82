"""`hpcdist explain`: why a run failed, stands still or waits, in at most five lines and one for each straggler."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcdist.diagnostics.failure_patterns import (
    HANG_FIX,
    HOST_MEMORY_FIX,
    NODE_FIX,
    TIME_FIX,
    WAITING,
    Pattern,
    cause_of,
    first_match,
    quote,
)
from hpcdist.files.atomic import read_json
from hpcdist.files.log_text import MAX_LINE_CHARS, last_lines
from hpcdist.files.ownership import stays_inside
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir, State
from hpcdist.run.status import RunStatus, status_of
from hpcdist.slurm.job_info import JobInfo

#: No more of a log than its end is searched, and no more logs than this.
MAX_LINES = 20_000
MAX_LOGS = 64
_JOB_ENDS = {
    "OUT_OF_MEMORY": ("the job used more memory than it had asked for", HOST_MEMORY_FIX),
    "TIMEOUT": ("the job reached its time limit before the ranks had saved", TIME_FIX),
    "DEADLINE": ("the job reached its deadline", TIME_FIX),
    "NODE_FAIL": ("a node failed", NODE_FIX),
    "BOOT_FAIL": ("a node did not boot", NODE_FIX),
    "PREEMPTED": ("a job of higher priority took the nodes", "`hpcdist resume` goes on from the newest checkpoint"),
    "CANCELLED": ("the job was cancelled (scancel, or the cluster's staff)", "`hpcdist resume` submits it again"),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found out."""

    cause: str
    evidence: str = ""
    fix: str = ""


def explain(run: RunDir) -> list[str]:
    """What to tell of a run: one line when nothing is wrong, else status, cause, evidence, fix and Slurm's word.

    Whoever held up the others goes last.
    """
    now = status_of(run, history=True)
    straggling = run.attempt(now.state.attempt).current_stragglers() if now.state.attempt else []
    return [*_explain(run, now), *(f"{'slow:':<10}{text}" for text in straggling)]


def _explain(run: RunDir, now: RunStatus) -> list[str]:
    state = now.state
    if now.name == "finished":
        times = f" after {state.restarts} restart{'s' * (state.restarts != 1)}" if state.restarts else ""
        return [f"finished{times}: {state.reason}; nothing to explain"]
    if now.name == "created":
        return [f"created: it was never started; `hpcdist resume {run.name}` starts it"]
    finding = _finding(run, now)
    if finding is None:
        return [f"{quote(now.sentence)}; nothing to explain" + _sign_of_life(run, state)]
    lines = {
        "status": quote(now.sentence),
        "cause": finding.cause,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "slurm": now.facts.describe(time.time()) if now.facts else now.slurm_error,
    }
    return [f"{name + ':':<10}{text}" for name, text in lines.items() if text]


def _finding(run: RunDir, now: RunStatus) -> Finding | None:
    state, facts = now.state, now.facts
    if now.name == "queued":
        return _why_waiting(facts)
    if now.name == "running":
        # The last failure that was answered by a restart, if there was one.
        return _of_attempt(run, run.attempt(state.attempt - 1), "") if state.restarts and state.attempt > 1 else None
    if facts is not None and (facts.state in _JOB_ENDS or facts.out_of_memory):
        end = "OUT_OF_MEMORY" if facts.out_of_memory else facts.state
        # A job that someone cancels after its run has failed explains nothing.
        if end != "CANCELLED" or now.name in ("lost", "cancelled"):
            cause, fix = _JOB_ENDS[end]
            evidence = f"Slurm: {facts.sentence()}" + (f", MaxRSS {facts.max_rss}" if facts.max_rss else "")
            return Finding(cause=cause, evidence=evidence, fix=fix)
    if now.name in ("stopped", "cancelled"):
        return Finding(cause=state.reason, fix=f"`hpcdist resume {run.name}` goes on from the newest checkpoint")
    found = _of_attempt(run, run.attempt(state.attempt), state.reason) if state.attempt else _of_batch_log(run)
    if found is not None:
        return found
    if now.name == "lost" or state.reason == "its supervisor died":
        cause = f"its supervisor was killed; {now.reason}" if now.reason else "its supervisor was killed"
        return Finding(cause=cause, fix=f"`hpcdist resume {run.name}` goes on from the newest checkpoint")
    return Finding(cause=state.reason or "nothing was left that says why", evidence=f"logs in {run.path}/attempts")


def _why_waiting(facts: JobInfo | None) -> Finding | None:
    if facts is None or not facts.reason:
        return None
    # `ReqNodeNotAvail,_UnavailableNodes:n[1-2]`
    meaning, fix = WAITING.get(facts.reason.split(",")[0], ("", ""))
    if not meaning and facts.reason.startswith(("Assoc", "QOS")):
        meaning, fix = "a limit of the account or quality of service is reached", "wait, or ask for less"
    return Finding(cause=f"{meaning} ({facts.reason})" if meaning else facts.reason, fix=fix)


def _of_attempt(run: RunDir, attempt: Attempt, reason: str) -> Finding | None:
    """What an attempt's ranks left: the first one that failed by itself speaks, else the logs.

    Where none was started, since nodes were not fit, the preflight does.
    """
    if reason.startswith("preflight: ") and (found := _of_preflight(run, attempt)) is not None:
        return found
    failed = [item for item in attempt.outcomes().items() if item[1]["outcome"] in ("failed", "rejected")]
    failed.sort(key=lambda item: (bool(item[1].get("peer_lost")), item[1]["time"]))
    if failed and not failed[0][1].get("peer_lost"):
        return _of_outcome(run, attempt, *failed[0])
    hang = _of_hang(run, attempt)
    for path in _logs(run, attempt):
        if (match := _search(path)) is not None and match[0].name != "peer-lost":
            pattern, number, line = match
            if hang is not None and pattern.name == "hang":
                continue  # what was collected tells more than that
            return Finding(cause=cause_of(pattern, line), evidence=_cite(run, path, number, line), fix=pattern.fix)
    if hang is not None:
        return hang
    if (known := first_match([reason])) is not None:
        return Finding(cause=cause_of(known[0], reason), evidence=_stack(run, attempt), fix=known[0].fix)
    return _of_outcome(run, attempt, *failed[0]) if failed else None


def _of_preflight(run: RunDir, attempt: Attempt) -> Finding | None:
    for check in (read_json(attempt.preflight) or {}).get("checks", ()):
        if check["level"] == "failure":
            where = f"{check['node']} is" if check["node"] else "the nodes are"
            return Finding(
                cause=f"{where} not fit for a run: {check['name']}: {check['text']}",
                evidence=f"{attempt.preflight.with_suffix('.txt').relative_to(run.path)}, before any rank was started",
                fix=check["fix"],
            )
    return None


def _of_outcome(run: RunDir, attempt: Attempt, rank: int, outcome: Mapping[str, Any]) -> Finding:
    """A rank's own word. What else its log holds is not searched: a warning is not the cause."""
    error, trace = str(outcome["error"]), "".join(outcome["traceback"]).splitlines()
    said = [error, *trace]
    if (match := first_match(said)) is not None:
        pattern, line = match[0], said[match[1]]
        return Finding(cause=cause_of(pattern, line), evidence=_cite_line(run, attempt, rank, line), fix=pattern.fix)
    if outcome["outcome"] == "rejected":
        fix = f"correct it, then `hpcdist resume {run.name} key=value …`"
        return Finding(
            cause="what was asked for cannot be run", evidence=_cite_line(run, attempt, rank, error), fix=fix
        )
    where = next((line.strip() for line in reversed(trace) if line.lstrip().startswith("File ")), "")
    cause = f"an exception in the code that trains{f', at {where}' if where else ''}"
    fix = f"mend it, then `hpcdist resume {run.name} --with-current-code`"
    return Finding(cause=quote(cause), evidence=_cite_line(run, attempt, rank, error), fix=fix)


def _of_hang(run: RunDir, attempt: Attempt) -> Finding | None:
    """What was collected of ranks that stood still, before they were killed."""
    try:
        with open(attempt.stacks_summary, errors="replace") as file:
            sentence = file.readline(MAX_LINE_CHARS).rstrip("\n")
    except FileNotFoundError:
        return None
    where = attempt.stacks_summary.relative_to(run.path)
    return Finding(
        cause=f"the ranks stood still: {sentence}",
        evidence=f"{where}, and the stacks of each rank in {where.parent}/rank-*.stacks.txt",
        fix=HANG_FIX,
    )


def _of_batch_log(run: RunDir) -> Finding | None:
    for path in _batch_logs(run):
        if (match := _search(path)) is not None:
            pattern, number, line = match
            return Finding(cause=cause_of(pattern, line), evidence=_cite(run, path, number, line), fix=pattern.fix)
    return None


def _logs(run: RunDir, attempt: Attempt) -> Iterator[Path]:
    """srun's messages, the batch step's and supervisor's logs, and the ranks' own."""
    yield from (path for path in (attempt.path / "srun.log",) if path.is_file())
    yield from _batch_logs(run)
    yield from _rank_logs(run, attempt)


def _rank_logs(run: RunDir, attempt: Attempt) -> list[Path]:
    """The ranks' logs; links that leave the run folder are not followed."""
    found = sorted(attempt.path.glob("rank-*.log"))[:MAX_LOGS]
    return [path for path in found if path.is_file() and stays_inside(path, run.path)]


def _batch_logs(run: RunDir) -> list[Path]:
    found = [*(run.path / "submitit").glob("*.out"), *(run.path / "submitit").glob("*.err")]
    newest = sorted(found, key=lambda path: path.stat().st_mtime)[-1:]
    return [*newest, *(path for path in (run.path / "supervisor.log",) if path.is_file())]


def _tail(path: Path) -> list[tuple[int, str]]:
    """The last lines of a log with their numbers."""
    return last_lines(path, MAX_LINES)


def _search(path: Path) -> tuple[Pattern, int, str] | None:
    """The foremost pattern in a log, and the line that shows it."""
    lines = _tail(path)
    found = first_match(line for _, line in lines)
    return (found[0], *lines[found[1]]) if found else None


def _cite(run: RunDir, path: Path, number: int, line: str) -> str:
    """Quote a line with its file and number; a number of 0 is not known."""
    return f"{path.relative_to(run.path)}:{f'{number}:' if number else ''} {quote(line)}"


def _cite_line(run: RunDir, attempt: Attempt, rank: int, line: str) -> str:
    """Where a rank's log has a line, else what the rank said in its outcome."""
    path = attempt.log(rank)
    wanted = next((part for part in line.splitlines() if part.strip()), line).strip()
    if path.is_file() and stays_inside(path, run.path):
        found = next(((number, text) for number, text in reversed(_tail(path)) if wanted in text), None)
        if found is not None:
            return _cite(run, path, *found)
    return f"{attempt.outcome(rank).relative_to(run.path)}: {quote(wanted)}"


def _stack(run: RunDir, attempt: Attempt) -> str:
    """The innermost frame of the first stack that a rank which hung has printed."""
    for path in _rank_logs(run, attempt):
        lines = _tail(path)
        for (_, head), (number, frame) in pairwise(lines):
            if "Current thread" in head and "(most recent call first)" in head:
                return _cite(run, path, number, frame)
    return f"logs in {attempt.path.relative_to(run.path)}"


def _sign_of_life(run: RunDir, state: State) -> str:
    """How long ago rank 0 gave its last sign, where that is long enough to be of interest."""
    beat = run.attempt(state.attempt).beat(0)
    if not state.attempt or not beat.is_file():
        return ""
    ago = int(time.time() - beat.stat().st_mtime)
    return f" (but rank 0 gave its last sign of life {ago} s ago)" if ago > 60 else ""
