"""The version of MLflow on a server, which its path `/version` gives."""

from __future__ import annotations

import re


def version_in(answer: str) -> str:
    """Return the version in an answer of `/version`; empty for another page, such as that of a login."""
    text = answer.strip()
    return text if re.fullmatch(r"[0-9]+\.[0-9]+[\w.]{0,30}", text) else ""


def server_version(uri: str) -> str:
    """Return the version of the MLflow server at a URI; empty if none answers. Imports MLflow.

    MLflow's client sends the request: a server with accounts answers none without credentials.
    """
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    from hpcdist.tracking.client.mlflow_client import MlflowException

    try:
        response = http_request(get_default_host_creds(uri), "/version", "GET", max_retries=0, timeout=5)
    except MlflowException:
        return ""
    return version_in(response.text[:100]) if response.status_code == 200 else ""
