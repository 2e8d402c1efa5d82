"""What people see of a run: the plan before, progress during, the result after. Rich on a terminal, plain in a log."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from hpcdist.config.schema import Config, find_trainer
from hpcdist.config.written import redacted
from hpcdist.errors import RunFolderError
from hpcdist.rank.roles import rank_table
from hpcdist.run.folder import ENDED, Attempt, RunDir, State, read_json, read_record
from hpcdist.run.lease import holder
from hpcdist.run.lookup import Listing, find_runs
from hpcdist.run.status import Standing, job_of, look_now, stand
from hpcdist.slurm import client, job_snapshot
from hpcdist.slurm.client import SlurmError
from hpcdist.slurm.job_snapshot import JobSnapshot
from hpcdist.supervisor.plan import Plan, rank_command
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.tracking.uri import redact_uri

PLAIN_EVERY_S = 5.0
TRACEBACK_LINES = 8
#: Ranks that `status` has a line for.
SHOWN_RANKS = 32
_COLOURS = {
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
    """Print what is about to be started; `verbose` adds each rank's command and the variables it gets."""
    shown = redacted(config)
    trainer = " ".join(shown["trainer"]["script"]) or config.trainer.target
    last = plan.num_ranks - 1
    kinds = Counter(map(plan.device_of, range(plan.num_ranks)))
    devices = " + ".join(f"{count} × {device}" for device, count in kinds.items())
    rows = {
        "trainer": trainer,
        "roles": f"trainer → rank 0{f' … {last}' if last else ''}",
        "devices": f"{devices}, {plan.backend}, {plan.threads} thread{'s' * (plan.threads > 1)} per rank",
        "run folder": str(run_folder),
        "MLflow": redact_uri(tracking_uri),
    }
    if plan.roles is not None:
        rows["roles"] = "\n".join(rank_table(plan.roles, [(range(plan.num_ranks), "")], plan.devices))
    if verbose:
        rows["command"] = shlex.join(rank_command(run_folder))
        env = plan.env | shown["launch"]["env"]
        rows["variables"] = "\n".join(f"{name}={value}" for name, value in sorted(env.items()))
    _print_rows(console, {name: escape(value) for name, value in rows.items()})


def _print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """Names and values in two columns. Not a table of rich: it would cut a long path to the width of a log."""
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        text = value.replace("\n", "\n" + " " * width)
        console.print(f"[bold]{name:<{width}}[/]{text}", highlight=False, soft_wrap=True)


