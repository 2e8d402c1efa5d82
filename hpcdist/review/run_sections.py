"""The facts of a run that its report shows in tables: faults, stragglers, preflight, environment and config."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.config.tree import flat
from hpcdist.diagnostics.explain import JOB_ENDS, Finding, explain_attempt
from hpcdist.files import retry
from hpcdist.files.atomic import read_json
from hpcdist.files.log_text import last_lines
from hpcdist.files.ownership import stays_inside
from hpcdist.files.regular_file import open_regular
from hpcdist.machine.check import LEVELS
from hpcdist.review.attempts import ends_by_slurm
from hpcdist.run.attempt import Attempt
from hpcdist.run.attempt_times import read_times
from hpcdist.run.folder import RunDir

#: Limits of the rows of a table.
MAX_ROWS = 200
MAX_TEXT = 600
#: Percent of a node's memory below which a killed rank is not explained by it.
_HIGH_MEMORY = 80
#: Cause and fix of a killed rank on a node with free memory.
_NOT_MEMORY = (
    "the rank was killed from outside, by a user or program; the node had free memory",
    "`dmesg -T | grep -i oom` on that host shows a limit of the job (cluster.mem); else ask who ended the process",
)
#: Records at the end of a journal among which the last memory use of a node is searched.
_JOURNAL_LINES = 10_000
#: Limit of the shown part of the uncommitted changes, in characters.
MAX_PATCH = 100_000


@dataclass(frozen=True, kw_only=True)
class Fault:
    """The first failure of an attempt, with its explanation."""

    attempt: int
    where: str  #: rank and node, or the failed nodes
    step: int | None
    at_heartbeat: bool = False  #: whether `step` is that of the last heartbeat; the rank may have done more steps
    error: str
    finding: Finding


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A report on a slow node or rank."""

    attempt: int
    event: str
    text: str


@dataclass(frozen=True, kw_only=True)
class PreflightCheck:
    """A result of the preflight, of the network check between the ranks included."""

    level: str
    node: str
    name: str
    text: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The uncommitted changes of a run's code, as `code.patch` holds them."""

    text: str  #: at most MAX_PATCH characters, without passwords in addresses
    is_cut: bool
    num_files: int
    num_added: int  #: lines
    num_removed: int
    left_out: list[str]  #: places of likely secrets, which are not in the patch


def read_patch(run: RunDir) -> Patch | None:
    """Return the uncommitted changes; None without any. Raises OSError if the file cannot be read."""
    path = run.path / "code.patch"
    if not path.is_file() or not stays_inside(path, run.path):
        return None
    text, counts = retry.retry(lambda: _read_patch(path), path)
    if not counts.total():
        return None
    code = (read_json(run.environment) or {}).get("code")
    left_out = code.get("left_out") if isinstance(code, dict) else None
    return Patch(
        text=redact_text(text[:MAX_PATCH]),
        is_cut=len(text) > MAX_PATCH,
        num_files=counts["diff"],
        num_added=counts["+"],
        num_removed=counts["-"],
        left_out=[text_of(item) for item in _items(left_out)][:MAX_ROWS],
    )


def _read_patch(path: Path) -> tuple[str, Counter[str]]:
    """Return the beginning of a patch, and the numbers of its files, added and removed lines."""
    shown, num_chars, counts = [], 0, Counter[str]()
    with io.TextIOWrapper(open_regular(path), errors="replace") as file:
        for line in file:
            if num_chars <= MAX_PATCH:
                shown.append(line)
                num_chars += len(line)
            kind = "diff" if line.startswith("diff --git ") else line[:1]
            counts[kind] += not line.startswith(("+++ ", "--- "))
    return "".join(shown), counts


