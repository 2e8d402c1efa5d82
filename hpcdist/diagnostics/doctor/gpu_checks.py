"""Checks of this machine's GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.machine.check import Check, note, ok, warning
from hpcdist.machine.gpus import Gpu

#: Fraction of a GPU's memory; a display or a monitoring program uses less.
_IN_USE = 0.1


def gpu_checks(found: Sequence[Gpu], num_visible: int, num_devices: int, driver: str) -> list[Check]:
    """Return one result per GPU, or one that explains why there are none.

    Args:
        num_visible: GPUs that a run would use according to CUDA_VISIBLE_DEVICES.
        num_devices: GPUs with a device file.
        driver: version of the kernel's driver, empty without one.
    """
    if not found:
        if num_devices or driver:
            text = f"NVML reports no GPU, although driver {driver} is loaded and {num_devices} device files exist"
            fix = "see the error of `nvidia-smi`; in a container pass GPUs in (docker: --gpus all, podman: --device"
            return [warning("GPUs", text, f"{fix} nvidia.com/gpu=all)")]
        return [note("GPUs", "none: training uses the CPUs")]
    checks = [_gpu(gpu) for gpu in found]
    if num_visible < len(found):
        text = f"{num_visible} of {len(found)} according to CUDA_VISIBLE_DEVICES"
        checks.append(note("visible", text, "unset it to use all of them"))
    return checks


def _gpu(gpu: Gpu) -> Check:
    name, text = f"GPU {gpu.index}", gpu.name
    if gpu.total_mb:
        text += f", {gpu.total_mb / 1024:.0f} GiB"
    if gpu.uncorrected_errors:
        text += f": {gpu.uncorrected_errors} uncorrected memory errors (ECC) since the driver was loaded"
        fix = f"an administrator resets it: `nvidia-smi --gpu-reset -i {gpu.index}`; if errors return, the card is"
        return warning(name, text, f"{fix} defective: exclude it by CUDA_VISIBLE_DEVICES")
    if gpu.throttled:
        text += f": throttled, {', '.join(gpu.throttled)}"
        return warning(name, text, "report cooling or power supply to the administrators")
    if gpu.used_mb and gpu.total_mb and gpu.used_mb > _IN_USE * gpu.total_mb:
        user = f" by process {', '.join(map(str, gpu.pids))}" if gpu.pids else ""
        text += f": {gpu.used_mb / 1024:.1f} GiB in use{user}"
        fix = "`nvidia-smi` lists the processes; end leftover ones, or select other GPUs by CUDA_VISIBLE_DEVICES"
        return warning(name, text, fix)
    return ok(name, text)
