"""The resolved config as a run folder stores it: YAML with redacted secrets, and the variables that restore them.

It is read without OmegaConf, the import of which takes longer than that of all other modules of a rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hpcdist.config.document import load, read_text
from hpcdist.config.redaction import REDACTED, REDACTED_NUMBER, hidden_texts, is_redacted, redact_text, redact_tree
from hpcdist.config.schema import Config, SecretTexts, to_tree
from hpcdist.config.tree import flat, insert, leaves, parse_value
from hpcdist.errors import ConfigError
from hpcdist.files import formats
from hpcdist.files.regular_file import read_regular

#: Limit of the config in a run folder.
MAX_WRITTEN_BYTES = 16 << 20


def to_yaml(config: Config) -> str:
    """Return the whole resolved config as YAML, with redacted secrets."""
    return yaml.safe_dump(redacted(config), sort_keys=False, allow_unicode=True)


def run_yaml(config: Config) -> str:
    """Return the content of a run folder's config: the format number, then the result of `to_yaml`."""
    return yaml.safe_dump(formats.stamped({})) + to_yaml(config)


def plain_tree(path: Path) -> dict[str, Any]:
    """Read a run folder's config as plain containers, without its format number and without checks of its keys.

    Raises ConfigError if it cannot be read or has no keys, RunFolderError if a newer version of hpcdist wrote it.
    """
    try:
        tree = yaml.safe_load(read_regular(path, MAX_WRITTEN_BYTES))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"cannot be read: {' '.join(str(error).split())[:200]}"], str(path)) from error
    if not isinstance(tree, dict):
        raise ConfigError([f"must hold keys and values, holds a {type(tree).__name__}"], str(path))
    return formats.unstamped({str(key): value for key, value in tree.items()}, path)


def written_tree(path: Path) -> dict[str, Any] | None:
    """Return the plain containers of a run folder's config, or None if it does not have the form of `to_yaml`."""
    try:
        tree = load(read_text(path, MAX_WRITTEN_BYTES))
    except (ConfigError, ValueError, yaml.YAMLError):
        return None
    return formats.unstamped(tree, path) if isinstance(tree, dict) else None


def redacted(config: Config) -> dict[str, Any]:
    """Return the config as plain containers, with `***` for each secret, by its key, its form or its origin."""
    return redact_tree(to_tree(config), texts=config.secret_texts)


def flat_values(config: Config) -> dict[str, Any]:
    """Return the redacted values of a config by dotted key."""
    return flat(redacted(config))


def redacted_argument(text: str) -> str:
    """Return a command-line argument, with its value replaced if it is an override that sets a secret."""
    key, equals, raw = text.partition("=")
    if equals and not key.startswith("-"):
        tree: dict[str, Any] = {}
        insert(tree, key.split("."), parse_value(raw))
        if redact_tree(tree) != tree:
            text = f"{key}={REDACTED}"
    return redact_text(text)


def secret_keys(config: Config) -> list[tuple[str, ...]]:
    """Return the keys of the values that `to_yaml` redacts."""
    clean = dict(leaves(redacted(config)))
    return [path for path, value in leaves(to_tree(config)) if clean[path] != value]


def secrets_of(config: Config) -> dict[str, str]:
    """Return the environment variables from which `load_run_config` restores the redacted values."""
    tree = to_tree(config)
    values = dict(leaves(tree))
    return {
        _variable(path, tree): value if isinstance(value := values[path], str) else json.dumps(value)
        for path in secret_keys(config)
    }


def restore_secrets(
    tree: dict[str, Any], env: Mapping[str, str], *, without: set[str], require: bool, source: str
) -> SecretTexts:
    """Replace the redacted values of a config by those of the environment. Returns `Config.secret_texts`.

    Args:
        without: dotted keys that overrides set anyway.
        require: whether a missing variable is an error; otherwise the value stays `***`.
        source: path of the config, for the error.

    Raises ConfigError with one line for each missing variable.
    """
    problems, restored = [], {}
    for path, value in list(leaves(tree)):
        key, name = ".".join(path), _variable(path, tree)
        if not is_redacted(value) or key in without:
            continue
        if name in env:
            insert(tree, path, text := _restored(value, env[name], name))
            restored[path] = value, text
        elif require:
            problems.append(f"{key} was redacted when the run was written: set {name} in the environment")
    if problems:
        raise ConfigError(problems, source)
    clean = dict(leaves(redact_tree(tree)))
    return {path: hidden_texts(*pair) for path, pair in restored.items() if clean.get(path) != pair[0]}


def _restored(shown: Any, text: str, variable: str) -> Any:
    """Return the value of a variable; `secrets_of` writes values other than strings as JSON."""
    if isinstance(shown, str) and shown != REDACTED_NUMBER:
        return text
    try:
        return json.loads(text)
    except ValueError:
        raise ConfigError([f"{variable} in the environment must hold JSON, such as 3 or [1, 2]"]) from None


def _variable(path: Sequence[str], tree: Mapping[str, Any]) -> str:
    """Return the name of the environment variable that holds the value of a redacted key.

    A variable of the ranks is its own; if both sections contain it, `launch.env` wins, as it does in the ranks.
    """
    if path[:2] == ("launch", "env"):
        return path[-1]
    if path[:2] == ("cluster", "env") and path[-1] not in ((tree.get("launch") or {}).get("env") or {}):
        return path[-1]
    return re.sub(r"\W", "_", "_".join(("hpcdist", *path))).upper()
