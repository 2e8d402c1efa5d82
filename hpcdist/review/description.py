"""The setup of a run in words, and its description in Markdown for MLflow's UI."""

import re
import shlex
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from hpcdist.config.redaction import redact_text
from hpcdist.errors import duration, few, plural
from hpcdist.review import markdown
from hpcdist.review.facts import AttemptFacts, CheckpointFacts, LiveProgress, RunFacts, lost_text
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
from hpcdist.review.svg import number
from hpcdist.review.uncertainty import RUN_LEGEND
from hpcdist.run.figures import Text
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.sweeps import text_of
from hpcdist.run.training_record import DatasetRecord

if TYPE_CHECKING:
    from hpcdist.review.explain import Finding

#: Items of a list that are shown; of further ones only the number is.
_MAX_NODES = 8
_MAX_OVERRIDES = 30
#: Files with uncommitted changes that are named.
_MAX_CHANGED = 8
#: Lines of a text that a trainer has written.
_MAX_SAMPLE_LINES = 20
_TAB_SIZE = 4
#: Shown for a character that is not printed.
_UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"
#: Characters of the value of an override.
_MAX_VALUE = 100


def setup_rows(facts: RunFacts, *, in_full: bool = False) -> Iterator[tuple[str, list[str]]]:
    """Yield what ran, on what, from which code: names and lines, not escaped; overrides shortened unless `in_full`."""
    if facts.stored.problem:
        yield "Not read", [facts.stored.problem]
    if facts.config_name:
        config = facts.config_name
        if facts.cluster_name:
            config += f", cluster profile {facts.cluster_name}"
        yield "Config", [config]
        yield "Overrides", _overrides(facts, in_full=in_full) or ["none"]
    if facts.like:
        like = facts.like
        if facts.like_run_id:
            like += f" (MLflow run {facts.like_run_id})"
        yield "Config and code of", [like]
    if facts.sweep:
        yield "Sweep", [facts.sweep]
    yield "Trainer", [facts.trainer]
    model = _model(facts)
    if model:
        yield "Model", [model]
    if facts.datasets:
        yield "Data", [dataset_text(data) for data in facts.datasets]
    code = _code(facts)
    if code:
        yield "Code", [code]
    image = _image(facts)
    if image:
        yield "Image", [image]
    yield "Ranks", [_ranks(facts)]
    if facts.cpu:
        yield "CPU", [facts.cpu]
    versions = _versions(facts)
    if versions:
        yield "Versions", [versions]
    by = f" by {facts.user}" if facts.user else ""
    if facts.attempts:
        yield "Started", [clock(facts.attempts[0].started or facts.state.created) + by]
    else:
        yield "Created", [clock(facts.state.created) + by]
    folder = str(facts.folder)
    if facts.host:
        folder = f"{facts.host}:{folder}"
    yield "Folder", [folder]


def _overrides(facts: RunFacts, *, in_full: bool) -> list[str]:
    lines = []
    for key, override in facts.overrides.items():
        after = text_of(override.after)
        before = text_of(override.before)
        if not in_full:
            after = one_line(after, _MAX_VALUE)
            before = one_line(before, _MAX_VALUE)
        lines.append(f"{key} = {after} (config: {before})")
    if in_full:
        return lines
    return [*lines[:_MAX_OVERRIDES], *more(len(lines) - _MAX_OVERRIDES)]


def _model(facts: RunFacts) -> str:
    parts = [facts.model]
    if facts.num_parameters is not None:
        parts.append(f"{facts.num_parameters:,} trainable parameters")
    return ", ".join(filter(None, parts))


def _ranks(facts: RunFacts) -> str:
    """Return the number of ranks and where they ran: devices, nodes and job."""
    text = f"{facts.state.world_size}{_devices(facts)}"
    if facts.nodes:
        text += f" on {_nodes(facts.nodes)}"
    earlier = [node for attempt in facts.attempts for node in attempt.nodes if node not in facts.nodes]
    if earlier:
        text += f" (earlier attempts: {_nodes(list(dict.fromkeys(earlier)))})"
    if facts.job_id:
        text += f", Slurm job {facts.job_id}"
    return text


