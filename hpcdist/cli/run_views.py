"""Output of the commands on runs, with rich on a terminal, as plain lines elsewhere: plan, progress, status, list."""

import codecs
import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from operator import itemgetter
from pathlib import Path
from threading import Event
from typing import Any, Self

from rich import progress
from rich.console import Console
from rich.markup import escape
from rich.table import Column
from rich.text import Text

from hpcdist.cli.options import INTERRUPTED, console, exit_code, runs_dir, wrapped
from hpcdist.cli.tables import print_table, print_without_lines
from hpcdist.config.redaction import redact_text
from hpcdist.config.roles import rank_table
from hpcdist.config.schema import Config
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.config.written import redacted
from hpcdist.errors import HpcdistError, RunFolderError, duration, local_time, plural, terminal_text
from hpcdist.host import retry
from hpcdist.host.files import open_regular, short_path
from hpcdist.host.log_files import PIECE_BYTES, say
from hpcdist.host.ownership import is_mine, stays_inside
from hpcdist.review.explain import explain_failure, first_failed_rank
from hpcdist.review.facts import best_checkpoint, end_of_traceback, last_beat, read_attempts, read_checkpoints, readable
from hpcdist.review.ledger import allocated_s, allocations_of, hours_text, unit_of
from hpcdist.review.metric_series import is_of_hpcdist, median_speeds
from hpcdist.run import status as run_status
from hpcdist.run.attempt_times import read_times
from hpcdist.run.checkpoint_files import script_files
from hpcdist.run.folder import Attempt, RunDir, State, read_record, sentence_of
from hpcdist.run.lease import holder
from hpcdist.run.snapshot import code_state
from hpcdist.run.sweeps import checkpoint_config
from hpcdist.slurm.client import JobSnapshot
from hpcdist.supervisor.plan import Plan, rank_command
from hpcdist.supervisor.restart_policy import Failure
from hpcdist.tracking.uri import link_to_run

#: Time between two progress lines without a terminal, such as in a log file.
PLAIN_INTERVAL_S = 5.0
#: Metrics from here on are shown as whole numbers: four digits would need an exponent.
_MIN_WHOLE = 10_000
#: Colours of the statuses of runs.
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
    roles = "trainer → rank 0"
    if plan.roles is not None:
        roles = "\n".join(rank_table(plan.roles, [(range(plan.num_ranks), "")], plan.devices))
    elif plan.num_ranks > 1:
        roles += f" … {plan.num_ranks - 1}"
    ranks_by_device = Counter(plan.device_of(rank) for rank in range(plan.num_ranks))
    devices = " + ".join(f"{count} × {device}" for device, count in ranks_by_device.items())
    rows = {
        "trainer": " ".join(shown["trainer"]["script"]) or config.trainer.target,
        "roles": roles,
        "devices": f"{devices}, {plan.backend}, {plural(plan.threads, 'thread')} per rank",
        "run folder": short_path(run_folder),
        "MLflow": redact_text(tracking_uri),
    }
    run = RunDir(run_folder)
    if run.environment.exists():
        code = code_state(run)
        if code.copied:
            copied = f"{short_path(run.code)}, a copy of {code.root}"
            rows["code"] = f"{copied}; links in it lead to the files that are left out"
    if verbose:
        rows["command"] = shlex.join(rank_command(run_folder))
        env = plan.env | shown["launch"]["env"]
        rows["variables"] = "\n".join(f"{name}={value}" for name, value in sorted(env.items()))
    print_rows(console, rows)


