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
    if not uri.startswith("sqlite:///"):
        return None
    return Path(uri.removeprefix("sqlite:///")).absolute()


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
    if not uri:
        uri = f"sqlite:///{own_place(runs_dir).absolute() / DATABASE}"
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
        """Return the headers with which a request authenticates itself; empty without credentials."""
        if self.user:
            pair = f"{self.user}:{self.password}".encode()
            return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
        if self.token:
            return {"Authorization": f"Bearer {self.token}"}
        return {}


def credentials_file(env: Mapping[str, str]) -> Path:
    """Return the path of MLflow's file of credentials, which may not exist."""
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
    path = credentials_file(env)
    parser = configparser.ConfigParser()
    try:
        parser.read(path)
        saved = dict(parser["mlflow"]) if "mlflow" in parser else {}
    except (configparser.Error, UnicodeDecodeError) as error:
        # No part of the file in the message: it holds a password.
        raise UserMistake(
            f"{path} is not in the format of MLflow ({type(error).__name__}): it needs a section [mlflow] with"
            " mlflow_tracking_username and mlflow_tracking_password, in which % is written as %%"
        ) from None
    user = env.get("MLFLOW_TRACKING_USERNAME")
    password = env.get("MLFLOW_TRACKING_PASSWORD")
    source = VARIABLES if user and password else str(path)
    user = user or saved.get("mlflow_tracking_username", "")
    password = password or saved.get("mlflow_tracking_password", "")
    if user and password:
        return Credentials(user=user, password=password, source=source)
    return Credentials(token=env.get("MLFLOW_TRACKING_TOKEN", ""), source="MLFLOW_TRACKING_TOKEN")


def version_in(answer: str) -> str:
    """Return the version in an answer of `/version`; empty for another page, such as that of a login."""
    text = answer.strip()
    if not re.fullmatch(r"[0-9]+\.[0-9]+[\w.]{0,30}", text):
        return ""
    return text


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
    experiments: dict[float, str] = {}  #: by the time at which their run was created
    for run in runs:
        ids = _ids(run)
        experiment = ids.get("experiment_id")
        with suppress(RunFolderError, OSError):
            if experiment and ids.get("uri") == redact_text(store):
                experiments[run.read_state().created] = experiment
    if not experiments:
        return f"{address}#/experiments?{TRAINING_PAGES}"  # else MLflow opens its pages for LLM applications
    return experiment_page(address, experiments[max(experiments)])


def _ids(run: RunDir) -> dict[str, str]:
    """Return the strings of `mlflow.json`; a damaged file counts as empty."""
    try:
        ids = read_json(run.mlflow) or {}
    except (RunFolderError, OSError):
        ids = {}
    return {key: value for key, value in ids.items() if isinstance(value, str)}
