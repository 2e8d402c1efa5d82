"""System metrics of one node, under the names of MLflow's own monitor for its metrics tab, and energy."""

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.host.gpu_info import open_gpus
from hpcdist.rank.private_network import card_counters
from hpcdist.run.folder import RunDir, system_interval_s
from hpcdist.tracking.journal import JournalWriter

log = logging.getLogger(__name__)
#: Bytes of a megabyte, as in MLflow.
MB = 1e6
#: Time after which NVML's wait for an event returns, in milliseconds; the wait begins again at once.
_XID_WAIT_MS = 1000


@contextmanager
def monitored_node(config: Config, run: RunDir, topology: Topology, journal: JournalWriter) -> Iterator[None]:
    """Record CPU, memory, disk, network and GPU usage in a thread of each node's first rank while the block runs.

    The step of a record is the number of seconds since the run's creation, so that steps keep increasing after a
    restart. In a run on several nodes, the node is part of the metric names. Another thread logs errors of the GPUs.
    """
    interval_s = system_interval_s(config.tracking.system_interval_s, topology.num_nodes)
    gpus: Mapping[int, Any] = {}
    if topology.local_rank == 0:
        gpus = open_gpus()
    if gpus:
        threading.Thread(target=_log_xids, args=(gpus,), name="xids", daemon=True).start()
    if topology.local_rank > 0 or interval_s == 0:
        yield
        return
    prefix = "system/"
    if topology.num_nodes > 1:
        prefix = f"system/{socket.gethostname()}/"
    created = run.read_state().created
    network_before = _network_bytes()
    ended = threading.Event()

    def watch() -> None:
        psutil.cpu_percent()  # the first call of a thread only sets the start of the next measurement
        while not ended.wait(interval_s):
            usage = _usage(str(run.path), network_before, gpus)
            metrics = {prefix + name: value for name, value in usage.items()}
            journal.log(metrics, int(time.time() - created))

    thread = threading.Thread(target=watch, name="monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _usage(disk_path: str, network_before: tuple[int, int], gpus: Mapping[int, object]) -> dict[str, float]:
    """Return the metrics of this node. Their names contain the units.

    Args:
        network_before: the result of `_network_bytes` from which the traffic counts.
        gpus: handles of NVML by index.
    """
    memory = psutil.virtual_memory()
    received, sent = _network_bytes()
    received_before, sent_before = network_before
    values = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MB,
        "system_memory_usage_percentage": memory.percent,
        # The counters are smaller than before if a network card has disappeared.
        "network_receive_megabytes": max(0, received - received_before) / MB,
        "network_transmit_megabytes": max(0, sent - sent_before) / MB,
    }
    with suppress(OSError):  # the file system is unreachable, which ends neither the run nor the other metrics
        disk = psutil.disk_usage(disk_path)
        values["disk_usage_percentage"] = disk.percent
        values["disk_usage_megabytes"] = disk.used / MB
        values["disk_available_megabytes"] = disk.free / MB
    for index, handle in gpus.items():
        values |= _gpu_usage(f"gpu_{index}", handle)
    return values