def print_rows(console: Console, rows: Mapping[str, str], styles: Mapping[str, str] | None = None) -> None:
    """Print names and values in two columns; a table of rich would cut long paths."""
    width = max(map(len, rows)) + 2
    indent = " " * width
    for name, value in rows.items():
        text = indent + value.replace("\n", f"\n{indent}")
        if name not in ("command", "variables"):  # users copy these from the terminal
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
        #: Step and text of the last progress line, which is printed later: the last step is evaluated after its
        #: first heartbeat, and that adds metrics.
        self._last_line: tuple[int, str] | None = None
        self._doing = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._print_last_line()
        self._progress.stop()

    def attempt(self, attempt: Attempt, num_ranks: int) -> None:
        """Print the start of an attempt, and measure speed and remaining time anew."""
        self._began = None
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        ranks = plural(num_ranks, "rank")
        self.note(f"attempt {attempt.number}: starting {ranks}, logs in {short_path(attempt.path)}")

    def note(self, text: str) -> None:
        """Print a line above the progress."""
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
        for line in end_of_traceback(failure.traceback):
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
        doing = str(beat.get("doing", ""))
        if doing not in ("", self._doing):
            self._doing = doing
            self.note(doing)

    def _plain(self, step: int, total: int, numbers: str) -> None:
        """Print a progress line if the last one is old enough; keep that of the last step for later."""
        now = time.monotonic()
        if step == self._last_step or (step < total and now < self._next_plain):
            return
        if step >= total:
            self._last_line = (step, f"step {step}/{total}  {escape(numbers)}")
            return
        self._next_plain = now + PLAIN_INTERVAL_S
        self._last_step = step
        if self._began is None:
            self._began = (now, step)
        began, first_step = self._began
        eta = ""
        if first_step < step:
            left_s = (now - began) / (step - first_step) * (total - step)
            eta = f"  ETA {timedelta(seconds=round(left_s))}"
        self._console.print(f"step {step}/{total}  {escape(numbers)}{eta}", highlight=False, soft_wrap=True)

    def _print_last_line(self) -> None:
        if self._last_line is None:
            return
        self._last_step, line = self._last_line
        self._last_line = None
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
    metrics, steps = beat["metrics"], beat.get("metric_steps")
    texts_by_step: dict[int, list[str]] = {}
    for key, label in _LIVE.items():
        value = metrics.get(key)
        if value is None or (key.endswith("_per_s") and not with_speed):
            continue
        step = steps.get(key) if isinstance(steps, dict) else None
        if type(step) is not int:  # a heartbeat may be damaged
            step = beat["step"]
        number = f"{value:.4g}" if value < _MIN_WHOLE else f"{value:.0f}"
        texts_by_step.setdefault(step, []).append(f"{label} {number}")
    groups = []
    for step, texts in sorted(texts_by_step.items(), reverse=True):
        group = "  ".join(texts)
        if step != beat["step"]:
            group += f" (step {step})"
        groups.append(group)
    return "  ".join(groups)


def show_end(console: Console, run: RunDir, state: State, config: Config) -> None:
    """Print the final metrics, the next commands and, on the last line, the status with its reason."""
    metrics = _final_metrics(run)
    trainer = find_trainer(config.trainer.target)
    # The last metrics of a benchmark are those of the largest message only.
    is_benchmark = trainer is not None and trainer.is_benchmark
    if metrics and not is_benchmark:
        _print_line(console, f"{run.experiment}/{run.name}")  # the title of a table would be wrapped at its width
        rows = [(key, f"{value:.6g}") for key, value in sorted(metrics.items())]
        print_table(console, ("metric", "value"), rows)
    if state.attempt:
        for text in run.attempt(state.attempt).current_stragglers():
            _print_line(console, f"straggler: {text}", "yellow")
    for line in _next_commands(run, state, config, is_benchmark=is_benchmark):
        _print_line(console, line)
    _print_line(console, state.sentence, f"bold {COLOURS[state.status]}")


def _next_commands(run: RunDir, state: State, config: Config, *, is_benchmark: bool) -> list[str]:
    """Return the lines on how to review an ended run, and how to continue an unfinished one."""
    program = _program()
    folder = shlex.quote(short_path(run.path))
    ui = f"{program} ui"
    if config.tracking.uri:
        ui = f"MLFLOW_TRACKING_URI={shlex.quote(redact_text(config.tracking.uri))} {ui}"
    elif Path(config.runs_dir) != runs_dir().absolute():
        ui = f"HPCDIST_RUNS_DIR={shlex.quote(short_path(config.runs_dir))} {ui}"
    record = read_record(run.mlflow) or {}
    if record.get("run_id"):
        lines = [f"review in MLflow: {link_to_run(run) or ui}"]
    else:
        lines = [f"not in MLflow yet: {program} sync {folder}"]
    if run.report.is_file() and not is_benchmark:
        lines.append(f"report: {short_path(run.report)}")
    if is_benchmark and run.artifacts.is_dir():
        lines.append(f"report: {program} bench show {folder}")
    if state.status != "finished":
        resume = f"{program} resume {folder}"
        finding = explain_failure(run, state)
        if finding is not None and finding.code:
            lines.append(f"fix {short_path(finding.code)}, then: {resume} --with-current-code")
        elif finding is not None and finding.overrides:
            lines.append(f"correct it: {resume} {finding.overrides}")
        else:
            lines.append(f"continue: {resume}")
    return lines


