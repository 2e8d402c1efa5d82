"""The setup of a run in words, and its description in Markdown for MLflow's UI."""

import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from hpcdist.config.redaction import REDACTED, is_redacted, redact_text
from hpcdist.config.training_schema import script_name
from hpcdist.errors import duration, few, plural
from hpcdist.review.facts import Progress, RunFacts
from hpcdist.review.ledger import SHORT_RUN, Ledger, cost_of, hours_text, percent
from hpcdist.review.markdown import (
    PATCH,
    TRAINING_PAGES,
    Markdown,
    clock,
    escaped,
    link,
    one_line,
    run_page,
    table,
    with_code,
)
from hpcdist.review.uncertainty import LEGEND
from hpcdist.run.config_origin import PLAIN_SCRIPT
from hpcdist.run.folder import DATABASE, RunDir, State, own_place
from hpcdist.run.sweeps import text_of
from hpcdist.run.training_record import DatasetRecord

if TYPE_CHECKING:
    from hpcdist.review.explain import Finding

#: Items of a list beyond these are counted.
_MAX_NODES = 8
_MAX_OVERRIDES = 30
#: Files with uncommitted changes that are named.
_MAX_CHANGED = 8
#: Characters of the value of an override.
_MAX_VALUE = 100


def setup_rows(facts: RunFacts, *, in_full: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield what ran, on what, from which code: names and lines, not escaped; overrides shortened unless `in_full`."""
    if facts.stored.problem:
        yield "Not read", [facts.stored.problem]
    if facts.config_name:
        profile = f", cluster profile {facts.cluster_name}" if facts.cluster_name else ""
        yield "Config", [facts.config_name + profile]
        changed = []
        for key, item in facts.overrides.items():
            after, before = text_of(item.after), text_of(item.before)
            if not in_full:
                after, before = one_line(after, _MAX_VALUE), one_line(before, _MAX_VALUE)
            changed.append(f"{key} = {after} (config: {before})")
        num_shown = len(changed) if in_full else _MAX_OVERRIDES
        yield "Overrides", [*changed[:num_shown], *more(len(changed) - num_shown)] or ["none"]
    if facts.like:
        known_as = f" (MLflow run {facts.like_run_id})" if facts.like_run_id else ""
        yield "Config and code of", [facts.like + known_as]
    if facts.sweep:
        yield "Sweep", [facts.sweep]
    yield "Trainer", [facts.trainer]
    size = "" if facts.num_parameters is None else f"{facts.num_parameters:,} trainable parameters"
    if facts.model or size:
        yield "Model", [", ".join(filter(None, (facts.model, size)))]
    if facts.datasets:
        yield "Data", [dataset_text(one) for one in facts.datasets]
    if code := _code(facts):
        yield "Code", [code]
    if image := _image(facts):
        yield "Image", [image]
    device = " on the CPU" if facts.devices == "CPU" else f" on {facts.devices}" if facts.devices else ""
    if facts.is_script and facts.attempts and facts.devices != "CPU":
        device = f" with {facts.devices} visible to rank 0" if facts.devices else " on devices that are not recorded"
    nodes = facts.attempts[-1].nodes if facts.attempts else ()
    where = f" on {_nodes(nodes)}" if nodes else ""
    earlier = [node for attempt in facts.attempts for node in attempt.nodes if node not in nodes]
    others = f" (earlier attempts: {_nodes(list(dict.fromkeys(earlier)))})" if earlier else ""
    job = f", Slurm job {facts.job_id}" if facts.job_id else ""
    yield "Ranks", [f"{facts.state.world_size}{device}{where}{others}{job}"]
    if facts.cpu:
        yield "CPU", [facts.cpu]
    if versions := _versions(facts):
        yield "Versions", [versions]
    started = facts.attempts[0].started if facts.attempts else None
    by = f" by {facts.user}" if facts.user else ""
    yield "Created" if started is None else "Started", [clock(started or facts.state.created) + by]
    yield "Folder", [f"{facts.host}:{facts.folder}" if facts.host else str(facts.folder)]


def dataset_text(data: DatasetRecord) -> str:
    number = "" if data.num_samples is None else f", {data.num_samples:,} samples"
    return f"{data.name} ({data.split}){number}" + (f", digest {data.digest}" if data.digest else "")


def more(number: int) -> list[str]:
    return [f"{number} more"] if number > 0 else []


def _nodes(nodes: Sequence[str]) -> str:
    return ", ".join([*nodes[:_MAX_NODES], *more(len(nodes) - _MAX_NODES)])


def _code(facts: RunFacts) -> str:
    # The commit of a shipped trainer is that of hpcdist's own work tree.
    parts = [f"hpcdist {facts.versions.get('hpcdist', '')}".rstrip()] if facts.stored.trainer is not None else []
    if facts.git_commit:
        commit = f"commit {facts.git_commit}"
        if facts.git_dirty:
            commit += " with uncommitted changes"
        if facts.changed_files:
            commit += f" of {few(facts.changed_files, _MAX_CHANGED)}"
        parts = [", ".join([*(f"{shipped} from a git work tree" for shipped in parts), commit])]
    elif facts.code_copied:
        why = f", since {facts.no_commit}" if facts.no_commit else ""
        parts.append(f"no commit{why}; the run folder has a copy in code/")
    if facts.code_digest:
        parts.append(f"digest {facts.code_digest} of the copied files")
    if facts.git_commit and (number := facts.num_untracked):
        parts.append(f"{number} file{'s' * (number > 1)} of the copy {'are' if number > 1 else 'is'} not in git")
    if facts.live_code:
        parts.append(f"imported without a copy, so later edits change the run: {_nodes(facts.live_code)}")
    return "; ".join(parts)


def _image(facts: RunFacts) -> str:
    words = [facts.image or "name not recorded"]
    if facts.image_digest:
        # Of an image file without a digest in its name.
        partial = " (of its size, first and last MiB)" if facts.image_digest.startswith("ends-") else ""
        words.append(f"digest {facts.image_digest}{partial}")
    elif facts.image_build:
        words.append(f"build {facts.image_build[:12]}")
    if facts.image or len(words) > 1:
        return ", ".join(words)
    return "none, without a container" if facts.stored.values.get("container.runtime") == "none" else ""


def _versions(facts: RunFacts) -> str:
    def listed(versions: Mapping[str, str]) -> str:
        names = {"hpcdist": "hpcdist", "torch": "torch", "python": "Python", "cuda": "CUDA", "driver": "NVIDIA driver"}
        return ", ".join(f"{name} {versions[key]}" for key, name in names.items() if versions.get(key))

    own, inside = listed(facts.versions), listed(facts.rank_versions)
    if not facts.rank_python:
        return own
    place = "in the container" if facts.rank_python == "container" else "in the environment of the ranks"
    texts = [f"{inside} {place}" if inside else f"those {place} are recorded when the job starts"]
    return "; ".join([*texts, *([f"{own} on {facts.host}"] if own else [])])


#: Columns of `attempt_rows`.
ATTEMPT_COLUMNS = ("Attempt", "Start (UTC)", "Duration", "Nodes", "Steps", "Steps lost", "End", "Cause")


def attempt_rows(facts: RunFacts, *, in_full: bool = False) -> list[tuple[str, ...]]:
    """Return a row for each attempt, not escaped; the nodes shortened unless `in_full`."""
    return [
        (
            str(one.number),
            clock(one.started).removesuffix(" UTC"),
            "" if one.ended is None else duration(max(0.0, one.ended - one.started)),
            ", ".join(one.nodes) if in_full else _nodes(one.nodes),
            ("not reported" if facts.is_script else "")
            if one.last_step is None
            else f"{(one.first_step or 0) + 1:,} to {one.last_step:,}"
            if one.last_step > (one.first_step or 0)
            else "none",
            "" if one.steps_lost is None else f"{one.steps_lost:,}",
            one.status,
            one.cause,
        )
        for one in facts.attempts
    ]


#: Maximum length of a line of a command. MLflow's page of a run does not wrap code: a long line moves the section
#: `About this run` out of the window.
MAX_LINE = 80
#: A word of a command with its quotes; an option together with its value.
_WORD = re.compile(r"""(?:--[\w-]+ (?=[^-]))?(?:'[^']*'|"[^"]*"|\\.|\S)+""")


def run_again_command(facts: RunFacts) -> str:
    """Return the command that starts the same config in the same store, with `***` for secrets; empty if unknown."""
    if not facts.config_name or not facts.overrides_known:
        words = facts.command
    else:
        verb = "submit" if facts.launcher == "slurm" else "run"
        profile = ["--cluster", facts.cluster_name] if facts.cluster_name else []
        changed = [f"{key}={text_of(item.after)}" for key, item in facts.overrides.items()]
        named, script = [facts.config_name], []
        if facts.config_name == PLAIN_SCRIPT:
            named, script = [], facts.stored.config.trainer.script
            if script_name(script).removesuffix(".py") != facts.experiment:
                changed.insert(0, f"experiment={facts.experiment}")
        words = shlex.join(["hpcdist", verb, *named, *profile, *changed, *_location(facts), *script])
    return _in_folder(facts, words)


def rerun_command(facts: RunFacts) -> str:
    """Return the command that repeats a run with its own config and code, and compares both."""
    return shlex.join(["hpcdist", "rerun", str(facts.folder)])


def resume_command(facts: RunFacts) -> str:
    """Return the command that continues a run that was stopped, from any folder; empty for other runs."""
    return _resume_command(facts) if facts.state.status in ("stopped", "cancelled") else ""


def _resume_command(facts: RunFacts) -> str:
    return f"hpcdist resume {shlex.quote(str(facts.folder))}"


def wrapped(command: str) -> str:
    if len(command) <= MAX_LINE:
        return command
    lines = [""]
    for word in _WORD.findall(command):
        if lines[-1].endswith(" &&"):  # the shell reads on without a backslash
            lines.append(word)
        elif lines[-1] and len(lines[-1]) + len(word) + len("  \\") > MAX_LINE and word != "&&":
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


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


#: Rows of a table beyond these are left out, in the middle of the attempts.
_MAX_METRICS = 12
_MAX_CHECKPOINTS = 12
_KEPT_ATTEMPTS = (1000, 60, 30, 20, 10, 6, 4, 2)
#: Age of a heartbeat from which the description names it first: ranks beat at each step, at most once a second.
_SILENT_S = 120.0


def describe(
    facts: RunFacts, ledger: Ledger, finding: "Finding | None" = None, *, max_chars: int, now: float | None = None
) -> str:
    """Return the description of a run, at most `max_chars` long: the attempts in the middle are left out first."""
    when = time.time() if now is None else now
    return fitted(lambda num_kept: _sections(facts, ledger, finding, num_kept, when), _KEPT_ATTEMPTS, max_chars)


def fitted(sections: Callable[[int], Iterator[str]], kept: Sequence[int], max_chars: int) -> str:
    """Return the sections with the first number of rows in `kept` that fits into `max_chars`, else cut off."""
    for num_kept in kept:
        if len(text := "\n\n".join(sections(num_kept))) <= max_chars:
            return text
    return text[: max_chars - 2].rpartition("\n")[0] + "\n…" if max_chars > 2 else ""


def headline(facts: RunFacts, ledger: Ledger) -> str:
    """Return the result of a run in one line, not escaped: best value, cost, interruptions.

    Facts that a run does not have are left out; without any the line is empty.
    """
    words = []
    if facts.best is not None:
        value = f"{facts.monitor} {facts.best_text(f'{facts.best_value:.6g}')}"
        words.append(f"{value} so far" if facts.is_live else value)
    if ledger.entries:
        words.append(cost_of([ledger]))
    early = [one for one in facts.attempts if one.status not in ("running", "finished")]
    num_killed = sum(one.failure == "killed" for one in early)
    num_others = len(early) - num_killed
    num_lost = sum(one.steps_lost or 0 for one in facts.attempts)
    losses = []
    if num_killed:
        losses.append(f"{plural(num_killed, 'rank')} killed")
    if num_others:
        losses.append(plural(num_others, "interruption"))
    if num_lost:
        losses.append(f"{plural(num_lost, 'step')} lost")
    if losses:
        words.append(", ".join(losses))
    return " · ".join(words)


def status_line(state: State) -> str:
    return with_code(state.sentence, 1000).replace(state.status, f"**{state.status}**", 1)


def _sections(
    facts: RunFacts, ledger: Ledger, finding: "Finding | None", num_attempts: int, now: float
) -> Iterator[str]:
    # MLflow shows only the first lines until a click: the result, or the cause of a bad end.
    first, _, rest = headline(facts, ledger).partition(" · ")
    lines = [f"**{escaped(first)}**" + (f" · {escaped(rest, 1000)}" if rest else "")] if first else []
    status = [status_line(facts.state)]
    if finding and finding.fix:  # the fix of an exception names the line of the code, and its cause is the status
        # The command in the fix may be relative to the folder of the supervisor, which is not the reader's.
        fix = finding.fix.replace(RunDir(facts.folder).resume_command, _resume_command(facts))
        status.append(with_code(": ".join(filter(None, ("" if finding.code else finding.cause, fix))), 1000))
    if command := resume_command(facts):
        status.append(with_code(f"`{command}` continues it", 1000))
    yield from [*status, *lines] if facts.state.status in ("failed", "stopped", "cancelled") else [*lines, *status]
    if facts.progress is not None:
        yield _progress(facts, facts.progress, now)
    elif facts.is_live:
        is_running = facts.state.status == "running"
        yield f"State at {clock(now)}" + (": no step is done yet in this attempt." if is_running else ".")
    yield "### Setup\n\n" + setup_table(setup_rows(facts))
    if facts.has_patch:
        yield link("uncommitted changes", _artifact(facts, PATCH))
    if result := list(_result(facts)):
        yield "### Result\n\n" + "\n".join(f"- {line}" for line in result)
    if facts.attempts:
        yield "### Attempts\n\n" + _attempts(facts, num_attempts)
    if ledger.entries:
        yield "### Cost\n\n" + cost_text(ledger)
    yield from _load(facts)
    if command := run_again_command(facts):
        secrets = " Replace each \\*\\*\\* by the secret, which is not recorded." if REDACTED in command else ""
        yield (
            "### Run it again\n\nThe whole command, with all overrides and the code in that folder today:"
            f"{secrets}\n\n{_block(command, 'bash')}"
        )
    yield (
        "With the config and the code of this run, and a comparison of the logged values, where its folder is:\n\n"
        + _block(rerun_command(facts), "bash")
    )


def setup_table(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    cells = [
        (Markdown(f"**{name}**"), Markdown("<br>".join(escaped(one, 600) for one in lines))) for name, lines in rows
    ]
    return table(("", ""), cells)


def _artifact(facts: RunFacts, path: str) -> str:
    return run_page(facts.experiment_id, facts.run_id, path)


def _block(text: str, language: str) -> str:
    """Return code as a block, without passwords, with a command on several lines."""
    text = redact_text(text)  # passwords first: they are not found in divided words
    text = wrapped(text) if language == "bash" else text
    return f"```{language}\n{text.replace('```', chr(39) * 3)}\n```"


def _progress(facts: RunFacts, progress: Progress, now: float) -> str:
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
    if facts.best is not None:
        direction = "lowest" if facts.monitor_mode == "min" else "highest"
        yield f"**{escaped(facts.monitor)} = {facts.best_value:.6g}** at step {facts.best.step:,} (best = {direction})"
        artifact = f"; {link('uploaded', _artifact(facts, 'checkpoints/best'))}" if facts.has_uploaded_best else ""
        yield f"best checkpoint: {escaped(str(facts.best.path))}{artifact}"
        yield from [escaped(LEGEND)] * (facts.best_text("") != "")
    if facts.checkpoints:
        kept = []
        for one in facts.checkpoints[-_MAX_CHECKPOINTS:]:
            value = one.metrics.get(facts.monitor)
            kept.append(f"step {one.step:,}" + ("" if value is None else f" ({value:.6g})"))
        page = f"#/experiments/{quote(facts.experiment_id)}/models?{TRAINING_PAGES}"
        models = f"; {link('those of all runs', page)}" if facts.experiment_id else ""
        yield f"kept checkpoints: {', '.join(kept)}{models}"
    if files := facts.script_files:
        shown = [escaped(name) for name in files[-_MAX_CHECKPOINTS:]]
        yield f"files in the checkpoint folder: {', '.join([*more(len(files) - len(shown)), *shown])}"
    # By step: training metrics are logged in intervals, evaluations apart.
    metrics = [name for name in facts.metrics if not name.startswith(("system/", "time/"))]
    by_step: dict[int | None, list[str]] = {}
    for name in metrics[:_MAX_METRICS]:
        text = f"{escaped(name)} {_number(facts.metrics[name])}"
        by_step.setdefault(facts.metric_steps.get(name), []).append(text)
    for step, values in by_step.items():
        yield f"last values{'' if step is None else f' at step {step:,}'}: {', '.join(values)}"
    yield from (f"{others} metrics" for others in more(len(metrics) - _MAX_METRICS))
    for name, speed in facts.speeds.items():
        yield f"median of {escaped(name)} over its logged values: {_number(speed)}"


def _number(value: float) -> str:
    """Return a number without an exponent if it is large: `358,176`, `0.51165`."""
    return f"{value:,.0f}" if 1e5 <= abs(value) < 1e15 else f"{value:.5g}"


def _attempts(facts: RunFacts, num_kept: int) -> str:
    rows: list[tuple[str, ...]] = []
    for row, attempt in zip(attempt_rows(facts), facts.attempts, strict=True):
        logs = link("logs", _artifact(facts, f"logs/attempt-{attempt.number:03d}"))
        rows.append((*row[:-1], with_code(row[-1], 200), logs))
    if (left_out := len(rows) - num_kept) > 0:
        first = (num_kept + 1) // 2
        rows[first : first + left_out] = [("…", f"{left_out} more attempts", *[""] * 7)]
    text = table((*ATTEMPT_COLUMNS, "Logs"), rows)
    if facts.is_script and len(facts.attempts) > 1:
        text += "\n\nSteps are those that the script has reported."
    if report := _artifact(facts, "report.html"):
        text += f"\n\n{link('report.html', report)}: timeline, faults with cause and fix, charts."
    return text


def _load(facts: RunFacts) -> Iterator[str]:
    """Yield the commands that load the final model, and the best (else newest) checkpoint if it has other weights."""
    last_step = facts.attempts[-1].last_step if facts.attempts else None
    checkpoint = facts.best or (facts.checkpoints[-1] if facts.checkpoints else None)
    has_final = facts.has_model and bool(facts.run_id)
    if not has_final and checkpoint is None:
        return
    yield "### Load the model"
    is_final = has_final and checkpoint is not None and checkpoint.step == last_step
    kind = "best" if facts.best is not None else "newest"
    if has_final:
        words = ["The final model", "" if last_step is None else f"after step {last_step:,}"]
        words.append(f"the same as the {kind} checkpoint" if is_final else "")
        code = f'import mlflow\n\nmodel = mlflow.pytorch.load_model("runs:/{facts.run_id}/model")'
        yield (
            f"{', '.join(filter(None, words))}, from MLflow, with `MLFLOW_TRACKING_URI` as the address of this store;"
            f" it needs no hpcdist unless the code of the model does:\n\n{_block(code, 'python')}"
        )
    if checkpoint is not None and not is_final:
        value = f", {escaped(facts.monitor)} = {facts.best_value:.6g}" if facts.best is not None else ""
        if checkpoint is facts.best and facts.has_uploaded_best:
            source, first = "from MLflow", "import mlflow\n"
            last = (
                f'uri = "runs:/{facts.run_id}/checkpoints/best"\n'
                "state_dict = load_weights(mlflow.artifacts.download_artifacts(uri))"
            )
        else:
            source, first = "from its folder", ""
            last = f"folder = {str(checkpoint.path)!r}\nstate_dict = load_weights(folder)"
        code = f"{first}from hpcdist.checkpoint.state import load_weights\n\n{last}"
        yield f"The {kind} checkpoint, step {checkpoint.step:,}{value}, {source}:\n\n" + _block(code, "python")


def cost_text(ledger: Ledger) -> str:
    useful = "goodput not measured, since the script reported no step in at least one attempt"
    if ledger.is_measured:
        useful = f"of which {percent(ledger.goodput)} were useful compute (goodput)"
        useful += f"; {SHORT_RUN}: start and end dominate the shares" if ledger.is_short else ""
    words = [f"**{hours_text(ledger.allocated_s)} {ledger.unit}-hours** allocated, {useful}"]
    if ledger.queue_s:
        words.append(f"{duration(ledger.queue_s)} in the queue")
    words += [ledger.energy_text] if ledger.energy_text else []
    words += [f"{name} {escaped(text)}" for name, text in ledger.costs.items()]
    rows = [(*row[:-1], with_code(row[-1], 300)) for row in ledger.rows()]
    return "; ".join(words) + "\n\n" + table(("Cause", f"{ledger.unit}-hours", "Share", "Meaning"), rows)
