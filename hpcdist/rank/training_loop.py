"""Parts of the shipped training loops: progress with stop rules, meter, optimizer, schedule, initial rows of tables,
order of gradients.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import ParamsT

from hpcdist.config.schema import Config
from hpcdist.config.training_schema import OptimConfig, ScheduleConfig
from hpcdist.errors import ConfigError
from hpcdist.rank.context import Context, Restored
from hpcdist.rank.step_loop import Steps

#: Up to this number of ranks, the order in which gradients are added has no effect on their sum.
MAX_ORDER_FREE_RANKS = 2


class Progress:
    """Steps, epochs and evaluations done so far, and the stop rules of the config, which end training.

    Args:
        cfg: its sections `stop`, `checkpoint` and `tracking` are used.
        steps_per_epoch: optimizer steps of one epoch in this attempt.
        evaluate_every: optimizer steps between two evaluations within an epoch; None for those at its end only.
        saved: `state_dict()`, named `position` in checkpoints; None at the first start. If its steps per epoch differ,
            because the number of ranks or the batch size has changed, the position within the epoch is rescaled.
        goal: threshold of the task and its description; used if `stop.threshold` is not set.
    """

    def __init__(
        self,
        cfg: Config,
        steps_per_epoch: int,
        saved: Mapping[str, Any] | None = None,
        *,
        goal: tuple[float, str] | None = None,
        evaluate_every: int | None = None,
    ) -> None:
        self._cfg = cfg
        self._evaluate_every = evaluate_every
        self._goal = goal
        self.steps_per_epoch: int = steps_per_epoch
        self.load_state_dict(saved or {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue at a position that `state_dict` has returned; begin anew if it is empty."""
        cfg = self._cfg
        steps_per_epoch = self.steps_per_epoch
        self.step: int = saved.get("step", 0)  #: optimizer steps done in total
        self.epoch: int = saved.get("epoch", 0)  #: epochs done, counted by `end_epoch`
        self.step_in_epoch: int = saved.get("step_in_epoch", 0) * steps_per_epoch // saved.get("steps_per_epoch", 1)
        self.samples: int = saved.get("samples", 0)  #: of all ranks until the last logged step
        self._evaluated_step: int = saved.get("evaluated_step", -1)
        self._best: float | None = saved.get("best")
        self._num_evals_without_better: int = saved.get("num_evals_without_better", 0)
        remaining = max(0, cfg.stop.max_epochs - self.epoch) * steps_per_epoch - self.step_in_epoch
        #: The step at which training ends; computed anew in each attempt.
        self.total_steps: int = self.step + max(0, remaining)
        if cfg.stop.max_steps is not None:
            # A resume may have a smaller stop.max_steps than the checkpoint has steps.
            self.total_steps = max(self.step, min(self.total_steps, cfg.stop.max_steps))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training for a checkpoint."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "step_in_epoch": self.step_in_epoch,
            "steps_per_epoch": self.steps_per_epoch,
            "samples": self.samples,
            "evaluated_step": self._evaluated_step,
            "best": self._best,
            "num_evals_without_better": self._num_evals_without_better,
        }

    @property
    def epochs(self) -> float:
        """Epochs done, including the fraction of the current one."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch

    @property
    def steps_until_evaluation(self) -> int:
        """Steps to do before the next evaluation: the next one within the epoch, or at its end or that of training."""
        remaining = min(self.steps_per_epoch - self.step_in_epoch, self.total_steps - self.step)
        if self._evaluate_every is None:
            return remaining
        return min(remaining, self._evaluate_every - self.step % self._evaluate_every)

    def until_evaluation(self, steps: Steps) -> Iterator[int]:
        """Yield the steps before the next evaluation. In the body of the loop, its step counts as done."""
        for step in steps.until(self.step + self.steps_until_evaluation):
            self.step += 1
            self.step_in_epoch += 1
            yield step

    def add_samples(self, number: float) -> int:
        """Add the samples of all ranks since the last logged step. Returns their number since the start of the run."""
        self.samples += int(number)
        return self.samples

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Record an evaluation, and count the epoch if all of its steps are done.

        Raises ConfigError if `checkpoint.monitor` is not among the metrics.
        """
        checkpoint = self._cfg.checkpoint
        if checkpoint.monitor not in metrics:
            raise ConfigError(
                f"checkpoint.monitor={checkpoint.monitor!r} is not measured: use one of {', '.join(metrics)}"
            )
        value = metrics[checkpoint.monitor]
        if self._best is None or self._sign * value > self._sign * self._best:
            self._best = value
            self._num_evals_without_better = 0
        else:
            self._num_evals_without_better += 1
        self._evaluated_step = self.step
        if self.step_in_epoch == self.steps_per_epoch:
            self.epoch += 1
            self.step_in_epoch = 0

    @property
    def _sign(self) -> int:
        """Factor of the monitored metric with which larger values are better."""
        return 1 if self._cfg.checkpoint.monitor_mode == "max" else -1

    @property
    def end_reason(self) -> str:
        """Why training is over, empty while it continues. Training ends after an evaluation only."""
        if self._evaluated_step != self.step or self._best is None:
            return ""
        stop = self._cfg.stop
        monitor = self._cfg.checkpoint.monitor
        goal = self._goal
        if stop.threshold is not None:
            goal = (stop.threshold, "stop.threshold")
        if goal is not None:
            threshold, source = goal
            if self._sign * self._best >= self._sign * threshold:
                return f"{monitor} reached {self._best:.6g} ({source}={threshold:g}) at step {self.step}"
        if stop.patience is not None and self._num_evals_without_better >= stop.patience:
            return f"no better {monitor} in {stop.patience} evaluations (stop.patience) at step {self.step}"
        if self.step >= self.total_steps:
            epochs = f"{self.epochs:.4g}"
            unit = "epoch" if epochs == "1" else "epochs"
            return f"trained {self.step} steps, {epochs} {unit}"
        return ""


