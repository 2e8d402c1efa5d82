"""Commands by a tag of the MLflow run: `hpcdist.command` = `stop`, `save` or `profile steps=10 ranks=0,3`.

The shipper reads the tag between its passes if `tracking.commands` allows commands. It records the command
(`journal/command.json`) and removes the tag before it obeys, and answers in the tag `hpcdist.command.result`.
If it dies between obeying and recording the result, the next shipper obeys again, which has no effect: a second
request to stop is the first one, and the key of a `save` or `profile` finds the command that was sent.
"""

import logging
import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.run import rank_requests
from hpcdist.run.folder import ENDED, RunDir, State
from hpcdist.run.status import end
from hpcdist.tracking.mlflow_client import MlflowRun, entities
from hpcdist.tracking.upload_state import Sent

log = logging.getLogger(__name__)
TAG = "hpcdist.command"
RESULT_TAG = "hpcdist.command.result"
#: Minimum interval of requests for the tag.
INTERVAL_S = 10.0
#: Author of the commands, for messages. MLflow does not record who has set a tag.
AUTHOR = f"the tag {TAG} in MLflow"
#: Limit of the digits of a number of steps: no run has so many.
_MAX_DIGITS = 9


@dataclass(kw_only=True)
class SentCommand(Sent):
    """The command that is not completely answered, for the next process; without text there is none."""

    FILE = "command.json"
    text: str = ""
    key: str = ""
    attempt: int = 0
    stale: bool = False  #: set before the run was resumed
    result: str = ""  #: empty until the command was obeyed
    answered: str = ""  #: the result in MLflow
    number: int = 0  #: of the command to the ranks, as long as results are missing
    ranks: list[int] = field(default_factory=list)


class CommandTag:
    """Reads the commands that users set as a tag of a run's MLflow run, obeys them, and reports their results."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._command = SentCommand.load(run.journal)
        self._next = -math.inf

    def update(self, mlflow_run: MlflowRun, allowed: Sequence[str], state: State) -> None:
        """Obey a new command and report the result of the last one: every INTERVAL_S, and when the run has ended.

        After a TrackingError the next call continues.
        """
        if time.monotonic() < self._next and state.status not in ENDED:
            return
        self._next = time.monotonic() + INTERVAL_S
        if not self._command.text or self._command.result:
            # A new command replaces the last one, even if its result is still missing.
            current = mlflow_run.current()
            text = _text(current)
            if text:
                # The status of the last pass: this is the first one after the resume of a run that had ended.
                stale = current.info.status in ("FINISHED", "FAILED", "KILLED")
                self._note(SentCommand(text=text, key=secrets.token_hex(8), attempt=state.attempt, stale=stale))
        if self._command.text and not self._command.result:
            if _text(mlflow_run.current()) == self._command.text:  # a command set meanwhile stays for the next call
                mlflow_run.delete_tag(TAG)
            self._note(self._obey(self._command, allowed, state))
            log.info("%s=%s: %s", TAG, self._command.text, self._command.result)
        command = self._command
        if command.number:
            attempt = self._run.attempt(command.attempt)
            is_over = state.status != "running" or state.attempt != attempt.number
            outcome = rank_requests.outcome_of(attempt, command.number, command.ranks, is_over=is_over)
            if outcome is not None:
                self._note(replace(command, number=0, result="; ".join(outcome[0])))
        command = self._command
        if command.text:
            if command.result != command.answered:
                now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
                mlflow_run.set_tags({RESULT_TAG: f"{now} {command.text}: {command.result}"})
            # A command to the ranks stays until all of them have reported a result.
            self._note(replace(command, answered=command.result) if command.number else SentCommand())

    def _note(self, command: SentCommand) -> None:
        """Remember a command, and save it for the next process if it has changed."""
        if command != self._command:
            command.save(self._run.journal)
        self._command = command

    def _obey(self, command: SentCommand, allowed: Sequence[str], state: State) -> SentCommand:
        """Obey a command, or refuse it. Returns it with its result."""
        if state.status in ENDED:
            return replace(command, result=f"ignored, since the run has ended: it is {state.status}")
        if command.stale:
            return replace(command, result="ignored, since it was set before the run was resumed")
        if command.attempt != state.attempt:
            return replace(command, result=f"ignored, since it was set during attempt {command.attempt}")
        try:
            parsed = parse(command.text)
            action = "stop" if parsed is None else parsed.action
            if action not in allowed:
                raise UserMistake(f"tracking.commands allows {', '.join(allowed)}, not {action}: add it to the config")
            if parsed is None:
                return replace(command, result=end(self._run, "stop", by=AUTHOR))
            attempt, number = rank_requests.send_command(self._run, replace(parsed, key=command.key))
        except (HpcdistError, OSError) as error:
            return replace(command, result=f"refused: {error}")
        ranks = list(parsed.ranks)
        return replace(command, result="sent to the ranks", attempt=attempt.number, number=number, ranks=ranks)


def _text(run: entities.Run) -> str:
    return str(run.data.tags.get(TAG, "")).strip()[:200]


def parse(text: str) -> rank_requests.LiveCommand | None:
    """Return the command to the ranks in the value of the tag; None for `stop`. Raises UserMistake for others."""
    action, *words = text.split()
    options = dict(word.partition("=")[::2] for word in words)
    if action == "stop" and not words:
        return None
    if action == "save" and not words:
        return rank_requests.LiveCommand(action="save", by=AUTHOR)
    if action != "profile" or options.keys() - {"steps", "ranks"}:
        raise UserMistake(
            f"{text[:40]!r} is not a command: set stop, save or profile, such as 'profile steps=10 ranks=0,3'"
        )
    steps = options.get("steps", str(rank_requests.DEFAULT_PROFILE_STEPS))
    if not (steps.isascii() and steps.isdigit() and len(steps) <= _MAX_DIGITS):
        raise UserMistake(f"steps={steps[:40]}: expected a number")
    ranks = rank_requests.parse_ranks(options.get("ranks", "0"), "ranks")
    return rank_requests.profile_command(int(steps), ranks, by=AUTHOR)
