"""The GPUs of this machine: there, healthy, free?"""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.machine.check import Check
from hpcdist.machine.facts import Gpu

#: Of a GPU's memory; a display or a monitor takes less.
_IN_USE = 0.1


def gpus(found: Sequence[Gpu], num_visible: int, num_devices: int, driver: str) -> list[Check]:
    """A line for each GPU, or what it means that there is none.

    Args:
        num_visible: how many a run would use, by CUDA_VISIBLE_DEVICES.
        num_devices: how many have a device file here.
        driver: version of the kernel's driver, empty where there is none.
    """
    if not found:
        if num_devices or driver:
            text = f"the driver {driver} is here, {num_devices} devices are, but nvidia-smi shows no GPU"
            fix = "`nvidia-smi` says why; in a container pass them in (docker: --gpus all, podman: --device"
            return [Check(name="GPUs", level="warning", text=text, fix=f"{fix} nvidia.com/gpu=all)")]
        return [Check(name="GPUs", level="note", text="none here: training runs on the CPUs")]
    checks = [_gpu(gpu) for gpu in found]
    if num_visible < len(found):
        text = f"{num_visible} of {len(found)} by CUDA_VISIBLE_DEVICES"
        checks.append(Check(name="visible", level="note", text=text, fix="unset it to use all of them"))
    return checks


def _gpu(gpu: Gpu) -> Check:
    name, text = f"GPU {gpu.index}", gpu.name
    if gpu.total_mb:
        text += f", {gpu.total_mb / 1024:.0f} GiB"
    if gpu.uncorrected_errors:
        text += f": {gpu.uncorrected_errors} memory errors (ECC) that could not be corrected since the driver came up"
        fix = f"`nvidia-smi --gpu-reset -i {gpu.index}` by staff; if they come back the card is broken: leave it out by"
        return Check(name=name, level="warning", text=text, fix=f"{fix} CUDA_VISIBLE_DEVICES")
    if gpu.throttled:
        text += f": slowed down, {', '.join(gpu.throttled)}"
        return Check(name=name, level="warning", text=text, fix="cooling or power supply: tell the machine's staff")
    if gpu.used_mb and gpu.total_mb and gpu.used_mb > _IN_USE * gpu.total_mb:
        whose = f" by process {', '.join(map(str, gpu.pids))}" if gpu.pids else ""
        text += f": {gpu.used_mb / 1024:.1f} GiB in use{whose}"
        fix = "`nvidia-smi` shows whose; end what is left over, or choose others by CUDA_VISIBLE_DEVICES"
        return Check(name=name, level="warning", text=text, fix=fix)
    return Check(name=name, level="ok", text=text)