class RunView:
    """Tells a person how a run goes; the supervisor's `Reporter`. Use as a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._next_plain = 0.0
        #: Time and step of this attempt's first sign of progress, which the rate is measured from.
        self._began: tuple[float, int] | None = None
        self._last_step = -1

    def __enter__(self) -> RunView:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        self._began = None
        self.note(f"attempt {attempt.number}: starting {num_ranks} rank{'s' * (num_ranks > 1)}, logs in {attempt.path}")

    def note(self, text: str) -> None:
        self._console.print(escape(text), highlight=False, soft_wrap=True)

    def output(self, text: str) -> None:
        """What a plain script prints, as it is."""
        self._console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def failure(self, failure: Failure, log: Path) -> None:
        """The first failing rank, on top of everything: who, where, when, and its last lines."""
        self._console.print(f"[bold red]{escape(failure.sentence())}[/]", highlight=False, soft_wrap=True)
        lines = "".join(failure.traceback).rstrip().splitlines()[-TRACEBACK_LINES:]
        for line in lines:
            self._console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
        self._console.print(f"    whole log: {escape(str(log))}", highlight=False, soft_wrap=True)

    def progress(self, beat: Mapping[str, Any]) -> None:
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
        self._next_plain = now + PLAIN_EVERY_S
        began, first = self._began = self._began or (now, step)
        left = ""
        if first < step < total:
            left = f"  ETA {timedelta(seconds=round((now - began) / (step - first) * (total - step)))}"
        self._console.print(f"step {step}/{total}  {escape(numbers)}{left}", highlight=False, soft_wrap=True)


#: Shown while a run goes on, in this order, under these names.
_LIVE = {
    "train/loss": "loss",
    "train/return": "return",
    "eval/accuracy": "accuracy",
    "eval/return": "greedy return",
    "train/samples_per_s": "samples/s",
    "train/env_steps_per_s": "steps/s",
}


def format_metrics(metrics: Mapping[str, float]) -> str:
    """The few metrics that a progress line has room for."""
    shown = {name: metrics[key] for key, name in _LIVE.items() if key in metrics}
    return "  ".join(
        f"{name} {value:.4g}" if value < 10_000 else f"{name} {value:.0f}" for name, value in shown.items()
    )


def show_end(console: Console, run: RunDir, state: State, config: Config) -> None:
    """Print the final metrics, how to open the UI, and, last, why the run is over in one sentence."""
    metrics = _beat(run, state).get("metrics", {})
    trainer = find_trainer(config.trainer.target)
    # The last values of a benchmark's metrics concern its largest sizes alone.
    is_benchmark = trainer is not None and trainer.is_benchmark
    if metrics and not is_benchmark:
        table = Table("metric", "value", title=f"{run.experiment}/{run.name}")
        for key, value in sorted(metrics.items()):
            table.add_row(escape(key), f"{value:.6g}")
        console.print(table)
    program = _program()
    for text in run.attempt(state.attempt).straggling() if state.attempt else []:
        console.print(f"[yellow]straggler:[/] {escape(text)}", highlight=False, soft_wrap=True)
    lines = [f"look at it: {program} ui --runs-dir {escape(shlex.quote(config.runs_dir))}"]
    if config.tracking.uri:
        lines = [f"look at it: {program} ui --uri {escape(shlex.quote(redact_uri(config.tracking.uri)))}"]
    if is_benchmark and run.artifacts.is_dir():
        lines.append(f"its report: {program} bench show {escape(shlex.quote(str(run.path)))}")
    if state.status != "finished":
        lines.append(f"go on with: {program} resume {escape(shlex.quote(str(run.path)))}")
    lines.append(f"[bold {_COLOURS[state.status]}]{state.status}[/]: {escape(state.reason)}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _program() -> str:
    """This command as it can be typed here: by its name where that is found, else by its path."""
    if shutil.which("hpcdist") is not None:
        return "hpcdist"
    started = Path(sys.argv[0])
    return shlex.quote(os.path.relpath(started)) if started.name == "hpcdist" else f"{sys.executable} -m hpcdist"


def show_runs(console: Console, listing: Listing, runs_dir: Path) -> None:
    """A table of all runs, the newest last; runs that cannot be read have a line each below it."""
    if not listing.runs:
        console.print(f"no runs under {escape(str(runs_dir.absolute()))}", highlight=False, soft_wrap=True)
    table = Table(Column("run", no_wrap=True), "status", "step", "attempts", "created", "reason")
    looks, away = _looks(listing.runs)
    found: list[tuple[RunDir, Standing, Any]] = []
    notes = []
    for run in listing.runs:
        try:
            now = stand(run, looks.get(run.path))
            found.append((run, now, _beat(run, now.state).get("step", "")))
        except (RunFolderError, OSError) as error:
            notes.append(f"{run.experiment}/{run.name} is left out: {error}")
    for run, now, step in sorted(found, key=lambda item: item[1].state.created):
        name, state = now.name, now.state
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(state.created))
        table.add_row(
            escape(f"{run.experiment}/{run.name}"),
            f"[{_COLOURS[name]}]{name}[/]",
            str(step),
            str(state.attempt),
            created,
            escape(now.reason or (now.facts.sentence() if now.facts and not now.over else "")),
        )
    if found:
        console.print(table)
    if away:
        notes.append(f"Slurm does not say how jobs stand ({away})")
    for note in filter(None, [*notes, listing.note]):
        console.print(escape(note), highlight=False, soft_wrap=True)


def _beat(run: RunDir, state: State) -> dict[str, Any]:
    """Rank 0's last sign of life in the last attempt; empty before the first, and where it is damaged."""
    return (run.attempt(state.attempt).last_beat(0) or {}) if state.attempt else {}


