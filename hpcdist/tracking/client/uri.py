"""The tracking URI: its resolution from environment and config, and its redaction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcdist.config.redaction import REDACTED, redact_text
from hpcdist.config.schema import Config
from hpcdist.errors import TrackingError
from hpcdist.run.runs_dir import DATABASE, own_place


def redact_uri(text: str) -> str:
    """Return `text` with the secrets of all URIs in it redacted: `http://user:***@host`."""
    return redact_text(text)


def default_uri(runs_dir: Path) -> str:
    """Return the URI of the sqlite database in the folder of the runs."""
    return f"sqlite:///{own_place(runs_dir).absolute() / DATABASE}"


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of a sqlite URI; None for any other URI."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def is_server(uri: str) -> bool:
    """Return whether a URI names a server. Several hosts can write to a server, but not to a shared sqlite file."""
    return uri.startswith(("http://", "https://"))


def resolve_uri(config: Config, env: Mapping[str, str]) -> str:
    """Return the tracking URI of a run, see `choose_uri`. Each command or process calls this once and passes it on."""
    return choose_uri(env, config.tracking.uri, Path(config.runs_dir))


def choose_uri(env: Mapping[str, str], configured: str, runs_dir: Path) -> str:
    """Return the tracking URI: `HPCDIST_TRACKING_URI`, else `configured`, else `default_uri`.

    Raises:
        TrackingError: the password in the URI was redacted.
    """
    uri = env.get("HPCDIST_TRACKING_URI") or configured or default_uri(runs_dir)
    if f"{REDACTED}@" in uri or f"={REDACTED}" in uri:
        raise TrackingError(
            f"the password of {uri} is not kept in the run folder: set HPCDIST_TRACKING_URI to the whole URI"
        )
    return uri
