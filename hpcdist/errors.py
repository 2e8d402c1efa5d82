"""Every error that hpcdist raises on purpose, in one tree.

`exit_code` is what the process ends with: 1 for a failure that a retry may cure, 2 for the user's mistake,
which no retry cures (the rank's outcome is then `rejected`).
"""

from __future__ import annotations

from collections.abc import Sequence


class HpcdistError(Exception):
    """Base of all errors of this package. Its message is shown to the user without a traceback."""

    exit_code = 1


class UserMistake(HpcdistError):
    """Something that only the user can put right; never retried."""

    exit_code = 2


class ConfigError(UserMistake):
    """One or more mistakes in a config; `problems` holds one line for each."""

    def __init__(self, problems: Sequence[str], source: str = "") -> None:
        self.problems = tuple(problems)
        self.source = source
        head = f"{source}: " if source else ""
        if len(self.problems) == 1:
            super().__init__(head + self.problems[0])
        else:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            super().__init__(f"{head}{len(self.problems)} mistakes\n{lines}")


class TopologyError(UserMistake):
    """The environment's variables do not say, or contradict each other about, which rank this is."""


class TrainerError(UserMistake):
    """The trainer or script that a config names cannot be imported or run."""


class DataError(UserMistake):
    """A dataset is missing, unreadable, or not what its name says."""


class RunFolderError(UserMistake):
    """No such run, an ambiguous prefix, a folder that cannot be written, or one that another process holds."""


class CheckpointError(HpcdistError):
    """A checkpoint could not be written, or none that is asked for can be read."""


class RendezvousError(HpcdistError):
    """The ranks did not find each other in time, or a stranger answered in the master's place."""


class TrackingError(HpcdistError):
    """The tracking server refused or did not answer. Never raised in a training process."""


class DevClusterError(UserMistake):
    """The dev cluster cannot be made, changed or reached here; says what it needs."""


class ImageError(UserMistake):
    """An image is missing, made for another machine, or not what it must be."""