def _gpu_usage(gpu: str, handle: object) -> dict[str, float]:
    """Return the metrics of one GPU that are available."""
    import pynvml

    values: dict[str, float] = {}
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        values[f"{gpu}_memory_usage_megabytes"] = memory.used / MB
        values[f"{gpu}_memory_usage_percentage"] = 100 * memory.used / memory.total
        values[f"{gpu}_utilization_percentage"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        milliwatts = pynvml.nvmlDeviceGetPowerUsage(handle)
        values[f"{gpu}_power_usage_watts"] = milliwatts / 1000
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
        values[f"{gpu}_power_usage_percentage"] = 100 * milliwatts / limit
    except pynvml.NVMLError as error:
        # MIG slices and virtual GPUs do not support all queries; the values read so far are kept.
        log.debug("GPU metric is not available: %s", error)
    return values


def _log_xids(gpus: Mapping[int, Any]) -> None:
    """Log the errors that NVIDIA's driver reports for GPUs; `hpcdist explain` shows them."""
    import pynvml

    indices = {bytes(handle): index for index, handle in gpus.items()}  # NVML returns the same pointers
    with suppress(pynvml.NVMLError):  # some virtual GPUs have no events
        events = pynvml.nvmlEventSetCreate()
        for handle in gpus.values():
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        while True:
            with suppress(pynvml.NVMLError_Timeout):
                event = pynvml.nvmlEventSetWait_v2(events, _XID_WAIT_MS)
                index = indices.get(bytes(event.device), "?")
                log.warning("GPU %s reported Xid %d", index, event.eventData)


def _network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by this node, without the traffic between its own ranks on loopback."""
    received = 0
    sent = 0
    for card in card_counters().splitlines()[2:]:  # after two lines of headings
        name, _, numbers = card.partition(":")
        if name.strip() != "lo":
            counters = numbers.split()  # eight of reception, then eight of transmission, each beginning with bytes
            received += int(counters[0])
            sent += int(counters[8])
    return received, sent


# Energy counters of this machine: NVML for GPUs, RAPL for CPU packages and their memory.

#: The kernel's power capping framework. Only root may read its counters on most systems.
POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """The energy that sensors have counted since this object was created.

    Args:
        gpu_uuid: the GPU of this rank, as NVML writes it (`GPU-…`), if any; its counter includes other programs.
        env: the environment of the rank that counts the CPU packages of its node; None for the other ranks.
    """

    def __init__(self, gpu_uuid: str | None, env: Mapping[str, str] | None, *, powercap: Path = POWERCAP) -> None:
        counters: dict[str, Callable[[], tuple[float, float]]] = {}
        num_cpus = str(psutil.cpu_count())
        # RAPL counts for all CPUs of the node, which a step of Slurm may share.
        if env is not None and env.get("SLURM_CPUS_ON_NODE", num_cpus) == num_cpus:
            for folder in sorted(powercap.glob("*rapl:*")):
                with suppress(OSError):
                    name = (folder / "name").read_text().strip()
                    if name.startswith("package") or name == "dram":  # packages do not include their memory
                        counters[f"{folder.name} {name}"] = partial(_read_domain, folder)
        if gpu_uuid is not None:
            gpu_counter = _gpu_counter(gpu_uuid)
            if gpu_counter is not None:
                counters[gpu_uuid] = gpu_counter
        self._counters: dict[str, _Sum] = {}
        for key, read in counters.items():
            try:
                self._counters[key] = _Sum(read)
            except (OSError, ValueError, RuntimeError) as error:
                log.debug("an energy counter cannot be read: %s", error)

    def joules(self) -> dict[str, float]:
        """Return joules by sensor: the UUID of a GPU, or the name of a RAPL domain; empty without a sensor."""
        return {key: round(counter.joules(), 3) for key, counter in self._counters.items()}


class _Sum:
    """Adds up the differences of a counter, which starts at 0 again after `limit` joules or a reset."""

    def __init__(self, read: Callable[[], tuple[float, float]]) -> None:
        self._read = read
        self._last, _ = read()
        self._sum = 0.0

    def joules(self) -> float:
        """Return the sum until now; after a failed read, the sum until the read before."""
        with suppress(OSError, ValueError, RuntimeError):  # the next call includes the time of a failed one
            now, limit = self._read()
            if now >= self._last:
                self._sum += now - self._last
            else:
                self._sum += max(0.0, limit - self._last) + now
            self._last = now
        return self._sum


def _read_domain(folder: Path) -> tuple[float, float]:
    """Return the counter of a RAPL domain and its limit, in joules."""
    microjoules = int((folder / "energy_uj").read_text())
    limit = int((folder / "max_energy_range_uj").read_text())
    return microjoules / 1e6, limit / 1e6


def _gpu_counter(uuid: str) -> Callable[[], tuple[float, float]] | None:
    """Return a function that reads the counter of a GPU and its limit, in joules; None if NVML has no such GPU."""
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
