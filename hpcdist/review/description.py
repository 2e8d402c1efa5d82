"""The description of a run in MLflow: its facts and its costs as Markdown."""

from __future__ import annotations

import time
from collections.abc import Iterator

from hpcdist.config.redaction import REDACTED, redact_text
from hpcdist.review.attempts import AttemptFacts
from hpcdist.review.causes import CAUSES, MEANINGS
from hpcdist.review.checkpoints import CheckpointFacts
from hpcdist.review.commands import load_checkpoint, load_final_model, rerun_command, run_again_command, wrapped
from hpcdist.review.facts import RunFacts
from hpcdist.review.ledger import Ledger, percent
from hpcdist.review.markdown import code_block, escaped, link, models_page, table
from hpcdist.review.setup_section import setup_rows
from hpcdist.review.text import artifact_page, clock, duration, more, nodes_text

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
    now = time.time() if now is None else now
    text = ""
    for num_kept in _KEPT_ATTEMPTS:
        text = "\n\n".join(_sections(facts, ledger, num_kept, now))
        if len(text) <= max_chars:
            return text
    return text[: max_chars - 2].rpartition("\n")[0] + "\n…" if max_chars > 2 else ""


def _sections(facts: RunFacts, ledger: Ledger, num_attempts: int, now: float) -> Iterator[str]:
    state = facts.state
    yield escaped(state.sentence, 1000).replace(state.status, f"**{state.status}**", 1)
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
        yield f"### Run it again\n\n{_run_again(command)}\n\n" + _shell(command)
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


def _run_again(command: str) -> str:
    """Return a sentence about the command that runs it again."""
    secrets = " Replace each \\*\\*\\* by the secret, which is not recorded." if REDACTED in command else ""
    return f"The whole command, with all overrides and the code in that folder today:{secrets}"


_UNMEASURED = "goodput not measured, since the script reports no steps"


def _cost(ledger: Ledger) -> str:
    hours = ledger.allocated_s / 3600
    causes = ledger.by(lambda entry: entry.cause)
    lines = [
        f"**{hours:.3g} {ledger.unit}-hours** allocated, "
        + (f"of which {percent(ledger.goodput)} were useful compute (goodput)" if ledger.is_measured else _UNMEASURED)
    ]
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
