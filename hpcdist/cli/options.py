"""Arguments and options that several commands share, the values that the shell completes, the output of commands."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hpcdist.errors import terminal_text
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from rich.console import Console

    from hpcdist.run.folder import State


# Values that the shell completes: runs, experiments, configs, site profiles, config keys.
#
# A completion must neither print an error nor keep the shell waiting: each lookup has LIMIT_S, after which the values
# found so far are used, and an exception means no values.

#: Time limit of a lookup; the runs may be on a slow network file system.
LIMIT_S = 3.0
#: Values that one completion returns at most.
MAX_VALUES = 500

Completer = Callable[[typer.Context, str], list[str]]


def _bounded(find: Callable[[typer.Context, str], Iterator[str]]) -> Completer:
    """Make a completer of a generator of candidates: prefix filter, time limit, no exceptions."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        values: dict[str, None] = {}  # a set that keeps the order

        def collect() -> None:
            with suppress(Exception):
                for value in find(ctx, incomplete):
                    if value.startswith(incomplete) and value.isprintable() and len(values) < MAX_VALUES:
                        values[value] = None

        # A daemon thread, so that a lookup that hangs does not keep the process alive.
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        return list(values)

    return complete


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    """Return the visible folders in a folder, sorted backwards by name.

    The name of a run ends with its time by default, so the newest run of a trainer comes first.
    """
    with os.scandir(folder) as entries:
        folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(folders, key=lambda entry: entry.name, reverse=True)


def runs_dir() -> Path:
    """Return the folder of all runs: HPCDIST_RUNS_DIR, by default `runs`."""
    return Path(os.environ.get("HPCDIST_RUNS_DIR") or "runs").expanduser()


