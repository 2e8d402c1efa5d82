"""The descriptions of runs and sweeps in Markdown, for MLflow's UI: result, setup, and the commands to continue; the
best cell, and a table of the cells.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcdist.config.launch_schema import CheckpointConfig
from hpcdist.config.redaction import REDACTED, is_redacted, redact_text
from hpcdist.host.files import read_json
from hpcdist.review.charts import is_hidden, is_read, ranked
from hpcdist.review.facts import (
    AttemptFacts,
    CheckpointFacts,
    RunFacts,
    best_checkpoint,
    last_beat,
    read_checkpoints,
    readable,
)
from hpcdist.review.ledger import CAUSES, MEANINGS, Ledger, percent
from hpcdist.review.text import (
    PATCH,
    artifact_page,
    clock,
    code_block,
    duration,
    escaped,
    image_text,
    link,
    models_page,
    more,
    nodes_text,
    run_page,
    table,
)
from hpcdist.run.folder import DATABASE, RunDir, State, own_place
from hpcdist.run.records import PLAIN_SCRIPT, DatasetRecord
from hpcdist.run.sweeps import SweepDir, checkpoint_config, text_of

# The section Setup of a run's description: what ran, on what, from which code.

#: Words for `launch.device`; nothing for `auto`.
_DEVICES = {"cpu": " on the CPU", "cuda": " on GPUs"}
#: Overrides beyond these are counted.
_MAX_OVERRIDES = 30


def setup_rows(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the section as Markdown."""
    if facts.stored.problem:
        yield "Not read", escaped(facts.stored.problem, 400)
    if facts.config_name:
        profile = f", cluster profile {escaped(facts.cluster_name)}" if facts.cluster_name else ""
        yield "Config", escaped(facts.config_name) + profile
    if facts.overrides:
        shown = [
            f"{escaped(key)} = **{escaped(text_of(item.after), 100)}** (config: {escaped(text_of(item.before), 100)})"
            for key, item in list(facts.overrides.items())[:_MAX_OVERRIDES]
        ]
        yield "Overrides", "<br>".join([*shown, *more(len(facts.overrides) - _MAX_OVERRIDES)])
    elif facts.config_name:
        yield "Overrides", "none"
    if facts.rerun is not None:
        known_as = f" (MLflow run {escaped(facts.rerun.run_id)})" if facts.rerun.run_id else ""
        yield "Repeats", escaped(facts.rerun.name) + known_as
        yield "Not restored", "<br>".join(escaped(text, 300) for text in facts.rerun.missing) or "nothing"
        yield "Values", escaped(facts.rerun.result, 600) or "not compared yet"
    if facts.sweep:
        yield "Sweep", escaped(facts.sweep)
    yield "Trainer", escaped(facts.trainer)
    model = [escaped(facts.model)] if facts.model else []
    if facts.num_parameters is not None:
        model.append(f"{facts.num_parameters:,} trainable parameters")
    if model:
        yield "Model", ", ".join(model)
    if facts.datasets:
        yield "Data", "<br>".join(map(_dataset, facts.datasets))
    if code := _code(facts):
        yield "Code", code
    if image := image_text(facts):
        yield "Image", escaped(image, 600)
    device = _DEVICES.get(facts.stored.config.launch.device, "")
    yield "Ranks", f"{facts.state.world_size}{device}{_where(facts)}"
    if versions := _versions(facts):
        yield "Versions", versions
    started = facts.attempts[0].started if facts.attempts else None
    yield (
        "Created" if started is None else "Started",
        clock(started or facts.state.created) + (f" by {escaped(facts.user)}" if facts.user else ""),
    )
    yield "Folder", escaped(f"{facts.host}:{facts.folder}" if facts.host else str(facts.folder))


