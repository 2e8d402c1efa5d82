"""The section `notify`: notifications about the start, restarts and end of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcdist.config.schema.checks import check
from hpcdist.config.schema.paths import IS_PATH


@dataclass(frozen=True, kw_only=True)
class NotifyConfig:
    """The webhook or the command that receives the events of a run."""

    webhook_file: str = field(default="", metadata=IS_PATH)
    """File with mode 0600 that holds the URL to which events are posted as JSON; empty for none."""
    webhook: str = ""
    """The URL instead of a file, as '${oc.env:MY_WEBHOOK}'; it is a secret and is shown as `***`."""
    command: str = field(default="", metadata=IS_PATH)
    """Executable file that is called with event, run and status, and reads the JSON from its standard input."""

    def __post_init__(self) -> None:
        problems = []
        if self.webhook and not self.webhook.startswith(("http://", "https://", "***")):
            problems.append("webhook must be an address that begins with https:// or http://")  # without the secret
        if sum(map(bool, (self.webhook_file, self.webhook, self.command))) > 1:
            problems.append("webhook_file, webhook and command exclude each other: set one of them")
        check(problems)
