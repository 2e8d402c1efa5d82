"""Commands by a tag of the MLflow run: `hpcdist.command` = `stop`, `save` or `profile steps=10 ranks=0,3`.

The shipper reads the tag every few seconds if `tracking.commands` allows commands. It records the command
(`ShippingState.command`) and removes the tag before it obeys, and answers in the tag `hpcdist.command.result`.
If it dies between obeying and recording the result, the next shipper obeys again, which has no effect: a second
request to stop is the first one, and the key of a `save` or `profile` finds the command that was sent.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.run.commands import (
    DEFAULT_PROFILE_STEPS,
    LiveCommand,
    end,
    outcome_of,
    parse_ranks,
    profile_command,
    send_command,
)
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.tracking.mlflow_run import MlflowRun
from hpcdist.tracking.points import ShippingState, completion_of
from hpcdist.tracking.run_metadata import MAX_TAG, clean_text

log = logging.getLogger(__name__)
TAG = "hpcdist.command"
RESULT_TAG = "hpcdist.command.result"
#: Interval of requests for the tag, also during a pass of the shipper.
INTERVAL_S = 10.0
#: Author of the commands, for messages. MLflow does not record who has set a tag.
AUTHOR = f"the tag {TAG} in MLflow"


class CommandTag:
    """The tag of one run.

    Args:
        save: writes the state of the upload to its file.
    """

    def __init__(self, run: RunDir, save: Callable[[], None]) -> None:
        self._run = run
        self._save = save
        self._next = -math.inf

    def update(self, mlflow: MlflowRun, allowed: list[str], state: State, progress: ShippingState) -> None:
        """Obey a new command and report the result of the last one: every INTERVAL_S, and when the run has ended.

        Args:
            allowed: `tracking.commands` of the run.

        Raises:
            TrackingError: MLflow is unavailable or rejects a request; the next call continues.
        """
        has_just_ended = state.status in ENDED and progress.complete != completion_of(state)
        if not allowed or (time.monotonic() < self._next and not has_just_ended):
            return
        self._next = time.monotonic() + INTERVAL_S
        if not _is_claimed(progress.command):
            self._claim(mlflow, state, progress)
        if _is_claimed(command := progress.command):
            if mlflow.tag(TAG).strip()[:200] == command["text"]:  # a command set meanwhile stays for the next call
                mlflow.delete_tag(TAG)
            command = command | self._obey(command, allowed, state)
            log.info("%s=%s: %s", TAG, command["text"], command["result"])
            self._note(progress, command)
        if "number" in progress.command:
            self._follow(state, progress)
        if progress.command:
            self._answer(mlflow, progress)

    def _claim(self, mlflow: MlflowRun, state: State, progress: ShippingState) -> None:
        """Read the tag. A new command replaces the last one, whose result may still be missing."""
        text = mlflow.tag(TAG).strip()
        if text:
            # The status of the last pass: this is the first one after the resume of a run that had ended.
            is_stale = progress.status.partition(" ")[0] in ("FINISHED", "FAILED", "KILLED")
            command = {
                "text": text[:200],
                "key": secrets.token_hex(8),
                "attempt": str(state.attempt),
                "stale": "yes" if is_stale else "",
            }
            self._note(progress, command)

    def _follow(self, state: State, progress: ShippingState) -> None:
        """Look for the results of the ranks."""
        command = dict(progress.command)
        attempt = self._run.attempt(int(command["attempt"]))
        is_over = state.status != "running" or state.attempt != attempt.number
        ranks = [int(rank) for rank in command["ranks"].split(",")]
        outcome = outcome_of(attempt, int(command["number"]), ranks, is_over=is_over)
        if outcome is not None:
            del command["number"]
            self._note(progress, command | {"result": "; ".join(outcome[0])})

    def _answer(self, mlflow: MlflowRun, progress: ShippingState) -> None:
        """Write a new result to the tag of results."""
        command = dict(progress.command)
        if command["result"] != command.get("answered"):
            now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
            mlflow.set_tags({RESULT_TAG: clean_text(f"{now} {command['text']}: {command['result']}")[:MAX_TAG]})
        is_complete = "number" not in command
        self._note(progress, {} if is_complete else command | {"answered": command["result"]})

    def _note(self, progress: ShippingState, command: dict[str, str]) -> None:
        progress.command = command
        self._save()

    def _obey(self, command: Mapping[str, str], allowed: list[str], state: State) -> dict[str, str]:
        """Obey a command. Returns its result, and for a command to the ranks its number."""
        if state.status in ENDED:
            return {"result": f"ignored, since the run has ended: it is {state.status}"}
        if command["stale"]:
            return {"result": "ignored, since it was set before the run was resumed"}
        if command["attempt"] != str(state.attempt):
            return {"result": f"ignored, since it was set during attempt {command['attempt']}"}
        try:
            parsed = parse(command["text"])
            action = "stop" if parsed is None else parsed.action
            if action not in allowed:
                raise UserMistake(f"tracking.commands allows {', '.join(allowed)}, not {action}: add it to the config")
            if parsed is None:
                return {"result": end(self._run, "stop", by=AUTHOR)}
            attempt, number = send_command(self._run, replace(parsed, key=command.get("key", "")))
        except (HpcdistError, OSError) as error:
            return {"result": f"refused: {error}"}
        ranks = ",".join(str(rank) for rank in parsed.ranks)
        return {"result": "sent to the ranks", "attempt": str(attempt.number), "number": str(number), "ranks": ranks}


def _is_claimed(command: Mapping[str, str]) -> bool:
    """Return whether a command was read and not obeyed yet."""
    return "text" in command and "result" not in command


def parse(text: str) -> LiveCommand | None:
    """Return the command to the ranks in the value of the tag; None for `stop`.

    Raises UserMistake for another text.
    """
    action, *words = text.split()
    options = dict(word.partition("=")[::2] for word in words)
    if action in ("stop", "save") and not words:
        return None if action == "stop" else LiveCommand(action="save", by=AUTHOR)
    if action != "profile" or options.keys() - {"steps", "ranks"}:
        raise UserMistake(
            f"{text[:40]!r} is no command: set stop, save or profile, such as 'profile steps=10 ranks=0,3'"
        )
    steps = options.get("steps", str(DEFAULT_PROFILE_STEPS))
    if not (steps.isascii() and steps.isdigit() and len(steps) < 10):
        raise UserMistake(f"steps={steps[:40]}: expected a number")
    return profile_command(int(steps), parse_ranks(options.get("ranks", "0"), "ranks"), by=AUTHOR)
