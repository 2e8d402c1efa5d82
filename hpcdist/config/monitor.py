"""The monitored metric in the config of a run folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from hpcdist.config.schema import CheckpointConfig
from hpcdist.config.written import plain_tree
from hpcdist.errors import ConfigError, RunFolderError


class Monitor(NamedTuple):
    """The metric that determines the best checkpoint; an empty name if none does."""

    metric: str = CheckpointConfig.monitor
    mode: Literal["max", "min"] = CheckpointConfig.monitor_mode


def monitor_of(config: Mapping[str, Any]) -> Monitor:
    """Return the monitored metric of a config as plain containers; defaults replace missing and damaged values."""
    section = config.get("checkpoint")
    if not isinstance(section, Mapping):
        return Monitor()
    metric = section.get("monitor")
    return Monitor(
        metric=metric if isinstance(metric, str) else CheckpointConfig.monitor,
        mode="min" if section.get("monitor_mode") == "min" else "max",
    )


def first_monitor(configs: Iterable[Path]) -> Monitor:
    """Return the monitored metric of the first of some config files that can be read."""
    for path in configs:
        try:
            return monitor_of(plain_tree(path))
        except (ConfigError, RunFolderError):
            continue
    return Monitor()