def _devices(facts: RunFacts) -> str:
    if facts.devices == "CPU":
        return " on the CPU"
    if facts.is_script and facts.attempts:
        # Only the script knows which of the visible devices it uses.
        if facts.devices:
            return f" with {facts.devices} visible to rank 0"
        return " on devices that are not recorded"
    if facts.devices:
        return f" on {facts.devices}"
    return ""


def dataset_text(data: DatasetRecord) -> str:
    """Return a dataset as `digits (test), 360 samples, digest 1a2b3c`."""
    text = f"{data.name} ({data.split})"
    if data.num_samples is not None:
        text += f", {data.num_samples:,} samples"
    if data.digest:
        text += f", digest {data.digest}"
    return text


def more(number: int) -> list[str]:
    """Return the last item of a shortened list, `3 more`; none if nothing is left out."""
    if number <= 0:
        return []
    return [f"{number} more"]


def _nodes(nodes: Sequence[str]) -> str:
    return ", ".join([*nodes[:_MAX_NODES], *more(len(nodes) - _MAX_NODES)])


def _code(facts: RunFacts) -> str:
    parts = []
    if facts.stored.trainer is not None:
        parts.append(f"hpcdist {facts.versions.get('hpcdist', '')}".rstrip())
    if facts.git_commit:
        commit = f"commit {facts.git_commit}"
        if facts.git_dirty:
            commit += " with uncommitted changes"
        if facts.changed_files:
            commit += f" of {few(facts.changed_files, _MAX_CHANGED)}"
        # The commit of a shipped trainer is that of hpcdist's own work tree.
        shipped = [f"{version} from a git work tree" for version in parts]
        parts = [", ".join([*shipped, commit])]
    elif facts.code_copied:
        commit = "no commit"
        if facts.no_commit:
            commit += f", since {facts.no_commit}"
        parts.append(f"{commit}; the run folder has a copy in code/")
    if facts.code_digest:
        parts.append(f"digest {facts.code_digest} of the copied files")
    if facts.git_commit and facts.num_untracked == 1:
        parts.append("1 file of the copy is not in git")
    elif facts.git_commit and facts.num_untracked:
        parts.append(f"{facts.num_untracked} files of the copy are not in git")
    if facts.live_code:
        parts.append(f"imported without a copy, so later edits change the run: {_nodes(facts.live_code)}")
    return "; ".join(parts)


def _image(facts: RunFacts) -> str:
    words = [facts.image or "name not recorded"]
    if facts.image_digest:
        digest = f"digest {facts.image_digest}"
        if facts.image_digest.startswith("ends-"):
            # That of an image file without a digest in its name.
            digest += " (of its size, first and last MiB)"
        words.append(digest)
    elif facts.image_build:
        words.append(f"build {facts.image_build[:12]}")
    if facts.image or len(words) > 1:
        return ", ".join(words)
    if facts.stored.values.get("container.runtime") == "none":
        return "none, without a container"
    return ""


#: Names of the packages in `versions`, in the order in which they are shown.
_VERSION_NAMES = {
    "hpcdist": "hpcdist",
    "torch": "torch",
    "python": "Python",
    "cuda": "CUDA",
    "driver": "NVIDIA driver",
}


def _versions(facts: RunFacts) -> str:
    on_host = _listed_versions(facts.versions)
    of_ranks = _listed_versions(facts.rank_versions)
    if not facts.rank_python:
        return on_host
    place = "in the container" if facts.rank_python == "container" else "in the environment of the ranks"
    text = f"{of_ranks} {place}" if of_ranks else f"those {place} are recorded when the job starts"
    if on_host:
        text += f"; {on_host} on {facts.host}"
    return text


def _listed_versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {versions[key]}" for key, name in _VERSION_NAMES.items() if versions.get(key))


#: Columns of `attempt_rows`.
ATTEMPT_COLUMNS = ("Attempt", "Start (UTC)", "Duration", "Nodes", "Steps", "Steps lost", "End", "Cause")


