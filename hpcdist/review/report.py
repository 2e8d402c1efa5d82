"""The report of a run: one self-contained HTML file."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jinja2
from markupsafe import Markup, escape

from hpcdist.config.document import flat
from hpcdist.config.redaction import redact_text
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import HpcdistError
from hpcdist.host.files import read_json, read_regular, write_atomic
from hpcdist.review.charts import (
    MAX_ATTEMPTS,
    draw,
    metric_charts,
    number,
    timeline,
)
from hpcdist.review.description import ATTEMPT_COLUMNS, attempt_rows, rerun_command, run_again_command, setup_rows
from hpcdist.review.explain import Finding, explain_attempt
from hpcdist.review.facts import JOB_ENDS, Series, ends_by_slurm, is_hidden, read_facts
from hpcdist.review.figures import read_figures
from hpcdist.review.ledger import Ledger, hours_text, read_ledger
from hpcdist.review.text import duration
from hpcdist.run.folder import RunDir

T = TypeVar("T")

#: Limits of the rows of a table.
MAX_ROWS = 200
MAX_TEXT = 600


@dataclass(frozen=True, kw_only=True)
class Fault:
    attempt: int
    where: str  #: rank, node and step, or the failed nodes
    error: str
    finding: Finding


def read_faults(run: RunDir) -> list[Fault]:
    found = []
    ends = ends_by_slurm(run)
    for attempt in run.attempts():
        failure = read_json(attempt.failure)
        if failure is None:
            start = ends.get(attempt.number)
            if start is not None and start.state in JOB_ENDS and start.state not in ("PREEMPTED", "CANCELLED"):
                where = f"node {start.failed_nodes}" if start.failed_nodes else ""
                cause, fix = JOB_ENDS[start.state]
                finding, error = Finding(cause=cause, fix=fix), f"Slurm ended the job: {start.state}"
                found.append(Fault(attempt=attempt.number, where=where, error=error, finding=finding))
            continue
        error, kind = text_of(failure.get("error")), failure.get("kind")
        host, step = text_of(failure.get("host")), failure.get("step")
        where = f"rank {failure.get('rank')} on {host}" if host else ""
        if where and isinstance(step, int) and step:
            # The rank may have done more steps.
            where += f" after step {step}" + " (last heartbeat)" * (kind in ("killed", "vanished", "lost"))
        finding = explain_attempt(run, attempt, error, read_logs=False) or Finding(cause=error)
        found.append(Fault(attempt=attempt.number, where=where, error=error, finding=finding))
    return found[-MAX_ROWS:]


def read_environment(run: RunDir) -> dict[str, str]:
    found = {
        "": read_json(run.environment) or {},
        "container.": read_json(run.container) or {},
        "rank_environment.": read_json(run.rank_environment) or {},
        "slurm.": read_json(run.slurm) or {},
    }
    texts = {prefix + key: text for prefix, tree in found.items() for key, text in flat_texts(tree).items()}
    return {key: text for key, text in texts.items() if text != "null"}


def flat_texts(tree: Mapping[str, Any]) -> dict[str, str]:
    return {key: text_of(value) for key, value in flat(tree).items()}


def text_of(value: Any) -> str:
    """Return a value as text of at most MAX_TEXT characters, without passwords in addresses."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    text = redact_text(text.encode(errors="replace").decode())
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


@functools.cache
def environment() -> jinja2.Environment:
    # The page needs no network and no scripts, for MLflow's artifact viewer and for mail.
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("hpcdist.review"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(command=redact_text, duration=duration, number=number, marked=marked_code, text=text_of)
    found.filters["hours"] = hours_text
    found.globals.update(setup_rows=setup_rows, attempt_rows=attempt_rows, attempt_columns=ATTEMPT_COLUMNS)
    found.globals.update(run_again_command=run_again_command, rerun_command=rerun_command)
    found.globals.update(timeline=timeline, max_attempts=MAX_ATTEMPTS, draw=draw)
    return found


def marked_code(text: str) -> Markup:
    """Return a text as HTML, with the parts between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its end
        return escape(text)
    tags = (Markup("{}"), Markup("<code>{}</code>"))
    return Markup("").join(tags[index % 2].format(part) for index, part in enumerate(parts))


def write_report(run: RunDir, series: Mapping[str, Series]) -> bool:
    """Write `report.html` into the run folder. Returns whether its content has changed. Raises OSError."""
    text = render_report(run, series)
    try:
        if read_regular(run.report, len(text.encode())) == text.encode():
            return False
    except (OSError, ValueError):
        pass
    write_atomic(run.report, text)
    return True


def render_report(run: RunDir, series: Mapping[str, Series]) -> str:
    """Return the report of a run as HTML, without the parts whose files are damaged; it names the problems."""
    problems: list[str] = []

    def part(read: Callable[[RunDir], T]) -> T | None:
        try:
            return read(run)
        except (HpcdistError, OSError, ValueError) as error:
            problems.append(text_of(str(error)))
            return None

    stored = part(lambda run: read_stored(run.config)) or StoredConfig()
    problems += [text_of(stored.problem)] if stored.problem else []
    declared = stored.trainer.charts if stored.trainer else {}
    trainer_charts, charts = metric_charts(series, declared, stored.config.checkpoint.monitor)
    figures, no_figures = read_figures(run.artifacts)
    ledger = part(read_ledger) or Ledger()
    content: dict[str, Any] = {
        "run": run,
        "facts": part(read_facts),
        "ledger": ledger,
        "costs": ledger.costs(stored.config.cluster),
        "series": {key: found for key, found in sorted(series.items()) if not is_hidden(key)},
        "charts": charts,
        "trainer_charts": trainer_charts,
        "figures": figures,
        "stragglers": part(
            lambda run: [(one.number, event) for one in run.attempts() for event in one.straggler_events()][-MAX_ROWS:]
        ),
        "faults": part(read_faults),
        "environment": part(read_environment),
        "config": flat_texts(stored.values),
    }
    problems += no_figures
    return environment().get_template("report.html").render(content, problems=problems)
