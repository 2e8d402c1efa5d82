"""The outcome file of a rank, from which the supervisor learns how the rank ended.

Rank 0 writes `attempts/NNN/rank-00000.outcome.json` after a success; every rank that fails writes its own. A rank that
is killed writes nothing, and the supervisor sees its exit status.
"""

from __future__ import annotations

import logging
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from hpcdist.errors import HpcdistError, PeerLost, TrainerError, UserMistake
from hpcdist.files import retry
from hpcdist.files.atomic import write_json
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)
#: Parts of error messages of gloo, NCCL, TensorPipe and the store when another rank has died.
_PEER_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL",
    "tensorpipe",
)
_RESERVE_BYTES = 16 * 1024
#: Maximum number of characters of the error and of the traceback; the log has the whole text.
_MAX_TEXT = 10_000


class Outcome:
    """Writes the outcome file of one rank.

    It reserves disk space at once and frees it before writing, so that a rank that fails because the disk is full can
    still write its outcome.
    """

    def __init__(self, attempt: Attempt, rank: int) -> None:
        self._path = attempt.outcome(rank)
        self._rank = rank
        self._reserve = attempt.path / f".rank-{rank:05d}.reserve"
        #: Returns the number of steps done, if known.
        self.step: Callable[[], int | None] = lambda: None
        with suppress(OSError):  # the disk is already full: try to write the outcome without a reserve
            self._reserve.write_bytes(bytes(_RESERVE_BYTES))

    def write(self, outcome: Literal["done", "stopped", "failed", "rejected"], **details: Any) -> None:
        """Write the rank's result."""
        self.close()
        write_json(
            self._path,
            {
                "outcome": outcome,
                "rank": self._rank,
                "host": socket.gethostname(),
                "time": time.time(),
                "step": self.step(),
                **details,
            },
        )

    def close(self) -> None:
        """Free the reserved disk space."""
        retry.discard(self._reserve)

    def write_error(self, error: BaseException) -> int:
        """Log an exception, write the outcome file, and return the exit code."""
        is_rejected = isinstance(error, UserMistake | SyntaxError)
        is_expected = isinstance(error, HpcdistError)
        text = str(error) or type(error).__name__
        # Only an error in the user's module has a cause here.
        imported = error.__cause__ if isinstance(error, TrainerError) else None
        trace = "" if is_expected and imported is None else "".join(traceback.format_exception(imported or error))
        with suppress(HpcdistError, OSError):
            run = RunDir(self._path.parents[2])
            text, trace = run.with_original_paths(text), run.with_original_paths(trace)
        log.error("%s", "\n".join([text] * is_expected + [trace.rstrip()] * bool(trace)))
        self.write(
            "rejected" if is_rejected else "failed",
            error=_shorten(text if is_expected else f"{type(error).__name__}: {text}"),
            peer_lost=isinstance(error, PeerLost)
            or (isinstance(error, RuntimeError) and any(part in text for part in _PEER_LOST)),
            traceback=[_shorten(trace)] if trace else [],
        )
        return 2 if is_rejected else 1


def _shorten(text: str) -> str:
    """Remove the middle of a text that is too long for the supervisor, the commands and MLflow."""
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters, see the log …\n{text[-half:]}"
