"""Events of a run that are reported to a webhook, read from the run folder, and the bodies of their requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.errors import RunFolderError
from hpcdist.files.atomic import read_json
from hpcdist.files.formats import fill
from hpcdist.run.attempt import Attempt
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.slurm_job import job_starts
from hpcdist.supervisor.restart_policy import Failure


@dataclass(frozen=True, kw_only=True)
class Event:
    """One event; `id` is the same whenever the run folder is read again."""

    id: str
    kind: str  #: one of `schema.notification.EVENTS`
    attempt: int
    text: str  #: one sentence


def read_events(run: RunDir) -> list[Event]:
    """Return all events of a run so far: failures and stragglers by attempt, then its requeue or end.

    Raises RunFolderError or OSError if the run folder cannot be read.
    """
    found = [event for attempt in run.attempts() for event in _of_attempt(attempt)]
    state = run.read_state()
    if state.status == "queued":
        number = len(job_starts(run))
        found.append(_event(f"requeue {state.attempt} {number}", "requeue", state.attempt, f"requeued: {state.reason}"))
    elif state.status in ENDED:
        found.append(_end(state))
    return found


def lost_event(state: State) -> Event:
    """Return the end of a run whose supervisor died."""
    text = "the supervisor died before the end of the run: `hpcdist resume` continues it"
    return _event(f"lost {state.attempt}", "end", state.attempt, text)


def _end(state: State) -> Event:
    return _event(f"end {state.attempt} {state.status}", "end", state.attempt, state.sentence)


def _of_attempt(attempt: Attempt) -> Iterator[Event]:
    number = attempt.number
    for index, found in enumerate(attempt.straggler_events()):
        if found["event"] == "slow":
            yield _event(f"straggler {number} {index}", "straggler", number, str(found["text"]))
    if (saved := read_json(attempt.failure)) is not None:
        try:
            failure = fill(Failure, saved | {"traceback": ()}, attempt.failure)
            text = failure.sentence()
        except RunFolderError:
            text = str(saved.get("error", "unknown error"))
        yield _event(f"failure {number}", "failure", number, f"attempt {number} failed: {text}")


def _event(id_: str, kind: str, attempt: int, text: str) -> Event:
    return Event(id=id_, kind=kind, attempt=attempt, text=redact_text(" ".join(text.split()))[:1000])


def body(event: Event, run: RunDir, form: str) -> bytes:
    """Return the body of the request for an event.

    Args:
        form: `json` or `slack`.
    """
    if form == "slack":
        sentence = f"*{run.experiment}/{run.name}* {event.text}"
        # Slack's escapes for text: https://api.slack.com/reference/surfaces/formatting#escaping
        for char, escape in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
            sentence = sentence.replace(char, escape)
        return json.dumps({"text": sentence}).encode()
    facts: dict[str, Any] = {
        "id": f"{run.experiment}/{run.name} {event.id}",
        "event": event.kind,
        "experiment": run.experiment,
        "run": run.name,
        "attempt": event.attempt,
        "text": event.text,
        "status": run.read_state().status,
        "folder": str(run.path),
        "mlflow_run_id": (read_json(run.mlflow) or {}).get("run_id"),
    }
    return json.dumps(facts).encode()