def attempt_rows(facts: RunFacts, *, in_full: bool = False) -> list[tuple[str, ...]]:
    """Return a row for each attempt, not escaped; the nodes shortened unless `in_full`.

    The cause of the last one is empty if it is the reason of the run, with which its page begins.
    """
    rows: list[tuple[str, ...]] = []
    for attempt in facts.attempts:
        cause = attempt.cause
        if attempt is facts.attempts[-1] and cause == facts.state.reason:
            cause = ""
        spent = "" if attempt.ended is None else duration(max(0.0, attempt.ended - attempt.started))
        nodes = ", ".join(attempt.nodes) if in_full else _nodes(attempt.nodes)
        steps_lost = "" if attempt.steps_lost is None else f"{attempt.steps_lost:,}"
        rows.append(
            (
                str(attempt.number),
                clock(attempt.started).removesuffix(" UTC"),
                spent,
                nodes,
                _steps(attempt, is_script=facts.is_script),
                steps_lost,
                attempt.end,
                cause,
            )
        )
    return rows


def _steps(attempt: AttemptFacts, *, is_script: bool) -> str:
    """Return the steps of an attempt as `101 to 200`."""
    if attempt.last_step is None:
        return "not reported" if is_script else ""
    num_before = attempt.first_step
    if num_before is None:
        return f"to {attempt.last_step:,}"
    if attempt.last_step <= num_before:
        return "none"
    return f"{num_before + 1:,} to {attempt.last_step:,}"


#: Maximum length of a line of a command. MLflow's page of a run does not wrap code: a long line moves the section
#: `About this run` out of the window.
MAX_LINE = 80
#: A word of a command with its quotes; an option together with its value.
_WORD = re.compile(r"""(?:--[\w-]+ (?=[^-]))?(?:'[^']*'|"[^"]*"|\\.|\S)+""")


def start_command(facts: RunFacts) -> str:
    """Return the command that created the run, with the folder in which it was given; empty if it is not recorded."""
    if not facts.command or not facts.cwd:
        return facts.command
    return f"cd {shlex.quote(facts.cwd)} && {facts.command}"


def rerun_command(facts: RunFacts) -> str:
    """Return the command that repeats a run with its own config and code, and compares both."""
    return shlex.join(["hpcdist", "rerun", str(facts.folder)])


def log_command(facts: RunFacts, attempt: int, rank: int) -> str:
    """Return the command that prints the log of a rank, from any folder."""
    return shlex.join(["hpcdist", "logs", str(facts.folder), "--attempt", str(attempt), "--rank", str(rank)])


def resume_command(facts: RunFacts) -> str:
    """Return the command that continues a run that was stopped, from any folder; empty for other runs."""
    if facts.state.status not in ("stopped", "cancelled"):
        return ""
    return _resume_command(facts)


def _resume_command(facts: RunFacts) -> str:
    return f"hpcdist resume {shlex.quote(str(facts.folder))}"


def wrapped(command: str) -> str:
    """Return a shell command divided into lines of at most MAX_LINE characters, as far as its words are so short."""
    if len(command) <= MAX_LINE:
        return command
    lines = [""]
    for word in _WORD.findall(command):
        if not lines[-1]:
            lines[-1] = word
        elif lines[-1].endswith(" &&"):  # the shell reads on without a backslash
            lines.append(word)
        elif len(lines[-1]) + len(word) + len("  \\") > MAX_LINE and word != "&&":
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


#: Files of a script that are named.
_MAX_FILES = 12
#: Rows of the table of attempts that are tried until a description fits; those in the middle are left out.
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
        text = "\n\n".join(sections(num_kept))
        if len(text) <= max_chars:
            return text
    ending = "\n…"
    if max_chars <= len(ending):
        return ""
    return text[: max_chars - len(ending)].rpartition("\n")[0] + ending


def headline(facts: RunFacts, ledger: Ledger) -> str:
    """Return the result of a run in one line, not escaped: best or last value, cost, interruptions.

    Facts that a run does not have are left out; without any the line is empty.
    """
    parts = []
    if facts.best is not None:
        best = f"{facts.monitor} {facts.best_at_step}"
        if facts.is_live:
            best += " so far"
        parts.append(best)
    elif facts.logged is not None:
        parts.append(facts.logged.text)
    if ledger.entries:
        parts.append(cost_of([ledger]))
    interruptions = _interruptions(facts)
    if interruptions:
        parts.append(interruptions)
    return " · ".join(parts)


