"""The points that MLflow has received."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hpcdist.config.training_schema import TrainerConfig
from hpcdist.config.written import read_section
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.run.folder import ENDED, RunDir
from hpcdist.tracking.upload_state import Sent, SentFacts, state_key


@dataclass(kw_only=True)
class SentPoints(Sent):
    """The points taken from the journals, and the rule which of them count; the owner is `PointBatches`.

    "Sent" means that a point has passed this rule: the budget may still hold it or leave it out.
    """

    FILE = "sent-points.json"
    offsets: dict[str, int] = field(default_factory=dict)
    """Journal file → bytes with points that have been sent."""
    intent: dict[str, int] = field(default_factory=dict)
    """Offsets up to which records are being sent. After a crash the same records are sent again: MLflow's
    database stores points that agree in key, time, step and value once."""
    closing: dict[str, int] = field(default_factory=dict)
    """Attempt → last interval of node metrics that is being sent; part of the intent."""
    flushing: bool = False
    """Whether the points of open buckets (`series`) are being sent; part of the intent."""
    steps: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Metric → attempt → lowest and highest step sent."""
    series: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metric → its number of points before thinning, and its open bucket (`PointBudget`)."""
    node_intervals: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Attempt → its intervals of node metrics (`NodeCharts`)."""
    newest_counts: bool = False
    """Of a script, which may start from scratch: each attempt sends its own points of a (key, step)."""

    @property
    def is_sending(self) -> bool:
        """Whether the last batch may have been sent, in part or completely."""
        return bool(self.intent or self.closing or self.flushing)

    def commit(self) -> None:
        """Record that MLflow has the points that were being sent."""
        self.offsets |= self.intent
        self.intent = {}
        self.closing = {}
        self.flushing = False

    def admit(self, attempt: int, key: str, step: int, *, once: bool, was_seen: Callable[[], bool]) -> bool:
        """Return whether a point is new to MLflow, and record it as sent.

        A resumed attempt repeats steps that an earlier one logged after its last checkpoint: the first value is kept,
        except of a script, which need not load a checkpoint. MLflow's last value is then that of the later time.
        Records of an earlier attempt that arrive late, as on a network file system, count only below the first step
        of later attempts.

        Args:
            once: whether an attempt sends one point of a step, the first one.
            was_seen: returns whether a step between this attempt's lowest and highest was sent. It is expensive, and
                called only if the steps of a key do not increase.
        """
        shipped = self.steps.setdefault(key, {})
        for other, (low, high) in shipped.items():
            is_resumed = int(other) < attempt and step <= high and not self.newest_counts
            if is_resumed or (int(other) > attempt and step >= low):
                return False
        bounds = shipped.get(str(attempt))
        if bounds is None:
            shipped[str(attempt)] = [step, step]
        elif step > bounds[1]:
            bounds[1] = step
        elif step < bounds[0]:
            bounds[0] = step
        elif once:
            return step not in bounds and not was_seen()  # the lowest and the highest step were sent
        return True


def is_complete(run: RunDir) -> bool:
    """Return whether MLflow has everything of an ended run, without a request. Raises RunFolderError and OSError."""
    state, facts = run.read_state(), SentFacts.load(run.journal)
    offsets = SentPoints.load(run.journal).offsets | facts.events
    return (
        state.status in ENDED
        and facts.complete == state_key(state)
        and all(path.stat().st_size <= offsets.get(path.name, 0) for path in run.journal.glob("*.jsonl"))
    )


class StepSet:
    """A set of steps in any order, with one bit for each step, in blocks of 1024 steps."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}

    def __contains__(self, step: int) -> bool:
        return bool(self._blocks.get(step >> 10, 0) >> (step & 1023) & 1)

    def add(self, step: int) -> None:
        self._blocks[step >> 10] = self._blocks.get(step >> 10, 0) | 1 << (step & 1023)


def is_of_script(run: RunDir) -> bool:
    """Return whether a run starts a script of the user instead of a trainer; False if its config cannot be read."""
    try:
        return bool(read_section(run.config, "trainer", TrainerConfig).script)
    except (ConfigError, RunFolderError, OSError):  # a damaged file
        return False
