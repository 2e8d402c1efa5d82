"""The report of a run: one self-contained HTML page, `report.html`, for MLflow's artifact viewer and for mail.

It needs no network and no scripts, and all texts are escaped by Jinja's autoescape.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jinja2
from markupsafe import Markup, escape

from hpcdist.config.monitor import monitor_of
from hpcdist.config.redaction import redact_text
from hpcdist.config.schema.declaration import find_trainer
from hpcdist.config.written import plain_tree
from hpcdist.errors import HpcdistError
from hpcdist.files.atomic import write_atomic
from hpcdist.review import run_sections
from hpcdist.review.causes import MEANINGS
from hpcdist.review.charts import number
from hpcdist.review.commands import rerun_command, run_again_command
from hpcdist.review.drawing import MAX_ATTEMPTS, draw, draw_patch, duration, ledger_bar, timeline
from hpcdist.review.facts import read_facts
from hpcdist.review.figures import read_figures
from hpcdist.review.ledger import Ledger, percent, read_ledger
from hpcdist.review.markdown import PATCH
from hpcdist.review.metric_charts import chart_of, declared_charts, is_hidden, metric_charts, step_times
from hpcdist.review.series import Series
from hpcdist.review.text import image_text
from hpcdist.run.folder import RunDir

T = TypeVar("T")


@functools.cache
def environment() -> jinja2.Environment:
    """Return the templates of `hpcdist/review/templates/`, which escape every value."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("hpcdist.review"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "duration": duration,
        "number": number,
        "marked": marked_code,
        "percent": lambda share: percent(share, 1),
        "text": run_sections.text_of,
        "time": utc,
    }
    found.filters |= filters
    return found


def utc(seconds: float | None) -> str:
    """Return a time such as `2026-11-22 12:05:09 UTC`; empty for None."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds)) if seconds is not None else ""


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
        if run.report.read_text() == text:
            return False
    except (OSError, ValueError):
        pass
    write_atomic(run.report, text)
    return True


def render_report(run: RunDir, series: Mapping[str, Series]) -> str:
    """Return the report of a run as HTML.

    A part whose files are damaged is left out, and the report names the problem.

    Args:
        series: the metrics of the run.
    """
    problems: list[str] = []

    def part(read: Callable[[RunDir], T]) -> T | None:
        try:
            return read(run)
        except (HpcdistError, OSError, ValueError) as error:
            problems.append(run_sections.text_of(str(error)))
            return None

    config = part(lambda run: plain_tree(run.config)) or {}
    trainer = run_sections.flat_texts(config).get("trainer.target", "")
    declared = find_trainer(trainer)
    grouped = declared_charts(series, declared.charts if declared else {})
    figures = read_figures(run.artifacts)
    ledger = part(read_ledger) or Ledger()
    shown_apart = [key for keys in grouped.values() for key in keys]
    facts, patch = part(read_facts), part(run_sections.read_patch)
    content: dict[str, Any] = {
        "run": run,
        "facts": facts,
        "image": image_text(facts) if facts is not None else "",
        "run_again": redact_text(run_again_command(facts)) if facts is not None else "",
        "rerun": rerun_command(facts) if facts is not None else "",
        "patch": patch,
        "patch_name": PATCH,
        "patch_drawing": draw_patch(patch.text) if patch is not None else "",
        "max_attempts": MAX_ATTEMPTS,
        "timeline": timeline(ledger),
        "ledger": ledger,
        "causes": MEANINGS,
        "cause_of": lambda entry: entry.cause,
        "ledger_bar": ledger_bar(ledger),
        "series": {key: found for key, found in sorted(series.items()) if not is_hidden(key)},
        "charts": metric_charts(series, monitor=monitor_of(config).metric, skip=shown_apart),
        "trainer": trainer,
        "trainer_charts": [chart_of(title, keys, series) for title, keys in grouped.items()],
        "figures": [(figure, draw(figure)) for figure in figures.figures],
        "step_times": step_times(series),
        "stragglers": part(run_sections.read_stragglers),
        "faults": part(run_sections.read_faults),
        "preflight": part(run_sections.read_preflight),
        "environment": part(run_sections.read_environment),
        "config": run_sections.flat_texts(config),
    }
    problems += figures.problems
    return environment().get_template("report.html").render(content, problems=problems)
