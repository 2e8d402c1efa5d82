"""Metrics in the lines that a script prints, by the regular expressions of `tracking.stdout_metrics`."""

import logging
import os
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from hpcdist.config.record_schema import STEP_GROUP, value_group
from hpcdist.host.files import open_regular

log = logging.getLogger(__name__)

#: Limit of one read.
CHUNK_BYTES = 1 << 20
#: Longer lines are no progress messages: only their beginning is searched.
MAX_LINE_CHARS = 1000
#: Time for one expression in one line, after which it is given up: some expressions take years on some lines.
MATCH_S = 1.0
_LINE_END = re.compile(rb"[\r\n]")


class Match(NamedTuple):
    """A value in a line; the step is None if the expression has no group for it."""

    metric: str
    value: float
    step: int | None


def read_lines(path: Path, offset: int, *, final: bool) -> tuple[list[str], int]:
    """Return the lines of a log from `offset` on, and the offset at which the next call continues.

    A carriage return ends a line, too, as in progress bars. At most CHUNK_BYTES are read.

    Args:
        final: the last line is complete even if it has no end.

    Raises OSError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < offset:  # the middle of the log was removed, see `limit_log`
            return [], size
        file.seek(offset)
        data = file.read(CHUNK_BYTES)
    is_at_end = offset + len(data) >= size
    if not (is_at_end and final):
        complete = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if complete or len(data) < CHUNK_BYTES:
            data = data[:complete]
    lines = [line[: 4 * MAX_LINE_CHARS].decode(errors="replace")[:MAX_LINE_CHARS] for line in _LINE_END.split(data)]
    return lines, offset + len(data)


class OutputPatterns:
    """The regular expressions of `tracking.stdout_metrics`. For the main thread, in which a signal ends a match."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._patterns = {metric: re.compile(text) for metric, text in texts.items()}

    def find(self, line: str) -> Iterator[Match]:
        """Yield the values in a line, in the order of the expressions. One that takes too long is not used again."""
        for metric, pattern in list(self._patterns.items()):
            try:
                with _time_limit(MATCH_S):
                    found = pattern.search(line)
            except _TooSlow:
                log.warning(
                    "tracking.stdout_metrics.%s is not used any more: %r takes over %g s on the line %.80r; write it"
                    " without repetitions inside of repetitions",
                    metric,
                    pattern.pattern,
                    MATCH_S,
                    line,
                )
                del self._patterns[metric]
                continue
            if found is not None:
                yield from _match(metric, found)


def _match(metric: str, found: re.Match[str]) -> Iterator[Match]:
    """Yield the value of a match, unless its groups hold no numbers."""
    step = None
    text = found[value_group(found.re)] or ""
    try:
        value = float(text.rstrip("."))  # `loss ([0-9.]+)` takes the end of a sentence, too
        if STEP_GROUP in found.re.groupindex:
            step = int(found[STEP_GROUP])
    except (ValueError, TypeError):  # such as of an optional group that is not in the line
        return
    yield Match(metric, value, step)


class _TooSlow(Exception): ...


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TooSlow in the block after some seconds; `re` looks for signals while it searches."""

    def interrupt(*_: object) -> NoReturn:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
