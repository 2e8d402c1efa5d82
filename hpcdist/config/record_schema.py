"""The sections of a config on checkpoints and MLflow: `checkpoint`, `tracking`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.section import ConfigSection, address_problem, number
from hpcdist.errors import shown

COMMANDS = ("stop", "save", "profile")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ConfigSection):
    """When checkpoints are saved, and which are kept."""

    every_steps: int | None = number(None, least=1)
    """Optimizer steps between two saves; a save at the end of each epoch comes in addition."""
    keep_last: int = number(2, least=2)
    """Number of newest checkpoints to keep; the best one is always kept."""
    monitor: str = "eval/accuracy"
    """Metric that determines the best checkpoint; empty (the default for your own code): the newest is the best."""
    monitor_mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower value of `monitor` is better."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(ConfigSection):
    """The records for MLflow, and how often they are logged."""

    uri: str = "${oc.env:MLFLOW_TRACKING_URI,''}"
    """URI of the MLflow server or database; empty means the SQLite file `<runs_dir>/mlflow.db`."""
    register_as: str | None = None
    """Name of the final model in MLflow's model registry, where the alias `best` follows `monitor`; null: none."""
    log_every_steps: int = number(50, least=1)
    """Optimizer steps between two values of the training metrics; the last step is logged as well."""
    patch: bool = False
    """Whether `code.patch`, the uncommitted changes of the code, is uploaded to MLflow as it is, secrets included."""
    system_interval_s: float = number(10.0, least=0)
    """Seconds between two values of each node's system metrics; 0 disables them."""
    drain_timeout_s: float = number(60.0, least=0)
    """Seconds that the end of a run waits for MLflow; 0: not at all. `hpcdist sync` ships the rest later."""
    commands: list[str] = field(default_factory=list)
    """Commands to obey from the tag `hpcdist.command` in MLflow: stop, save, profile. Needs EDIT permission there."""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional tags of the MLflow run."""
    script_files: bool = True
    """Whether metrics in TensorBoard's event files and csv logs that rank 0 of a script writes are uploaded."""
    stdout_metrics: dict[str, str] = field(default_factory=dict)
    """Metrics in the output of rank 0: name → regular expression with a group for the value, such as
    `{loss: 'loss ([0-9.]+)'}`; a group `(?P<step>…)` gives the step, else the matches are numbered from 0."""

    def problems(self) -> list[str]:
        problems = []
        if self.uri.startswith(("http://", "https://")) and address_problem(self.uri):
            problems.append(f"uri {address_problem(self.uri)}")
        for name in self.commands:
            if name not in COMMANDS:
                problems.append(f"commands: {name!r} must be one of {', '.join(COMMANDS)}")
        for name, text in self.stdout_metrics.items():
            problem = _pattern_problem(text)
            if problem:
                problems.append(f"stdout_metrics.{name}: {shown(text)} {problem}")
        return problems


#: Names of the groups of a regular expression that hold the step and the value.
STEP_GROUP, VALUE_GROUP = "step", "value"


def _pattern_problem(text: str) -> str:
    """Return why a text is not a regular expression for a metric; empty if it is one."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        return f"is not a regular expression: {error}"
    if not value_group(pattern):
        return "has no group for the value: put the number in parentheses, as in 'loss ([0-9.]+)'"
    return ""


def value_group(pattern: re.Pattern[str]) -> int:
    """Return the number of the group `value`, else of the first one that is not the step; 0 if there is none."""
    names = pattern.groupindex
    if VALUE_GROUP in names:
        return names[VALUE_GROUP]
    groups = [number for number in range(1, pattern.groups + 1) if number != names.get(STEP_GROUP)]
    return groups[0] if groups else 0
