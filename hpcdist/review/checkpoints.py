"""The checkpoints in a run folder, from their manifests; reads no tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.monitor import Monitor
from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json
from hpcdist.run.folder import RunDir
from hpcdist.run.saved_checkpoints import MANIFEST_FILE, complete_checkpoints


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """One complete checkpoint."""

    path: Path
    step: int
    created: float | None = None  #: seconds since the epoch
    metrics: Mapping[str, float]  #: finite metrics of an evaluation at this step; empty without one


def read_checkpoints(run: RunDir) -> tuple[CheckpointFacts, ...]:
    """Return the checkpoints with a manifest, oldest first."""
    found = (_read(path, step) for step, path in complete_checkpoints(run))
    return tuple(facts for facts in found if facts is not None)


def best_checkpoint(checkpoints: Iterable[CheckpointFacts], monitor: Monitor) -> CheckpointFacts | None:
    """Return the checkpoint with the best monitored metric, the newest of equal ones; None if none has the metric."""
    sign, key = -1.0 if monitor.mode == "min" else 1.0, monitor.metric
    scored = [(sign * one.metrics[key], one.step, one) for one in checkpoints if key in one.metrics]
    return max(scored, key=lambda item: item[:2])[2] if scored else None


def _read(path: Path, step: int) -> CheckpointFacts | None:
    try:
        manifest = read_json(path / MANIFEST_FILE)
    except (RunFolderError, OSError):
        return None
    if manifest is None:
        return None
    metrics = manifest.get("metrics")
    named = metrics.items() if isinstance(metrics, dict) else ()
    values = {name: number for name, value in named if (number := finite_number(value)) is not None}
    return CheckpointFacts(path=path, step=step, created=finite_number(manifest.get("created")), metrics=values)


def finite_number(value: Any) -> float | None:
    """Return a number of a manifest as float; None for NaN, infinity and anything else."""
    if type(value) not in (int, float) or abs(value) > sys.float_info.max or math.isnan(value):
        return None
    return float(value)
