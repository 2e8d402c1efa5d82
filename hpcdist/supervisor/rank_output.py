"""The output of a script, or of an own trainer, in the log of its rank, which also has lines of hpcdist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcdist.files.log_text import LogTail
from hpcdist.logs import RANK_LINE


class RankOutput:
    """New output of a rank since the last call, without hpcdist's own lines except its warnings.

    An error is reported with its traceback by `Reporter.failure`, so nothing is shown after its line.
    """

    def __init__(self, log: Path) -> None:
        self._tail = LogTail(log)
        self._failed = False

    def news(self) -> Iterator[str]:
        """Yield the new text in pieces. Raises OSError if the log cannot be read."""
        for text in self._tail.news():
            if shown := "".join(line for line in text.splitlines(keepends=True) if self._is_shown(line)):
                yield shown

    def _is_shown(self, line: str) -> bool:
        own = RANK_LINE.match(line)
        self._failed = self._failed or (own is not None and own["level"] == "ERROR")
        return not self._failed and (own is None or own["level"] == "WARNING")
