"""Energy counters of this machine: NVML for GPUs, RAPL for CPU packages and their memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

#: The kernel's power capping framework. Only root may read its counters on most systems.
POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """The energy that sensors have counted since this object was created.

    Args:
        gpu_uuid: the GPU of this rank, as NVML writes it (`GPU-…`); its counter includes other programs. None to read
            none.
        env: environment of the process; None to leave out the CPU packages, of which one process per node is enough.
        powercap: folder of the RAPL counters.
    """

    def __init__(self, gpu_uuid: str | None, env: Mapping[str, str] | None, *, powercap: Path = POWERCAP) -> None:
        counters = dict(_package_counters(powercap)) if env is not None and _has_all_cores(env) else {}
        if gpu_uuid is not None and (read := _gpu_counter(gpu_uuid)) is not None:
            counters[gpu_uuid] = read
        self._counters = {key: counter for key, read in counters.items() if (counter := _Sum.start(read)) is not None}

    def joules(self) -> dict[str, float]:
        """Return joules by sensor: the UUID of a GPU, or the name of a RAPL domain; empty without a sensor."""
        return {key: round(counter.joules(), 3) for key, counter in self._counters.items()}


class _Sum:
    """Adds up the differences of a counter, which starts at 0 again after `limit` joules or a reset."""

    def __init__(self, read: Callable[[], tuple[float, float]], first: float) -> None:
        self._read, self._last, self._sum = read, first, 0.0

    @classmethod
    def start(cls, read: Callable[[], tuple[float, float]]) -> _Sum | None:
        try:
            return cls(read, read()[0])
        except (OSError, ValueError, RuntimeError) as error:
            log.debug("an energy counter cannot be read: %s", error)
            return None

    def joules(self) -> float:
        with suppress(OSError, ValueError, RuntimeError):  # the next call includes the time of a failed one
            now, limit = self._read()
            self._sum += now - self._last if now >= self._last else max(0.0, limit - self._last) + now
            self._last = now
        return self._sum


def _has_all_cores(env: Mapping[str, str]) -> bool:
    """Return whether this step has all CPUs of its node, for all of which RAPL counts. Always true without Slurm."""
    import psutil

    return env.get("SLURM_CPUS_ON_NODE", str(psutil.cpu_count())) == str(psutil.cpu_count())


def _package_counters(powercap: Path) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """Yield the counters of the CPU packages and of their memory, which packages do not include."""
    for folder in sorted(powercap.glob("*rapl:*")):
        with suppress(OSError):
            name = (folder / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                yield f"{folder.name} {name}", lambda folder=folder: _read_domain(folder)  # type: ignore[misc]


def _read_domain(folder: Path) -> tuple[float, float]:
    microjoules, limit = (int((folder / file).read_text()) for file in ("energy_uj", "max_energy_range_uj"))
    return microjoules / 1e6, limit / 1e6


def _gpu_counter(uuid: str) -> Callable[[], tuple[float, float]] | None:
    try:
        import pynvml
    except ModuleNotFoundError:  # an environment of ranks need not contain nvidia-ml-py
        return None

    def read() -> tuple[float, float]:
        try:
            joules = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
        except pynvml.NVMLError as error:  # before Volta, MIG slices, virtual GPUs
            raise RuntimeError(error) from error
        return joules, 0.0  # counts from the load of the driver, without a limit

    handle: Any
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        log.debug("NVML does not know %s: %s", uuid, error)
        return None
    return read
