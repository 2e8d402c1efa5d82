"""Output of the commands on runs, with rich on a terminal, as plain lines elsewhere: plan, progress, status, list."""

import codecs
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from threading import Event
from typing import Any, Literal, Self

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from hpcdist.cli.options import console, exit_code, print_table, runs_dir, wrapped
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.redaction import redact_text
from hpcdist.config.roles import rank_table
from hpcdist.config.schema import Config
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.config.written import redacted
from hpcdist.errors import HpcdistError, RunFolderError, duration, terminal_text
from hpcdist.host import retry
from hpcdist.host.files import open_regular, short_path
from hpcdist.host.log_files import PIECE_BYTES, say
from hpcdist.host.ownership import is_mine, stays_inside
from hpcdist.review.explain import explain_failure, first_failed_rank
from hpcdist.review.facts import (
    best_checkpoint,
    last_beat,
    read_attempts,
    read_checkpoints,
    read_facts,
    readable,
    with_speeds,
)
from hpcdist.review.ledger import allocated_s, allocations_of, hours_text, unit_of
from hpcdist.review.verdict import judge
from hpcdist.run import status as run_status
from hpcdist.run.attempt_times import read_times
from hpcdist.run.checkpoint_files import script_files
from hpcdist.run.folder import Attempt, RunDir, State, read_record, sentence_of
from hpcdist.run.lease import holder
from hpcdist.run.snapshot import code_state
from hpcdist.run.sweeps import checkpoint_config
from hpcdist.supervisor.plan import Plan, rank_command
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.tracking.uri import link_to_run

PLAIN_INTERVAL_S = 5.0
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
    """Print names and values in two columns; a table of rich would cut long paths."""
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


class _Metrics(progress.ProgressColumn):
    """The metrics in a progress bar: the only column that is cut on a narrow terminal."""

    def render(self, task: progress.Task) -> Text:
        return Text(task.fields["numbers"], no_wrap=True, overflow="ellipsis")


class RunView:
    """Output during a run: the `Reporter` of the supervisor, and a context manager around the run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = progress.Progress(
            progress.TextColumn("[bold]{task.description}"),
            progress.BarColumn(bar_width=None, table_column=Column(ratio=1)),  # the room that the others leave
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            _Metrics(),
            progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task: progress.TaskID | None = None
        self._next_plain = 0.0
        #: Time and step of the first progress in this attempt, from which the rate is measured.
        self._began: tuple[float, int] | None = None
        self._last_step = -1
        self._last_line = (-1, "")  #: not printed yet: the evaluation at the last step follows it
        self._doing = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print_last_line()
        self._progress.stop()

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        self._began = None
        if self._task is not None:  # whose remaining time would count the speed of the attempt before
            self._progress.remove_task(self._task)
            self._task = None
        ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
        self.note(f"attempt {attempt.number}: starting {ranks}, logs in {short_path(attempt.path)}")

    def note(self, text: str) -> None:
        self._print_last_line()
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
        self._print_last_line()
        _print_line(self._console, failure.sentence(), "bold red")
        lines = "".join(failure.traceback).rstrip().splitlines()[-8:]
        for line in lines:
            self._console.print(f"    {escape(line)}", highlight=False, soft_wrap=True)
        self._console.print(f"    full log: {escape(short_path(log))}", highlight=False, soft_wrap=True)

    def progress(self, beat: Mapping[str, Any]) -> None:
        """Show the step and metrics of rank 0's newest heartbeat, and what it does after the last step."""
        step, total = beat["step"], beat["total_steps"]
        # The speed of the last interval is not that of the run, which `show_end` prints.
        numbers = format_metrics(beat, with_speed=total is None or step < total)
        if total is not None:
            if not self._console.is_terminal:
                self._plain(step, total, numbers)
            elif self._task is None:
                self._task = self._progress.add_task("step", total=total, completed=step, numbers=numbers)
            else:
                self._progress.update(self._task, total=total, completed=step, numbers=numbers)
        if (doing := str(beat.get("doing", ""))) not in ("", self._doing):
            self._doing = doing
            self.note(doing)

    def _plain(self, step: int, total: int, numbers: str) -> None:
        now = time.monotonic()
        if step == self._last_step or (step < total and now < self._next_plain):
            return
        if step >= total:
            self._last_line = (step, f"step {step}/{total}  {escape(numbers)}")
            return
        self._next_plain, self._last_step = now + PLAIN_INTERVAL_S, step
        began, first = self._began = self._began or (now, step)
        left = ""
        if first < step:
            left = f"  ETA {timedelta(seconds=round((now - began) / (step - first) * (total - step)))}"
        self._console.print(f"step {step}/{total}  {escape(numbers)}{left}", highlight=False, soft_wrap=True)

    def _print_last_line(self) -> None:
        (step, line), self._last_line = self._last_line, (-1, "")
        if line:
            self._last_step = step
            self._console.print(line, highlight=False, soft_wrap=True)


