"""Where MLflow is: which URI counts, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcdist.config.redaction import REDACTED, redact_text
from hpcdist.errors import TrackingError
from hpcdist.run.runs_dir import DATABASE


def redact_uri(text: str) -> str:
    """`text` with the secrets of every URI in it replaced: `http://user:***@host`."""
    return redact_text(text)


def default_uri(runs_dir: Path) -> str:
    """The sqlite database beside the runs."""
    return f"sqlite:///{runs_dir.absolute() / DATABASE}"


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI, None for any other URI."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def is_server(uri: str) -> bool:
    """Whether a URI names a server, which any host may ship to; a database on a shared file system is unsafe."""
    return uri.startswith(("http://", "https://"))


def choose_uri(env: Mapping[str, str], configured: str, runs_dir: Path) -> str:
    """The URI to ship to: `HPCDIST_TRACKING_URI`, else what the config says, else `default_uri`.

    Raises TrackingError when it has lost its password to redaction.
    """
    uri = env.get("HPCDIST_TRACKING_URI") or configured or default_uri(runs_dir)
    if f"{REDACTED}@" in uri or f"={REDACTED}" in uri:
        raise TrackingError(
            f"the password of {uri} is not kept in the run folder: set HPCDIST_TRACKING_URI to the whole URI"
        )
    return uri