def _interruptions(facts: RunFacts) -> str:
    """Return the numbers of killed ranks, failures, other interruptions and lost steps, without those that are 0."""
    ended_early = [attempt for attempt in facts.attempts if attempt.status not in ("running", "finished")]
    num_killed = sum(attempt.failure == "killed" for attempt in ended_early)
    num_bugs = sum(attempt.is_bug for attempt in ended_early)
    num_others = len(ended_early) - num_killed - num_bugs
    num_lost = lost_text(facts.attempts)
    parts = []
    if num_killed:
        parts.append(f"{plural(num_killed, 'rank')} killed")
    if num_bugs:
        parts.append(plural(num_bugs, "failure"))
    if num_others:
        parts.append(plural(num_others, "interruption"))
    if num_lost not in ("", "0", "at least 0"):
        noun = "step" if num_lost == "1" else "steps"
        parts.append(f"{num_lost} {noun} lost")
    return ", ".join(parts)


def status_line(state: State) -> str:
    """Return status and reason as Markdown, the status in bold type."""
    return with_code(state.sentence, 1000).replace(state.status, f"**{state.status}**", 1)


def _sections(
    facts: RunFacts, ledger: Ledger, finding: "Finding | None", num_attempts: int, now: float
) -> Iterator[str]:
    yield from _first_lines(facts, ledger, finding)
    if finding and finding.memory:
        yield _block("\n".join(finding.memory), "text")
    if facts.state.status == "failed" and facts.last_traceback:
        yield _block("\n".join(facts.last_traceback), "text")
        logs = _artifact(facts, f"logs/attempt-{facts.attempts[-1].number:03d}")
        yield link("logs of all ranks", logs)
    if facts.progress is not None:
        yield _progress(facts, facts.progress, now)
    elif facts.state.status == "running":
        yield f"State at {clock(now)}: no step is done yet in this attempt."
    else:
        yield state_at(facts.state, now)
    if facts.is_live and facts.launcher == "slurm" and facts.tracking_uri.startswith("sqlite:"):
        yield _NOT_FROM_THE_JOB
    yield "### Setup\n\n" + setup_table(setup_rows(facts))
    if facts.has_patch:
        yield link("uncommitted changes", _artifact(facts, PATCH))
    result = list(_result(facts))
    if result:
        yield "### Result\n\n" + "\n".join(f"- {line}" for line in result)
    if facts.texts:
        yield "### Sample\n\n" + "\n\n".join(_sample(text) for text in facts.texts)
    if facts.attempts:
        yield "### Attempts\n\n" + _attempts(facts, num_attempts)
    if ledger.entries:
        yield "### Cost\n\n" + cost_text(ledger)
    yield from _load(facts)
    yield (
        "### Run it again\n\nWith its config and its code, and a comparison of the logged values, where its folder is:"
        f"\n\n{_block(rerun_command(facts), 'bash')}"
    )
    command = start_command(facts)
    if command:
        yield f"The command that started it:\n\n{_block(command, 'bash')}"


def _first_lines(facts: RunFacts, ledger: Ledger, finding: "Finding | None") -> list[str]:
    """Return status and result, after a bad end its cause first: until a click, MLflow shows only the first lines."""
    result = []
    first, _, rest = headline(facts, ledger).partition(" · ")
    if first:
        line = f"**{escaped(first)}**"
        if rest:
            line += f" · {escaped(rest, 1000)}"
        result.append(line)
    status = [status_line(facts.state)]
    if finding and finding.fix:
        # The command in the fix may be relative to the folder of the supervisor, which is not the reader's.
        fix = finding.fix.replace(RunDir(facts.folder).resume_command, _resume_command(facts))
        # The fix of an exception names the line of the code, and its cause is the status.
        if finding.cause and not finding.code:
            fix = f"{finding.cause}: {fix}"
        status.append(with_code(fix, 1000))
    command = resume_command(facts)
    if command:
        status.append(with_code(f"`{command}` continues it", 1000))
    if facts.state.status in ("failed", "stopped", "cancelled"):
        return status + result
    return result + status


def _sample(figure: Text) -> str:
    """Return a text that a trainer has written as a block of code, in which nothing of it is Markdown or HTML."""
    lines: list[str] = []
    for line in markdown.text_of(figure.text).splitlines():
        # A character such as NUL, which some databases refuse, or one that reverses the order of those after it.
        shown = "".join(char if char.isprintable() else _UNPRINTABLE for char in line.expandtabs(_TAB_SIZE))
        lines += textwrap.wrap(shown, MAX_LINE, drop_whitespace=False) or [""]
    if len(lines) > _MAX_SAMPLE_LINES:
        lines = [*lines[:_MAX_SAMPLE_LINES], "…"]
    text = "\n".join(lines)
    return f"{escaped(figure.title)}, step {figure.step:,}:\n\n{_block(text, 'text')}"


