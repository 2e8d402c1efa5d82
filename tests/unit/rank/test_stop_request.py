"""Stop requests on a file system that is temporarily unreachable."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpcdist.rank import stop_agreement
from hpcdist.rank.stop_agreement import StopAgreement
from hpcdist.rank.stop_signals import StopFlag


def test_check_for_a_stop_request_is_retried_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stop_agreement, "REQUEST_INTERVAL_S", 0.0)
    monkeypatch.setattr(stop_agreement, "AGREEMENT_INTERVAL_S", 0.0)
    request = tmp_path / "request.json"
    request.touch()
    errors = [errno.ESTALE, errno.EIO]
    exists = Path.exists

    def fail_first(path: Path) -> bool:
        if errors:
            number = errors.pop(0)
            raise OSError(number, os.strerror(number))
        return exists(path)

    monkeypatch.setattr(Path, "exists", fail_first)
    agreement = StopAgreement(None, StopFlag(), request, watch_request=True)
    assert [agreement.at_boundary() for _ in range(3)] == [False, False, True]
    assert caplog.messages == [f"{request}: Stale file handle; the next check for a stop request is in a second"]
