"""Origin of a run's config, in `origin.json`: the config that the run was started with, before its overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcdist.errors import HpcdistError
from hpcdist.files.atomic import read_if_valid, write_json
from hpcdist.run.folder import RunDir

#: The shipped config of `hpcdist run train.py --lr 0.1`; the script is no override of it.
PLAIN_SCRIPT = "plain_script"
#: Keys that say where a run is stored, not what it does.
LOCATION = ("name", "runs_dir", "tracking.uri")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The config of a command line without its overrides."""

    config: str  #: as given: the name of a shipped config, or a path
    cluster: str = ""  #: the site profile as given, if there was one
    values: dict[str, Any] = field(default_factory=dict)
    """Resolved values by dotted key, redacted; empty if the config is not valid without overrides."""
    written: list[str] = field(default_factory=list)  #: keys that the YAML, the site profile or an override has set


@dataclass(frozen=True, kw_only=True)
class Override:
    """The values of one config key in the config of origin and in the run."""

    before: Any
    after: Any


def load_origin(source: str, overrides: Sequence[str] = (), cluster: str | None = None) -> Origin:
    """Return the origin of a run that is started with this config, these overrides and this site profile."""
    from hpcdist.config.loading import load_config, written_keys
    from hpcdist.config.written import flat_values

    try:
        values = flat_values(load_config(source, cluster=cluster))
    except HpcdistError:  # it needs an override
        values = {}
    written = written_keys(source, overrides, cluster=cluster)
    return Origin(config=str(source), cluster=str(cluster or ""), values=values, written=written)


def write_origin(run: RunDir, origin: Origin) -> None:
    """Write `origin.json`. Raises OSError if that fails."""
    write_json(run.path / "origin.json", asdict(origin))


def read_origin(run: RunDir) -> Origin | None:
    """Return the origin of a run; None if it is not recorded, or the file is damaged."""
    return read_if_valid(Origin, run.path / "origin.json")


def overrides(origin: Origin, values: Mapping[str, Any]) -> dict[str, Override]:
    """Return the keys whose values differ from the config of origin, without those that only locate the run.

    Args:
        values: redacted values of the run's config by dotted key.
    """
    if not origin.values:
        return {}
    return {
        key: Override(before=origin.values.get(key), after=value)
        for key, value in values.items()
        if key not in LOCATION
        and value != origin.values.get(key)
        and not (origin.config == PLAIN_SCRIPT and key in ("experiment", "trainer.script"))
    }
