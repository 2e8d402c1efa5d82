"""Stop requests on a file system that is temporarily unreachable."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from hpcdist.rank import stopping
from hpcdist.rank.processes import STOP_SIGNALS, StopFlag
from hpcdist.rank.stopping import StopAgreement
from hpcdist.run.commands import RequestReader
from hpcdist.run.folder import Attempt


def test_check_for_a_stop_request_is_retried_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path := tmp_path / "001").mkdir()
    monkeypatch.setattr(stopping, "REQUEST_INTERVAL_S", 0.0)
    monkeypatch.setattr(stopping, "AGREEMENT_INTERVAL_S", 0.0)
    attempt = Attempt(tmp_path)
    attempt.request.touch()
    errors = [errno.ESTALE, errno.EIO]
    exists = Path.exists

    def fail_first(path: Path) -> bool:
        if errors:
            number = errors.pop(0)
            raise OSError(number, os.strerror(number))
        return exists(path)

    monkeypatch.setattr(Path, "exists", fail_first)
    agreement = StopAgreement(None, StopFlag(), RequestReader(attempt))
    assert [agreement.at_boundary(step) for step in range(3)] == [False, False, True]
    assert caplog.messages == [f"{attempt.path}: Stale file handle; the next check for requests is in a second"]


def test_stop_signal_that_was_blocked_sets_the_flag() -> None:
    """Ranks of forked tasks begin so."""
    handlers = [(number, signal.getsignal(number)) for number in STOP_SIGNALS]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        flag = StopFlag()
        flag.install()
        assert flag.is_set
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & {*STOP_SIGNALS}
    finally:
        for number, handler in handlers:
            signal.signal(number, signal.SIG_IGN)  # drops a signal that still waits
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
            signal.signal(number, handler)
