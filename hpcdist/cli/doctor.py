"""`hpcdist doctor`: what works here and what does not."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli.options import RUNS, RunsDir, console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from hpcdist.diagnostics.doctor.section import Section
    from hpcdist.diagnostics.doctor.sections import Request
    from hpcdist.machine.check import Check
    from hpcdist.run.folder import RunDir

app = typer.Typer()

#: Wider than this a page is hard to read, and where there is no terminal nobody has said how wide it may be.
_WIDEST = 100
_COLOURS = {"title": "bold", "ok": "green", "note": "cyan", "warning": "yellow", "failure": "bold red"}


@app.command()
def doctor(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Look at the nodes of this run instead of this machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, for programs.")] = False,
    runs_dir: RunsDir = RUNS,
) -> int:
    """Say what works on this machine and what does not, each with the fix; exit code 1 when a run would fail.

    Examples:

        hpcdist doctor

        hpcdist doctor ddp-2026          # the nodes of a run

        hpcdist doctor --json | jq '.checks[] | select(.level == "failure")'
    """
    import hpcdist
    from hpcdist.diagnostics.doctor.page import document, would_fail
    from hpcdist.files.ownership import require_trusted
    from hpcdist.run.lookup import resolve_run

    found = resolve_run(run, runs_dir) if run is not None else None
    if found is not None:
        require_trusted(found.path, "doctor")  # it asks the server and the nodes that the run's config names
    facts = {
        "hpcdist": hpcdist.__version__,
        "host": socket.gethostname(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "runs_dir": str(runs_dir.absolute()),
        "run": str(found.path) if found is not None else None,
    }
    sections = _sections_of(found) if found is not None else _sections_here(runs_dir)
    page = _looked(sections) if as_json else _shown(sections, facts)
    if as_json:
        print(json.dumps(document(page, facts), indent=2))
    return 1 if would_fail(page) else 0


def _sections_here(runs_dir: Path) -> list[Section]:
    from hpcdist.diagnostics.doctor.sections import machine_sections

    return machine_sections(_request(runs_dir, os.environ.get("MLFLOW_TRACKING_URI", ""), runs_dir))


def _sections_of(run: RunDir) -> list[Section]:
    """The run and its nodes; for a run of this machine, what it needs of the machine."""
    from hpcdist.config.loading import load_run_config
    from hpcdist.diagnostics.doctor.run_report import run_sections
    from hpcdist.diagnostics.doctor.sections import machine_sections
    from hpcdist.run.secret_file import kept
    from hpcdist.run.slurm_job import job_of

    config = load_run_config(run.config, [], {**kept(run), **os.environ}, require_secrets=False)
    sections = run_sections(run, config)
    if job_of(run) is None:
        sections += machine_sections(_request(Path(config.runs_dir), config.tracking.uri, run.path))
    return sections


def _request(runs_dir: Path, uri: str, folder: Path) -> Request:
    """What a run would use, by the tracking's own rules; `folder` is the one that is written to."""
    from hpcdist.diagnostics.doctor.mlflow_store import Store
    from hpcdist.diagnostics.doctor.sections import Request
    from hpcdist.errors import TrackingError
    from hpcdist.tracking.uri import choose_uri, redact_uri, sqlite_path

    try:
        chosen = choose_uri(os.environ, uri, runs_dir)
    except TrackingError as error:
        return Request(env=os.environ, folder=folder, store=None, store_problem=str(error))
    store = Store(uri=chosen, shown=redact_uri(chosen), database=sqlite_path(chosen))
    return Request(env=os.environ, folder=folder, store=store)


def _looked(sections: Sequence[Section]) -> list[tuple[str, list[Check]]]:
    from hpcdist.diagnostics.doctor.section import examine

    return [_redacted(*section) for section in examine(sections)]


def _redacted(title: str, checks: Sequence[Check]) -> tuple[str, list[Check]]:
    """A section without secrets: pages are pasted into tickets."""
    from dataclasses import replace

    from hpcdist.config.redaction import redact_text

    return title, [replace(check, text=redact_text(check.text), fix=redact_text(check.fix)) for check in checks]


def _shown(sections: Sequence[Section], facts: dict[str, str | None]) -> list[tuple[str, list[Check]]]:
    """The page, each section as soon as it is there."""
    from hpcdist.diagnostics.doctor.page import section_lines, summary_lines
    from hpcdist.diagnostics.doctor.section import examine

    out = console()
    width = min(out.width, _WIDEST)
    _print(out, [("title", f"hpcdist {facts['hpcdist']} on {facts['host']}, {time.strftime('%Y-%m-%d %H:%M')}")])
    page = []
    with _waiting(out) as status:
        for section in examine(sections, lambda titles: _tell(status, titles)):
            title, checks = _redacted(*section)
            page.append((title, checks))
            if lines := list(section_lines(title, checks, width)):
                _print(out, [("", ""), *lines])
    _print(out, [("", ""), *summary_lines(page, width)])
    return page


@contextmanager
def _waiting(out: Console) -> Iterator[Status | None]:
    """A line at the bottom of a terminal that says what is still being looked at."""
    if not out.is_terminal:
        yield None
        return
    with out.status("looking") as status:
        yield status


def _tell(status: Status | None, titles: Sequence[str]) -> None:
    if status is not None and titles:
        more = f" and {len(titles) - 1} more" if len(titles) > 1 else ""
        status.update(f"looking at {titles[0]}{more}")


def _print(out: Console, lines: Sequence[tuple[str, str]] | Iterator[tuple[str, str]]) -> None:
    from rich.text import Text

    for kind, line in lines:
        text = Text(line)
        if kind in ("title",):
            text.stylize(_COLOURS[kind])
        elif kind:
            start = len(line) - len(line.lstrip())
            text.stylize(_COLOURS[kind], start, start + len(line.split()[0]))
        out.print(text, highlight=False, soft_wrap=True)
