"""Origin of a run's config, in `origin.json`: the config that the run was started with, before its overrides."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcdist.config.document import escaped
from hpcdist.config.redaction import is_redacted
from hpcdist.config.written import flat_values
from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import read_if_valid, write_json
from hpcdist.run.folder import RunDir

#: The shipped config of `hpcdist run train.py --lr 0.1`. The experiment and the script do not count as its overrides.
PLAIN_SCRIPT = "plain_script"
#: Keys that determine where a run is stored, without effect on its training.
LOCATION = ("name", "runs_dir", "tracking.uri")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The config of a command line without its overrides."""

    config: str  #: as given: the name of a shipped config, or a path
    cluster: str = ""  #: the site profile as given, if there was one
    values: dict[str, Any] = field(default_factory=dict)
    """Resolved values by dotted key, redacted; empty if the config is not valid without overrides."""
    written: list[str] = field(default_factory=list)  #: keys that the YAML, the site profile or an override has set
    overridden: list[str] = field(default_factory=list)  #: keys that an override or a sweep has set
    references: dict[str, str | list[str]] = field(default_factory=dict)
    """Values that refer to other keys, as they are written (`written_references`)."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """The value of a key in the config of the command line, and in the run."""

    before: Any
    after: Any


def load_origin(source: str, overrides: Sequence[str] = (), cluster: str | None = None) -> Origin:
    """Return the origin of a config that a command line loads with the same arguments."""
    from hpcdist.config.loading import load_config, written_keys, written_references

    try:
        values = flat_values(load_config(source, cluster=cluster))
    except HpcdistError:  # it needs an override
        values = {}
    written = written_keys(source, overrides, cluster=cluster)
    overridden = [text.partition("=")[0] for text in overrides]
    return Origin(
        config=str(source),
        cluster=str(cluster or ""),
        values=values,
        written=written,
        overridden=overridden,
        references=written_references(source, overrides, cluster=cluster),
    )


def write_origin(run: RunDir, origin: Origin) -> None:
    write_json(run.path / "origin.json", asdict(origin))


def is_generated(name: str) -> bool:
    """Return whether a run's name ends with date, time and random characters, as `with_name` makes it."""
    return re.search(r"-\d{8}-\d{6}-[0-9a-f]{4}$", name) is not None


def read_origin(run: RunDir) -> Origin | None:
    """Return the content of `origin.json`; None if the file is missing or damaged."""
    return read_if_valid(Origin, run.path / "origin.json")


def keys_in_references(origin: Origin) -> set[str]:
    """Return the dotted keys to which other values of the config refer."""
    from hpcdist.config.loading import referred_keys

    keys: set[str] = set()
    for written in origin.references.values():
        entries = written if isinstance(written, list) else [written]
        for entry in entries:
            keys |= referred_keys(entry)
    return keys


def referring_overrides(run: RunDir, env: Mapping[str, str]) -> list[str]:
    """Return overrides by which values of a stored config refer to other keys again, as the config of origin does.

    A stored config has resolved values: without these overrides, `--lr ${params.lr}` in the arguments of a script would
    not follow a change of `params.lr`. Values that a resume has replaced, and those with secrets, are left out.

    Args:
        env: variables from which the redacted values of the config are restored.
    """
    from hpcdist.config.loading import load_run_config

    origin = read_origin(run)
    if origin is None or not origin.references:
        return []
    stored = flat_values(load_run_config(run.config, [], env))
    words = {}
    for key, written in origin.references.items():
        value = _as_written(written, stored.get(key))
        if value is not None:
            words[key] = f"{key}={json.dumps(value)}"
    again = flat_values(load_run_config(run.config, list(words.values()), env))
    return [word for key, word in words.items() if again[key] == stored[key]]


def _as_written(written: Any, stored: Any) -> str | list[str] | None:
    """Return a stored value with the references of the config of origin; None if the two do not fit, or for a secret.

    Args:
        written: see `Origin.references`.
    """
    if is_redacted(stored):
        return None
    if isinstance(written, str):
        return written
    if not isinstance(stored, list) or not isinstance(written, list) or len(stored) != len(written):
        return None
    return [reference or escaped(str(value)) for reference, value in zip(written, stored, strict=True)]


def overrides(origin: Origin, values: Mapping[str, Any]) -> dict[str, Override]:
    """Return the keys with other values than the config of origin, without those that only locate the run."""
    if not origin.values:
        return {}
    skipped: tuple[str, ...] = LOCATION
    if origin.config == PLAIN_SCRIPT:
        skipped = (*LOCATION, "experiment", "trainer.script")
    changed = {}
    for key, value in values.items():
        before = origin.values.get(key)
        if key not in skipped and value != before:
            changed[key] = Override(before=before, after=value)
    return changed
