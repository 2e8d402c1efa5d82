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
from http import HTTPStatus
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
#: Limit of the reason in an event.
_REASON_CHARS = 500


class Notifier(AbstractContextManager["Notifier"]):
    """Delivers the events of a run in order, if the config has a `notify` section.

    If an event could not be delivered, the end of the context passes a sentence about it to `note`.
    """

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
        reason = redact_text(" ".join(state.reason.split()))
        self._events.put(
            {
                "event": event,
                "run": f"{self._run.experiment}/{self._run.name}",
                "status": state.status,
                "reason": reason[:_REASON_CHARS],
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
            why = self._lost or "see notifier.log"
            self._note(f"not all notifications were delivered ({why})")

    def _deliver_all(self) -> None:
        while True:
            facts = self._events.get()
            if facts is None:
                return
            try:
                mlflow_record = read_json(self._run.mlflow, within_s=0) or {}
                facts["mlflow_run_id"] = mlflow_record.get("run_id")
                with open(self._run.path / "notifier.log", "ab", buffering=0) as log:
                    if not self._deliver_patiently(facts, log):
                        self._lost = "see notifier.log"
            except (HpcdistError, OSError) as error:
                self._lost = str(error)

    def _deliver_patiently(self, facts: Mapping[str, Any], log: IO[bytes]) -> bool:
        """Try to deliver an event several times, and return whether this succeeded."""
        for pause_s in _PAUSES_S:
            time.sleep(pause_s)
            problem = self._deliver(facts, log)
            if not problem:
                return True
            log.write(f"'{facts['event']}' is not delivered: {problem}\n".encode())
        return False

    def _deliver(self, facts: Mapping[str, Any], log: IO[bytes]) -> str:
        """Run the command or post to the webhook; return the reason of a failure, or ""."""
        import requests  # most runs have no webhook

        body = json.dumps(facts).encode()
        try:
            if self._command:
                subprocess.run(
                    [self._command, facts["event"], facts["run"], facts["status"]],
                    input=body,
                    stdout=log,
                    stderr=log,
                    env=self._env,
                    start_new_session=True,
                    timeout=DELIVERY_S,
                    check=True,
                )
                return ""
            with requests.post(
                self._url,
                body,
                headers={"Content-Type": "application/json"},
                # A redirect would turn the POST into a GET of another address.
                allow_redirects=False,
                # Without `auth`, requests would send a password of ~/.netrc.
                auth=lambda request: request,
                stream=True,
                timeout=DELIVERY_S,
            ) as response:
                if response.status_code < HTTPStatus.MULTIPLE_CHOICES:
                    return ""
                return f"HTTP status {response.status_code}"
        except (requests.RequestException, ValueError) as error:
            return type(error).__name__  # its text has the URL
        except (subprocess.SubprocessError, OSError) as error:
            return str(error)