@_bounded
def runs(_: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield names of runs and sweeps; `experiment/name` where the word has a slash."""
    for experiment in _folders(runs_dir()):
        for run in _folders(Path(experiment.path)):
            name = f"{experiment.name}/{run.name}" if "/" in incomplete else run.name
            if not name.startswith(incomplete):
                continue
            if os.path.lexists(f"{run.path}/state.json") or os.path.lexists(f"{run.path}/sweep.json"):
                yield name


@_bounded
def experiments(_: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield names of experiments that have a run."""
    for folder in _folders(runs_dir()):
        if any(os.path.lexists(f"{run.path}/state.json") for run in _folders(Path(folder.path))):
            yield folder.name


def _shipped(kind: str, incomplete: str) -> Iterator[str]:
    """Yield shipped configs or site profiles, and YAML files."""
    from hpcdist.config.document import shipped_configs

    yield from shipped_configs(kind)
    folder = Path(os.path.dirname(incomplete))  # of `configs/` it is `configs`
    prefix = "" if str(folder) == "." else f"{folder}/"
    with os.scandir(folder.expanduser()) as entries:
        for entry in entries:
            if entry.name.endswith((".yaml", ".yml")):
                yield f"{prefix}{entry.name}"
            elif "/" in incomplete and entry.is_dir():
                yield f"{prefix}{entry.name}/"


configs = _bounded(lambda _, incomplete: _shipped("", incomplete))
profiles = _bounded(lambda _, incomplete: _shipped("cluster", incomplete))


@_bounded
def keys(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Yield config keys as `key=`, and a sole one with its default, since shells append a space to a sole candidate."""
    from hpcdist.config.describe import describe

    defaults = {key: default for key, _, default, _ in describe()}
    # bash splits a word at `=`: `optim.lr=0` arrives as `optim.lr`, `=`, `0`, and Typer may drop the `=`.
    earlier = [word for word in ctx.params.get("overrides") or [] if word != "="]
    if earlier and earlier[-1] in defaults:  # this word is the value of a key
        return
    matching = [key for key in defaults if key.startswith(incomplete)]
    for key in matching:
        yield f"{key}="
    if len(matching) != 1:
        return
    key = matching[0]
    default = defaults[key]
    needs_quotes = bool(set(str(default)) & set(" '\"${}[]()"))
    if default not in (None, "") and not needs_quotes:
        yield f"{key}={default}"


# Arguments and options that several commands share: one definition for each name.


def argument(metavar: str, text: str, complete: Completer) -> Any:
    """Return an argument, shown as `metavar`, with its help text and the values that the shell completes."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=complete)


def option(flag: str, metavar: str, text: str, complete: Completer | None = None, **more: Any) -> Any:
    """Return an option with a value; `more` are further arguments of `typer.Option`."""
    return typer.Option(flag, metavar=metavar, help=text, autocompletion=complete, **more)


def flag(name: str, text: str) -> Any:
    """Return an option without a value and without a negative form `--no-…`."""
    return typer.Option(name, help=text)


# --- Configs

_CONFIG = argument("CONFIG", "Path of a YAML file, or name of a shipped config.", configs)
ConfigName = Annotated[str, _CONFIG]
OptionalConfigName = Annotated[str | None, _CONFIG]
Overrides = Annotated[list[str] | None, argument("KEY=VALUE", "Overrides of config keys.", keys)]
SweepAxes = Annotated[
    list[str] | None,
    option("--sweep", "KEY=V1,V2", "Values of a key to sweep over; repeat the option for a grid.", keys),
]
Repeat = Annotated[
    int | None,
    option("--repeat", "N", "Run each setting with the seeds 1 to N, short for --sweep seed=1,…,N.", min=2, max=1000),
]
Cluster = Annotated[
    str | None, option("--cluster", "PROFILE", "Site profile: path of a YAML file, or name of a shipped one.", profiles)
]

# --- Existing runs

RunName = Annotated[str, argument("RUN", "Name of a run, a unique prefix of it, or its folder.", runs)]
_NEWEST = "Name of a run, a unique prefix of it, or its folder; by default the newest run."
OptionalRunName = Annotated[str | None, argument("RUN", _NEWEST, runs)]
RunNames = Annotated[list[str] | None, argument("RUN", "Names of runs; all runs by default.", runs)]
Experiment = Annotated[str | None, option("--experiment", "NAME", "Only runs of this experiment.", experiments)]
LikeRun = Annotated[
    str | None, option("--like", "RUN", "Start with the config and the code of this run instead of a CONFIG.", runs)
]

# --- Behaviour

Follow = Annotated[
    bool, typer.Option("--follow/--detach", "-f/-d", help="Show progress until the end, or return at once.")
]
DryRun = Annotated[bool, flag("--dry-run", "Print the plan without starting anything.")]
Json = Annotated[bool, flag("--json", "Print JSON.")]
Dependency = Annotated[str | None, option("--dependency", "KIND:JOB", "Jobs to wait for, as for sbatch.")]
Begin = Annotated[str | None, option("--begin", "TIME", "Earliest start, as for sbatch: now+2hours, 20:00.")]
Force = Annotated[bool, flag("--force", "Submit even if checks of the cluster fail, also sbatch --test-only.")]


def named(run: str | None, *, active: bool = False) -> str:
    """Return the argument RUN, by default the folder of the newest run or sweep; its name is then printed.

    Args:
        active: choose only from the runs that run or wait.
    """
    if run is not None:
        return run
    from hpcdist.host.files import short_path
    from hpcdist.run.lookup import newest

    folder = runs_dir()
    chosen = newest(folder, active=active)
    reason = f"the newest in {short_path(folder)}"
    if active:
        reason += " that runs or waits"
    # Standard output may be read by a program.
    say(f"{chosen.kind}: {chosen.experiment}/{chosen.name} ({reason})", error=True)
    return str(chosen.path)


class ScriptCommand(TyperCommand):
    """A command on `[CONFIG] [KEY=VALUE…] SCRIPT [ARG…]`: no word after a script is an option of hpcdist."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for index, word in enumerate(args):
            if word == "--":
                break
            if _is_script(word):
                # Click takes no word after `--` as an option.
                args = [*args[:index], "--", *args[index:]]
                break
        return super().parse_args(ctx, args)


#: Endings of programs. Notebooks and shell scripts are included to refuse them as scripts, not as bad configs.
_PROGRAMS = (".py", ".ipynb", ".sh")


def _is_script(word: str) -> bool:
    return word == "-m" or (word.endswith(_PROGRAMS) and not re.match(r"[\w.]+=", word))


def with_script(config: str, overrides: Sequence[str] | None) -> tuple[str, list[str]]:
    """Return the config and the overrides of a command line that may contain a script and its arguments."""
    words = [config, *(overrides or [])]
    start = next((index for index, word in enumerate(words) if _is_script(word)), None)
    if start is None:
        return config, words[1:]
    before = words[:start]
    command = words[start:]
    script = f"trainer.script={json.dumps(command, ensure_ascii=False)}"
    if before and "=" not in before[0]:  # a config before the script
        return before[0], [*before[1:], script]
    from hpcdist.config.training_schema import script_name
    from hpcdist.run.config_origin import PLAIN_SCRIPT
    from hpcdist.run.create import plain_name

    experiment = plain_name(script_name(command).removesuffix(".py"))
    return PLAIN_SCRIPT, [f"experiment={experiment}", *before, script]


# Standard output of the commands, and their exit codes.

#: Exit code of a command that SIGINT has ended, as shells report it: 128 + the signal. A cancelled run has it, too.
INTERRUPTED = 128 + signal.SIGINT
#: Columns of output into a pipe or file: enough for a line of a table with the names of runs.
_FILE_WIDTH = 160


def console() -> Console:
    """Return standard output as a console without control characters, wide enough for names of runs."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            # Text and style are separate here, so the sequences of rich itself remain.
            for part in super().render(renderable, options):
                if part.control:
                    yield part
                else:
                    yield Segment(terminal_text(part.text), part.style)

    output = Clean()
    # rich obeys COLUMNS, but assumes 80 columns without it.
    if output.is_terminal or (os.environ.get("COLUMNS") or "").isdigit():
        return output
    return Clean(width=_FILE_WIDTH)


def wrapped(console: Console, text: str, indent: int) -> str:
    """Return text that is broken into lines at the width of a terminal; words, such as paths, stay whole.

    Args:
        indent: spaces before the second and further lines.
    """
    if not console.is_terminal:
        return text
    wrapper = textwrap.TextWrapper(
        width=max(console.width, 2 * indent),  # a narrow terminal must leave room for words after the indent
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrapper.fill(line) for line in text.split("\n"))


def exit_code(state: State) -> int:
    """Return the exit code of a command that has followed a run to its end."""
    if state.status == "failed":
        return 2 if state.rejected else 1
    if state.status == "cancelled":
        return INTERRUPTED
    return 0
