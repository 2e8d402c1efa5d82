"""Resolution and redaction of the tracking URI."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.errors import TrackingError
from hpcdist.tracking.uri import choose_uri, default_uri, redact_uri, sqlite_path


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("http://me:secret@host:5000", "http://me:***@host:5000"),
        ("postgresql://me:p@ss:w@host/db", "postgresql://me:***@host/db"),
        ("http://host:5000/a@b", "http://host:5000/a@b"),
        ("sqlite:////runs/mlflow.db", "sqlite:////runs/mlflow.db"),
        ("API request to http://me:secret@host/api failed", "API request to http://me:***@host/api failed"),
    ],
)
def test_password_in_a_uri_is_redacted(text: str, redacted: str) -> None:
    assert redact_uri(text) == redacted
    assert redact_uri(redacted) == redacted


def test_uri_precedence_is_environment_config_default_database(tmp_path: Path) -> None:
    assert choose_uri({"HPCDIST_TRACKING_URI": "http://a"}, "http://b", tmp_path) == "http://a"
    assert choose_uri({"HPCDIST_TRACKING_URI": ""}, "http://b", tmp_path) == "http://b"
    assert choose_uri({}, "", tmp_path) == default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert sqlite_path(default_uri(tmp_path)) == tmp_path / "mlflow.db"
    assert sqlite_path("http://a") is None


def test_redacted_uri_is_rejected() -> None:
    with pytest.raises(TrackingError, match=r"password of http://me:.*@host is not kept .* set HPCDIST_TRACKING_URI"):
        choose_uri({}, "http://me:***@host", Path("runs"))
