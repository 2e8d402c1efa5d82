"""Secrets of a config that would become readable to other users of the cluster."""

from __future__ import annotations

from hpcdist.config.schema import Config
from hpcdist.config.written import secret_keys


def exposed_secrets(config: Config) -> list[str]:
    """Return a problem for each secret that would be part of the batch script or of a command line."""
    keys = [path for path in secret_keys(config) if path[0] in ("cluster", "container") and path[1] != "env"]
    return [
        f"{'.'.join(key)} holds a secret, which other users could read in the batch script or on a command line:"
        f" pass it as an environment variable, such as cluster.env.MY_TOKEN='${{oc.env:MY_TOKEN}}'"
        for key in keys
    ]