def read_faults(run: RunDir) -> list[Fault]:
    """Return the first failure of each attempt that failed, or that Slurm ended, the oldest first."""
    found = []
    ends = ends_by_slurm(run)
    for attempt in run.attempts():
        failure = read_json(attempt.failure)
        if failure is None:
            start = ends.get(attempt.number)
            end = start.state if start is not None else ""
            if start is not None and end in JOB_ENDS and end not in ("PREEMPTED", "CANCELLED"):  # these are no faults
                cause, fix = JOB_ENDS[end]
                finding = Finding(cause=cause, fix=fix)
                error = f"Slurm ended the job: {end}"
                where = f"node {start.failed_nodes}" if start.failed_nodes else ""
                found.append(Fault(attempt=attempt.number, where=where, step=None, error=error, finding=finding))
            continue
        error = text_of(failure.get("error"))
        host, step = text_of(failure.get("host")), failure.get("step")
        where = f"rank {failure.get('rank')} on {host}" if host else ""
        finding = explain_attempt(run, attempt, error, read_logs=False) or Finding(cause=error)
        if failure.get("kind") == "killed" and (used := _memory_before(run, attempt, host)) is not None:
            memory = f"the last measured memory use of {host} was {used} %"
            finding = replace(finding, evidence="; ".join(filter(None, (finding.evidence, memory))))
            if used < _HIGH_MEMORY:
                finding = replace(finding, cause=_NOT_MEMORY[0], fix=_NOT_MEMORY[1])
        found.append(
            Fault(
                attempt=attempt.number,
                where=where,
                step=step if isinstance(step, int) else None,
                at_heartbeat=failure.get("kind") in ("killed", "vanished", "lost"),
                error=error,
                finding=finding,
            )
        )
    return found[-MAX_ROWS:]


def _memory_before(run: RunDir, attempt: Attempt, host: str) -> int | None:
    """Return the last measured memory use of a node in an attempt in percent; None if there is none."""
    times = read_times(attempt)
    share = times.shares.get(host) if times is not None else None
    if share is None or not share.ranks:
        return None
    path = run.journal / f"attempt-{attempt.number:03d}.rank-{min(share.ranks):05d}.jsonl"
    pattern = re.compile(rf'"system/{re.escape(host)}/system_memory_usage_percentage":\s*([0-9]+)')
    try:
        lines = last_lines(path, _JOURNAL_LINES)
    except OSError:
        return None
    return next((int(match[1]) for _, line in reversed(lines) if (match := pattern.search(line))), None)


def read_stragglers(run: RunDir) -> list[Straggler]:
    """Return the reports on slow nodes and ranks of all attempts, the oldest first."""
    found = [
        Straggler(attempt=attempt.number, event=event["event"], text=event["text"])
        for attempt in run.attempts()
        for event in attempt.straggler_events()
    ]
    return found[-MAX_ROWS:]


def read_preflight(run: RunDir) -> list[PreflightCheck]:
    """Return the newest results of the checks before training, the most severe first; empty without a preflight."""
    newest_first = run.attempts()[::-1]
    preflight = next((found for it in newest_first if (found := read_json(it.preflight)) is not None), {})
    network = next((found for it in newest_first if (found := read_json(it.network)) is not None), {})
    checks = [
        PreflightCheck(**{key: text_of(check.get(key) or "") for key in ("level", "node", "name", "text", "fix")})
        for check in _items(preflight.get("checks"))
        if isinstance(check, Mapping)
    ]
    texts = [("warning", text) for text in _items(network.get("warnings"))] + [("ok", network.get("text"))]
    checks += [
        PreflightCheck(level=level, node="", name="collectives", text=text_of(text), fix="")
        for level, text in texts
        if text
    ]
    severity: dict[str, int] = {level: -number for number, level in enumerate(LEVELS)}
    return sorted(checks, key=lambda check: severity.get(check.level, 0))[:MAX_ROWS]


def read_environment(run: RunDir) -> dict[str, str]:
    """Return the recorded environment by dotted key: host, code, versions, container and Slurm job."""
    found = {
        "": read_json(run.environment) or {},
        "container.": read_json(run.container) or {},
        "rank_environment.": read_json(run.rank_environment) or {},
        "slurm.": read_json(run.slurm) or {},
    }
    texts = {prefix + key: text for prefix, tree in found.items() for key, text in flat_texts(tree).items()}
    return {key: text for key, text in texts.items() if text != "null"}


def flat_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of a tree as text by dotted key, without passwords in addresses."""
    return {key: text_of(value) for key, value in flat(tree).items()}


def text_of(value: Any) -> str:
    """Return a value as text of at most MAX_TEXT characters, without passwords in addresses."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = redact_text(text.encode(errors="replace").decode())
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