def _code(facts: RunFacts) -> str:
    """Return the commit of the code, what it does not contain, and code that later edits change."""
    parts = []
    if facts.stored.trainer is not None:
        parts.append(f"hpcdist {escaped(facts.versions.get('hpcdist', ''))}".rstrip())
    if facts.git_commit:
        changes = link("uncommitted changes", artifact_page(facts, PATCH)) if facts.has_patch else "uncommitted changes"
        parts.append(f"commit {escaped(facts.git_commit)}" + (f" with {changes}" if facts.git_dirty else ""))
    elif facts.code_copied:
        parts.append("no commit, since it was not in a git repository; the run folder has a copy in `code`")
    if facts.git_commit and (number := facts.num_untracked):
        parts.append(f"{number} file{'s' * (number > 1)} of the copy {'are' if number > 1 else 'is'} not in git")
    if facts.live_code:
        parts.append(f"imported without a copy, so later edits change the run: {nodes_text(facts.live_code)}")
    return "; ".join(parts)


def _versions(facts: RunFacts) -> str:
    """Return the versions that the ranks use, then those of the machine on which the run was created."""
    names = {"hpcdist": "hpcdist", "torch": "torch", "python": "Python", "cuda": "CUDA"}

    def listed(versions: Mapping[str, str]) -> str:
        return escaped(", ".join(f"{name} {versions[key]}" for key, name in names.items() if versions.get(key)))

    own, inside = listed(facts.versions), listed(facts.rank_versions)
    if not facts.rank_python:
        return own
    place = "in the container" if facts.rank_python == "container" else "in the environment of the ranks"
    texts = [f"{inside} {place}" if inside else f"those {place} are recorded when the job starts"]
    return "; ".join([*texts, *([f"{own} on {escaped(facts.host)}"] if own else [])])


def _where(facts: RunFacts) -> str:
    job = f", Slurm job {escaped(facts.job_id)}" if facts.job_id else ""
    nodes = facts.attempts[-1].nodes if facts.attempts else ()
    earlier = [node for attempt in facts.attempts for node in attempt.nodes if node not in nodes]
    others = f" (earlier attempts: {nodes_text(list(dict.fromkeys(earlier)))})" if earlier else ""
    return (f" on {nodes_text(nodes)}" if nodes else "") + others + job


def _dataset(dataset: DatasetRecord) -> str:
    words = [f"{escaped(dataset.name)} ({escaped(dataset.split)})"]
    if dataset.num_samples is not None:
        words.append(f"{dataset.num_samples:,} samples")
    if dataset.digest:
        words.append(f"digest {escaped(dataset.digest)}")
    return ", ".join(words)


# Commands for the reviewers of a run: how to load its model, and how to run it again.

#: Maximum length of a line of a command. MLflow's page of a run does not wrap code: a long line moves the section
#: `About this run` out of the window.
MAX_LINE = 80
#: Length of the parts of a longer word, which get quotes, an indent or the name of an option.
MAX_PART = 60
#: A word of a command with its quotes; an option together with its value.
_WORD = re.compile(r"""(?:--[\w-]+ (?=[^-]))?(?:'[^']*'|"[^"]*"|\\.|\S)+""")


def load_final_model(facts: RunFacts) -> str:
    """Return lines of Python that load the final model from MLflow; empty before its upload."""
    if not facts.has_model or not facts.run_id:
        return ""
    return f'import mlflow\n\nmodel = mlflow.pytorch.load_model("runs:/{facts.run_id}/model")'


def load_checkpoint(facts: RunFacts, checkpoint: CheckpointFacts) -> str:
    """Return lines of Python that load the weights of a checkpoint, from MLflow if it has them, or from its folder."""
    if checkpoint is facts.best and facts.has_uploaded_best:
        lines = ["import mlflow", "from hpcdist.checkpoint.state import load_weights", ""]
        lines.append(f'uri = "runs:/{facts.run_id}/checkpoints/best"')
        lines.append("state_dict = load_weights(mlflow.artifacts.download_artifacts(uri))")
    else:
        lines = ["from hpcdist.checkpoint.state import load_weights", ""]
        lines += [f"folder = {str(checkpoint.path)!r}", "state_dict = load_weights(folder)"]
    return "\n".join(lines)


