"""Probe answers of a healthy cluster, in which tests insert faults."""

from __future__ import annotations

import copy
from typing import Any

from hpcdist.host.machine import Check
from hpcdist.slurm.preflight.node_checks import check_nodes
from hpcdist.slurm.preflight.probe import ProbeRequest

Answers = dict[str, dict[str, Any]]
#: Bytes that each node sends in an exchange, divisible by small numbers of peers.
EXCHANGE_BYTES = 210 * 2**12


def request(num_nodes: int = 4, **changes: Any) -> ProbeRequest:
    return ProbeRequest(
        **{
            "nodes": tuple(f"n{number}" for number in range(1, num_nodes + 1)),
            "port": 23456,
            "token": "t",
            "run_folder": "/runs/e/r",
            "checkpoint_folder": "/runs/e/r/checkpoints",
            "witness": "/runs/e/r/preflight/witness",
            **changes,
        }
    )


def healthy(num_nodes: int = 4, **changes: Any) -> Answers:
    """Return equal answers of nodes n1, n2, …; `changes` replace values of every answer."""
    nodes = request(num_nodes).nodes
    answer: dict[str, Any] = {
        "host": "host",
        "seconds": 0.4,
        "witness": True,
        "versions": {
            "python": "3.12.3",
            "hpcdist": "0.1.0",
            "source": "abc",
            "torch": "2.15.0",
            "cuda": "13.2",
            "nccl": "2.30.7",
            "driver": "580.82.07",
        },
        "gpus": [],
        "visible_gpus": 0,
        "gpu_device_files": 0,
        "cores": 16,
        "interfaces": [],
        "infiniband": {},
        "locked_memory": None,
        "variables": {},
        "lookups": {},
        "checkpoints": {"folder": "/runs/e/r/checkpoints", "kind": "nfs4", "free": 10**12, "bytes_s": 5e8},
        "shm": {"folder": "/dev/shm", "free": 2**34, "total": 2**34},
        "tmp": {"folder": "/tmp", "free": 10**10, "total": 10**10},
        **changes,
    }
    return {
        node: copy.deepcopy(answer)
        | {
            "node": node,
            "network": {
                "addresses": [f"10.0.0.{index}"],
                "exchange_bytes": EXCHANGE_BYTES // (num_nodes - 1),
                "peers": {
                    other: {"status": "ok", "exchange_s": EXCHANGE_BYTES / 1e9, "offset_s": 1e-4}
                    for other in nodes
                    if other != node
                },
            },
        }
        for index, node in enumerate(nodes, 1)
    }


def messages(asked: ProbeRequest, answers: Answers) -> list[str]:
    """Return the findings with their levels, such as `failure n3: disk: …`."""
    return [f"{check.level} {check.sentence()}" for check in findings(asked, answers)]


def findings(asked: ProbeRequest, answers: Answers) -> list[Check]:
    """Return the results of the checks without the summary."""
    found = check_nodes(asked, answers)
    assert found[-1].level == "ok", "the last result is the summary"
    return found[:-1]
