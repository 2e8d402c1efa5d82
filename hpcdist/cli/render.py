"""Output of one run: the plan, the progress, the result; with rich on a terminal, as plain lines elsewhere."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from hpcdist.cli.options import print_table, wrapped
from hpcdist.config.redaction import redact_text
from hpcdist.config.schema import Config, find_trainer
from hpcdist.config.topology import rank_table
from hpcdist.config.written import redacted
from hpcdist.errors import terminal_text
from hpcdist.host.files import short_path
from hpcdist.review.explain import explain_attempt
from hpcdist.review.facts import last_beat
from hpcdist.run.folder import Attempt, RunDir, State
from hpcdist.run.snapshot import code_state
from hpcdist.supervisor.plan import Plan, rank_command
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.tracking import links

PLAIN_INTERVAL_S = 5.0
TRACEBACK_LINES = 8
COLOURS = {
    "created": "cyan",
    "queued": "cyan",
    "running": "cyan",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
    "cancelled": "red",
    "lost": "red",
}


def show_plan(
    console: Console, config: Config, plan: Plan, run_folder: Path, tracking_uri: str, *, verbose: bool
) -> None:
    """Print the plan of a run; `verbose` adds the command and the environment variables of the ranks."""
    shown = redacted(config)
    trainer = " ".join(shown["trainer"]["script"]) or config.trainer.target
    last = plan.num_ranks - 1
    kinds = Counter(map(plan.device_of, range(plan.num_ranks)))
    devices = " + ".join(f"{count} × {device}" for device, count in kinds.items())
    rows = {
        "trainer": trainer,
        "roles": f"trainer → rank 0{f' … {last}' if last else ''}",
        "devices": f"{devices}, {plan.backend}, {plan.threads} thread{'s' * (plan.threads > 1)} per rank",
        "run folder": short_path(run_folder),
        "MLflow": redact_text(tracking_uri),
    }
    run = RunDir(run_folder)
    if run.environment.exists() and (code := code_state(run)).copied:
        copied = f"{short_path(run.code)}, a copy of {code.root}"
        rows["code"] = f"{copied}; links in it lead to the files that are left out"
    if plan.roles is not None:
        rows["roles"] = "\n".join(rank_table(plan.roles, [(range(plan.num_ranks), "")], plan.devices))
    if verbose:
        rows["command"] = shlex.join(rank_command(run_folder))
        env = plan.env | shown["launch"]["env"]
        rows["variables"] = "\n".join(f"{name}={value}" for name, value in sorted(env.items()))
    print_rows(console, rows)


def print_rows(console: Console, rows: Mapping[str, str], styles: Mapping[str, str] | None = None) -> None:
    """Print names and values in two columns; a table of rich would cut long paths.

    Args:
        styles: style of a value, by the name of the row.
    """
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        text = " " * width + value.replace("\n", "\n" + " " * width)
        if name not in ("command", "variables"):  # which are copied
            text = wrapped(console, text, width)
        line = Text(f"{name:<{width}}{text[width:]}", (styles or {}).get(name, ""))
        line.stylize("bold", 0, width)
        console.print(line, highlight=False, soft_wrap=True)


def _print_line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(wrapped(console, text, 4), style), highlight=False, soft_wrap=True)


class _Metrics(ProgressColumn):
    """The metrics in a progress bar: the only column that is cut on a narrow terminal."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


