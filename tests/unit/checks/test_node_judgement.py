"""Judgement of the answers of all nodes of a job."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import pytest

from hpcdist.checks.node_links import TRANSFER_BYTES, shifts
from hpcdist.checks.preflight import ORDER, Needs, check_nodes
from hpcdist.host.check_result import Check

GPU = {"index": 0, "used_mb": 4, "total_mb": 143771, "uncorrected_errors": 0, "throttled": [], "pids": []}
BROKEN = GPU | {"index": 1, "uncorrected_errors": 2}
ON_GPUS: dict[str, Any] = {"backend": "nccl", "gpus_per_node": 2}
VERSIONS = {"python": "3.12.3", "hpcdist": "0.1.0", "source": "abc", "torch": "2.15.0", "cuda": "13.2"} | {
    "nccl": "2.30.7", "driver": "580.82.07"
}  # fmt: skip


def test_missing_answer_is_the_only_finding_of_a_healthy_cluster() -> None:
    for num_nodes in (2, 3, 16):
        assert messages(needs(num_nodes), healthy(num_nodes)) == []
    assert messages(needs(**ON_GPUS), healthy()) == []
    answers = healthy()
    del answers["n3"]
    assert messages(needs(), answers) == [
        "failure n3: answer: its preflight did not answer; inspect the node: `scontrol show node n3`, `srun -w n3"
        " hostname`"
    ], "not that the others waited for it"


def other(**versions: str) -> dict[str, Any]:
    return {"versions": VERSIONS | versions}


@pytest.mark.parametrize(
    ("change", "asked", "finding"),
    [
        (other(hpcdist="0.0.9"), {}, "failure n3: version: hpcdist 0.0.9, the other 3 nodes have 0.1.0; install"),
        (other(source="xyz"), {}, "failure n3: version: the code of hpcdist xyz, the other 3 nodes have abc"),
        (other(python="3.11.2"), {}, "failure n3: version: python 3.11.2, the other 3 nodes have 3.12.3"),
        (other(python="3.12.1"), {}, "warning n3: version: python 3.12.1, the other 3 nodes have 3.12.3"),
        (other(torch=""), {}, "failure n3: version: torch is missing, the other 3 nodes have 2.15.0"),
        (other(nccl="2.29.1"), {}, "note n3: version: NCCL 2.29.1, the other 3 nodes have 2.30.7"),
        (other(nccl="2.29.1"), ON_GPUS, "failure n3: version: NCCL 2.29.1, the other 3 nodes have 2.30.7"),
        (other(driver="570.1.2"), {}, "note n3: version: driver 570.1.2, the other 3 nodes have 580.82.07"),
        ({"versions": None}, {}, "warning n3: driver: its driver or Python's file system does not answer"),
        ({"witness": False}, {}, "failure n3: run folder: /runs/e/r is not visible there, or not the same one; mount"),
        ({"shm": {"free": 2**26}}, {}, "warning n3: shm: 64 MiB are free in /dev/shm; data workers and NCCL pass"),
        ({"lookups": {"n3": {"error": "Name or service not known", "forward_s": 0.1}}}, {},
         "failure n3: names: its own name cannot be looked"),
        ({"checkpoints": {"folder": "/c", "write_error": "No space left on device", "free": 0}}, {},
         "failure n3: disk: checkpoints cannot be written to /c: No space left on device (0 MB are free); free space"),
        ({"checkpoints": {"folder": "/c", "error": "no answer in 5 s"}}, {},
         "failure n3: disk: checkpoints cannot be written to /c: no answer"),
        ({"checkpoints": {"folder": "/c", "free": 3 * 10**9}}, {"checkpoint_bytes": 2 * 10**9},
         "warning n3: disk: 3,000 MB are free in /c, the last checkpoint had 2,000 MB"),
        ({"visible_gpus": 1, "gpus": [GPU]}, ON_GPUS, "failure n3: gpu: 1 of 2 GPUs are usable; see `nvidia-smi`"),
        ({"visible_gpus": 1, "gpus": [GPU]}, {"gpus_per_node": 2}, "warning n3: gpu: 1 of 2 GPUs are usable"),
        ({"visible_gpus": 0, "gpus": []}, ON_GPUS,
         "failure n3: gpu: 0 of 2 GPUs are usable; the driver fails or does not answer; see"),
        ({"visible_gpus": 0, "gpus": [], "amd_driver": True}, ON_GPUS,
         "failure n3: gpu: 0 of 2 GPUs are usable; the driver fails or does not answer; see"),
        ({"visible_gpus": 0, "gpus": [], "gpu_device_files": 0, "amd_driver": True}, ON_GPUS,
         "note n3: gpu: whether 2 GPUs are usable is unknown: hpcdist counts those of NVIDIA only; see `rocm-smi`"),
        ({"visible_gpus": 1, "gpus": [GPU], "amd_driver": True}, ON_GPUS, "failure n3: gpu: 1 of 2 GPUs are usable"),
        ({"visible_gpus": 1, "gpus": [BROKEN]}, {"gpus_per_node": 2, "backend": "xccl", "gpu_type": "xpu"},
         "note gpu: on all 4 nodes (n1, n2, n3, n4): whether 2 GPUs are usable is unknown"),
        ({"gpus": [GPU, BROKEN]}, ON_GPUS, "failure n3: gpu: GPU 1 has 2 uncorrected memory errors since its driver"),
        ({"gpus": [GPU, BROKEN]}, {}, ""),
    ],
)  # fmt: skip
def test_problem_of_a_node_is_reported_if_ranks_depend_on_it(
    change: dict[str, Any], asked: dict[str, Any], finding: str
) -> None:
    answers = healthy()
    answers["n3"] = {key: value for key, value in (answers["n3"] | change).items() if value is not None}
    found = messages(needs(**asked), answers)
    assert len(found) == bool(finding)
    assert "".join(found).startswith(finding)


def test_loopback_address_is_a_failure_on_the_first_node_only() -> None:
    loopback, reachable = {"address": "127.0.1.1", "forward_s": 0.0}, {"address": "10.0.0.1", "forward_s": 0.0}
    answers = healthy()
    for node, answer in answers.items():
        answer["lookups"] = {node: loopback, "n1": reachable}
    assert messages(needs(), answers) == [], "ranks connect to the first node only"
    answers["n1"]["lookups"] = {"n1": loopback}
    (found,) = messages(needs(), answers)
    assert found.startswith(
        "failure n1: names: its own name resolves to 127.0.1.1, which other nodes cannot reach; set"
    )
    for answer in answers.values():
        answer["lookups"] = {"n1": loopback}
    assert messages(needs(), answers) == [], "all nodes are on one machine"


def test_finding_shared_by_most_nodes_is_reported_once() -> None:
    answers = healthy()
    for index, answer in enumerate(answers.values()):
        answer["checkpoints"] = {"folder": "/c", "free": (500 + index) * 10**6}
    for where in ("all 4 nodes (n1, n2, n3, n4)", "3 of 4 nodes (n1, n2, n3)"):
        (found,) = messages(needs(), answers)
        assert found.startswith(f"warning disk: on {where}: 500 MB are free in /c")
        answers["n4"]["checkpoints"]["free"] = 10**12
    answers["n3"]["checkpoints"]["free"] = 10**12
    assert [check.node for check in findings(needs(), answers)] == ["n1", "n2"], "half of the nodes: no majority"


def test_findings_are_ordered_by_level_and_cause() -> None:
    answers = healthy()
    answers["n2"]["checkpoints"] = {"folder": "/c", "free": 500 * 10**6}
    answers["n3"]["witness"] = False
    answers["n3"]["checkpoints"] = {"folder": "/c", "error": "No such file or directory"}
    answers["n3"]["versions"]["torch"] = "2.14.0"
    answers["n4"]["versions"]["driver"] = "550.54.15"
    assert [check.name for check in findings(needs(**ON_GPUS), answers)[:3]] == ["run folder", "version", "driver"]
    found = [(check.level, check.node, check.name) for check in findings(needs(), answers)]
    assert found == [
        ("failure", "n3", "run folder"),  # its disk is not checked, because it is not the run's
        ("failure", "n3", "version"),
        ("warning", "n2", "disk"),
        ("note", "n4", "version"),
    ]
    assert {name for _, _, name in found} <= set(ORDER)


# --- the group: who joins it, and to which nodes bad links are due


def test_node_that_has_not_joined_is_named() -> None:
    answers = healthy()
    late = {"joined": True, "error": "no rank has set 'stage/joined' within the time limit"}
    for node in ("n1", "n2", "n4"):
        answers[node]["group"] = late
    del answers["n3"]["group"]
    (found,) = messages(needs(), answers)
    assert found.startswith(
        "failure n3: group: it has not joined the group of all nodes within 20 s: its probe has ended"
    )
    answers["n3"]["group"] = {"joined": False, "error": "rank 2 cannot reach the master at n1:23456: timed out"}
    (found,) = messages(needs(), answers)
    assert "within 20 s: rank 2 cannot reach the master at n1:23456: timed out; see whether n3 imports" in found
    for node in ("n2", "n4"):
        answers[node]["group"] = answers["n3"]["group"]
    (found,) = messages(needs(), answers)
    assert found.startswith(
        "failure n1: group: no other node could join it within 20 s: rank 2 cannot reach the master"
    )


def test_group_without_torch_is_unknown() -> None:
    answers = healthy()
    for answer in answers.values():
        answer["group"] = {"not_imported": "No module named 'torch'"}
    assert messages(needs(), answers) == [
        "warning network: unknown, since not all nodes can import torch and ZeroMQ (No module named 'torch'); install"
        " hpcdist[train] where the ranks run, or set preflight=off"
    ]
    for answer in answers.values():
        del answer["group"]
    assert messages(needs(join_s=0.0), answers) == [], "the nodes were not asked to join"


def test_failed_transfers_are_a_failure() -> None:
    answers = healthy()
    answers["n2"]["group"] = {"joined": True, "connections": {}, "error": "Timed out waiting 20000ms for recv"}
    (found,) = messages(needs(), answers)
    assert found.startswith("failure group: the nodes are connected, but the transfers between them failed: n2: Timed")


def block(answers: Answers, ways: str, reason: str = "packets to it are dropped") -> None:
    """Let connections fail: `n1,n2>n3`."""
    sources, _, targets = ways.partition(">")
    for source in sources.split(","):
        for target in targets.split(","):
            if target in answers[source]["group"]["connections"]:
                answers[source]["group"]["connections"][target] = reason


@pytest.mark.parametrize(
    ("num_nodes", "blocked", "found"),
    [
        (4, ["n1,n2,n4>n3"], ["n3: port: n1, n2, n4 cannot reach it: packets to it are dropped; open all TCP ports"]),
        (4, ["n3>n1,n2,n4"], ["n3: port: it cannot reach n4, n1, n2: packets to it are dropped; open all TCP ports"]),
        (2, ["n1>n2"], ["port: n1 cannot reach n2: packets to it are dropped; open all TCP ports"]),
        (4, ["n3>n1"], ["port: n3 cannot reach n1: packets to it are dropped; open all TCP ports"]),
        (5, ["n3>n1,n2,n4,n5", "n5>n3"], ["n3: port: it cannot reach n4, n5, n1, n2: packets"]),
        (
            6,
            ["n1,n2,n4,n5,n6>n3", "n1,n2,n3,n4,n6>n5"],
            ["n3: port: n1, n2, n5, n6 cannot", "n5: port: n1, n2, n3, n4 cannot"],
        ),
    ],
)
def test_node_is_blamed_for_its_blocked_connections(num_nodes: int, blocked: list[str], found: list[str]) -> None:
    answers = healthy(num_nodes)
    for ways in blocked:
        block(answers, ways)
    for line, beginning in zip(messages(needs(num_nodes), answers), found, strict=True):
        assert line.startswith(f"failure {beginning}")


def set_rate(answers: Answers, source: str, target: str, rate: float) -> None:
    if source in answers[target]["group"]["received_s"]:
        answers[target]["group"]["received_s"][source] = TRANSFER_BYTES / rate


@pytest.mark.parametrize(
    ("num_nodes", "slow", "rate", "level"),
    [(3, {"n1"}, 2.5e6, "failure"), (12, {"n2", "n3"}, 2.5e6, "failure"), (4, {"n3"}, 110e6, "warning")],
)
@pytest.mark.parametrize("direction", ["both", "sends", "receives"])
def test_slow_node_is_blamed_and_not_its_partners(
    num_nodes: int, slow: set[str], rate: float, level: str, direction: str
) -> None:
    answers = healthy(num_nodes)
    for node, other in product(slow, answers):
        if direction != "receives":
            set_rate(answers, node, other, rate)
        if direction != "sends":
            set_rate(answers, other, node, rate)
    found = findings(needs(num_nodes), answers)
    assert {check.node: check.level for check in found} == dict.fromkeys(slow, level)
    text = f"{rate / 1e6:.1f} MB/s to or from it, 1,000 MB/s between the other nodes; check its cable"
    assert found[0].sentence().startswith(f"{found[0].node}: network: {text}")


def test_noise_of_a_busy_machine_is_not_reported() -> None:
    answers = healthy(8)
    for index, (source, target) in enumerate(permutations(answers, 2)):
        set_rate(answers, source, target, 46e6 + 4e7 * (index % 13))
    for index, answer in enumerate(answers.values()):
        answer["group"]["compute_s"] *= 1 + 0.35 * index
    assert messages(needs(8), answers) == []


def test_slow_link_between_two_nodes_is_a_warning() -> None:
    answers = healthy(2)
    set_rate(answers, "n1", "n2", 2.5e6)
    set_rate(answers, "n2", "n1", 2.5e6)
    (found,) = messages(needs(2), answers)
    assert found.startswith("warning network: 2.5 MB/s between n1 and n2, too slow for training; check their cables")


@pytest.mark.parametrize(("factor", "level"), [(6.0, "warning"), (12.0, "failure")])
@pytest.mark.parametrize("num_nodes", [2, 4])
def test_node_with_a_slow_processor_is_named(num_nodes: int, factor: float, level: str) -> None:
    answers = healthy(num_nodes)
    answers["n2"]["group"]["compute_s"] *= factor
    (found,) = messages(needs(num_nodes), answers)
    assert found.startswith(f"{level} n2: processor: a computation on one core takes {factor} times as long as on the")


def test_rings_of_a_large_run_are_few_and_not_only_neighbours() -> None:
    assert [shifts(count) for count in (2, 3, 4, 5)] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]
    assert shifts(401) == [1, 101, 201, 301]


@pytest.mark.parametrize(
    ("skew_s", "text"),
    [
        (5.0, "warning n2: clock: its clock is at least 5.0 s ahead of that of the host that asked: logs and metrics"),
        (-5.0, "warning n2: clock: its clock is at least 5.0 s behind that of the host that asked: logs"),
        (
            40.0,
            "failure n2: clock: its clock is at least 40.0 s ahead of that of the host that asked: a live run could",
        ),
    ],
)
def test_clock_offset_is_reported_with_its_direction(skew_s: float, text: str) -> None:
    answers = healthy()
    answers["n2"]["time"] = (ANSWERED_AT if skew_s > 0 else ASKED_AT) + skew_s
    (found,) = messages(needs(), answers)
    assert found.startswith(text)


# --- Answers of a healthy cluster, in which tests insert faults.


Answers = dict[str, dict[str, Any]]
ASKED_AT, ANSWERED_AT = 1000.0, 1002.0


def needs(num_nodes: int = 4, **changes: Any) -> Needs:
    nodes = tuple(f"n{number}" for number in range(1, num_nodes + 1))
    return replace(Needs(nodes=nodes, run_folder="/runs/e/r", join_s=20.0), **changes)


def healthy(num_nodes: int = 4) -> Answers:
    """Return equal answers of nodes n1, n2, …."""
    nodes = needs(num_nodes).nodes
    answer: dict[str, Any] = {
        "time": 1001.0,
        "witness": True,
        "versions": VERSIONS,
        "gpus": [GPU, GPU | {"index": 1}],
        "visible_gpus": 2,
        "gpu_device_files": 2,
        "lookups": {},
        "checkpoints": {"folder": "/runs/e/r/checkpoints", "free": 10**12},
        "shm": {"free": 2**34},
    }
    answers = {}
    for index, node in enumerate(nodes):
        group = {
            "joined": True,
            "compute_s": 0.01,
            "connections": {nodes[(index + shift) % num_nodes]: "" for shift in shifts(num_nodes)},
            "received_s": {nodes[index - shift]: TRANSFER_BYTES / 1e9 for shift in shifts(num_nodes)},
        }
        answers[node] = copy.deepcopy(answer) | {"node": node, "group": group}
    return answers


def messages(asked: Needs, answers: Answers) -> list[str]:
    """Return the findings with their levels, such as `failure n3: disk: …`."""
    return [f"{check.level} {check.sentence()}" for check in findings(asked, answers)]


def findings(asked: Needs, answers: Answers) -> list[Check]:
    """Return the results of the checks without the summary."""
    found = check_nodes(asked, answers, ASKED_AT, ANSWERED_AT)
    assert found[-1].level == "ok", "the last result is the summary"
    return found[:-1]
