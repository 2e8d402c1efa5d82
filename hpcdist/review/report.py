"""The report of a run: one self-contained HTML file."""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from hpcdist.config.redaction import redact_text
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import HpcdistError, duration
from hpcdist.host.files import read_regular, write_atomic
from hpcdist.host.log_files import last_lines
from hpcdist.host.ownership import stays_inside
from hpcdist.review import charts, description, svg
from hpcdist.review.explain import MAX_ROWS, explain_failure, first_failed_rank, read_faults
from hpcdist.review.facts import RunFacts, flat_texts, logged_result, read_environment, read_facts, readable
from hpcdist.review.ledger import Ledger, cost_of, ledgers_of, read_ledger, together
from hpcdist.review.markdown import text_of
from hpcdist.review.metric_series import Series
from hpcdist.review.ranking import ReadLastValues
from hpcdist.review.sweep_charts import sweep_charts
from hpcdist.review.sweep_facts import SweepFacts, read_sweep_facts, sweep_setup
from hpcdist.review.uncertainty import RUN_LEGEND, ends
from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND
from hpcdist.review.verdict import judge
from hpcdist.run.figures import read_figures
from hpcdist.run.folder import RunDir
from hpcdist.run.sweeps import SweepDir, setting_of

ReadSeries = Callable[[RunDir], Mapping[str, Series]]
T = TypeVar("T")


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of the templates. Pages need no network and no scripts, for MLflow's viewer and mail."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("hpcdist.review"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters.update(
        command=redact_text,
        duration=duration,
        number=svg.number,
        marked=marked_code,
        text=text_of,
    )
    templates.globals.update(
        charts=charts,
        svg=svg,
        description=description,
        setting_of=setting_of,
        cost_of=cost_of,
        legend=RUN_LEGEND,
        verdict_legend=VERDICT_LEGEND,
        ends=ends,
    )
    return templates