class Meter:
    """Named sums since the last logged step, such as of the loss. A checkpoint holds `state_dict()`.

    Tensors stay on their device: reading a value at each step would wait for the device.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None, device: torch.device | None = None) -> None:
        self._device = device
        self._paused_at: float | None = None
        self.load_state_dict(saved or {})

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue with the sums that `state_dict` has returned; begin anew if it is empty."""
        self.sums: dict[str, Any] = dict(saved)
        for name, value in saved.items():
            if isinstance(value, Tensor):
                self.sums[name] = value.to(self._device)
        self._since: float = time.perf_counter() - self.sums.pop("elapsed_s", 0.0)

    @classmethod
    def restore(cls, ctx: Context, saved: Restored | None) -> Self:
        """Return the meter whose `state_dict()` was saved as the state `local` of each rank.

        If the number of ranks has changed, rank 0 has the sums of all ranks and the longest of their times.
        """
        if saved is None:
            return cls(None, ctx.device)
        if saved.local is not None or not ctx.is_main:
            return cls(saved.local, ctx.device)
        sums: dict[str, Any] = {}
        elapsed_s = 0.0
        for local in saved.local_by_rank:
            rank_sums = local or {}
            for name, value in rank_sums.items():
                sums[name] = sums.get(name, 0.0) + value
            elapsed_s = max(elapsed_s, rank_sums.get("elapsed_s", 0.0))
        sums["elapsed_s"] = elapsed_s
        return cls(sums, ctx.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the time for a checkpoint; empty right after a logged step."""
        if not self.sums:
            return {}
        return {**self.sums, "elapsed_s": self.elapsed_s}

    def add(self, **values: float | Tensor) -> None:
        """Add values to the sums of these names."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    @property
    def elapsed_s(self) -> float:
        """Seconds of training since the last logged step."""
        now = time.perf_counter() if self._paused_at is None else self._paused_at
        return now - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from `elapsed_s`."""
        self._paused_at = time.perf_counter()
        yield
        self._since += time.perf_counter() - self._paused_at
        self._paused_at = None

    def reset(self) -> None:
        """Begin new sums after a logged step."""
        self.sums.clear()
        self._since = time.perf_counter()


def build_optimizer(parameters: ParamsT, cfg: OptimConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer, of parameters or groups of them, fused unless torch has no such implementation.

    From a saved state it loads the state of each parameter only: options such as weight decay come from the config.
    """
    optimizer: torch.optim.Optimizer
    if cfg.name == "sgd":
        optimizer = torch.optim.SGD(
            parameters, lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay, fused=True
        )
        for group in optimizer.param_groups:
            if any(_is_distributed(parameter) for parameter in group["params"]):
                group["fused"] = None  # torch chooses another: DTensor has no fused SGD
    else:
        kind = torch.optim.AdamW if cfg.name == "adamw" else torch.optim.Adam
        optimizer = kind(parameters, lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
    optimizer.register_load_state_dict_pre_hook(_with_own_options)
    return optimizer


def _is_distributed(parameter: Tensor) -> bool:
    """Return whether a parameter is a DTensor. An import of DTensor for this check would take long."""
    return hasattr(parameter, "device_mesh")


def _with_own_options(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    return {**optimizer.state_dict(), "state": saved["state"]}


def lr_factor(step: int, total_steps: int, cfg: ScheduleConfig) -> float:
    """Return the learning rate of optimizer step `step` (from 0), relative to its peak.

    The schedule is a function of the step alone, so a checkpoint does not need to hold it.
    """
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.name == "cosine":
        fraction = (step - cfg.warmup_steps) / max(1, total_steps - cfg.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))
    if cfg.name == "wsd":
        num_decay_steps = max(1, math.ceil(cfg.decay_fraction * total_steps))
        return min(1.0, max(0, total_steps - step) / num_decay_steps)
    return 1.0


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


#: Number of rows that `fill_rows` draws together.
BLOCK_ROWS = 1024


def fill_rows(out: Tensor, rows: range, *, table: str, scale: float, seed: int) -> None:
    """Write the initial values of rows of a table into `out` [len(rows), dim]: uniform in ± scale.

    They depend on (seed, table, row) only, so that they are equal for every number of servers.
    """
    first_block = rows.start // BLOCK_ROWS
    end_block = math.ceil(rows.stop / BLOCK_ROWS)
    for block in range(first_block, end_block):
        digest = hashlib.blake2b(f"{seed}/{table}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        drawn = torch.empty(BLOCK_ROWS, out.shape[1]).uniform_(-scale, scale, generator=generator)
        first = block * BLOCK_ROWS
        begin = max(rows.start, first)
        end = min(rows.stop, first + BLOCK_ROWS)
        out[begin - rows.start : end - rows.start] = drawn[begin - first : end - first]


def settle_buckets(model: DistributedDataParallel, loss: Callable[[], Tensor]) -> None:
    """Make DDP rebuild its buckets before the first training step. Call it on every rank.

    DDP rebuilds its buckets after it has seen the order of the gradients. The position of a gradient in its bucket
    determines the order in which the ranks' values are added, and with more than two ranks the order determines the
    rounding. Without this call the first steps after a resume are rounded differently than in an uninterrupted run.

    `loss` runs a forward pass of `model` with any batch, and returns the loss. The model and the random number
    generators are not changed. Call it after the restore: a forward pass ends the start-up time.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = [] if model.device_type == "cpu" else model.device_ids
    with torch.random.fork_rng(devices, device_type=model.device_type):
        for _ in range(2):  # with a static graph DDP rebuilds its buckets after the second backward pass
            torch.autograd.backward(loss())
            model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
