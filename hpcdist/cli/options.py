"""Arguments and options that several commands share: one definition for each name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from hpcdist.cli import completion
from hpcdist.logs import say

RUNS = Path("runs")


def _expanded(path: Path | None) -> Path | None:
    return path.expanduser() if path is not None else None


def _into_environment(uri: str | None) -> str | None:
    """Make an explicit URI take precedence over the environment's, in this process and in the processes it starts."""
    if uri:
        os.environ["HPCDIST_TRACKING_URI"] = uri
    return uri


def argument(metavar: str, text: str, complete: completion.Completer) -> Any:
    """Return an argument with completion."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete)


def option(flag: str, metavar: str, text: str, complete: completion.Completer | None = None, **more: Any) -> Any:
    """Return an option that has a value."""
    return typer.Option(flag, metavar=metavar, help=text, autocompletion=complete, **more)


def flag(flag: str, text: str) -> Any:
    """Return an option without a value."""
    return typer.Option(flag, help=text)


# --- Configs

_CONFIG = argument("CONFIG", "Path of a YAML file, or name of a shipped config.", completion.configs)
ConfigName = Annotated[str, _CONFIG]
OptionalConfigName = Annotated[str | None, _CONFIG]
Overrides = Annotated[list[str] | None, argument("KEY=VALUE", "Overrides of config keys.", completion.keys)]
SweepAxes = Annotated[
    list[str] | None,
    option("--sweep", "KEY=V1,V2", "Values of a key to sweep over; repeat the option for a grid.", completion.keys),
]
Cluster = Annotated[
    str | None,
    option("--cluster", "PROFILE", "Site profile: path of a YAML file, or name of a shipped one.", completion.profiles),
]
#: Commands that read a config: these options are short forms of overrides, see `with_options`.
RunsDirKey = Annotated[
    Path | None, option("--runs-dir", "DIR", "Folder of the runs; short for runs_dir=DIR.", callback=_expanded)
]
ExperimentKey = Annotated[
    str | None,
    option("--experiment", "NAME", "MLflow experiment; short for experiment=NAME.", completion.experiments),
]
TrackingUriKey = Annotated[
    str | None,
    option("--tracking-uri", "URI", "MLflow store; short for tracking.uri=URI.", callback=_into_environment),
]

# --- Existing runs

RunName = Annotated[str, argument("RUN", "Name of a run, a unique prefix of it, or its folder.", completion.runs)]
_NEWEST = "Name of a run, a unique prefix of it, or its folder; by default the newest run in --runs-dir."
OptionalRunName = Annotated[str | None, argument("RUN", _NEWEST, completion.runs)]
RunNames = Annotated[list[str] | None, argument("RUN", "Names of runs; all runs by default.", completion.runs)]
RunsDir = Annotated[
    Path, option("--runs-dir", "DIR", "Folder of the runs.", envvar="HPCDIST_RUNS_DIR", callback=_expanded)
]
Experiment = Annotated[
    str | None, option("--experiment", "NAME", "Only runs of this experiment.", completion.experiments)
]
TrackingUri = Annotated[
    str | None,
    option("--tracking-uri", "URI", "MLflow store instead of the configured one.", callback=_into_environment),
]

# --- Behaviour

Follow = Annotated[
    bool, typer.Option("--follow/--detach", "-f/-d", help="Show progress until the end, or return at once.")
]
Wait = Annotated[bool, flag("--wait", "Show only changes of state until the end.")]
DryRun = Annotated[bool, flag("--dry-run", "Print the plan without starting anything.")]
Json = Annotated[bool, flag("--json", "Print JSON.")]
Dependency = Annotated[str | None, option("--dependency", "KIND:RUN", "As for sbatch, with names of runs or job ids.")]
Begin = Annotated[str | None, option("--begin", "TIME", "Earliest start, as for sbatch: now+2hours, 20:00.")]
Force = Annotated[bool, flag("--force", "Submit even if the checks of hpcdist, not Slurm, fail.")]


def named(run: str | None, runs_dir: Path, *, active: bool = False) -> str:
    """Return the argument RUN. If it was left out, print the name of the newest run and return its folder.

    Args:
        active: consider only runs that run or wait.
    """
    if run is not None:
        return run
    from hpcdist.files.short_path import short_path
    from hpcdist.run.lookup import newest

    found = newest(runs_dir, active=active)
    kind = " that runs or waits" if active else ""
    # Standard output may be read by a program.
    text = f"{found.kind}: {found.experiment}/{found.name} (the newest in {short_path(runs_dir)}{kind})"
    say(text, error=True)
    return str(found.path)


class ScriptCommand(TyperCommand):
    """A command on `[CONFIG] [KEY=VALUE…] SCRIPT [ARG…]`: no word after a script is an option of hpcdist."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        start = next((index for index, word in enumerate(args) if word == "--" or _is_script(word)), len(args))
        if start < len(args) and args[start] != "--":
            args = [*args[:start], "--", *args[start:]]
        return super().parse_args(ctx, args)


def _is_script(word: str) -> bool:
    return word == "-m" or (word.endswith(".py") and not re.match(r"[\w.]+=", word))


def with_script(config: str, overrides: Sequence[str] | None) -> tuple[str, list[str]]:
    """Return the config and the overrides of a command line that may contain a script and its arguments."""
    words = [config, *(overrides or [])]
    start = next((index for index, word in enumerate(words) if _is_script(word)), None)
    if start is None:
        return config, words[1:]
    before, command = words[:start], words[start:]
    script = f"trainer.script={json.dumps(command, ensure_ascii=False)}"
    if before and "=" not in before[0]:
        return before[0], [*before[1:], script]
    from hpcdist.config.schema import script_name
    from hpcdist.run.create import plain_name
    from hpcdist.run.origin import PLAIN_SCRIPT

    experiment = plain_name(script_name(command).removesuffix(".py"))
    return PLAIN_SCRIPT, [f"experiment={experiment}", *before, script]


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
