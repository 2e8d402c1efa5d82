"""A profile of some steps of a rank by torch.profiler, written as a trace for Perfetto."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule


class StepProfiler:
    """Profiles the next steps of this rank, after one step that is not recorded, because it starts the profiler.

    The trace contains the operators of the training thread and of the backward pass, and on a GPU its kernels.

    Args:
        path: the trace to write. Its name ends with `.json.gz`; until it is complete it is a hidden file.
        num_steps: steps to record.
        device: device of the rank.
    """

    def __init__(self, path: Path, num_steps: int, device: torch.device) -> None:
        self._path = path
        self._limit = num_steps
        self._num_done = 0
        self._failure: OSError | None = None
        #: Seconds that it took to write the trace.
        self.export_s = 0.0
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=num_steps, repeat=1),
            on_trace_ready=self._export,
        )
        self._profile.start()

    @property
    def num_steps(self) -> int:
        """Number of recorded steps."""
        return max(0, self._num_done - 1)

    def step_done(self) -> bool:
        """Record the end of a step. Returns whether the trace is complete.

        Raises OSError if the trace cannot be written.
        """
        self._num_done += 1
        self._profile.step()
        self._raise_failure()
        return self.num_steps >= self._limit

    def stop(self) -> None:
        """Write the trace of fewer steps. Raises OSError if that fails; writes nothing before the first one."""
        self._profile.stop()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _export(self, finished: profile) -> None:
        # Called by the profiler, which must be able to continue.
        if not self.num_steps:
            return
        began = time.perf_counter()
        partial = self._path.with_name(f".{self._path.name}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            finished.export_chrome_trace(str(partial))
            os.replace(partial, self._path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            self._failure = error
        self.export_s = time.perf_counter() - began
