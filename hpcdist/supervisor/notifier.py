"""The process that posts the events of a run to a webhook.

    python -P -m hpcdist.supervisor.notifier RUN_DIR      HPCDIST_NOTIFY_WEBHOOK in the environment

The supervisor starts it and waits for it for a bounded time at the end, so that a webhook that hangs or fails affects
neither the run nor the upload to MLflow. It reads events from the run folder. `notified.json` in the run folder holds
the ids of those that were sent, so that the next process sends each of the others once. The URL is a secret: it is
neither in the arguments nor in a message.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from hpcdist import logs
from hpcdist.config.schema import Config, NotifyConfig
from hpcdist.config.written import plain_tree
from hpcdist.errors import HpcdistError
from hpcdist.files import retry
from hpcdist.files.atomic import read_json, write_json
from hpcdist.files.private_file import read_private
from hpcdist.run import lease
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.supervisor.notification_events import Event, body, lost_event, read_events

log = logging.getLogger(__name__)
URL = "HPCDIST_NOTIFY_WEBHOOK"
PARENT = "HPCDIST_SUPERVISOR_PID"
POLL_S = 2.0
#: Time limit of each step of one request: connection, response.
REQUEST_S = 10.0
#: Time that the end of a run waits for the last events.
DRAIN_S = 20.0
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)


class NotifierProcess:
    """The notifier of one run, as a child process of its supervisor."""

    def __init__(self, run: RunDir, url: str, env: Mapping[str, str], note: Callable[[str], None]) -> None:
        self._note = note
        if not run_file(run).exists():  # what happened before this configuration is no news
            write_json(run_file(run), {"done": [event.id for event in read_events(run)]})
        with open(run.path / "notifier.log", "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hpcdist.supervisor.notifier", str(run.path)],
                env={**env, URL: url, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @classmethod
    def start(
        cls, run: RunDir, config: Config, env: Mapping[str, str], note: Callable[[str], None]
    ) -> NotifierProcess | None:
        """Start the notifier of a run that configures one. A failure is passed to `note`: the run continues without."""
        settings = config.notify
        if not (settings.webhook or settings.webhook_file):
            return None
        try:
            return cls(run, settings.webhook or read_private(Path(settings.webhook_file)), env, note)
        except (HpcdistError, OSError) as error:
            note(f"events are not sent to the webhook: {error}")
            return None

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until all events of a run that has ended are sent, at most `timeout_s`; then end the process."""
        try:
            all_sent = self._process.wait(timeout_s) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            all_sent = False
        if timeout_s and not all_sent:
            self._note("not all events were sent to the webhook (see notifier.log)")


def run_file(run: RunDir) -> Path:
    """Return the file with the ids of the events that need no further request."""
    return run.path / "notified.json"


class Notifier:
    """Sends the events of one run, in order.

    Args:
        url: of the webhook.
    """

    def __init__(self, run: RunDir, settings: NotifyConfig, url: str) -> None:
        self._run = run
        self._settings = settings
        self._url = url
        self._done = set((read_json(run_file(run)) or {}).get("done") or [])
        self._num_failures = 0
        self._next_try = 0.0

    def send_new(self, more: Sequence[Event] = ()) -> bool:
        """Send the events that were not sent yet, except during the pause after a failure.

        Returns whether none is left.
        """
        events = [event for event in [*read_events(self._run), *more] if event.id not in self._done]
        for event in events:
            if event.kind in self._settings.events:
                if time.monotonic() < self._next_try:
                    return False
                if not self._try(event):
                    return False
            self._done.add(event.id)
            write_json(run_file(self._run), {"done": sorted(self._done)})
        return True

    def _try(self, event: Event) -> bool:
        """Send an event. Returns whether it needs no further try: it was accepted, or is given up."""
        reason, may_pass = _post(self._url, body(event, self._run, self._settings.format))
        if not reason:
            self._num_failures = 0
            return True
        if may_pass and self._num_failures < len(_PAUSES_S):
            self._next_try = time.monotonic() + _PAUSES_S[self._num_failures]
            if not self._num_failures:
                log.warning("the webhook did not accept the event '%s' (%s); trying again", event.id, reason)
            self._num_failures += 1
            return False
        log.warning("the event '%s' was not sent: the webhook %s", event.id, reason)
        self._num_failures = 0
        return True


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET of another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(url: str, data: bytes) -> tuple[str, bool]:
    """Send a POST. Returns the reason of a failure, empty on success, and whether another try may succeed.

    The reason does not contain the URL.
    """
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 (checked)
        with opener.open(request, timeout=REQUEST_S):
            return "", True
    except urllib.error.HTTPError as error:
        return f"answered {error.code}", error.code in (408, 425, 429) or error.code >= 500
    except TimeoutError:
        return f"did not answer within {REQUEST_S:g} s", True
    except (OSError, HTTPException) as error:
        why = getattr(error, "reason", error)
        return f"cannot be reached ({getattr(why, 'strerror', None) or type(why).__name__})", True
    except ValueError:
        return "has an invalid address", False


def send_until_end(run: RunDir, notifier: Notifier, parent_pid: int) -> bool:
    """Send events until the run has ended or is requeued, or the supervisor has exited. Returns whether all are sent.

    The supervisor ends this process some time after the end of the run; without a supervisor, it exits after DRAIN_S.
    """
    until: float | None = None
    while True:
        # Read before the state: a supervisor that exits after the end of the run did not die.
        orphaned = os.getppid() != parent_pid
        state = run.read_state()
        over = state.status in (*ENDED, "queued")
        lost = orphaned and not over
        if lost and lease.holder(run) is not None:
            return False  # another supervisor has taken over, with its own notifier
        sent = notifier.send_new([lost_event(state)] if lost else [])
        if over or lost:
            until = until or time.monotonic() + DRAIN_S
            if sent or (orphaned and time.monotonic() > until):
                return sent
        time.sleep(POLL_S if until is None else POLL_S / 10)


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Send the events of the run in folder `argv[0]` until it has ended. Returns the exit code."""
    parent_pid = int(env.get(PARENT) or os.getppid())
    logs.configure()
    try:
        run = RunDir.open(Path(argv[0]))
        found = plain_tree(run.effective_config).get("notify") or {}
        settings = NotifyConfig(format=found.get("format", "json"), events=found.get("events") or [])
        with retry.patient(retry.UNATTENDED_S):
            return 0 if send_until_end(run, Notifier(run, settings, env[URL]), parent_pid) else 1
    except (HpcdistError, OSError, ValueError) as error:
        log.error("%s; no further events are sent", error)
        return 1


if __name__ == "__main__":
    # At a requeue or a preemption, Slurm may send SIGTERM to all processes of the job; the event is to be sent then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(main(sys.argv[1:], os.environ))
