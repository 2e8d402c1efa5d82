"""System metrics of one node, under the names of MLflow's own monitor for its metrics tab."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

from hpcdist.host.machine import open_gpus
from hpcdist.rank.private_network import card_counters
from hpcdist.tracking.journal import JournalWriter

log = logging.getLogger(__name__)
MB = 1e6


@contextmanager
def monitored_node(
    journal: JournalWriter, *, interval_s: float, began: float, node: str | None, disk: str
) -> Iterator[None]:
    """Record CPU, memory, disk, network and GPU usage every `interval_s` in a thread while the block runs; 0: never.

    The step of a record is the number of seconds since `began`, the Unix time of the run's creation, so that steps keep
    increasing after a restart. `node` is part of the metric names.
    """
    prefix = f"system/{node}/" if node else "system/"
    network, gpus, ended = _network_bytes(), open_gpus(), threading.Event()

    def watch() -> None:
        psutil.cpu_percent()  # the first call of a thread only sets the start of the next measurement
        while not ended.wait(interval_s):
            values = _usage(disk, network, gpus)
            journal.log({prefix + name: value for name, value in values.items()}, int(time.time() - began))

    thread = threading.Thread(target=watch, name="monitor", daemon=True)
    if interval_s > 0:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if interval_s > 0:
            thread.join()


def _usage(disk_path: str, before: tuple[int, int], gpus: Mapping[int, object]) -> dict[str, float]:
    # The units are in the names; a megabyte is 10⁶ bytes, as in MLflow.
    memory = psutil.virtual_memory()
    disk = psutil.disk_usage(disk_path)
    received, sent = _network_bytes()
    values = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / MB,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / MB,
        "disk_available_megabytes": disk.free / MB,
        "network_receive_megabytes": (received - before[0]) / MB,
        "network_transmit_megabytes": (sent - before[1]) / MB,
    }
    for index, handle in gpus.items():
        import pynvml

        try:
            used = pynvml.nvmlDeviceGetMemoryInfo(handle)
            values[f"gpu_{index}_memory_usage_megabytes"] = used.used / MB
            values[f"gpu_{index}_memory_usage_percentage"] = 100 * used.used / used.total
            values[f"gpu_{index}_utilization_percentage"] = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
            milliwatts = pynvml.nvmlDeviceGetPowerUsage(handle)
            values[f"gpu_{index}_power_usage_watts"] = milliwatts / 1000
            limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            values[f"gpu_{index}_power_usage_percentage"] = 100 * milliwatts / limit
        except pynvml.NVMLError as error:
            # MIG slices and virtual GPUs do not support all queries; the values read so far are kept.
            log.debug("GPU metric is not available: %s", error)
    return values


def _network_bytes() -> tuple[int, int]:
    """Return the bytes received and sent by this node, without the traffic between its own ranks on loopback."""
    lines = [line.partition(":") for line in card_counters().splitlines()[2:]]
    cards = [counts.split() for name, _, counts in lines if name.strip() != "lo"]
    return sum(int(card[0]) for card in cards), sum(int(card[8]) for card in cards)
