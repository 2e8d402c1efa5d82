"""The tracking URI: its resolution from environment and config, its credentials, and links to the pages of MLflow's UI.

Imports no MLflow, since commands on a login node print these links.
"""

import base64
import configparser
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from hpcdist.config.redaction import REDACTED, redact_text
from hpcdist.config.schema import Config
from hpcdist.errors import RunFolderError, TrackingUriError, UserMistake
from hpcdist.host.json_files import read_json
from hpcdist.review.markdown import TRAINING_PAGES, run_page
from hpcdist.run.folder import DATABASE, RunDir, own_place


def sqlite_path(uri: str) -> Path | None:
    """Return the database file of a sqlite URI; None for any other URI."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def is_server(uri: str) -> bool:
    """Return whether a URI names a server. Several hosts can write to a server, but not to a shared sqlite file."""
    return uri.startswith(("http://", "https://"))


def resolve_uri(config: Config, env: Mapping[str, str]) -> str:
    """Return the tracking URI of a run. Each command or process calls this once and passes it on."""
    return choose_uri(env, config.tracking.uri, Path(config.runs_dir))


def choose_uri(env: Mapping[str, str], configured: str, runs_dir: Path) -> str:
    """Return the tracking URI: `HPCDIST_TRACKING_URI`, else `configured`, else a database in `runs_dir`.

    Raises TrackingUriError if the password in the URI was redacted.
    """
    uri = env.get("HPCDIST_TRACKING_URI") or configured
    uri = uri or f"sqlite:///{own_place(runs_dir).absolute() / DATABASE}"
    if f"{REDACTED}@" in uri or f"={REDACTED}" in uri:
        raise TrackingUriError(
            f"the password of {uri} is not kept in the run folder: set HPCDIST_TRACKING_URI to the whole URI"
        )
    return uri


# The credentials that MLflow's client sends to a server: from the URI, the environment or `~/.mlflow/credentials`.

VARIABLES = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"


@dataclass(frozen=True, kw_only=True, repr=False)
class Credentials:
    """User and password, or a token; all empty for a server without accounts."""

    user: str = ""
    password: str = ""
    token: str = ""
    source: str = ""  #: where they are set, for messages

    def headers(self) -> dict[str, str]:
        if self.user:
            return {"Authorization": "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()}
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def credentials_file(env: Mapping[str, str]) -> Path:
    return Path(env.get("HOME") or Path.home(), ".mlflow", "credentials")


def read_credentials(uri: str, env: Mapping[str, str]) -> Credentials:
    """Return the credentials for a server, in MLflow's order: the URI, then each variable, then the file, then a token.

    Raises UserMistake if the credentials file cannot be parsed.
    """
    try:
        parts = urlsplit(uri)
        if parts.username:
            return Credentials(user=unquote(parts.username), password=unquote(parts.password or ""), source="the URI")
    except ValueError:
        pass  # the request reports an invalid URI
    path, parser = credentials_file(env), configparser.ConfigParser()
    try:
        parser.read(path)
        saved = dict(parser["mlflow"]) if "mlflow" in parser else {}
    except (configparser.Error, UnicodeDecodeError) as error:
        # No part of the file in the message: it holds a password.
        raise UserMistake(
            f"{path} is not in the format of MLflow ({type(error).__name__}): it needs a section [mlflow] with"
            " mlflow_tracking_username and mlflow_tracking_password, in which % is written as %%"
        ) from None
    user = env.get("MLFLOW_TRACKING_USERNAME") or saved.get("mlflow_tracking_username", "")
    password = env.get("MLFLOW_TRACKING_PASSWORD") or saved.get("mlflow_tracking_password", "")
    if user and password:
        own = env.get("MLFLOW_TRACKING_USERNAME") and env.get("MLFLOW_TRACKING_PASSWORD")
        return Credentials(user=user, password=password, source=VARIABLES if own else str(path))
    return Credentials(token=env.get("MLFLOW_TRACKING_TOKEN", ""), source="MLFLOW_TRACKING_TOKEN")


def version_in(answer: str) -> str:
    """Return the version in an answer of `/version`; empty for another page, such as that of a login."""
    text = answer.strip()
    return text if re.fullmatch(r"[0-9]+\.[0-9]+[\w.]{0,30}", text) else ""


# Links to the pages of MLflow's UI: a run and an experiment.


def web_address(uri: str) -> str:
    """Return the address of a server's UI: its tracking URI without user name, password and final slash."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")


def experiment_page(address: str, experiment_id: str) -> str:
    """Return the link to an experiment's list of runs."""
    return f"{address}#/experiments/{experiment_id}/runs?{TRAINING_PAGES}"


def link_to_run(run: RunDir) -> str:
    """Return the link to a run in MLflow's UI; empty if the store has no address, or before the run is uploaded."""
    ids = _ids(run)
    uri = ids.get("uri", "")
    page = run_page(ids.get("experiment_id", ""), ids.get("run_id", ""))
    if not is_server(uri) or not page:
        return ""
    return f"{web_address(uri)}/{page}"


def link_to_newest(runs: Iterable[RunDir], store: str, address: str) -> str:
    """Return the link to the experiment of the newest run in `store`, else to the list of experiments."""
    found: dict[float, dict[str, str]] = {}
    for run in runs:
        ids = _ids(run)
        with suppress(RunFolderError, OSError):
            if ids.get("experiment_id") and ids.get("uri") == redact_text(store):
                found[run.read_state().created] = ids
    if not found:
        return f"{address}#/experiments?{TRAINING_PAGES}"  # else MLflow opens its pages for LLM applications
    return experiment_page(address, found[max(found)]["experiment_id"])


def _ids(run: RunDir) -> dict[str, str]:
    """Return the strings of `mlflow.json`; a damaged file counts as empty."""
    try:
        found = read_json(run.mlflow) or {}
    except (RunFolderError, OSError):
        found = {}
    return {key: value for key, value in found.items() if isinstance(value, str)}