#: Several hosts cannot write to a database on a shared file system.
_NOT_FROM_THE_JOB = (
    "The job cannot write to this database: the page follows the run while `hpcdist ui` or `hpcdist follow` is open,"
    " and after `hpcdist sync`."
)


def state_at(state: State, now: float) -> str:
    """Return as of when a page shows a run or sweep: the time of its end, or that of the page while it has not ended.

    Args:
        now: the time of the page, in seconds since the epoch.
    """
    if state.status in ENDED and state.ended is not None:
        return f"State at {clock(state.ended)}, when it ended."
    return f"State at {clock(now)}."


def setup_table(rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return `setup_rows` as a table in Markdown."""
    cells = []
    for name, lines in rows:
        text = "<br>".join(escaped(line, 600) for line in lines)
        cells.append((Markdown(f"**{name}**"), Markdown(text)))
    return table(("", ""), cells)


def _artifact(facts: RunFacts, path: str) -> str:
    return run_page(facts.experiment_id, facts.run_id, path)


def _block(text: str, language: str) -> str:
    """Return code as a block, without passwords, with a command on several lines."""
    text = redact_text(text)  # passwords first: they are not found in divided words
    if language == "bash":
        text = wrapped(text)
    text = text.replace("```", "'''")
    return f"```{language}\n{text}\n```"


def _progress(facts: RunFacts, progress: LiveProgress, now: float) -> str:
    age_s = max(0.0, now - progress.seen)
    is_silent = age_s >= _SILENT_S
    step = f"step {progress.step:,}"
    if progress.total_steps:
        percentage = 100 * progress.step / progress.total_steps
        step += f" of {progress.total_steps:,} ({percentage:.0f} %)"
    parts = [step, f"last heartbeat {duration(age_s)} before"]
    if progress.eta is not None and not is_silent:
        parts.append(f"ends in about {_until(progress.eta, now)}")
    parts.append(_last_save(facts))
    if progress.time_limit is not None:
        parts.append(f"time limit in {_until(progress.time_limit, now)}")
    text = f"Progress at {clock(now)}: {'; '.join(parts)}."
    if is_silent:
        warning = f"**No heartbeat for {duration(age_s)}**: a long step, a hang, or a node that has failed."
        text = f"{warning}\n\n{text}"
    return text


def _until(time_s: float, now: float) -> str:
    """Return the time until a point in time, and that point: `5 min 3 s (2026-11-22 12:30 UTC)`."""
    return f"{duration(max(0.0, time_s - now))} ({clock(time_s)})"


def _last_save(facts: RunFacts) -> str:
    if facts.checkpoints:
        last = facts.checkpoints[-1]
        text = f"last save at step {last.step:,}"
        if last.created is not None:
            text += f" ({clock(last.created)})"
        return text
    if facts.script_files:
        return f"last save {facts.script_files[-1]}"
    return "nothing is saved yet"


def _result(facts: RunFacts) -> Iterator[str]:
    if facts.best is not None:
        direction = "lowest" if facts.monitor_mode == "min" else "highest"
        line = f"best checkpoint, with the {direction} {escaped(facts.monitor)}: {escaped(str(facts.best.path))}"
        if facts.has_uploaded_best:
            line += f"; {link('uploaded', _artifact(facts, 'checkpoints/best'))}"
        yield line
        if "±" in facts.best_text:
            yield escaped(RUN_LEGEND)
    if facts.checkpoints and facts.experiment_id:
        page = f"#/experiments/{quote(facts.experiment_id)}/models?{TRAINING_PAGES}"
        yield link("checkpoints of all runs with their values", page)
    if facts.script_files:
        names = [escaped(name) for name in facts.script_files[-_MAX_FILES:]]
        left_out = more(len(facts.script_files) - len(names))
        yield f"files in the checkpoint folder: {', '.join([*left_out, *names])}"
    for name, speed in facts.speeds.items():
        yield f"median of {escaped(name)} over its logged values: {number(speed)}"


def _attempts(facts: RunFacts, num_kept: int) -> str:
    rows: list[tuple[str, ...]] = []
    for row, attempt in zip(attempt_rows(facts), facts.attempts, strict=True):
        logs = link("logs", _artifact(facts, f"logs/attempt-{attempt.number:03d}"))
        rows.append((*row[:-1], with_code(row[-1], 200), logs))
    columns = (*ATTEMPT_COLUMNS, "Logs")
    left_out = len(rows) - num_kept
    if left_out > 0:
        first = (num_kept + 1) // 2
        texts = ("…", f"{left_out} more attempts")
        empty = [""] * (len(columns) - len(texts))
        rows[first : first + left_out] = [(*texts, *empty)]
    text = table(columns, rows)
    if facts.is_script and len(facts.attempts) > 1:
        text += "\n\nSteps are those that the script has reported."
    report = _artifact(facts, "report.html")
    if report:
        text += f"\n\n{link('report.html', report)}: timeline, faults with cause and fix, charts."
    return text


def _load(facts: RunFacts) -> Iterator[str]:
    """Yield the commands that load the final model, and the best (else newest) checkpoint if it has other weights."""
    last_step = facts.attempts[-1].last_step if facts.attempts else None
    kind = "best"
    checkpoint = facts.best
    if checkpoint is None:
        kind = "newest"
        checkpoint = facts.checkpoints[-1] if facts.checkpoints else None
    has_final = facts.has_model and bool(facts.run_id)
    if not has_final and checkpoint is None:
        return
    yield "### Load the model"
    is_final = has_final and checkpoint is not None and checkpoint.step == last_step
    if has_final:
        same = f"the same as the {kind} checkpoint" if is_final else ""
        yield _load_final(facts, last_step, same)
    if checkpoint is not None and not is_final:
        yield _load_checkpoint(facts, checkpoint, kind)


def _load_final(facts: RunFacts, last_step: int | None, same: str) -> str:
    words = ["The final model"]
    if last_step is not None:
        words.append(f"after step {last_step:,}")
    if same:
        words.append(same)
    code = f'import mlflow\n\nmodel = mlflow.pytorch.load_model("runs:/{facts.run_id}/model")'
    return (
        f"{', '.join(words)}, from MLflow, with `MLFLOW_TRACKING_URI` as the address of this store;"
        f" it needs no hpcdist unless the code of the model does:\n\n{_block(code, 'python')}"
    )


def _load_checkpoint(facts: RunFacts, checkpoint: CheckpointFacts, kind: str) -> str:
    imports = "from hpcdist.checkpoint.state import load_weights"
    if checkpoint is facts.best and facts.has_uploaded_best:
        source = "from MLflow"
        imports = f"import mlflow\n{imports}"
        load = (
            f'uri = "runs:/{facts.run_id}/checkpoints/best"\n'
            "state_dict = load_weights(mlflow.artifacts.download_artifacts(uri))"
        )
    else:
        source = "from its folder"
        load = f"folder = {str(checkpoint.path)!r}\nstate_dict = load_weights(folder)"
    code = f"{imports}\n\n{load}"
    return f"The {kind} checkpoint, step {checkpoint.step:,}, {source}:\n\n" + _block(code, "python")


def cost_text(ledger: Ledger) -> str:
    """Return the allocated time with its useful part and its price, and a table of its causes.

    Their meanings are in the report and in the documentation.
    """
    useful = "goodput not measured, since the script reported no step in at least one attempt"
    if ledger.is_measured:
        useful = f"of which {percent(ledger.goodput)} were useful compute (goodput)"
        if ledger.is_short:
            useful += f"; {SHORT_RUN}: start and end dominate the shares"
    parts = [f"**{hours_text(ledger.allocated_s)} {ledger.unit}-hours** allocated, {useful}"]
    if ledger.queue_s:
        parts.append(f"{duration(ledger.queue_s)} in the queue")
    if ledger.energy_text:
        parts.append(ledger.energy_text)
    for name, text in ledger.costs.items():
        parts.append(f"{name} {escaped(text)}")
    rows = [row[:-1] for row in ledger.rows()]
    return "; ".join(parts) + "\n\n" + table(("Cause", f"{ledger.unit}-hours", "Share"), rows)
