"""The charts of a node's system metrics: few of them, independent of the number of GPUs.

A rank records all metrics of its node, five for each GPU among them (`rank/system_metrics.py`). MLflow gets those of
`_OF_NODE`, and one over all GPUs for each of `_OF_GPUS`: at most eight series. Others are only in the report, which
shows the range and the median of all. Of several nodes, `NodeCharts` keeps one value.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from hpcdist.review.metric_series import SYSTEM_PREFIX

_OF_NODE = (
    "cpu_utilization_percentage",
    "system_memory_usage_percentage",
    "disk_usage_percentage",
    "network_receive_megabytes",
    "network_transmit_megabytes",
)
#: How the values of all GPUs of a node become one; a full memory ends a run, whichever GPU it is.
_OF_GPUS: dict[str, Callable[[Sequence[float]], float]] = {
    "utilization_percentage": fmean,
    "memory_usage_percentage": max,
    "power_usage_watts": sum,
}
_GPU = re.compile(r"(?P<prefix>.*/gpu_)[0-9]+_(?P<name>\w+)")


def charted(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Return the metrics of a record that MLflow gets, under the names that they have there."""
    if not any(key.startswith(SYSTEM_PREFIX) for key in metrics):
        return metrics
    chosen = {}
    of_gpus: dict[str, tuple[str, list[float]]] = {}
    for key, value in metrics.items():
        gpu = _GPU.fullmatch(key)
        if not key.startswith(SYSTEM_PREFIX) or key.rpartition("/")[2] in _OF_NODE:
            chosen[key] = value
        elif gpu and gpu["name"] in _OF_GPUS:
            _, values = of_gpus.setdefault(gpu["prefix"] + gpu["name"], (gpu["name"], []))
            values.append(value)
    for key, (name, values) in of_gpus.items():
        chosen[key] = _OF_GPUS[name](values)
    return chosen