def _program() -> str:
    """Return how to call hpcdist in this shell: by its name if it is on the PATH, else by its path."""
    if shutil.which("hpcdist") is not None:
        return "hpcdist"
    started = Path(sys.argv[0])
    if started.name == "hpcdist":
        return shlex.quote(os.path.relpath(started))
    return f"{sys.executable} -m hpcdist"


def _final_metrics(run: RunDir) -> dict[str, float]:
    """Return the last values of metrics, and of throughputs the median of the run, as all pages show it."""
    from hpcdist.tracking.series import read_series

    series = readable(lambda: read_series(run)) or {}
    speeds = median_speeds(series)
    values = {}
    for key, points in series.items():
        if is_of_hpcdist(key) or points.last is None:
            continue
        if key in speeds:
            values[f"{key}, median"] = speeds[key]
        else:
            values[key] = points.last
    return values


# The list of runs and the status of one run, as tables and as JSON.

#: Ranks that `status` shows, one in a line.
MAX_SHOWN_RANKS = 32
#: Ended attempts that `status` shows, one in a line.
MAX_SHOWN_ATTEMPTS = 5
#: Checkpoints that `status` names.
MAX_SHOWN_CHECKPOINTS = 10
#: Keys of a heartbeat that `status` shows.
_BEAT = ("step", "total_steps", "time", "metrics", "metric_steps")
#: Columns of a terminal from which on the list of runs shows steps, attempts and reasons as well.
_MIN_WIDE = 140


