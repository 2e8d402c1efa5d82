"""Notifications: a thread posts the events of a run to a webhook or passes them to a command.

The run waits for it only at its end, for a bounded time. The URL is a secret: it is not in any message.
"""

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import IO, Any

from hpcdist.config.launch_schema import NotifyConfig
from hpcdist.config.redaction import redact_text
from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir, State

#: Time limit of the command, and of a server's answer.
DELIVERY_S = 10.0
#: Time that the end of a run waits for the last events.
DRAIN_S = 20.0
#: Pauses before the tries of an event.
_PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)


class Notifier(AbstractContextManager["Notifier"]):
    """Delivers the events of a run in order, if the config has a `notify` section. A failure is passed to `note`."""

    def __init__(
        self, run: RunDir, settings: NotifyConfig, env: Mapping[str, str], note: Callable[[str], None]
    ) -> None:
        self._run, self._env, self._note = run, env, note
        self._command, self._url = settings.command, settings.webhook
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._lost = ""  #: where the reason of a failure is
        self._thread = threading.Thread(target=self._deliver_all, name="notifier", daemon=True)
        if self._command or self._url:
            self._thread.start()

    def send(self, event: str, state: State) -> None:
        """Pass on an event: `started`, `restarted`, `requeued` or `ended`."""
        self._events.put(
            {
                "event": event,
                "run": f"{self._run.experiment}/{self._run.name}",
                "status": state.status,
                "reason": redact_text(" ".join(state.reason.split()))[:500],
                "attempt": state.attempt,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "folder": str(self._run.path),
            }
        )

    def __exit__(self, *_: object) -> None:
        if self._thread.ident is None:
            return
        self._events.put(None)
        self._thread.join(DRAIN_S)
        if self._thread.is_alive() or self._lost:
            self._note(f"not all notifications were delivered ({self._lost or 'see notifier.log'})")

    def _deliver_all(self) -> None:
        while (facts := self._events.get()) is not None:
            try:
                facts["mlflow_run_id"] = (read_json(self._run.mlflow, within_s=0) or {}).get("run_id")
                with open(self._run.path / "notifier.log", "ab", buffering=0) as log:
                    for pause_s in _PAUSES_S:
                        time.sleep(pause_s)
                        if not (problem := self._deliver(facts, log)):
                            break
                        log.write(f"'{facts['event']}' is not delivered: {problem}\n".encode())
                    else:
                        self._lost = "see notifier.log"
            except (HpcdistError, OSError) as error:
                self._lost = str(error)

    def _deliver(self, facts: Mapping[str, Any], log: IO[bytes]) -> str:
        import requests  # most runs have no webhook

        body = json.dumps(facts).encode()
        try:
            if self._command:
                command = [self._command, facts["event"], facts["run"], facts["status"]]
                options: dict[str, Any] = {"stdout": log, "stderr": log, "env": self._env, "start_new_session": True}
                subprocess.run(command, input=body, timeout=DELIVERY_S, check=True, **options)
                return ""
            # A redirect would turn the POST into a GET of another address.
            options = {"headers": {"Content-Type": "application/json"}, "allow_redirects": False}
            # Without `auth`, requests would send a password of ~/.netrc.
            options["auth"] = lambda request: request
            with requests.post(self._url, body, timeout=DELIVERY_S, stream=True, **options) as done:
                return f"HTTP status {done.status_code}" if done.status_code >= 300 else ""
        except (requests.RequestException, ValueError) as error:
            return type(error).__name__  # its text has the URL
        except (subprocess.SubprocessError, OSError) as error:
            return str(error)
