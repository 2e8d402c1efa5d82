"""Notifications: a child process of the supervisor posts the events of a run to a webhook or passes them to a command.

    python -P -m hpcdist.supervisor.notifier [COMMAND]      HPCDIST_NOTIFY_WEBHOOK in the environment

It reads one JSON object per line from its standard input and ends with it. The supervisor waits for it only at the end
of the run, for a bounded time. The URL is a secret: it is neither in the arguments nor in a message.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from hpcdist.config.launch_schema import NotifyConfig
from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError
from hpcdist.host.files import read_json, read_private
from hpcdist.run.folder import RunDir, State

URL = "HPCDIST_NOTIFY_WEBHOOK"
#: Time limit of the command, and of each step of a request.
DELIVERY_S = 10.0
#: Time that the end of a run waits for the last events.
DRAIN_S = 20.0
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 0.0)


class Notifier(AbstractContextManager["Notifier"]):
    """Passes the events of a run to the process that delivers them, if the config has a `notify` section.

    A failure is passed to `note`: the run continues without notifications.
    """

    def __init__(
        self, run: RunDir, settings: NotifyConfig, env: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._run, self._note = run, note
        self._process: subprocess.Popen[bytes] | None = None
        if not (settings.command or settings.webhook or settings.webhook_file):
            return
        try:
            url = read_private(Path(settings.webhook_file)) if settings.webhook_file else settings.webhook
            command = [sys.executable, "-P", "-m", "hpcdist.supervisor.notifier", *filter(None, [settings.command])]
            with open(run.path / "notifier.log", "ab") as log:
                self._process = subprocess.Popen(
                    command,
                    env={**env, URL: url},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    bufsize=0,
                )
        except (HpcdistError, OSError) as error:
            note(f"notifications are not sent: {error}")

    def send(self, event: str, state: State) -> None:
        """Pass on an event: `started`, `restarted`, `requeued` or `ended`."""
        if self._process is None or self._process.stdin is None:
            return
        facts = {
            "event": event,
            "run": f"{self._run.experiment}/{self._run.name}",
            "status": state.status,
            "reason": redact_text(" ".join(state.reason.split()))[:500],
            "attempt": state.attempt,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "folder": str(self._run.path),
        }
        try:
            facts["mlflow_run_id"] = (read_json(self._run.mlflow, within_s=0) or {}).get("run_id")
            os.set_blocking(self._process.stdin.fileno(), False)
            if not self._process.stdin.write(json.dumps(facts).encode() + b"\n"):
                raise BlockingIOError("too many events are waiting")
        except (HpcdistError, OSError) as error:
            self._note(f"the notification '{event}' is not sent: {error}")

    def __exit__(self, *_: object) -> None:
        """Wait until all events are delivered, at most DRAIN_S; then end the process."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            all_delivered = self._process.wait(DRAIN_S) == 0
        except subprocess.TimeoutExpired:
            self._process.kill()
            all_delivered = self._process.wait() == 0
        if not all_delivered:
            self._note("not all notifications were delivered (see notifier.log)")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET of another address."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _deliver(line: bytes, command: str, env: Mapping[str, str]) -> str:
    """Deliver an event once. Returns the reason of a failure, without the URL; empty on success."""
    try:
        if command:
            facts = json.loads(line)
            arguments = [command, facts["event"], facts["run"], facts["status"]]
            subprocess.run(arguments, input=line, timeout=DELIVERY_S, check=True, env=env)
        else:
            request = urllib.request.Request(env[URL], line, {"Content-Type": "application/json"})  # noqa: S310
            urllib.request.build_opener(_NoRedirect).open(request, timeout=DELIVERY_S).close()
    except subprocess.SubprocessError as error:
        return str(error)
    except HTTPError as error:
        return f"HTTP status {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", error)
        return getattr(why, "strerror", None) or type(why).__name__
    return ""


def main(lines: Iterable[bytes], command: str, env: Mapping[str, str]) -> int:
    """Deliver events, in order, with retries. Returns the exit code."""
    num_lost = 0
    for line in lines:
        for pause_s in _PAUSES_S:
            if not (reason := _deliver(line.strip(), command, env)):
                break
            print(f"'{json.loads(line)['event']}' is not delivered: {reason}", flush=True)
            time.sleep(pause_s)
        else:
            num_lost += 1
    return 1 if num_lost else 0


if __name__ == "__main__":
    # At a requeue or a preemption, Slurm may send SIGTERM to all processes of the job; the event is to be sent then.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(main(sys.stdin.buffer, "".join(sys.argv[1:]), os.environ))