def run_again_command(facts: RunFacts) -> str:
    """Return the command that starts a run with the same config in the same store; empty if it is not recorded.

    A value that is a secret is `***`.
    """
    if not facts.config_name or not facts.overrides_known:
        words = facts.command
    else:
        verb = "submit" if facts.launcher == "slurm" else "run"
        profile = ["--cluster", facts.cluster_name] if facts.cluster_name else []
        changed = [f"{key}={text_of(item.after)}" for key, item in facts.overrides.items()]
        named, script = [facts.config_name], []
        if facts.config_name == PLAIN_SCRIPT:
            named, script = [], facts.stored.config.trainer.script
        words = shlex.join(["hpcdist", verb, *named, *profile, *changed, *_location(facts), *script])
    return _in_folder(facts, words)


def rerun_command(facts: RunFacts) -> str:
    """Return the command that repeats a run with its own code and compares the values; empty before its upload."""
    if not facts.run_id:
        return ""
    words = ["hpcdist", "rerun", facts.run_id]
    for word in _location(facts):
        key, _, value = word.partition("=")
        words += [f"--{key.replace('.', '-').replace('_', '-')}", value]
    return _in_folder(facts, shlex.join(words))


def wrapped(command: str) -> str:
    """Return a command of the shell on lines of at most MAX_LINE characters, as far as possible."""
    if len(command) <= MAX_LINE:
        return command
    lines = [""]
    for word in map(_divided, _WORD.findall(command)):
        if lines[-1].endswith(" &&"):  # the shell reads on without a backslash
            lines.append(word)
        elif lines[-1] and len(lines[-1]) + len(word) + len("  \\") > MAX_LINE and word != "&&":
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
        lines += lines.pop().split("\n")
    return "\n".join(lines)


