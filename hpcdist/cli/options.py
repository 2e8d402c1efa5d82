"""Arguments and options that several commands share: one definition for each name."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.cli import completion

RUNS = Path("runs")


def _expanded(path: Path | None) -> Path | None:
    return path.expanduser() if path is not None else None


def _into_environment(uri: str | None) -> str | None:
    """Make an explicit URI take precedence over the environment's, in this process and in the processes it starts."""
    if uri:
        os.environ["HPCDIST_TRACKING_URI"] = uri
    return uri


# --- Configs

ConfigName = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="Path of a YAML file, or name of a shipped config.", autocompletion=completion.configs
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides of config keys.", autocompletion=completion.overrides),
]
SweepAxes = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=V1,V2",
        help="Values of a key to sweep over; repeat the option for a grid.",
        autocompletion=completion.keys,
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="PROFILE",
        help="Site profile: path of a YAML file, or name of a shipped one.",
        autocompletion=completion.profiles,
    ),
]
#: Commands that read a config: these options are short forms of overrides, see `with_options`.
RunsDirKey = Annotated[
    Path | None,
    typer.Option("--runs-dir", metavar="DIR", help="Folder of the runs; short for runs_dir=DIR.", callback=_expanded),
]
ExperimentKey = Annotated[
    str | None,
    typer.Option(
        "--experiment",
        metavar="NAME",
        help="MLflow experiment; short for experiment=NAME.",
        autocompletion=completion.experiments,
    ),
]
TrackingUriKey = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri", metavar="URI", help="MLflow store; short for tracking.uri=URI.", callback=_into_environment
    ),
]

# --- Existing runs

RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Name of a run, a unique prefix of it, or its folder.", autocompletion=completion.runs
    ),
]
RunNames = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN", help="Names of runs; all runs by default.", autocompletion=completion.runs),
]
RunsDir = Annotated[
    Path,
    typer.Option(
        "--runs-dir", metavar="DIR", envvar="HPCDIST_RUNS_DIR", help="Folder of the runs.", callback=_expanded
    ),
]
Experiment = Annotated[
    str | None,
    typer.Option(
        "--experiment", metavar="NAME", help="Only runs of this experiment.", autocompletion=completion.experiments
    ),
]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        metavar="URI",
        help="MLflow store instead of the configured one.",
        callback=_into_environment,
    ),
]

# --- Behaviour

Follow = Annotated[
    bool, typer.Option("--follow/--detach", "-f/-d", help="Show progress until the end, or return at once.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Show only changes of state until the end.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan without starting anything.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Dependency = Annotated[
    str | None,
    typer.Option("--dependency", metavar="KIND:RUN", help="As for sbatch, with names of runs or job ids."),
]
Begin = Annotated[
    str | None, typer.Option("--begin", metavar="TIME", help="Earliest start, as for sbatch: now+2hours, 20:00.")
]
Force = Annotated[bool, typer.Option("--force", help="Submit even if the checks of hpcdist, not Slurm, fail.")]


def with_options(
    overrides: Sequence[str] | None,
    *,
    runs_dir: Path | None = None,
    experiment: str | None = None,
    tracking_uri: str | None = None,
) -> list[str]:
    """Return the overrides of a command line, those that were given as options included."""
    values = {"runs_dir": runs_dir, "experiment": experiment, "tracking.uri": tracking_uri}
    # Quoted, since overrides are YAML.
    given = [f"{key}={json.dumps(str(value))}" for key, value in values.items() if value is not None]
    return [*(overrides or []), *given]