def marked_code(text: str) -> Markup:
    """Return a text as HTML, with the parts between backticks as code."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its end
        return escape(text)
    marked = [escape(part) for part in parts]
    marked[1::2] = [Markup("<code>{}</code>").format(part) for part in parts[1::2]]
    return Markup("").join(marked)


def write_report(run: RunDir, read: ReadSeries, read_last: ReadLastValues) -> bool:
    """Write `report.html` of a run or sweep. Returns whether its content has changed. Raises OSError."""
    if isinstance(run, SweepDir):
        facts = read_sweep_facts(run, run.read_state(), read_last)
        spent = ledgers_of(run.cells())
        text = render_sweep(run, facts, spent, charts_of(run, facts, spent, read))
    else:
        text = render_report(run, read, read_last)
    try:
        content = text.encode()
        if read_regular(run.report, len(content)) == content:
            return False
    except (OSError, ValueError):
        pass
    write_atomic(run.report, text)
    return True


def render_sweep(
    sweep: SweepDir,
    facts: SweepFacts,
    spent: Mapping[str, Ledger],
    drawn: Mapping[str, charts.Chart],
    *,
    with_links: bool = True,
) -> str:
    """Return the report of a sweep as HTML.

    Args:
        spent: the ledgers of its cells, see `ledgers_of`.
        drawn: the charts of `charts_of`.
        with_links: link the reports of the cells that have one, with paths relative to the sweep's folder.
    """
    pages = {}
    if with_links:
        pages = {run.name: f"../{quote(run.name)}/report.html" for run in sweep.cells() if run.report.is_file()}

    def cost(setting: str = "") -> str:
        """Return the cost of the cells of a setting, by default of all."""
        return cost_of(spent[cell.name] for cell in facts.cells if setting in ("", setting_of(cell.values)))

    content = {
        "run": sweep,
        "facts": facts,
        "as_of": description.state_at(facts.state, time.time()),
        "spent": spent,
        "pages": pages,
        "cost": cost,
        "verdicts": {row.name: row.verdict for row in facts.rows if row.verdict is not None},
        "ledger": together(spent.values()),
        "setup": sweep_setup(facts, sweep),
        "charts_of_sweep": drawn.values(),
    }
    return environment().get_template("sweep.html").render(content)


def charts_of(
    sweep: SweepDir, facts: SweepFacts, spent: Mapping[str, Ledger], read: ReadSeries
) -> dict[str, charts.Chart]:
    """Return the charts of a sweep, see `sweep_charts`, without the curves of cells with unreadable files."""
    series = {run.name: readable(partial(read, run)) or {} for run in sweep.cells()}
    return sweep_charts(facts, series, spent)


def as_image(chart: charts.Chart) -> str:
    """Return a chart as an SVG file, which needs the style sheet of the report in itself."""
    style = environment().get_template("style.css").render()
    background = f'<style>{style}</style><rect width="100%" height="100%" style="fill:var(--page)"/>'
    head, _, content = str(chart.figure).partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{background}{content}'


def render_report(run: RunDir, read: ReadSeries, read_last: ReadLastValues) -> str:
    """Return the report of a run as HTML. It leaves out parts with damaged files, and names the problems."""
    problems: list[str] = []

    def part(read: Callable[[RunDir], T]) -> T | None:
        try:
            return read(run)
        except (HpcdistError, OSError, ValueError) as error:
            problems.append(text_of(str(error)))
            return None

    stored = part(lambda run: read_stored(run.config)) or StoredConfig()
    if stored.problem:
        problems.append(text_of(stored.problem))
    declared = stored.trainer.charts if stored.trainer else {}
    facts = part(read_facts)
    primary = stored.config.checkpoint.monitor
    if facts is not None:
        without_result = facts
        logged = part(lambda run: logged_result(without_result, partial(read_last, run)))
        facts = replace(facts, logged=logged)
        primary = facts.primary_metric
    series = part(read) or {}
    trainer_charts, other_charts = charts.metric_charts(series, declared, primary, facts)
    figures, figure_problems = read_figures(run.artifacts)
    content: dict[str, Any] = {
        "run": run,
        "facts": facts,
        "ledger": part(read_ledger) or Ledger(),
        "series": dict(sorted(series.items())),
        "other_charts": other_charts,
        "trainer_charts": trainer_charts,
        "figures": figures,
        "stragglers": part(_straggler_events),
        "faults": (part(lambda run: read_faults(run, facts.attempts)) if facts else None) or {},
        "finding": part(lambda run: explain_failure(run, facts.state)) if facts else None,
        "log": part(lambda run: _log_of_failure(run, facts)) if facts else None,
        "environment": part(read_environment),
        "config": flat_texts(stored.values),
        "curve": charts.primary_chart(facts, series, _compared_run(run, facts, read)) if facts else None,
        "as_of": description.state_at(facts.state, time.time()) if facts else "",
    }
    problems += figure_problems
    content["problems"] = list(dict.fromkeys(problems))
    return environment().get_template("report.html").render(content)


def _compared_run(run: RunDir, facts: RunFacts, read: ReadSeries) -> charts.ComparedRun | None:
    """Return the run from which a run has its config and code; None without its folder or the primary metric."""
    if not facts.like:
        return None
    # Both have the same folder of runs.
    other = readable(lambda: RunDir.open(run.path.parent.parent / facts.like))
    if other is None:
        return None
    logged = (readable(lambda: read(other)) or {}).get(facts.primary_metric)
    other_facts = readable(lambda: read_facts(other))
    if logged is None or other_facts is None:
        return None
    verdict = ""
    if facts.best is not None and other_facts.best is not None and facts.monitor == other_facts.monitor:
        verdict = judge(other_facts.measured(), facts.measured()).sentence(facts.monitor, facts.like)
    return charts.ComparedRun(name=facts.like, logged=logged, verdict=verdict)


class FailureLog(NamedTuple):
    """The log of the rank that failed first."""

    path: Path
    command: str  #: that prints it
    end: str  #: its last lines, without passwords


#: Last lines of a log in a report.
_LOG_LINES = 40


def _log_of_failure(run: RunDir, facts: RunFacts) -> FailureLog | None:
    """Return the log of the failure that has ended a run; None without a failure, or if there is no such file.

    A report has no link to it. In MLflow's viewer, a sandbox without an address, a click on one replaces the page with
    an empty one, and a page that was sent by mail has no logs beside it.
    """
    if facts.state.status != "failed" or not facts.attempts:
        return None
    attempt = run.attempt(facts.attempts[-1].number)
    rank = first_failed_rank(attempt) or 0
    path = attempt.log(rank)
    # A rank may have replaced its log by a link.
    if not path.is_file() or not stays_inside(path, run.path):
        return None
    end = "\n".join(redact_text(line) for _, line in last_lines(path, _LOG_LINES))
    return FailureLog(path, description.log_command(facts, attempt.number, rank), end)


def _straggler_events(run: RunDir) -> list[tuple[int, dict[str, Any]]]:
    """Return the newest events of stragglers, each with the number of its attempt."""
    events = [(attempt.number, event) for attempt in run.attempts() for event in attempt.straggler_events()]
    return events[-MAX_ROWS:]
