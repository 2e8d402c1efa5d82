"""Saves the state of an FSDP2 model in turn by hpcdist and by torch.distributed.checkpoint (DCP), and measures each."""

from __future__ import annotations

import itertools
import json
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.fsdp import fully_shard

from hpcdist import Config, Context

#: Layers of the model, each with a square matrix.
NUM_LAYERS = 10
#: Weights and two moments of Adam, of four bytes each.
BYTES_PER_WEIGHT = 12
#: Steps that are measured before and after a save.
STEPS_AFTER_SAVE = 3

#: A save that has copied the state returns a function that waits until it is on disk.
Save = Callable[[int], Callable[[], object]]


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM:")]
    return 1024 * int(line.split()[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Contenders:
    """The kinds of saves of one model and optimizer."""

    def __init__(self, ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._ctx = ctx
        self._model = model
        self._optimizer = optimizer
        self._folder = folder
        # As fast as DCP can be: the plan and the host memory of the first save are kept.
        self._planners = [DefaultSavePlanner(enable_plan_caching=True) for _ in range(2)]
        options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False,
                                 use_non_blocking_copy=False)  # fmt: skip
        # Its thread calls collectives, which must not mix with those of the training.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._stager = DefaultStager(options)
        self.kinds: dict[str, Save] = {
            "hpcdist": self.ours,
            "dcp.save": self.dcp_save,
            "dcp.save, cached plan": self.dcp_save_planned,
            "dcp.save, no fsync": self.dcp_save_unsynced,
            "dcp.async_save": self.dcp_async,
        }

    def ours(self, step: int) -> Callable[[], object]:
        self._ctx.save(step, model=self._model, optimizer=self._optimizer)
        return self._ctx._saves.wait

    def _state(self) -> dict[str, object]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _new(self, name: str, step: int, *, sync_files: bool = True) -> FileSystemWriter:
        return FileSystemWriter(self._folder / f"{name}-{step}", sync_files=sync_files)

    def remove_old(self, step: int) -> None:
        """Remove the checkpoints before a step, outside of the measured time."""
        if self._ctx.is_main:
            for old in (*self._folder.glob("dcp-*"), *self._ctx.run.checkpoints.glob("step-*")):
                if int(old.name.rpartition("-")[2]) < step:
                    shutil.rmtree(old)
        self._ctx.groups.barrier()

    def dcp_save(self, step: int) -> Callable[[], object]:
        save(self._state(), storage_writer=self._new("dcp-plain", step))
        return lambda: None

    def dcp_save_planned(self, step: int) -> Callable[[], object]:
        save(self._state(), storage_writer=self._new("dcp-planned", step), planner=self._planners[0])
        return lambda: None

    def dcp_save_unsynced(self, step: int) -> Callable[[], object]:
        save(self._state(), storage_writer=self._new("dcp-unsynced", step, sync_files=False))
        return lambda: None

    def dcp_async(self, step: int) -> Callable[[], object]:
        response = async_save(
            self._state(),
            storage_writer=self._new("dcp-async", step),
            planner=self._planners[1],
            async_stager=self._stager,
            process_group=self._group,
        )
        future: Any = getattr(response, "upload_completion", response)
        wait: Callable[[], object] = future.result
        return wait


class Training:
    """A sharded model and its optimizer, which take steps on one batch.

    Args:
        num_bytes: of the weights and of the optimizer's state.
    """

    def __init__(self, ctx: Context, num_bytes: int) -> None:
        self._groups = ctx.groups
        num_weights = num_bytes // BYTES_PER_WEIGHT
        width = int((num_weights / NUM_LAYERS) ** 0.5)
        self.model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))
        mesh = ctx.mesh(shard=-1)
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._batch = torch.randn(8, width)

    def step_seconds(self) -> float:
        """Train some steps and return the seconds of one."""
        self._groups.barrier()
        began = time.perf_counter()
        for _ in range(STEPS_AFTER_SAVE):
            self.model(self._batch).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._groups.barrier()
        return (time.perf_counter() - began) / STEPS_AFTER_SAVE


def measure_beside_training(training: Training, start_save: Save, number: int) -> dict[str, float]:
    """Return the cost of a save, of this number, while the training goes on."""
    usual = training.step_seconds()
    wait = start_save(number)
    after = training.step_seconds()
    wait()
    return {"step_over_usual": after / usual}


def measure_alone(ctx: Context, start_save: Save, number: int) -> dict[str, float]:
    """Return the times and the memory of a save, of this number, while nothing else runs."""
    reset_peak()
    resident = peak_bytes()
    cpu_began = time.process_time()
    own_cpu_began = time.thread_time()
    began = time.perf_counter()
    wait = start_save(number)
    stall = time.perf_counter() - began
    stall_cpu = time.thread_time() - own_cpu_began
    wait()
    cpu = time.process_time() - cpu_began
    ctx.groups.barrier()
    durable = time.perf_counter() - began
    peak_mb = (peak_bytes() - resident) / 1e6
    return {"stall_s": stall, "stall_cpu_s": stall_cpu, "durable_s": durable, "cpu_s": cpu, "peak_mb": peak_mb}


def train(ctx: Context, cfg: Config) -> None:
    """Measure each kind of save in turn, and write the slowest rank's values to `rows.json`."""
    warnings.filterwarnings("ignore")
    params = cfg.params
    folder = Path(params["folder"])
    training = Training(ctx, params["megabytes"] * 1_000_000)
    ctx.restore()
    training.step_seconds()  # the first steps are slower
    contenders = Contenders(ctx, training.model, training.optimizer, folder)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in contenders.kinds}
    numbers = itertools.count(1)
    for _ in range(params["rounds"] + 1):
        for name, start_save in contenders.kinds.items():
            number = next(numbers)
            values = measure_alone(ctx, start_save, number)
            contenders.remove_old(number)
            values |= measure_beside_training(training, start_save, next(numbers))
            largest = ctx.groups.max(list(values.values()))
            rows[name].append(dict(zip(values, largest, strict=True)))
    if ctx.is_main:
        (folder / "rows.json").write_text(json.dumps(rows))
    ctx.end_reason = "measured"
