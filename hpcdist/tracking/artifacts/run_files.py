"""The files of a run that become MLflow artifacts, with fingerprints that show which have changed.

Symbolic links are followed inside the run folder only, see `leaves_folder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcdist.config.monitor import monitor_of
from hpcdist.files import retry
from hpcdist.files.ownership import stays_inside
from hpcdist.review.checkpoints import best_checkpoint, read_checkpoints
from hpcdist.review.markdown import PATCH
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir

#: Larger logs are uploaded only at the end of the run.
LIVE_LOG_BYTES = 5_000_000
#: Maximum number of ranks of an attempt with uploaded logs.
MAX_RANKS = 64
#: Folder of a script's artifacts whose names hpcdist uses itself.
SCRIPT_FOLDER = "script"


class Artifact(NamedTuple):
    """A file or folder, its path in MLflow, and a text that changes with its content."""

    source: Path
    target: str
    fingerprint: str


def is_own_name(path: str) -> bool:
    """Return whether hpcdist uploads artifacts of its own at or below this path."""
    first, _, rest = path.partition("/")
    folders = ("logs", "checkpoints", "model")
    files = ("config.yaml", PATCH, "environment.json", "names.json", "network.json", "report.html")
    return first in folders or (not rest and (first in files or first.startswith("preflight.")))


def fingerprint(path: Path) -> str:
    """Return name, size and time of a file, or of all files in a folder; empty if there are none."""
    return retry.retry(lambda: _fingerprint(path), path)


def _fingerprint(path: Path) -> str:
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    stats = [item.stat() for item in files if item.is_file()]
    if not stats:
        return ""
    return f"{path.name}:{len(stats)}:{sum(item.st_size for item in stats)}:{max(item.st_mtime_ns for item in stats)}"


def leaves_folder(item: Artifact, run: RunDir) -> str:
    """Return why an artifact must not be uploaded: a link that leaves the run folder; empty if there is none."""
    paths = [item.source, *item.source.rglob("*")] if item.source.is_dir() else [item.source]
    for path in paths:
        if not stays_inside(path, run.path):
            return f"{path} is a symbolic link that leaves the run folder"
    return ""


def documents(run: RunDir) -> Iterator[Artifact]:
    """Yield the config, the code state, the environment, the original names of renamed metrics, and the report."""
    for path in (run.config, run.path / "code.patch", run.environment, run.journal / "names.json", run.report):
        yield Artifact(path, PATCH if path.name == "code.patch" else path.name, fingerprint(path))


def preflight(run: RunDir) -> Iterator[Artifact]:
    """Yield the newest reports of the checks of the nodes and of the network between the ranks."""
    newest_first = run.attempts()[::-1]
    for name in ("preflight.json", "preflight.txt", "network.json"):
        if (path := next((it for attempt in newest_first if (it := attempt.path / name).exists()), None)) is not None:
            yield Artifact(path, name, fingerprint(path))


def trainer_artifacts(run: RunDir) -> Iterator[Artifact]:
    """Yield the files of `Context.artifact` under their names; hidden files are incomplete."""
    for path in sorted(run.artifacts.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield Artifact(path, path.relative_to(run.artifacts).as_posix(), fingerprint(path))


def reports(run: RunDir, *, ended: bool) -> Iterator[Artifact]:
    """Yield logs and outcomes of the ranks, and stack traces of hung ranks.

    Long files are included only when the run has ended. Of an attempt with more than MAX_RANKS ranks, the ranks that
    reported an outcome first are included, then the lowest ranks.
    """
    for attempt in run.attempts():
        folder = f"logs/attempt-{attempt.number:03d}"
        logs = sorted(attempt.path.glob("rank-*.log"))
        outcomes = sorted(attempt.path.glob("rank-*.outcome.json"))
        if len(logs) > MAX_RANKS:
            outcomes = sorted(outcomes, key=lambda path: path.lstat().st_mtime_ns)[:MAX_RANKS]
            reported = {path.name.split(".")[0] for path in outcomes}
            logs = sorted(logs, key=lambda path: path.stem not in reported)[:MAX_RANKS]
        for path in sorted([*logs, *outcomes, *attempt.path.glob(attempt.stragglers.name)]):
            if path.is_file() and (ended or path.stat().st_size <= LIVE_LOG_BYTES):
                yield Artifact(path, f"{folder}/{path.name}", fingerprint(path))
        for path in _hang_reports(attempt):
            if path.is_file() and path.stat().st_size <= LIVE_LOG_BYTES:
                yield Artifact(path, f"{folder}/{path.name}", fingerprint(path))


def _hang_reports(attempt: Attempt) -> Iterator[Path]:
    """Yield stack traces of hung ranks once they are summarized, and torch's own dumps after collective timeouts."""
    patterns = ["flight-rank-*"]
    if summaries := [path for path in (attempt.stacks_summary, attempt.silence) if path.exists()]:
        yield from summaries
        patterns = ["rank-*.stacks.txt", "rank-*.flight.json", *patterns]
    for pattern in patterns:
        yield from sorted(attempt.path.glob(pattern))[:MAX_RANKS]


def checkpoints(run: RunDir, config: Mapping[str, Any]) -> Iterator[Artifact]:
    """Yield the newest checkpoint as `checkpoints/final` and the best one as `checkpoints/best`."""
    complete = read_checkpoints(run)
    if complete:
        yield Artifact(complete[-1].path, "checkpoints/final", fingerprint(complete[-1].path))
    if (best := best_checkpoint(complete, monitor_of(config))) is not None:
        yield Artifact(best.path, "checkpoints/best", fingerprint(best.path))
