"""From YAML and `key=value` overrides to a frozen `Config`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcdist.config.document import as_literal, protected, read_document
from hpcdist.config.merging import merge
from hpcdist.config.redaction import hide_values
from hpcdist.config.resolution import resolve
from hpcdist.config.schema import Config, exact
from hpcdist.config.shipped import find_config
from hpcdist.config.written import restore_secrets, written_tree
from hpcdist.errors import ConfigError
from hpcdist.files import formats


def load_config(source: str | Path, overrides: Sequence[str] = (), *, cluster: str | Path | None = None) -> Config:
    """Read a config and apply `key=value` overrides.

    Args:
        source: path of a YAML file, or the name of a shipped config (`ddp_digits`).
        cluster: path or name of a site's profile; the config's own `cluster` section overrides it.
        overrides: `section.key=value`; the value is read as YAML.

    Returns the frozen config with interpolations resolved and paths absolute.
    Raises ConfigError with one line for every mistake found.
    """
    path = find_config(source)
    tree = _read_yaml(path)
    if cluster is not None:
        profile = _read_yaml(find_config(cluster, "cluster"))
        # A site's profile may contain the container runtime and the location of images.
        if site := profile.pop("container", None):
            tree["container"] = {**site, **(tree.get("container") or {})}
        own = tree.get("cluster") or {}
        if isinstance(own, dict):
            theirs, mine = profile.get("environment"), own.get("environment")
            if isinstance(theirs, dict) and isinstance(mine, dict):  # a section of its own, merged by key as well
                own = {**own, "environment": {**theirs, **mine}}
            own = {**profile, **own}
        tree["cluster"] = own
    with _hidden_values(tree):
        return resolve(merge(tree, overrides, str(path)), str(path))


def load_run_config(
    path: Path, overrides: Sequence[str], env: Mapping[str, str], *, require_secrets: bool = True
) -> Config:
    """Read a run folder's config and restore its redacted values from `env`.

    Interpolations were resolved when the config was written. `${` in the file is text, also if the file was edited
    since; only interpolations of `overrides` are resolved.

    Without `require_secrets`, values that `env` does not contain stay `***`.
    Raises ConfigError if a secret of the run is missing.
    """
    source = str(path)
    given = {text.partition("=")[0] for text in overrides}
    tree, config = written_tree(path), None
    if tree is not None:
        restore_secrets(tree, env, without=given, require=require_secrets, source=source)
        config = exact(tree)
    if tree is None or config is None:  # edited: read like any other config
        tree = _read_yaml(path, literal=True)
        restore_secrets(tree, env, without=given, require=require_secrets, source=source)
    with _hidden_values(tree):
        if config is not None and not overrides:
            return resolve(config, source)
        return as_literal(resolve(merge(protected(tree), overrides, source), source))


@contextmanager
def _hidden_values(tree: Mapping[str, Any]) -> Iterator[None]:
    """Remove secrets, and values from the environment, from the errors that the block raises.

    Args:
        tree: the config before its interpolations are resolved; overrides may be added to it in the block.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(hide_values(error.problems, tree, os.environ), error.source) from None


def _read_yaml(path: Path, *, literal: bool = False) -> dict[str, Any]:
    return formats.unstamped(read_document(path, literal=literal), path)