class RunView:
    """Output during a run: the `Reporter` of the supervisor, and a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),  # the room that the others leave
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Metrics(),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._next_plain = 0.0
        #: Time and step of the first progress in this attempt, from which the rate is measured.
        self._began: tuple[float, int] | None = None
        self._last_step = -1
        self._doing = ""

    def __enter__(self) -> RunView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """Print the start of an attempt."""
        self._began = None
        ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
        self.note(f"attempt {attempt.number}: starting {ranks}, logs in {short_path(attempt.path)}")

    def note(self, text: str) -> None:
        """Print a line as it is."""
        _print_line(self._console, text)

    def output(self, text: str) -> None:
        """Print the output of a plain script: unchanged into a pipe or file, as plain text on a terminal."""
        if not self._console.is_terminal:
            self._console.file.write(text)
            self._console.file.flush()
        else:
            self._console.print(terminal_text(text), end="", markup=False, highlight=False, soft_wrap=True)

    def failure(self, failure: Failure, log: Path) -> None:
        """Print the first failure: the rank, its node, the time, and the end of the traceback."""
        _print_line(self._console, failure.sentence(), "bold red")
        lines = "".join(failure.traceback).rstrip().splitlines()[-TRACEBACK_LINES:]
        for line in lines:
            self._console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
        self._console.print(f"    full log: {escape(short_path(log))}", highlight=False, soft_wrap=True)

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Show the step and metrics of rank 0's newest heartbeat, and what it does after the last step."""
        self._show_step(beat)
        if (doing := str(beat.get("doing", ""))) not in ("", self._doing):
            self._doing = doing
            self.note(doing)

    def _show_step(self, beat: Mapping[str, Any]) -> None:
        step, total = beat["step"], beat["total_steps"]
        if total is None or step == self._last_step:
            return
        self._last_step = step
        numbers = format_metrics(beat["metrics"])
        if not self._console.is_terminal:
            self._plain(step, total, numbers)
        elif self._task is None:
            self._task = self._progress.add_task("step", total=total, completed=step, numbers=numbers)
        else:
            self._progress.update(self._task, total=total, completed=step, numbers=numbers)

    def _plain(self, step: int, total: int, numbers: str) -> None:
        now = time.monotonic()
        if now < self._next_plain and step < total:
            return
        self._next_plain = now + PLAIN_INTERVAL_S
        began, first = self._began = self._began or (now, step)
        left = ""
        if first < step < total:
            left = f"  ETA {timedelta(seconds=round((now - began) / (step - first) * (total - step)))}"
        self._console.print(f"step {step}/{total}  {escape(numbers)}{left}", highlight=False, soft_wrap=True)


#: Metrics in a progress line, in this order, with their labels.
_LIVE = {
    "train/loss": "loss",
    "train/return": "return",
    "eval/accuracy": "accuracy",
    "eval/return": "greedy return",
    "train/samples_per_s": "samples/s",
    "train/env_steps_per_s": "steps/s",
}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a progress line."""
    shown = {name: metrics[key] for key, name in _LIVE.items() if key in metrics}
    return "  ".join(
        f"{name} {value:.4g}" if value < 10_000 else f"{name} {value:.0f}" for name, value in shown.items()
    )


def show_end(console: Console, run: RunDir, state: State, config: Config) -> None:
    """Print the final metrics, the next commands and, on the last line, the status with its reason."""
    metrics = last_beat(run).get("metrics", {})
    trainer = find_trainer(config.trainer.target)
    # The last metrics of a benchmark are those of the largest message only.
    is_benchmark = trainer is not None and trainer.is_benchmark
    if metrics and not is_benchmark:
        _print_line(console, f"{run.experiment}/{run.name}")  # the title of a table would be wrapped at its width
        print_table(console, ("metric", "value"), [(key, f"{value:.6g}") for key, value in sorted(metrics.items())])
    program = _program()
    for text in run.attempt(state.attempt).current_stragglers() if state.attempt else []:
        _print_line(console, f"straggler: {text}", "yellow")
    store = f"--runs-dir {shlex.quote(short_path(config.runs_dir))}"
    if config.tracking.uri:
        store = f"--tracking-uri {shlex.quote(redact_text(config.tracking.uri))}"
    lines = links.end_of_run(run) or [f"review in MLflow: {program} ui {store}"]
    if run.report.is_file() and not is_benchmark:
        lines.append(f"report: {short_path(run.report)}")
    if is_benchmark and run.artifacts.is_dir():
        lines.append(f"report: {program} bench show {shlex.quote(short_path(run.path))}")
    if state.status != "finished":
        resume = f"{program} resume {shlex.quote(short_path(run.path))}"
        failed = state.status == "failed" and state.attempt > 0
        finding = explain_attempt(run, run.attempt(state.attempt), read_logs=False) if failed else None
        if finding is not None and finding.code:
            lines.append(f"fix {short_path(finding.code)}, then: {resume} --with-current-code")
        else:
            lines.append(f"continue: {resume}")
    for line in lines:
        _print_line(console, line)
    _print_line(console, state.sentence, f"bold {COLOURS[state.status]}")


def _program() -> str:
    """Return how to call hpcdist in this shell: by name if it is in PATH, else by path."""
    if shutil.which("hpcdist") is not None:
        return "hpcdist"
    started = Path(sys.argv[0])
    return shlex.quote(os.path.relpath(started)) if started.name == "hpcdist" else f"{sys.executable} -m hpcdist"
