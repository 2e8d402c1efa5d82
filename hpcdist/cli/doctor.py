"""Commands that check a machine and explain failures: `hpcdist doctor` and `hpcdist explain`."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli import options
from hpcdist.cli.options import Json, OptionalRunName, argument, console, named, wrapped
from hpcdist.errors import few, local_time
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from rich.console import Console

    from hpcdist.checks.doctor_report import Section
    from hpcdist.host.check_result import Check

app = typer.Typer()
_COLOURS = {"title": "bold", "ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}
#: Width of the labels of an explanation, such as `evidence:`, by which further lines of a text are indented.
_LABEL_WIDTH = 10
#: Longest line of a report: longer ones are hard to read, also in a file.
_MAX_WIDTH = 100


@app.command()
def explain(run: OptionalRunName = None, as_json: Json = False) -> None:
    """Explain why a run failed or waits: cause, evidence and fix.

    Examples:
        hpcdist explain
        hpcdist explain digits/first --json
    """
    from hpcdist.config.redaction import redact_text, redact_tree
    from hpcdist.review.explain import explain
    from hpcdist.run.lookup import resolve_run

    folder = resolve_run(named(run), options.runs_dir())
    finding = explain(folder)
    if as_json:
        document = {"run": f"{folder.experiment}/{folder.name}", "folder": str(folder.path)} | asdict(finding)
        say(json.dumps(redact_tree(document), indent=2))
        return
    for line in finding.lines:
        say(wrapped(console(), redact_text(line), _LABEL_WIDTH))


@app.command()
def doctor(
    run: Annotated[
        str | None, argument("RUN", "Check the nodes of this run instead of this machine.", options.runs)
    ] = None,
    as_json: Json = False,
) -> int:
    """Check this machine, or the nodes of a run; each finding comes with its fix.

    The exit code is 1 if a run would fail.

    Examples:
        hpcdist doctor
        hpcdist doctor ddp-2026
        hpcdist doctor --json | jq '.checks[] | select(.level == "failure")'
    """
    import hpcdist
    from hpcdist.checks.doctor_page import document, would_fail
    from hpcdist.checks.doctor_report import execute, run_sections
    from hpcdist.config.loading import load_run_config
    from hpcdist.host.ownership import require_trusted
    from hpcdist.run.kept_secrets import kept
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.status import job_of

    runs_dir = options.runs_dir()
    facts: dict[str, str | None] = {
        "hpcdist": hpcdist.__version__,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "runs_dir": str(runs_dir.absolute()),
        "run": None,
    }
    if run is None:
        sections = _machine_sections(runs_dir, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    else:
        folder = resolve_run(run, runs_dir)
        require_trusted(folder.path, "doctor")  # the checks connect to the server and the nodes of the run's config
        facts["run"] = str(folder.path)
        config = load_run_config(folder.config, [], {**kept(folder), **os.environ}, require_secrets=False)
        sections = run_sections(folder, config)
        if job_of(folder) is None:  # a local run: this machine, too
            sections += _machine_sections(Path(config.runs_dir), config.tracking.uri, folder.path)
    if as_json:
        page = [_redacted(*section) for section in execute(sections)]
        say(json.dumps(document(page, facts), indent=2))
    else:
        page = _show_page(sections, facts)
    return 1 if would_fail(page) else 0


def _machine_sections(runs_dir: Path, uri: str, folder: Path) -> list[Section]:
    """Return the sections about this machine and about an MLflow store.

    Args:
        uri: tracking URI of the config or the environment; empty for the default in `runs_dir`.
        folder: the folder that a run writes to.
    """
    from hpcdist.checks.doctor_report import machine_sections
    from hpcdist.checks.store_checks import store_checks
    from hpcdist.errors import TrackingError
    from hpcdist.host.check_result import warning
    from hpcdist.tracking.uri import choose_uri

    def store() -> list[Check]:
        try:
            return store_checks(choose_uri(os.environ, uri, runs_dir), os.environ)
        except TrackingError as error:
            return [warning("store", str(error))]

    return machine_sections(os.environ, folder, store)


def _redacted(title: str, checks: Sequence[Check]) -> tuple[str, list[Check]]:
    """Return a section without secrets, since reports are pasted into tickets."""
    from hpcdist.config.redaction import redact_text

    return title, [replace(check, text=redact_text(check.text), fix=redact_text(check.fix)) for check in checks]


def _show_page(sections: Sequence[Section], facts: dict[str, str | None]) -> list[tuple[str, list[Check]]]:
    """Print the report section by section as the checks complete, and return it."""
    from hpcdist.checks.doctor_page import section_lines, summary_lines
    from hpcdist.checks.doctor_report import execute

    out = console()
    width = min(out.width, _MAX_WIDTH)
    _print(out, [("title", f"hpcdist {facts['hpcdist']} on {facts['host']}, {local_time(time.time())}")])
    page = []
    # The spinner shows the sections in progress at the bottom of a terminal.
    with out.status("checking") if out.is_terminal else nullcontext() as status:

        def show_pending(titles: Sequence[str]) -> None:
            if status is not None and titles:
                status.update(f"checking {few(titles, most=1)}")

        for section in execute(sections, show_pending):
            title, checks = _redacted(*section)
            page.append((title, checks))
            lines = list(section_lines(title, checks, width))
            if lines:
                _print(out, [("", ""), *lines])
    _print(out, [("", ""), *summary_lines(page, width)])
    return page


def _print(out: Console, lines: Iterable[tuple[str, str]]) -> None:
    """Print lines, each with its kind: a title is styled as a whole, of a finding the first word, others not at all."""
    from rich.text import Text

    for kind, line in lines:
        text = Text(line)
        if kind == "title":
            text.stylize(_COLOURS[kind])
        elif kind:
            indent = len(line) - len(line.lstrip())
            first_word = line.split()[0]
            text.stylize(_COLOURS[kind], indent, indent + len(first_word))
        out.print(text, highlight=False, soft_wrap=True)
