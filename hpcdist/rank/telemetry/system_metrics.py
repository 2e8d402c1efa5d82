"""System metrics of one node, under the names of MLflow's own monitor, so that MLflow shows them in its metrics tab."""

from __future__ import annotations

import logging
import threading
import time

import psutil

from hpcdist.machine.gpus import open_gpus
from hpcdist.rank.network.private_network import card_counters
from hpcdist.tracking.journal.writer import JournalWriter

log = logging.getLogger(__name__)
MB = 1e6


class NodeMonitor:
    """A thread that records CPU, memory, disk, network and GPU usage. It runs in local rank 0 of each node.

    Args:
        journal: destination of the records.
        interval_s: seconds between two records; 0 disables the monitor.
        began: Unix time of the run's creation. The step of a record is the number of seconds since then, so that steps
            keep increasing after a restart.
        node: node name to include in the metric names, for runs on several nodes.
        disk: a path on the disk to monitor.
    """

    def __init__(self, journal: JournalWriter, *, interval_s: float, began: float, node: str | None, disk: str) -> None:
        self._journal = journal
        self._interval_s = interval_s
        self._began = began
        self._prefix = f"system/{node}/" if node else "system/"
        self._disk = disk
        self._network = _network_bytes()
        self._gpus = open_gpus()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> NodeMonitor:
        if self._interval_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        psutil.cpu_percent()  # the first call of a thread only sets the start of the next measurement
        while not self._ended.wait(self._interval_s):
            self._journal.log(self.sample(), int(time.time() - self._began))

    def sample(self) -> dict[str, float]:
        """Return the current metrics; units are in their names (a megabyte is 10⁶ bytes, as in MLflow)."""
        memory = psutil.virtual_memory()
        disk = psutil.disk_usage(self._disk)
        received, sent = _network_bytes()
        values = {
            "cpu_utilization_percentage": psutil.cpu_percent(),
            "system_memory_usage_megabytes": memory.used / MB,
            "system_memory_usage_percentage": memory.percent,
            "disk_usage_percentage": disk.percent,
            "disk_usage_megabytes": disk.used / MB,
            "disk_available_megabytes": disk.free / MB,
            "network_receive_megabytes": (received - self._network[0]) / MB,
            "network_transmit_megabytes": (sent - self._network[1]) / MB,
        }
        for index, handle in self._gpus.items():
            values.update({f"gpu_{index}_{name}": value for name, value in _gpu_usage(handle).items()})
        return {self._prefix + name: value for name, value in values.items()}


def _network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by this node, without the traffic between its own ranks on loopback."""
    lines = [line.partition(":") for line in card_counters().splitlines()[2:]]
    cards = [counts.split() for name, _, counts in lines if name.strip() != "lo"]
    return sum(int(card[0]) for card in cards), sum(int(card[8]) for card in cards)


def _gpu_usage(handle: object) -> dict[str, float]:
    import pynvml

    values: dict[str, float] = {}
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        values["memory_usage_megabytes"] = memory.used / MB
        values["memory_usage_percentage"] = 100 * memory.used / memory.total
        values["utilization_percentage"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        milliwatts = pynvml.nvmlDeviceGetPowerUsage(handle)
        values["power_usage_watts"] = milliwatts / 1000
        values["power_usage_percentage"] = 100 * milliwatts / pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
    except pynvml.NVMLError as error:
        # MIG slices and virtual GPUs do not support all queries; the values read so far are kept.
        log.debug("GPU metric is not available: %s", error)
    return values