def _divided(word: str) -> str:
    """Return a long word as parts that the shell joins: a backslash at the end of a line removes the line break."""
    if len(word) + len("     \\") <= MAX_LINE:
        return word
    try:
        *option, text = shlex.split(word)
    except ValueError:  # a quote without its end, in a command that was recorded without quotes
        return word
    parts = []
    while text:
        ends = [text.rfind(mark, MAX_PART // 2, MAX_PART) + 1 for mark in "/, "] if len(text) > MAX_PART else []
        end = max(ends, default=0) or MAX_PART
        parts.append(shlex.quote(text[:end]))
        text = text[end:]
    return " ".join([*option, "\\\n".join(parts)])


def _location(facts: RunFacts) -> list[str]:
    """Return the overrides for the folder and the store of the run, if they are not the default ones of its folder."""
    runs_dir = facts.folder.parent.parent.absolute()
    words = [f"runs_dir={runs_dir}"] if Path(facts.cwd, "runs") != runs_dir else []
    # A redacted password makes the URI useless.
    default = f"sqlite:///{own_place(runs_dir) / DATABASE}"
    is_default = facts.tracking_uri in ("", default) or is_redacted(facts.tracking_uri)
    return words if is_default else [*words, f"tracking.uri={facts.tracking_uri}"]


def _in_folder(facts: RunFacts, command: str) -> str:
    return f"cd {shlex.quote(facts.cwd)} && {command}" if command and facts.cwd else command


# The description of a run in MLflow: its facts and its costs as Markdown.

#: Rows of a table beyond these are left out, in the middle of the attempts.
_MAX_METRICS = 12
_MAX_CHECKPOINTS = 12
_KEPT_ATTEMPTS = (1000, 60, 30, 20, 10, 6, 4, 2)
#: Age of a heartbeat from which the description names it first: ranks beat at each step, at most once a second.
_SILENT_S = 120.0


def describe(facts: RunFacts, ledger: Ledger, *, max_chars: int, now: float | None = None) -> str:
    """Return the description of a run, at most `max_chars` long: the attempts in the middle are left out first.

    Args:
        now: seconds since the epoch, for the remaining times of a live run.
    """
    when = time.time() if now is None else now
    return _shortened(lambda num_kept: _sections(facts, ledger, num_kept, when), _KEPT_ATTEMPTS, max_chars)


def _shortened(sections: Callable[[int], Iterator[str]], kept: Sequence[int], max_chars: int) -> str:
    """Return sections with the largest number of kept rows at which they are short enough, else their beginning."""
    text = ""
    for num_kept in kept:
        text = "\n\n".join(sections(num_kept))
        if len(text) <= max_chars:
            return text
    return text[: max_chars - 2].rpartition("\n")[0] + "\n…" if max_chars > 2 else ""


def _status(state: State) -> str:
    return escaped(state.sentence, 1000).replace(state.status, f"**{state.status}**", 1)


def _sections(facts: RunFacts, ledger: Ledger, num_attempts: int, now: float) -> Iterator[str]:
    yield _status(facts.state)
    if summary := _summary(facts, ledger):
        yield summary
    if facts.progress is not None:
        yield _progress(facts, now)
    elif facts.is_live:
        is_running = facts.state.status == "running"
        yield f"State at {clock(now)}" + (": no step is done yet in this attempt." if is_running else ".")
    yield "### Setup\n\n" + table(("", ""), ((f"**{name}**", value) for name, value in setup_rows(facts)))
    if result := list(_result(facts)):
        yield "### Result\n\n" + "\n".join(f"- {line}" for line in result)
    if facts.attempts:
        yield "### Attempts\n\n" + _attempts(facts, num_attempts)
    if ledger.entries:
        yield "### Cost\n\n" + _cost(ledger)
    yield from _load(facts)
    if command := run_again_command(facts):
        secrets = " Replace each \\*\\*\\* by the secret, which is not recorded." if REDACTED in command else ""
        yield (
            "### Run it again\n\nThe whole command, with all overrides and the code in that folder today:"
            f"{secrets}\n\n{_shell(command)}"
        )
    if command := rerun_command(facts):
        yield (
            "With the code of this run, uncommitted changes included, and a comparison of the logged values:\n\n"
            + _shell(command)
        )


def _summary(facts: RunFacts, ledger: Ledger) -> str:
    """Return the most important facts in one line: MLflow shows the first lines of a description only."""
    words = []
    if facts.best is not None and facts.best_value is not None:
        words.append(f"**{escaped(facts.monitor)} = {facts.best_value:.6g}** at step {facts.best.step:,}")
    if facts.config_name:
        words.append(f"config {escaped(facts.config_name)}")
    if facts.datasets:
        words.append(f"data {escaped(facts.datasets[0].name)}")
    if facts.attempts:
        number = len(facts.attempts)
        words.append(f"{number} attempt{'s' * (number != 1)}")
    if ledger.entries:
        words.append(f"{ledger.allocated_s / 3600:.3g} {ledger.unit}-hours, goodput {percent(ledger.goodput)}")
    return ", ".join(words)


def _progress(facts: RunFacts, now: float) -> str:
    progress = facts.progress
    assert progress is not None
    age_s = max(0.0, now - progress.seen)
    is_silent = age_s >= _SILENT_S
    words = [f"step {progress.step:,}"]
    if progress.total_steps:
        words[0] += f" of {progress.total_steps:,} ({100 * progress.step / progress.total_steps:.0f} %)"
    words.append(f"last heartbeat {duration(age_s)} before")
    if progress.eta is not None and not is_silent:
        words.append(f"ends in about {duration(max(0.0, progress.eta - now))} ({clock(progress.eta)})")
    if facts.checkpoints:
        last = facts.checkpoints[-1]
        at = f" ({clock(last.created)})" if last.created is not None else ""
        words.append(f"last save at step {last.step:,}{at}")
    elif facts.script_files:
        words.append(f"last save {facts.script_files[-1]}")
    else:
        words.append("nothing is saved yet")
    if progress.time_limit is not None:
        words.append(f"time limit in {duration(max(0.0, progress.time_limit - now))} ({clock(progress.time_limit)})")
    warning = f"**No heartbeat for {duration(age_s)}**: a long step, a hang, or a node that has failed.\n\n"
    return warning * is_silent + f"Progress at {clock(now)}: {'; '.join(words)}."


def _result(facts: RunFacts) -> Iterator[str]:
    if facts.best is not None and facts.best_value is not None:
        direction = "lowest" if facts.monitor_mode == "min" else "highest"
        yield f"**{escaped(facts.monitor)} = {facts.best_value:.6g}** at step {facts.best.step:,} (best = {direction})"
        uploaded = link("uploaded", artifact_page(facts, "checkpoints/best"))
        artifact = f"; {uploaded}" if facts.has_uploaded_best else ""
        yield f"best checkpoint: {escaped(str(facts.best.path))}{artifact}"
    if facts.checkpoints:
        kept = ", ".join(_kept(facts, one) for one in facts.checkpoints[-_MAX_CHECKPOINTS:])
        page = models_page(facts.experiment_id)
        yield f"kept checkpoints: {kept}" + (f"; {link('those of all runs', page)}" if page else "")
    if files := facts.script_files:
        shown = [escaped(name) for name in files[-_MAX_CHECKPOINTS:]]
        yield f"files in the checkpoint folder: {', '.join([*more(len(files) - len(shown)), *shown])}"
    yield from _last_values(facts)
    if facts.samples_per_s is not None:
        yield f"mean throughput of the training steps: {_number(facts.samples_per_s)} samples/s"


def _last_values(facts: RunFacts) -> Iterator[str]:
    """Yield the last values of the metrics by step: training metrics are logged in intervals, evaluations apart."""
    metrics = [name for name in facts.metrics if not name.startswith(("system/", "time/"))]
    by_step: dict[int | None, list[str]] = {}
    for name in metrics[:_MAX_METRICS]:
        value = f"{escaped(name)} {_number(facts.metrics[name])}"
        by_step.setdefault(facts.metric_steps.get(name), []).append(value)
    for step, values in by_step.items():
        yield f"last values{'' if step is None else f' at step {step:,}'}: {', '.join(values)}"
    yield from (f"{more} metrics" for more in more(len(metrics) - _MAX_METRICS))


def _kept(facts: RunFacts, checkpoint: CheckpointFacts) -> str:
    value = checkpoint.metrics.get(facts.monitor)
    return f"step {checkpoint.step:,}" + ("" if value is None else f" ({value:.6g})")


def _attempts(facts: RunFacts, num_kept: int) -> str:
    attempts = list(facts.attempts)
    left_out = len(attempts) - num_kept
    rows = [_attempt(facts, attempt) for attempt in attempts]
    if left_out > 0:
        first = (num_kept + 1) // 2
        rows[first : first + left_out] = [("…", f"{left_out} more attempts", *[""] * 7)]
    head = ("Attempt", "Start", "Duration", "Nodes", "Steps", "End", "Cause", "Steps lost", "Logs")
    report = artifact_page(facts, "report.html")
    more = f"\n\n{link('report.html', report)}: timeline, faults with cause and fix, charts." if report else ""
    own = "\n\nSteps are those that the script has reported." if facts.is_script and len(attempts) > 1 else ""
    return table(head, rows) + own + _restarts(facts) + more


def _restarts(facts: RunFacts) -> str:
    """Return how the attempts came about: each start of the job is one, and so is each restart of the ranks in it."""
    if not facts.num_job_starts or len(facts.attempts) < 2:
        return ""
    starts, restarts = facts.num_job_starts, facts.state.restarts
    return (
        f"\n\nSlurm started the run {_times(starts)}; the ranks were restarted {_times(restarts)} within these starts."
        " An attempt lasts from the start to the end of its ranks; the allocated time around it is in Cost (*start*,"
        " *down*)."
    )


def _times(number: int) -> str:
    return f"{number} time{'s' * (number != 1)}"


def _attempt(facts: RunFacts, attempt: AttemptFacts) -> tuple[str, ...]:
    first = attempt.first_step or 0
    return (
        str(attempt.number),
        clock(attempt.started),
        "" if attempt.ended is None else duration(max(0.0, attempt.ended - attempt.started)),
        nodes_text(attempt.nodes),
        ("not reported" if facts.is_script else "")
        if attempt.last_step is None
        else f"{first:,} to {attempt.last_step:,}",
        attempt.status,
        escaped(attempt.cause, 200),
        "" if attempt.steps_lost is None else f"{attempt.steps_lost:,}",
        link("logs", artifact_page(facts, attempt.logs)),
    )


def _load(facts: RunFacts) -> Iterator[str]:
    """Yield the commands that load the final model, and the best checkpoint if that has other weights.

    Without a best checkpoint, the newest one is loaded.
    """
    last_step = facts.attempts[-1].last_step if facts.attempts else None
    checkpoint = facts.best or (facts.checkpoints[-1] if facts.checkpoints else None)
    final = load_final_model(facts)
    if not final and checkpoint is None:
        return
    yield "### Load the model"
    is_final = bool(final) and checkpoint is not None and checkpoint.step == last_step
    kind = "best" if facts.best is not None else "newest"
    if final:
        words = ["The final model", "" if last_step is None else f"after step {last_step:,}"]
        words.append(f"the same as the {kind} checkpoint" if is_final else "")
        needs = (
            "with `MLFLOW_TRACKING_URI` as the address of this store;"
            " it needs no hpcdist unless the code of the model does"
        )
        yield f"{', '.join(filter(None, words))}, from MLflow, {needs}:\n\n" + code_block(final, "python")
    if checkpoint is not None and not is_final:
        value = f", {escaped(facts.monitor)} = {facts.best_value:.6g}" if facts.best_value is not None else ""
        source = "from MLflow" if checkpoint is facts.best and facts.has_uploaded_best else "from its folder"
        which = f"The {kind} checkpoint, step {checkpoint.step:,}{value}, {source}:"
        yield f"{which}\n\n" + code_block(load_checkpoint(facts, checkpoint), "python")
    if facts.registered_as:
        name = escaped(facts.registered_as)
        best = (
            f" Its alias `best` (models:/{name}&#64;best) is the version with the best last value of"
            f" {escaped(facts.monitor)} among all runs{'' if is_final else ', not the best checkpoint of this run'}."
        )
        yield f"The registered model {name} has a version for the **final** model of each finished run." + (
            best if facts.monitor else ""
        )


def _shell(command: str) -> str:
    # Passwords first: they are not found in divided words.
    return code_block(wrapped(redact_text(command)), "bash")


def _cost(ledger: Ledger) -> str:
    hours = ledger.allocated_s / 3600
    causes = ledger.by(lambda entry: entry.cause)
    useful = "goodput not measured, since the script reports no steps"
    if ledger.is_measured:
        useful = f"of which {percent(ledger.goodput)} were useful compute (goodput)"
    lines = [f"**{hours:.3g} {ledger.unit}-hours** allocated, {useful}"]
    if ledger.queue_s:
        lines.append(f"{duration(ledger.queue_s)} in the queue")
    if ledger.energy_kwh is not None:
        lines.append(f"{ledger.energy_kwh:.3g} kWh ({ledger.energy_of})")
    rows = [
        (cause, _hours(causes[cause]), f"{100 * causes[cause] / ledger.allocated_s:.1f} %", MEANINGS[cause])
        for cause in CAUSES
        if causes.get(cause)
    ]
    total = ("**allocated**", _hours(ledger.allocated_s), "100.0 %", "")
    return "; ".join(lines) + "\n\n" + table(("Cause", f"{ledger.unit}-hours", "Share", "Meaning"), [*rows, total])


def _number(value: float) -> str:
    """Return a number without an exponent if it is large: `358,176`, `0.51165`."""
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"


def _hours(seconds: float) -> str:
    hours = seconds / 3600
    return f"{hours:.3g}" if hours >= 0.001 else "&lt;0.001"


# The description of a sweep.

_KEPT_CELLS = (1000, 100, 60, 40, 20, 10, 5)


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """One cell of a sweep."""

    values: dict[str, Any]  #: by swept key
    label: str
    status: str  #: that of its state file; `missing` or `unreadable` without one
    metric: float | None = None  #: best value of the monitored metric, or last value of another one
    step: int | None = None  #: step of that value
    page: str = ""  #: address in MLflow's UI; empty before the cell is uploaded


@dataclass(frozen=True, kw_only=True)
class SweepFacts:
    """A sweep and its cells in the order of `sweep.json`."""

    state: State
    keys: tuple[str, ...]
    monitor: str  #: the metric of the cells; empty if they have logged none
    monitor_mode: str  #: max, min, or empty if it is unknown which values are better
    cells: tuple[CellFacts, ...]


def read_sweep_facts(sweep: SweepDir, state: State) -> SweepFacts:
    """Return the facts of a sweep. Raises RunFolderError if `sweep.json` cannot be read."""
    content = sweep.read()
    runs = [RunDir(sweep.path.parent / cell["name"]) for cell in content["cells"]]
    monitor = checkpoint_config(runs)
    cells = [_read_cell(run, cell, monitor) for run, cell in zip(runs, content["cells"], strict=True)]
    metric, mode = monitor.monitor, str(monitor.monitor_mode)
    if all(cell.metric is None for cell in cells):  # no evaluated checkpoints, as in runs of scripts
        beats = [last_beat(run) for run in runs]
        metric = common_metric([beat.get("metrics", {}) for beat in beats], monitor.monitor)
        mode = mode if metric == monitor.monitor else "min" if "loss" in metric else ""
        cells = [
            replace(cell, metric=beat.get("metrics", {}).get(metric), step=beat.get("metric_steps", {}).get(metric))
            for cell, beat in zip(cells, beats, strict=True)
        ]
    return SweepFacts(state=state, keys=tuple(content["keys"]), monitor=metric, monitor_mode=mode, cells=tuple(cells))


def common_metric(logged: Sequence[Mapping[str, float]], monitor: str) -> str:
    """Return the metric by which to compare runs: the monitored one, or else one that most of them have logged.

    Args:
        logged: the metrics of each run.
    """
    counts = Counter(key for metrics in logged for key in metrics if is_read(key) and not is_hidden(key))
    most = [key for key, count in counts.items() if count == max(counts.values())]
    return monitor if monitor in counts else next(iter(ranked(most, monitor)), "")


def describe_sweep(facts: SweepFacts, *, max_chars: int) -> str:
    """Return the description of a sweep, at most `max_chars` long: the worst cells are left out first."""
    return _shortened(lambda num_kept: _sweep_sections(facts, num_kept), _KEPT_CELLS, max_chars)


def _sweep_sections(facts: SweepFacts, num_kept: int) -> Iterator[str]:
    yield _status(facts.state)
    cells = _ordered(facts)
    if cells and cells[0].metric is not None and facts.monitor_mode:
        best = cells[0]
        yield (
            f"Best cell: {_titled(best)} with **{escaped(facts.monitor)} = {best.metric:.6g}** at step {best.step:,}"
            f" ({'lowest' if facts.monitor_mode == 'min' else 'highest'} is best)"
        )
    head = ("Run", *map(escaped, facts.keys), *([escaped(facts.monitor), "Step"] if facts.monitor else []), "State")
    rows = []
    for cell in cells[:num_kept]:
        numbers = ["" if cell.metric is None else f"{cell.metric:.6g}", "" if cell.step is None else f"{cell.step:,}"]
        values = [escaped(text_of(cell.values.get(key)), 60) for key in facts.keys]
        rows.append([_titled(cell), *values, *(numbers if facts.monitor else []), cell.status])
    left_out = len(cells) - num_kept
    yield table(head, rows) + (f"\n\n{left_out} more cells" if left_out > 0 else "")


def _ordered(facts: SweepFacts) -> Sequence[CellFacts]:
    """Return the cells from the best to the worst if that is known, those without a value last."""
    sign = {"min": 1.0, "max": -1.0}.get(facts.monitor_mode, 0.0)
    return sorted(facts.cells, key=lambda cell: (cell.metric is None, sign * (cell.metric or 0.0)))


def _titled(cell: CellFacts) -> str:
    return link(escaped(cell.label, 100), cell.page) if cell.page else escaped(cell.label, 100)


def _read_cell(run: RunDir, cell: dict[str, Any], monitor: CheckpointConfig) -> CellFacts:
    best = best_checkpoint(read_checkpoints(run), monitor)
    ids, state = readable(lambda: read_json(run.mlflow)) or {}, readable(run.read_state)
    known = "unreadable" if (run.path / "state.json").exists() else "missing"
    return CellFacts(
        values=cell["values"],
        label=cell["label"],
        status=known if state is None else state.status,
        metric=None if best is None else best.metrics[monitor.monitor],
        step=None if best is None else best.step,
        page=run_page(str(ids.get("experiment_id", "")), str(ids.get("run_id", ""))),
    )
