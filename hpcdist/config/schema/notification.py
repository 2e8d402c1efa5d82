"""The section `notify`: messages about a run to a chat or a service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import check
from hpcdist.config.schema.paths import IS_PATH

EVENTS = ("end", "failure", "straggler", "requeue")


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """A webhook that receives the events of a run."""

    webhook_file: str = field(default="", metadata=IS_PATH)
    """File with mode 0600 that holds the webhook's URL, to which the supervisor posts events; empty for none."""
    webhook: str = ""
    """The URL instead of a file, as '${oc.env:MY_WEBHOOK}'; it is a secret and is shown as `***`."""
    format: Literal["json", "slack"] = "json"
    """Body of the request: a JSON object with the facts, or a message for Slack and compatible services."""
    events: list[str] = field(default_factory=lambda: list(EVENTS))
    """Events to report: end of the run, failure of an attempt, straggler, requeue of the Slurm job."""

    def __post_init__(self) -> None:
        problems = [
            f"events: {name!r} must be one of {', '.join(EVENTS)}" for name in self.events if name not in EVENTS
        ]
        if self.webhook and not self.webhook.startswith(("http://", "https://", "***")):
            problems.append("webhook must be an address that begins with https:// or http://")  # without the secret
        if self.webhook and self.webhook_file:
            problems.append("webhook and webhook_file exclude each other: remove one of them")
        check(problems)