#: Metrics in a progress line, in this order, with their labels.
_LIVE = {
    "train/loss": "loss",
    "train/return": "return",
    "eval/accuracy": "accuracy",
    "eval/return": "greedy return",
    "train/samples_per_s": "samples/s",
    "train/env_steps_per_s": "steps/s",
}


def format_metrics(beat: Mapping[str, Any], *, with_speed: bool = True) -> str:
    """Return the metrics of a heartbeat in words: those of its step, then older ones with their step."""
    metrics, steps, groups = beat["metrics"], beat.get("metric_steps"), dict[int, list[str]]()
    steps = {key: step for key, step in steps.items() if type(step) is int} if isinstance(steps, dict) else {}
    for key, name in _LIVE.items():
        if (value := metrics.get(key)) is not None and (with_speed or not key.endswith("_per_s")):
            text = f"{name} {value:.4g}" if value < 10_000 else f"{name} {value:.0f}"
            groups.setdefault(steps.get(key, beat["step"]), []).append(text)
    shown = [(step, "  ".join(texts)) for step, texts in sorted(groups.items(), reverse=True)]
    return "  ".join(text if step == beat["step"] else f"{text} (step {step})" for step, text in shown)


def show_end(console: Console, run: RunDir, state: State, config: Config) -> None:
    """Print the final metrics, the next commands and, on the last line, the status with its reason."""
    metrics = last_beat(run).get("metrics", {})
    trainer = find_trainer(config.trainer.target)
    # The last metrics of a benchmark are those of the largest message only.
    is_benchmark = trainer is not None and trainer.is_benchmark
    if metrics and not is_benchmark:
        _print_line(console, f"{run.experiment}/{run.name}")  # the title of a table would be wrapped at its width
        rows = [(key, f"{value:.6g}") for key, value in sorted(_with_median_speeds(run, metrics).items())]
        print_table(console, ("metric", "value"), rows)
    # How to call hpcdist in this shell: by name if it is in PATH, else by path.
    program, started = "hpcdist", Path(sys.argv[0])
    if shutil.which(program) is None:
        is_script = started.name == "hpcdist"
        program = shlex.quote(os.path.relpath(started)) if is_script else f"{sys.executable} -m hpcdist"
    for text in run.attempt(state.attempt).current_stragglers() if state.attempt else []:
        _print_line(console, f"straggler: {text}", "yellow")
    ui = f"{program} ui"
    if config.tracking.uri:
        ui = f"MLFLOW_TRACKING_URI={shlex.quote(redact_text(config.tracking.uri))} {ui}"
    elif Path(config.runs_dir) != runs_dir().absolute():
        ui = f"HPCDIST_RUNS_DIR={shlex.quote(short_path(config.runs_dir))} {ui}"
    if (read_record(run.mlflow) or {}).get("run_id"):
        lines = [f"review in MLflow: {link_to_run(run) or ui}"]
    else:
        lines = [f"not in MLflow yet: {program} sync {shlex.quote(short_path(run.path))}"]
    if run.report.is_file() and not is_benchmark:
        lines.append(f"report: {short_path(run.report)}")
    if is_benchmark and run.artifacts.is_dir():
        lines.append(f"report: {program} bench show {shlex.quote(short_path(run.path))}")
    if state.status != "finished":
        resume = f"{program} resume {shlex.quote(short_path(run.path))}"
        finding = explain_failure(run, state)
        if finding is not None and finding.code:
            lines.append(f"fix {short_path(finding.code)}, then: {resume} --with-current-code")
        else:
            lines.append(f"continue: {resume}")
    for line in lines:
        _print_line(console, line)
    _print_line(console, state.sentence, f"bold {COLOURS[state.status]}")