def _looks(runs: list[RunDir]) -> tuple[dict[Path, JobSnapshot], str]:
    """A look at the jobs of all runs that may go on, in one call; and why there is none."""
    jobs = {}
    for run in runs:
        with suppress(RunFolderError, OSError):  # reported where the run's state is read
            if (job := job_of(run)) and run.read_state().status not in ENDED:
                jobs[run.path] = job
    try:
        known = client.query_jobs([job.id for job in jobs.values()])
    except SlurmError as error:
        return {path: JobSnapshot(error=str(error), installed=error.installed) for path in jobs}, str(error)
    looks = {}
    for path, job in jobs.items():
        facts = known.get(job.id)
        # What this call does not know may be another cluster's job, or one that ended a while ago.
        looks[path] = (
            JobSnapshot(info=facts) if facts and job.name in ("", facts.name) else job_snapshot.take_snapshot(job)
        )
    return looks, ""


def show_status(console: Console, run: RunDir) -> None:
    """How one run stands."""
    look = look_now(run)
    now = stand(run, look)
    name, state = now.name, now.state
    rows = {
        "status": f"[{_COLOURS[name]}]{name}[/]" + (f": {escape(now.reason)}" if now.reason else ""),
        "folder": escape(str(run.path)),
        "attempt": f"{state.attempt}, {state.restarts} restart{'s' * (state.restarts != 1)} after failures",
    }
    if look is not None:
        unknown = f"cannot be asked: {look.error}" if look.error else "does not know its job any more"
        rows["Slurm"] = escape(look.info.describe(time.time()) if look.info else unknown)
    if (held := holder(run)) is not None:
        rows["held by"] = escape(f"process {held['pid']} of {held['user']} on {held['host']}")
    if name == "lost":
        rows["what now"] = "its supervisor has died: `hpcdist resume` goes on, `hpcdist sync` closes it in MLflow"
    world_size = state.world_size if state.attempt else 0
    for rank in range(min(world_size, SHOWN_RANKS)):
        beat = run.attempt(state.attempt).last_beat(rank)
        if beat is not None:
            total = f" of {beat['total_steps']}" if beat["total_steps"] else ""
            ago = max(0, int(time.time() - beat["time"]))
            rows[f"rank {rank}"] = f"step {beat['step']}{total}, {ago} s ago  {escape(format_metrics(beat['metrics']))}"
    if world_size > SHOWN_RANKS:
        rows["more ranks"] = f"{world_size - SHOWN_RANKS}, see {escape(str(run.attempt(state.attempt).path))}"
    if straggling := run.attempt(state.attempt).straggling() if state.attempt else []:
        rows["straggler"] = escape("\n".join(straggling))
    saved = sorted(path.name for path in run.checkpoints.glob("step-*"))
    rows["checkpoints"] = ", ".join(saved) or "none yet"
    if (mlflow := read_record(run.mlflow)) is not None and mlflow.get("run_id"):
        rows["MLflow run"] = escape(str(mlflow["run_id"]))
    _print_rows(console, rows)


def training_links(runs_dir: Path, tracking_uri: str, address: str) -> list[str]:
    """Return a link to each experiment of these runs in the UI at `address`.

    Without the link the UI opens on a page for chats and traces.
    """
    ids: dict[str, str] = {}
    for run in find_runs(runs_dir):
        known: dict[str, Any] = {}
        with suppress(RunFolderError, OSError):  # `hpcdist runs` reports damaged runs
            known = read_json(run.mlflow) or {}
        if isinstance(known.get("experiment_id"), str) and known.get("uri") == redact_uri(tracking_uri):
            ids[run.experiment] = known["experiment_id"]
    return [
        f"{name}: {address}#/experiments/{number}/runs?workflowType=machine_learning"
        for name, number in sorted(ids.items())
    ]
