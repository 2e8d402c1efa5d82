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
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from rich.console import Console

    from hpcdist.checks.doctor_report import Section
    from hpcdist.host.check_result import Check

app = typer.Typer()
_COLOURS = {"title": "bold", "ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


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

    chosen = resolve_run(named(run), options.runs_dir())
    found = explain(chosen)
    if as_json:
        document = {"run": f"{chosen.experiment}/{chosen.name}", "folder": str(chosen.path)} | asdict(found)
        say(json.dumps(redact_tree(document), indent=2))
        return
    for line in found.lines:
        say(wrapped(console(), redact_text(line), 10))  # columns of the labels, such as `evidence:`


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
    from hpcdist.checks.doctor_report import document, execute, run_sections, would_fail
    from hpcdist.config.loading import load_run_config
    from hpcdist.host.ownership import require_trusted
    from hpcdist.run.kept_secrets import kept
    from hpcdist.run.lookup import resolve_run
    from hpcdist.run.status import job_of

    runs_dir = options.runs_dir()
    found = resolve_run(run, runs_dir) if run is not None else None
    if found is not None:
        require_trusted(found.path, "doctor")  # the checks connect to the server and the nodes of the run's config
    facts = {
        "hpcdist": hpcdist.__version__,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "runs_dir": str(runs_dir.absolute()),
        "run": str(found.path) if found is not None else None,
    }
    if found is None:
        sections = _machine_sections(runs_dir, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir)
    else:
        config = load_run_config(found.config, [], {**kept(found), **os.environ}, require_secrets=False)
        sections = run_sections(found, config)
        if job_of(found) is None:  # a local run: this machine, too
            sections += _machine_sections(Path(config.runs_dir), config.tracking.uri, found.path)
    if as_json:
        page = [_redacted(*section) for section in execute(sections)]
        say(json.dumps(document(page, facts), indent=2))
    else:
        page = _show_page(sections, facts)
    return 1 if would_fail(page) else 0


def _machine_sections(runs_dir: Path, uri: str, folder: Path) -> list[Section]:
    """Return the sections about this machine and the MLflow store of a run; `folder` is the one written to."""
    from hpcdist.checks.doctor_report import machine_sections
    from hpcdist.checks.site import store_checks
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
    from hpcdist.checks.doctor_report import execute, section_lines, summary_lines

    out = console()
    width = min(out.width, 100)  # for readability, and for output without a terminal
    _print(out, [("title", f"hpcdist {facts['hpcdist']} on {facts['host']}, {time.strftime('%Y-%m-%d %H:%M')}")])
    page = []
    # The spinner shows the sections in progress at the bottom of a terminal.
    with out.status("checking") if out.is_terminal else nullcontext() as status:

        def show_pending(titles: Sequence[str]) -> None:
            if status is not None and titles:
                more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
                status.update(f"checking {titles[0]}{more}")

        for section in execute(sections, show_pending):
            title, checks = _redacted(*section)
            page.append((title, checks))
            if lines := list(section_lines(title, checks, width)):
                _print(out, [("", ""), *lines])
    _print(out, [("", ""), *summary_lines(page, width)])
    return page


def _print(out: Console, lines: Iterable[tuple[str, str]]) -> None:
    from rich.text import Text

    for kind, line in lines:
        text = Text(line)
        if kind == "title":
            text.stylize(_COLOURS[kind])
        elif kind:
            start = len(line) - len(line.lstrip())
            text.stylize(_COLOURS[kind], start, start + len(line.split()[0]))
        out.print(text, highlight=False, soft_wrap=True)