def read_rows(runs: Sequence[RunDir], experiment: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each run, the newest one last, and notes on runs that cannot be read."""
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
                "reason": now.reason,
            }
            if not now.reason and now.facts is not None and not now.final:
                row["reason"] = now.facts.sentence()
            rows.append(row | _result_of(run))
        except (RunFolderError, OSError) as error:
            notes.append(f"{run.experiment}/{run.name} is not listed: {error}")
    errors = [snapshot.error for snapshot in snapshots.values() if snapshot.error]
    if errors:
        notes.append(f"Slurm does not report the states of jobs ({errors[0]})")
    rows.sort(key=itemgetter("created"))
    return rows, notes


def _result_of(run: RunDir) -> dict[str, Any]:
    """Return the best value, cost, start and duration of a run; each is None if the run has none or it is damaged."""
    keys = ("best", "best_metric", "best_mode", "best_step", "hours", "unit", "started", "duration_s")
    result: dict[str, Any] = dict.fromkeys(keys)
    checkpoints = readable(lambda: read_checkpoints(run)) or ()
    if any(checkpoint.metrics for checkpoint in checkpoints):  # reading the config takes the longest time
        monitor = checkpoint_config([run])
        best = best_checkpoint(checkpoints, monitor)
        if best is not None:
            result["best"] = best.metrics[monitor.monitor]
            result["best_metric"] = monitor.monitor
            result["best_mode"] = str(monitor.monitor_mode)
            result["best_step"] = best.step
    # Not the ledger, which reads the accounts of all ranks.
    allocations = readable(lambda: allocations_of(run)) or []
    attempts = [attempt for allocation in allocations for attempt in allocation.attempts]
    if attempts:
        result["started"] = attempts[0].times.began
    seconds = sum(map(allocated_s, allocations))
    if seconds:
        result["hours"] = seconds / 3600
        result["unit"] = unit_of(attempts)
        result["duration_s"] = sum(allocation.ended - allocation.began for allocation in allocations)
    return result


def show_runs(console: Console, rows: list[dict[str, Any]], notes: list[str], runs_dir: Path) -> None:
    """Print the rows of `read_rows`; a narrow terminal shows the reasons of unfinished runs below the table."""
    is_wide = console.width >= _MIN_WIDE
    metrics = {row["best_metric"] for row in rows if row["best_metric"]}
    units = {row["unit"] for row in rows if row["unit"]}
    table: list[list[str | Text]] = []
    for row in rows:
        table.append(_cells(row, is_wide=is_wide, with_metric=len(metrics) > 1, with_unit=len(units) > 1))
    best_title = f"best {_last_part(min(metrics))}" if len(metrics) == 1 else "best"
    hours_title = f"{min(units)}-h" if len(units) == 1 else "hours"
    head = ["run", "status", best_title, hours_title, "started", "duration"]
    if not rows:
        notes = [f"no runs under {runs_dir.absolute()}", *notes]
    elif is_wide:
        print_table(console, [*head, "step", "attempts", "reason"], table, num_whole=2)
    else:
        experiments = {row["run"].partition("/")[0] for row in rows}
        if len(experiments) == 1:
            head[0] = f"run of {min(experiments)}"
            table = [[str(name).partition("/")[2], *cells] for name, *cells in table]
        print_without_lines(console, [head, *table])
        reasons = []
        for row in rows:
            if row["reason"] and row["status"] != "finished":
                reasons.append(f"{row['run']} {sentence_of(row['status'], row['reason'])}")
        notes = [*reasons, *notes]
    for note in notes:
        console.print(escape(wrapped(console, note, 4)), highlight=False, soft_wrap=True)


def _cells(row: Mapping[str, Any], *, is_wide: bool, with_metric: bool, with_unit: bool) -> list[str | Text]:
    """Return the cells of a run in the list of runs.

    Args:
        with_metric: whether the best value is shown with its metric.
        with_unit: whether the hours are shown with their unit.
    """
    best = hours = started = spent = ""
    if row["best"] is not None:
        best = f"{row['best']:.4g}"
        if with_metric:
            best = f"{_last_part(row['best_metric'])} {best}"
    if row["hours"] is not None:
        hours = hours_text(3600 * row["hours"])
        if with_unit:
            hours = f"{hours} {row['unit']}"
    if row["started"] is not None:
        clock = "%Y-%m-%d %H:%M" if is_wide else "%m-%d %H:%M"
        started = time.strftime(clock, time.localtime(row["started"]))
    if row["duration_s"] is not None:
        spent = duration(row["duration_s"])
        if not is_wide:  # of the largest unit
            number, unit = spent.split()[:2]
            spent = f"{number} {unit}"
    cells: list[str | Text] = [row["run"], Text(row["status"], COLOURS[row["status"]]), best, hours, started, spent]
    if is_wide:
        step = "" if row["step"] is None else str(row["step"])
        cells += [step, str(row["attempts"]), row["reason"]]
    return cells


def _last_part(metric: str) -> str:
    """Return the name of a metric without its group: `accuracy` of `eval/accuracy`."""
    return metric.rpartition("/")[2]


def read_status(run: RunDir) -> dict[str, Any]:
    """Return the status of a run as a JSON document; facts that a run does not have are None."""
    snapshot = run_status.query_job(run)
    now = run_status.status_from(run, snapshot)
    state = now.state
    if snapshot is not None and now.name != "running":
        with suppress(HpcdistError, OSError):  # the folder of another user
            run_status.update_job_starts(run)  # for the causes of the attempts
    ended: list[dict[str, Any]] = []
    ranks: list[dict[str, Any]] = []
    stragglers: list[str] = []
    if state.attempt:
        with suppress(RunFolderError, OSError):
            for past in read_attempts(run, state, read_checkpoints(run)):
                if past.status == "running":
                    continue
                ended.append(
                    {
                        "attempt": past.number,
                        "status": past.status,
                        "end": past.end,
                        "nodes": list(past.nodes),
                        "cause": past.cause,
                    }
                )
        attempt = run.attempt(state.attempt)
        for rank in range(min(state.world_size, MAX_SHOWN_RANKS)):
            beat = attempt.read_beat(rank)
            if beat is not None:
                ranks.append({"rank": rank} | {key: beat.get(key) for key in _BEAT})
        stragglers = attempt.current_stragglers()
    held = holder(run)
    if (
        now.facts is not None and now.facts.waiting
    ):  # the lease of a supervisor that was killed with its start of the job
        held = None
    mlflow = read_record(run.mlflow) or {}
    return {
        "run": f"{run.experiment}/{run.name}",
        "folder": str(run.path),
        "status": now.name,
        "reason": now.reason,
        "attempt": state.attempt,
        "ended_attempts": ended[-MAX_SHOWN_ATTEMPTS:],
        "restarts": state.restarts,
        "world_size": state.world_size,
        "slurm": _job_text(snapshot),
        "held_by": f"process {held['pid']} of {held['user']} on {held['host']}" if held is not None else None,
        "ranks": ranks,
        "stragglers": stragglers,
        "checkpoints": sorted(path.name for path in run.checkpoints.glob("step-*")) or script_files(run),
        "mlflow_run_id": mlflow.get("run_id") or None,
        **_result_of(run),
    }


def _job_text(snapshot: JobSnapshot | None) -> str | None:
    """Return the state of a job in words; None for a local run."""
    if snapshot is None:
        return None
    if snapshot.info is not None:
        return snapshot.info.describe(time.time())
    if snapshot.error:
        return f"not available: {snapshot.error}"
    return "the job is no longer known"


def show_status(console: Console, run: RunDir) -> None:
    """Print the status of a run, one fact in a row."""
    document = read_status(run)
    status = document["status"]
    rows = {
        "status": sentence_of(status, document["reason"] or ""),
        "folder": short_path(document["folder"]),
        "attempt": f"{document['attempt']}, {plural(document['restarts'], 'restart')} after failures",
    }
    if document["best"] is not None:
        rows["best"] = f"{document['best_metric']} {document['best']:.6g} at step {document['best_step']}"
    if document["hours"]:
        rows["duration"] = duration(document["duration_s"])
        rows["cost"] = f"{hours_text(3600 * document['hours'])} {document['unit']}-hours"
    # The cause of the last attempt is often the reason of the status.
    for ended in document["ended_attempts"]:
        if ended["cause"] != document["reason"]:
            rows[f"attempt {ended['attempt']}"] = sentence_of(ended["end"], ended["cause"])
    if document["slurm"]:
        rows["Slurm"] = document["slurm"]
    if document["held_by"]:
        rows["supervisor"] = document["held_by"]
    if status == "lost":
        rows["next"] = "the supervisor died: `hpcdist resume` continues the run, `hpcdist sync` closes it in MLflow"
    for beat in document["ranks"]:
        rows[f"rank {beat['rank']}"] = _rank_text(beat)
    if document["attempt"] and document["world_size"] > MAX_SHOWN_RANKS:
        others = document["world_size"] - MAX_SHOWN_RANKS
        rows["more ranks"] = f"{others}, see {short_path(run.attempt(document['attempt']).path)}"
    if document["stragglers"]:
        rows["straggler"] = "\n".join(document["stragglers"])
    rows["checkpoints"] = _checkpoints_text(document["checkpoints"])
    if run.report.is_file():
        rows["report"] = short_path(run.report)
    if document["mlflow_run_id"]:
        rows["MLflow run"] = str(document["mlflow_run_id"])
    print_rows(console, rows, {"status": COLOURS[status]})


def _rank_text(beat: Mapping[str, Any]) -> str:
    """Return the step, age and metrics of a rank's heartbeat."""
    step = f"step {beat['step']}"
    if beat["total_steps"]:
        step += f" of {beat['total_steps']}"
    age_s = max(0, int(time.time() - beat["time"]))
    return f"{step}, {age_s} s ago  {format_metrics(beat)}"


def _checkpoints_text(names: Sequence[str]) -> str:
    """Return the names of the newest checkpoints, and the number of the others."""
    if not names:
        return "none yet"
    text = ", ".join(names[-MAX_SHOWN_CHECKPOINTS:])
    if len(names) > MAX_SHOWN_CHECKPOINTS:
        text = f"{len(names) - MAX_SHOWN_CHECKPOINTS} more, {text}"
    return text


# Follow a run until it ends: its log, or its state and progress, on this machine or on Slurm.

#: Time between two looks at the files of a run.
POLL_S = 0.3


def follow_to_end(run: RunDir, config: Config) -> int:
    """Follow a run until it ends, and upload an own run on Slurm if its job does not. Returns the exit code."""
    from hpcdist.supervisor import children

    uploading: AbstractContextManager[object] = nullcontext()
    if run_status.job_of(run) is not None and is_mine(run.path):
        uploading = children.shipping_from_here(run, config, os.environ)
    try:
        with uploading:
            state = follow(console(), run)
    except KeyboardInterrupt:
        say(f"run {run.name} continues: `hpcdist follow {run.name}` shows it again, `hpcdist stop` stops it")
        return INTERRUPTED
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
            with retry.retry(partial(open_regular, path), path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < position:
                    position = size  # what is written from now on is shown, also while the reader prints the note
                    yield "\n[hpcdist: this log was shortened]\n"
                file.seek(position)
                while data := file.read(PIECE_BYTES):
                    yield decoder.decode(data)
                position = file.tell()
        if attempt is None and state.attempt > number:
            number += 1
            position = 0
            decoder.reset()
            path = _log_of(run.attempt(number), rank)
        elif ended:
            return
        else:
            waiting.wait(POLL_S)


def _log_of(attempt: Attempt, rank: int | None) -> Path:
    """Return the log of a rank, by default of the one that failed first, which is then named, else of rank 0."""
    if rank is None:
        rank = first_failed_rank(attempt)
        if rank:
            say(f"hpcdist: the log of rank {rank}, which failed first", error=True)
    return attempt.log(rank or 0)


def follow(console: Console, run: RunDir) -> State:
    """Show a run's states and progress until its end, which is recorded if nobody else has. Returns its last state."""
    watch = run_status.StatusWatch()
    waiting = Event()
    shown_line = shown_error = ""
    shown_attempt = 0
    num_shown = 0  # events of stragglers in this attempt
    with RunView(console) as view, retry.patient(retry.UNATTENDED_S):
        while True:
            (status,) = watch.poll([run])
            if status.final:
                break
            line = _status_line(status)
            if line != shown_line:
                view.note(line + _expected_start(status))
                shown_line = line
            if status.slurm_error != shown_error:
                shown_error = status.slurm_error
                if shown_error:
                    view.note(f"Slurm does not report the state of the job ({shown_error})")
            state = status.state
            if 0 < shown_attempt < state.attempt:
                _note_restarts(view, run, state, since=shown_attempt)
                num_shown = 0
            shown_attempt = state.attempt
            if state.attempt:
                attempt = run.attempt(state.attempt)
                if status.name == "running":
                    beat = attempt.read_beat(0)
                    if beat is not None:
                        view.progress(beat)
                events = attempt.straggler_events()
                for event in events[num_shown:]:
                    view.note(event["text"])
                num_shown = len(events)
            waiting.wait(POLL_S)
    if status.name == "lost" and is_mine(run.path):
        run_status.close_if_lost(run)
        return run.read_state()
    return status.state


def _note_restarts(view: RunView, run: RunDir, state: State, *, since: int) -> None:
    """Show how the attempts from `since` on have ended, and that the ranks have been started again."""
    for number in range(since, state.attempt):
        times = read_times(run.attempt(number))
        if times is not None and times.status:
            view.note(f"attempt {number} {sentence_of(times.status, times.reason)}")
    view.attempt(run.attempt(state.attempt), state.world_size)


def _status_line(status: run_status.RunStatus) -> str:
    """Return the status with its reason, and the state of the job."""
    job = status.facts
    if job is None:
        return sentence_of(status.name, status.reason)
    name, reason = status.name, status.reason
    if name == "queued" and job.alive and not job.waiting:
        name, reason = "starting", ""  # the supervisor in the job has not recorded a status
    about_job = ""
    if name == "running" and not job.waiting:
        about_job = f"job {job.id}"
        if job.nodes:
            about_job += f" on {job.nodes}"
    elif not status.is_lost and job.sentence() != reason:
        about_job = job.sentence()
    return sentence_of(name, "; ".join(filter(None, [reason, about_job])))


def _expected_start(status: run_status.RunStatus) -> str:
    """Return Slurm's estimate of the start, which changes too often to print a new line for it."""
    facts = status.facts
    if facts is None or not facts.waiting or facts.started is None or facts.started <= time.time():
        return ""
    return f", expected to start at {local_time(facts.started)}"