def _with_median_speeds(run: RunDir, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the last values of metrics, and of throughputs the median of the run, as all pages show it."""
    from hpcdist.tracking.series import read_series

    facts = readable(lambda: with_speeds(read_facts(run), read_series(run)))
    speeds = {} if facts is None else facts.speeds
    return {f"{key}, median" if key in speeds else key: speeds.get(key, value) for key, value in metrics.items()}


# The list of runs and the status of one run, as tables and as JSON.

#: Ranks, and attempts that have ended, that `status` shows in a line each.
MAX_SHOWN_RANKS = 32
MAX_SHOWN_ATTEMPTS = 5
#: Checkpoints that `status` names.
MAX_SHOWN_CHECKPOINTS = 10
#: What `status` shows of a heartbeat.
_BEAT = ("step", "total_steps", "time", "metrics", "metric_steps")


def read_rows(
    runs: Sequence[RunDir], experiment: str | None = None, sort: Literal["created", "best"] = "created"
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each run, and notes on runs that cannot be read.

    The newest run is the last one, or with `sort="best"` the best one of each monitored metric.
    """
    runs = [run for run in runs if experiment in (None, run.experiment)]
    snapshots = run_status.query_jobs(runs, skip_ended=True)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for run in runs:
        try:
            now = run_status.status_from(run, snapshots.get(run.path))
            row = {
                "run": f"{run.experiment}/{run.name}",
                "folder": str(run.path),
                "status": now.name,
                "step": last_beat(run).get("step"),
                "attempts": now.state.attempt,
                "created": now.state.created,
                "reason": now.reason or (now.facts.sentence() if now.facts and not now.final else ""),
            }
            rows.append(row | _result_of(run))
        except (RunFolderError, OSError) as error:
            notes.append(f"{run.experiment}/{run.name} is not listed: {error}")
    if problem := next((snapshot.error for snapshot in snapshots.values() if snapshot.error), ""):
        notes.append(f"Slurm does not report the states of jobs ({problem})")
    rows.sort(key=itemgetter("created"))
    if sort == "best":
        signs = {"min": -1.0}
        rows.sort(key=lambda row: (row["best_metric"] or "", signs.get(row["best_mode"], 1.0) * (row["best"] or 0.0)))
        for metric, group in groupby((row for row in rows if row["best_metric"]), itemgetter("best_metric")):
            notes += _best_of(metric, list(group))
    return rows, notes


def _best_of(metric: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return a note on the best of the runs with a metric, which is the last one, against the next one."""
    both = [readable(partial(read_facts, RunDir(Path(row["folder"])))) for row in rows[-2:]]
    values = [facts.measured() for facts in both if facts is not None and facts.best is not None]
    if len(values) < 2:
        return []
    found = judge(values[0], values[1])
    delta = f", {found.text}" if found.delta else ""
    return [f"best run by {metric}: {rows[-1]['run']}, {found.beside(rows[-2]['run'])}{delta}"]


def _result_of(run: RunDir) -> dict[str, Any]:
    """Return the best value, cost, start and duration of a run; of damaged files None."""
    checkpoints, monitor, best = readable(lambda: read_checkpoints(run)) or (), CheckpointConfig(), None
    if any(one.metrics for one in checkpoints):  # reading the config takes the longest time
        monitor = checkpoint_config([run])
        best = best_checkpoint(checkpoints, monitor)
    # The ledger reads the accounts of all ranks.
    allocations = readable(lambda: allocations_of(run)) or []
    attempts = [attempt for allocation in allocations for attempt in allocation.attempts]
    seconds = sum(map(allocated_s, allocations)) or None
    return {
        "best": best and best.metrics[monitor.monitor],
        "best_metric": best and monitor.monitor,
        "best_mode": best and str(monitor.monitor_mode),
        "best_step": best and best.step,
        "hours": seconds and seconds / 3600,
        "unit": seconds and unit_of(attempts),
        "started": attempts[0].times.began if attempts else None,
        "duration_s": seconds and sum(one.ended - one.began for one in allocations),
    }


def show_runs(console: Console, rows: list[dict[str, Any]], notes: list[str], runs_dir: Path) -> None:
    is_wide = console.width >= 140
    clock = "%Y-%m-%d %H:%M" if is_wide else "%m-%d %H:%M"
    metrics, units = ({row[key] for row in rows if row[key]} for key in ("best_metric", "unit"))
    table: list[list[str | Text]] = []
    for row in rows:
        best = "" if row["best"] is None else f"{row['best']:.4g}"
        hours = "" if row["hours"] is None else hours_text(3600 * row["hours"])
        best = f"{_last_part(row['best_metric'])} {best}" if best and len(metrics) > 1 else best
        hours = f"{hours} {row['unit']}" if hours and len(units) > 1 else hours
        started = "" if row["started"] is None else time.strftime(clock, time.localtime(row["started"]))
        # Its largest unit.
        spent = "" if row["duration_s"] is None else " ".join(duration(row["duration_s"]).split()[:2])
        status = Text(row["status"], COLOURS[row["status"]])
        steps = "" if row["step"] is None else str(row["step"]), str(row["attempts"]), row["reason"]
        table.append([row["run"], status, best, hours, started, spent, *(steps if is_wide else [])])
    head = ["run", "status", f"best {_last_part(min(metrics))}" if len(metrics) == 1 else "best"]
    head += [f"{min(units)}-h" if len(units) == 1 else "hours", "started", "duration"]
    if not rows:
        notes = [f"no runs under {runs_dir.absolute()}", *notes]
    elif is_wide:
        print_table(console, [*head, "step", "attempts", "reason"], table, num_whole=2)
    else:
        experiments = {row["run"].partition("/")[0] for row in rows}
        if len(experiments) == 1:
            head[0] = f"run of {min(experiments)}"
            table = [[str(name).partition("/")[2], *cells] for name, *cells in table]
        _print_narrow(console, [head, *table])
        shown = [row for row in rows if row["reason"] and row["status"] != "finished"]
        notes = [*(f"{row['run']} {sentence_of(row['status'], row['reason'])}" for row in shown), *notes]
    for note in notes:
        console.print(escape(wrapped(console, note, 4)), highlight=False, soft_wrap=True)


def _print_narrow(console: Console, rows: Sequence[Sequence[str | Text]]) -> None:
    """Print rows without lines between the columns; a first cell that is too wide is alone in its line."""
    widths = [max(len(row[index]) for row in rows) for index in range(1, len(rows[0]))]
    names = [len(row[0]) for row in rows]
    room = min(max(names), max(0, console.width - sum(width + 2 for width in widths)))
    for name, status, *numbers in rows:
        start = Text(str(name).ljust(room) if len(name) <= room else f"{name}\n{' ' * room}")
        shown = Text(str(status).ljust(widths[0]), status.style if isinstance(status, Text) else "")
        ends = [str(number).rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        console.print(Text("  ").join([start, shown, *map(Text, ends)]), soft_wrap=True)


def _last_part(metric: str) -> str:
    return metric.rpartition("/")[2]


def read_status(run: RunDir) -> dict[str, Any]:
    """Return the status of a run as a JSON document; facts that a run does not have are None."""
    snapshot = run_status.query_job(run)
    now = run_status.status_from(run, snapshot)
    state = now.state
    slurm = None
    if snapshot is not None:
        unknown = f"not available: {snapshot.error}" if snapshot.error else "the job is no longer known"
        slurm = snapshot.info.describe(time.time()) if snapshot.info else unknown
    if snapshot is not None and now.name != "running":
        with suppress(HpcdistError, OSError):  # the folder of another user
            run_status.update_job_starts(run)  # for the causes of the attempts
    ended = []
    with suppress(RunFolderError, OSError):
        attempts = read_attempts(run, state, read_checkpoints(run)) if state.attempt else ()
        ended = [one for one in attempts if one.status != "running"][-MAX_SHOWN_ATTEMPTS:]
    held = holder(run)
    attempt = run.attempt(state.attempt) if state.attempt else None
    ranks = []
    for rank in range(min(state.world_size, MAX_SHOWN_RANKS) if attempt else 0):
        if attempt and (beat := attempt.read_beat(rank)) is not None:
            ranks.append({"rank": rank} | {key: beat.get(key) for key in _BEAT})
    mlflow = read_record(run.mlflow) or {}
    return {
        "run": f"{run.experiment}/{run.name}",
        "folder": str(run.path),
        "status": now.name,
        "reason": now.reason,
        "attempt": state.attempt,
        "ended_attempts": [
            {"attempt": one.number, "status": one.status, "nodes": list(one.nodes), "cause": one.cause} for one in ended
        ],
        "restarts": state.restarts,
        "world_size": state.world_size,
        "slurm": slurm,
        "held_by": f"process {held['pid']} of {held['user']} on {held['host']}" if held is not None else None,
        "ranks": ranks,
        "stragglers": attempt.current_stragglers() if attempt else [],
        "checkpoints": sorted(path.name for path in run.checkpoints.glob("step-*")) or script_files(run),
        "mlflow_run_id": mlflow.get("run_id") or None,
        **_result_of(run),
    }


def show_status(console: Console, run: RunDir) -> None:
    found = read_status(run)
    status, restarts = found["status"], found["restarts"]
    rows = {
        "status": sentence_of(status, found["reason"] or ""),
        "folder": short_path(found["folder"]),
        "attempt": f"{found['attempt']}, {restarts} restart{'s' * (restarts != 1)} after failures",
    }
    if found["best"] is not None:
        rows["best"] = f"{found['best_metric']} {found['best']:.6g} at step {found['best_step']}"
    if found["hours"]:
        rows["duration"] = duration(found["duration_s"])
        rows["cost"] = f"{hours_text(3600 * found['hours'])} {found['unit']}-hours"
    # The cause of the last attempt is often the reason of the status.
    for ended in found["ended_attempts"]:
        if ended["cause"] != found["reason"]:
            rows[f"attempt {ended['attempt']}"] = sentence_of(ended["status"], ended["cause"])
    if found["slurm"]:
        rows["Slurm"] = found["slurm"]
    if found["held_by"]:
        rows["supervisor"] = found["held_by"]
    if status == "lost":
        rows["next"] = "the supervisor died: `hpcdist resume` continues the run, `hpcdist sync` closes it in MLflow"
    for beat in found["ranks"]:
        total = f" of {beat['total_steps']}" if beat["total_steps"] else ""
        age_s = max(0, int(time.time() - beat["time"]))
        rows[f"rank {beat['rank']}"] = f"step {beat['step']}{total}, {age_s} s ago  {format_metrics(beat)}"
    if found["attempt"] and found["world_size"] > MAX_SHOWN_RANKS:
        others = found["world_size"] - MAX_SHOWN_RANKS
        rows["more ranks"] = f"{others}, see {short_path(run.attempt(found['attempt']).path)}"
    if found["stragglers"]:
        rows["straggler"] = "\n".join(found["stragglers"])
    shown = found["checkpoints"][-MAX_SHOWN_CHECKPOINTS:]
    left_out = len(found["checkpoints"]) - len(shown)
    rows["checkpoints"] = f"{left_out} more, " * (left_out > 0) + ", ".join(shown) or "none yet"
    if run.report.is_file():
        rows["report"] = short_path(run.report)
    if found["mlflow_run_id"]:
        rows["MLflow run"] = str(found["mlflow_run_id"])
    print_rows(console, rows, {"status": COLOURS[status]})


# Follow a run until it ends: its log, or its state and progress, on this machine or on Slurm.

POLL_S = 0.3


def follow_to_end(run: RunDir, config: Config) -> int:
    """Follow a run until it ends, and upload an own one where its job does not. Returns the exit code."""
    from hpcdist.supervisor import children

    uploads = run_status.job_of(run) is not None and is_mine(run.path)
    uploading = children.shipping_from_here(run, config, os.environ) if uploads else nullcontext()
    try:
        with uploading:
            state = follow(console(), run)
    except KeyboardInterrupt:
        say(f"run {run.name} continues: `hpcdist follow {run.name}` shows it again, `hpcdist stop` stops it")
        return 130
    show_end(console(), run, state, config)
    return exit_code(state)


def stream_log(run: RunDir, rank: int | None, attempt: int | None, *, follow: bool) -> Iterator[str]:
    """Yield the text of a rank's log; with `follow`, until the run ends, through all its attempts.

    Args:
        rank: by default the rank that failed first, else rank 0.
    """
    number = attempt or run.read_state().attempt
    path = _log_of(run.attempt(number), rank)
    if os.path.lexists(path) and not stays_inside(path, run.path):
        raise RunFolderError(f"{path} is a symbolic link to a file outside of the run folder: it is not shown")
    if not retry.exists(path) and not follow:
        raise RunFolderError(f"no log of rank {rank or 0} in attempt {number} of {run.name} ({short_path(path)})")
    position = 0
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    waiting = Event()
    watch = run_status.StatusWatch() if follow else None
    while True:
        # The status is read before the log: lines written in between are read in the next round.
        ended = watch is None or watch.poll([run])[0].final
        state = run.read_state()
        if retry.retry(path.is_file, path) and stays_inside(path, run.path):
            with retry.retry(lambda path=path: open_regular(path), path) as file:  # type: ignore[misc]
                if os.fstat(file.fileno()).st_size < position:
                    yield "\n[hpcdist: this log was shortened]\n"
                    position = os.fstat(file.fileno()).st_size
                file.seek(position)
                while data := file.read(PIECE_BYTES):
                    yield decoder.decode(data)
                position = file.tell()
        if attempt is None and state.attempt > number:
            number, position = number + 1, 0
            decoder.reset()
            path = _log_of(run.attempt(number), rank)
        elif ended:
            return
        else:
            waiting.wait(POLL_S)


def _log_of(attempt: Attempt, rank: int | None) -> Path:
    if rank is None and (rank := first_failed_rank(attempt)):
        say(f"hpcdist: the log of rank {rank}, which failed first", error=True)
    return attempt.log(rank or 0)


def follow(console: Console, run: RunDir) -> State:
    """Show a run's states and progress until its end, which is recorded if nobody else has. Returns its last state."""
    watch = run_status.StatusWatch()
    waiting = Event()
    shown_line, shown_error, num_shown, shown_attempt = "", "", 0, 0
    with RunView(console) as view, retry.patient(retry.UNATTENDED_S):
        while True:
            (found,) = watch.poll([run])
            if found.final:
                break
            if (line := _status_line(found)) != shown_line:
                view.note(line + _expected_start(found))
                shown_line = line
            if found.slurm_error != shown_error and (shown_error := found.slurm_error):
                view.note(f"Slurm does not report the state of the job ({shown_error})")
            if 0 < shown_attempt < found.state.attempt:
                _note_restarts(view, run, found.state, since=shown_attempt)
                num_shown = 0
            shown_attempt = found.state.attempt
            if found.state.attempt and found.name == "running":
                beat = run.attempt(found.state.attempt).read_beat(0)
                if beat is not None:
                    view.progress(beat)
            stragglers = run.attempt(found.state.attempt).straggler_events() if found.state.attempt else []
            for new in stragglers[num_shown:]:
                view.note(new["text"])
            num_shown = len(stragglers)
            waiting.wait(POLL_S)
    if found.name == "lost" and is_mine(run.path):
        run_status.close_if_lost(run)
        return run.read_state()
    return found.state


def _note_restarts(view: RunView, run: RunDir, state: State, *, since: int) -> None:
    """Show how the attempts from `since` on have ended, and that the ranks have been started again."""
    for number in range(since, state.attempt):
        times = read_times(run.attempt(number))
        if times is not None and times.status:
            view.note(f"attempt {number} {sentence_of(times.status, times.reason)}")
    view.attempt(run.attempt(state.attempt), state.world_size)


def _status_line(found: run_status.RunStatus) -> str:
    """Return the status line; a new one is printed when it changes."""
    facts, name = found.facts, found.name
    parts = [found.reason] if found.reason else []
    if facts is not None and name == "queued" and facts.alive and not facts.waiting:
        name, parts = "starting", []  # the supervisor in the job has not recorded a status
    if facts is not None and (facts.waiting or name != "running"):
        parts += [facts.sentence()] if not found.is_lost and facts.sentence() not in parts else []
    elif facts is not None:
        parts.append(f"job {facts.id} on {facts.nodes}" if facts.nodes else f"job {facts.id}")
    return sentence_of(name, "; ".join(parts))


def _expected_start(found: run_status.RunStatus) -> str:
    """Return Slurm's estimate of the start, which changes too often to print a new line for it."""
    facts = found.facts
    if facts is None or not facts.waiting or facts.started is None or facts.started <= time.time():
        return ""
    return f", expected to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(facts.started))}"
