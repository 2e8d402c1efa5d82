"""The loop of a trainer: `Context.steps` returns `Steps`, which counts, asks for a stop, and saves after each step."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcdist.errors import TrainerError

if TYPE_CHECKING:
    from hpcdist.rank.context import Context


class Steps:
    """The steps of a training. `Context.steps` creates it, and a trainer iterates over it once.

    A loop with evaluations iterates over parts, each of which ends at a given step:

        steps = ctx.steps(total_steps, model=model, optimizer=optimizer)
        while steps.step < total_steps and not steps.is_stopped:
            for step in steps.until(steps.step + 500):
                train_step(model, optimizer)
            if not steps.is_stopped:
                steps.save(evaluate(model))

    Attributes:
        step: number of steps done.
        total_steps: the step at which the training ends.
        is_stopped: whether the ranks have agreed to stop; then the loop is over, and its last step is saved.
        is_complete: set it to False in a step after which the state cannot be saved, such as one with a batch in
            flight: a save or a stop waits for the next step. Each step begins with True.
    """

    def __init__(
        self,
        ctx: "Context",
        *,
        step: int,
        total_steps: int,
        log_every: int,
        save: Callable[[int, Mapping[str, float]], None],
        after_first_step: Callable[[], None] | None,
        save_is_due: Callable[[], bool],
    ) -> None:
        self.step = step
        self.total_steps = total_steps
        self.is_stopped = False
        self.is_complete = True
        self.is_open = False  #: whether the body of the loop is running, or was left
        self._ctx = ctx
        self._log_every = log_every
        self._save = save
        self._save_is_due = save_is_due
        self._after_first_step = after_first_step
        self._metrics: dict[str, float] = {}  #: of the evaluation in this step
        self._given: dict[str, int] = {}  #: by metric: the step for which `ctx.log` was called last

    @property
    def number(self) -> int:
        """Number of the step that the body of the loop is doing, from 1; between parts, of the last one."""
        if self.is_open:
            return self.step + 1
        return self.step

    @property
    def log_is_due(self) -> bool:
        """Whether to log in this step: every `tracking.log_every_steps` steps, and in the last step."""
        return self.number % self._log_every == 0 or self.number == self.total_steps

    @property
    def save_is_due(self) -> bool:
        """Whether a stop or `hpcdist save` waits for a step with a complete state."""
        return self._save_is_due()

    def __iter__(self) -> Iterator[int]:
        """Yield the number of steps done before each step, up to `total_steps`, and save the last one."""
        return self._run(None)

    def until(self, end: int) -> Iterator[int]:
        """Yield the steps before step `end`, as a part of the loop.

        The last one is saved only if it is the last before a stop: call `save` with the metrics of its evaluation.
        """
        return self._run(end)

    def save(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation, and save a checkpoint with them. Call it on every rank.

        In the body of the loop, the checkpoint is saved at the end of the step.
        """
        self._ctx.log(metrics, self.number)
        self._metrics |= metrics
        if not self.is_open:
            self._save_step()

    def end(self, reason: str) -> None:
        """Make this step the last one, for a reason that the status of the run shows.

        Call it on every rank in the body of the same step.
        """
        self.total_steps = self.number
        self._ctx.end_reason = reason

    def due(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics to record in this step; see `Context.log`."""
        before = self.number - 1
        is_due = self.log_is_due
        due = {name: value for name, value in metrics.items() if is_due or self._given.get(name) != before}
        self._given |= dict.fromkeys(metrics, self.number)
        return due

    def _run(self, end: int | None) -> Iterator[int]:
        while not self.is_stopped and self.step < self.total_steps and (end is None or self.step < end):
            self.is_open = True
            self.is_complete = True
            yield self.step
            self.is_open = False
            self.step += 1
            self._end_step(end)

    def _end_step(self, end: int | None) -> None:
        """Ask for a stop, and save if a checkpoint is due."""
        is_stopped = self._ctx.should_stop(self.step, self.total_steps)
        if self._after_first_step is not None:
            self._after_first_step()
            self._after_first_step = None
        if not self.is_complete:
            return
        self.is_stopped = is_stopped
        is_last = self.step == self.total_steps
        if is_stopped or self._metrics:
            is_due = True
        elif end is None:
            is_due = is_last or self._ctx.should_save(self.step)
        else:
            # The trainer evaluates the last step of a part, and saves it with the metrics.
            is_due = not is_last and self.step != end and self._ctx.should_save(self.step)
        if is_due:
            self._save_step()

    def _save_step(self) -> None:
        metrics = self._metrics
        self._metrics = {}
        self._save(self.step, metrics)

    def check_left(self) -> None:
        """Raise TrainerError if the body of the loop was left: its last step is not saved."""
        if self.is_open:
            raise TrainerError(
                f"the loop of ctx.steps was left in step {self.number} of {self.total_steps}, by break, return or the"
                " end of the data, so this step is not saved: end the loop by steps.end('reason') with"
                " steps = ctx.steps(…), or pass the number of steps that the data has"
            )
