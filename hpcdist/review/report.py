"""The report of a run: one self-contained HTML file."""

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from hpcdist.config.redaction import redact_text
from hpcdist.config.written import StoredConfig, read_stored
from hpcdist.errors import HpcdistError, duration
from hpcdist.host.files import read_regular, write_atomic
from hpcdist.review import charts, description
from hpcdist.review.explain import MAX_ROWS, explain_failure, read_faults
from hpcdist.review.facts import (
    RunFacts,
    Series,
    flat_texts,
    is_hidden,
    read_environment,
    read_facts,
    readable,
)
from hpcdist.review.ledger import Ledger, cost_of, read_ledger, together
from hpcdist.review.markdown import text_of
from hpcdist.review.sweep_facts import SettingFacts, SweepFacts, read_sweep_facts, sweep_setup
from hpcdist.review.uncertainty import LEGEND, ends
from hpcdist.review.verdict import LEGEND as VERDICT_LEGEND
from hpcdist.run.attempt_times import read_times
from hpcdist.run.figures import read_figures
from hpcdist.run.folder import RunDir
from hpcdist.run.sweeps import REPETITION, SweepDir, setting_of
from hpcdist.run.sweeps import text_of as config_text

ReadSeries = Callable[[RunDir], Mapping[str, Series]]
T = TypeVar("T")


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
    found.filters.update(command=redact_text, duration=duration, number=charts.number, marked=marked_code, text=text_of)
    found.globals.update(
        charts=charts,
        description=description,
        setting_of=setting_of,
        cost_of=cost_of,
        legend=LEGEND,
        verdict_legend=VERDICT_LEGEND,
        ends=ends,
    )
    found.globals.update(environment_rows=environment_rows, environment_names=_ENVIRONMENT)
    return found


def marked_code(text: str) -> Markup:
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its end
        return escape(text)
    tags = (Markup("{}"), Markup("<code>{}</code>"))
    return Markup("").join(tags[index % 2].format(part) for index, part in enumerate(parts))


#: Rows of `setup_rows` that are shown as environment.
_ENVIRONMENT = ("Ranks", "CPU", "Versions", "Image")


def environment_rows(run: RunDir, facts: RunFacts, recorded: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return what the run used, in words, for a reader who does not know the keys of `read_environment`."""
    rows = [row for row in description.setup_rows(facts, in_full=True) if row[0] in _ENVIRONMENT]
    times = [found for attempt in run.attempts() if (found := read_times(attempt)) is not None]
    if times and (shares := times[-1].shares.values()):
        total = sum(share.allocated for share in shares)
        rows.append(("Allocated", [f"{times[-1].unit}s: {charts.number(total)}, nodes: {len(shares)}"]))
    cores = f"{recorded['cores']} cores" if "cores" in recorded else ""
    about = facts.host, recorded.get("platform"), recorded.get("cpu", cores)
    return [*rows, ("Created on", [", ".join(filter(None, about))])]


def write_report(run: RunDir, read: ReadSeries) -> bool:
    """Write `report.html` of a run or sweep. Returns whether its content has changed. Raises OSError."""
    text = render_sweep(run) if isinstance(run, SweepDir) else render_report(run, read)
    try:
        if read_regular(run.report, len(text.encode())) == text.encode():
            return False
    except (OSError, ValueError):
        pass
    write_atomic(run.report, text)
    return True


def render_sweep(sweep: SweepDir, facts: SweepFacts | None = None, *, with_links: bool = True) -> str:
    facts, runs = facts or read_sweep_facts(sweep, sweep.read_state()), sweep.cells()
    spent = {run.name: readable(partial(read_ledger, run)) or Ledger() for run in runs}
    pages = {run.name: f"../{quote(run.name)}/report.html" for run in runs if with_links and run.report.is_file()}

    def cost(setting: str = "") -> str:
        return cost_of(spent[one.name] for one in facts.cells if setting in ("", setting_of(one.values)))

    content = {"facts": facts, "spent": spent, "pages": pages, "cost": cost, "verdicts": facts.minus_best}
    content |= {"ledger": together(spent.values()), "setup": sweep_setup(facts, sweep)}
    page = environment().get_template("sweep.html")
    return page.render(content, run=sweep, heat_map=heat_map(facts), repetition=REPETITION)


def heat_map(facts: SweepFacts) -> dict[str, dict[str, tuple[SettingFacts, str]]]:
    """Return the settings of a sweep over two keys with their shades, by their values; empty for other sweeps."""
    keys, settings = [key for key in facts.keys if key != REPETITION], facts.by_setting
    known = [one.mean for one in settings.values() if one.mean is not None]
    found: dict[str, dict[str, tuple[SettingFacts, str]]] = {}
    for cell in facts.cells if len(keys) == 2 and known else ():
        one, (row, column) = settings[setting_of(cell.values)], [config_text(cell.values.get(key)) for key in keys]
        share = 0.0 if one.mean is None else (one.mean - min(known)) / (max(known) - min(known) or 1.0)
        found.setdefault(row, {})[column] = one, charts.shade(1 - share if facts.sign > 0 else share)
    return found


def render_report(run: RunDir, read: ReadSeries) -> str:
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
    facts, series = part(read_facts), part(read) or {}
    monitor = stored.config.checkpoint.monitor
    trainer_charts, other_charts = charts.metric_charts(series, declared, monitor, facts)
    figures, no_figures = read_figures(run.artifacts)
    content: dict[str, Any] = {
        "run": run,
        "facts": facts,
        "ledger": part(read_ledger) or Ledger(),
        "series": {key: found for key, found in sorted(series.items()) if not is_hidden(key)},
        "other_charts": other_charts,
        "trainer_charts": trainer_charts,
        "figures": figures,
        "stragglers": part(
            lambda run: [(one.number, event) for one in run.attempts() for event in one.straggler_events()][-MAX_ROWS:]
        ),
        "faults": part(read_faults),
        "finding": part(lambda run: explain_failure(run, facts.state)) if facts else None,
        "environment": part(read_environment),
        "config": flat_texts(stored.values),
        "curve": charts.primary_chart(facts, series) if facts else None,
    }
    problems += no_figures
    return environment().get_template("report.html").render(content, problems=list(dict.fromkeys(problems)))
