"""Checks that compare the probe answers of all nodes."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from hpcdist.host.machine import Check
from hpcdist.slurm.preflight_checks import ORDER, check_nodes
from hpcdist.slurm.preflight_probe import ProbeRequest

GPU = {"index": 0, "used_mb": 4, "total_mb": 143771, "uncorrected_errors": 0, "throttled": [], "pids": []}
BROKEN = GPU | {"index": 1, "uncorrected_errors": 2}
ON_GPUS = {"backend": "nccl", "gpus_per_node": 2}
VERSIONS = {"python": "3.12.3", "hpcdist": "0.1.0", "source": "abc", "torch": "2.15.0", "cuda": "13.2"} | {
    "nccl": "2.30.7", "driver": "580.82.07"
}  # fmt: skip


def test_healthy_cluster_has_no_findings_and_a_missing_answer_is_a_failure() -> None:
    for num_nodes in (2, 3, 16):
        assert messages(request(num_nodes), healthy(num_nodes)) == []
    assert messages(request(**ON_GPUS), healthy()) == []
    answers = healthy()
    del answers["n3"]
    block(answers, [*answers], ["n3"], "absent")
    assert messages(request(), answers) == [
        "failure n3: answer: its preflight did not answer; inspect the node: `scontrol show node n3`, `srun -w n3"
        " hostname`"
    ], "not that it is blocked as well"


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
        ({"gpus": [GPU, BROKEN]}, ON_GPUS, "failure n3: gpu: GPU 1 has 2 uncorrected memory errors since its driver"),
        ({"gpus": [GPU, BROKEN]}, {}, ""),
    ],
)  # fmt: skip
def test_problem_of_a_node_is_reported_if_ranks_depend_on_it(
    change: dict[str, Any], asked: dict[str, Any], finding: str
) -> None:
    answers = healthy()
    answers["n3"] = {key: value for key, value in (answers["n3"] | change).items() if value is not None}
    found = messages(request(**asked), answers)
    assert len(found) == bool(finding)
    assert "".join(found).startswith(finding)


def test_loopback_address_is_a_failure_on_the_first_node_only() -> None:
    loopback = {"address": "127.0.1.1", "forward_s": 0.0}
    answers = healthy()
    answers["n2"]["lookups"] = {"n2": loopback}
    assert messages(request(), answers) == [], "ranks connect to the first node only"
    answers["n1"]["lookups"] = {"n1": loopback}
    (found,) = messages(request(), answers)
    assert found.startswith(
        "failure n1: names: its own name resolves to 127.0.1.1, which other nodes cannot reach; set"
    )
    for answer in answers.values():
        answer["network"]["addresses"] = ["127.0.0.1"]
    assert messages(request(), answers) == [], "all nodes are on one machine"


def test_finding_shared_by_most_nodes_is_reported_once() -> None:
    answers = healthy()
    for index, answer in enumerate(answers.values()):
        answer["checkpoints"] = {"folder": "/c", "free": (500 + index) * 10**6}
    for where in ("all 4 nodes (n1, n2, n3, n4)", "3 of 4 nodes (n1, n2, n3)"):
        (found,) = messages(request(), answers)
        assert found.startswith(f"warning disk: on {where}: 500 MB are free in /c")
        answers["n4"]["checkpoints"]["free"] = 10**12
    answers["n3"]["checkpoints"]["free"] = 10**12
    assert [check.node for check in findings(request(), answers)] == ["n1", "n2"], "half of the nodes: no majority"


def test_findings_are_ordered_by_level_and_cause() -> None:
    answers = healthy()
    answers["n2"]["checkpoints"] = {"folder": "/c", "free": 500 * 10**6}
    answers["n3"]["witness"] = False
    answers["n3"]["checkpoints"] = {"folder": "/c", "error": "No such file or directory"}
    answers["n3"]["versions"]["torch"] = "2.14.0"
    answers["n4"]["versions"]["driver"] = "550.54.15"
    assert [check.name for check in findings(request(**ON_GPUS), answers)[:3]] == ["run folder", "version", "driver"]
    found = [(check.level, check.node, check.name) for check in findings(request(), answers)]
    assert found == [
        ("failure", "n3", "run folder"),  # its disk is not checked, because it is not the run's
        ("failure", "n3", "version"),
        ("warning", "n2", "disk"),
        ("note", "n4", "version"),
    ]
    assert {name for _, _, name in found} <= set(ORDER)


# --- the network: a node is reported if most of its pairs are affected


def block(answers: Answers, sources: list[str], targets: list[str], status: str, detail: str = "") -> None:
    """Replace the results of connections."""
    for source, target in ((source, target) for source in sources for target in targets if source != target):
        answers[source]["network"]["peers"][target] = {"status": status} | ({"detail": detail} if detail else {})


def set_rate(answers: Answers, one: str, other: str, rate: float) -> None:
    """Set the rate of a node's exchange to that of a pair."""
    answers[one]["network"]["peers"][other]["exchange_s"] = EXCHANGE_BYTES / rate


def pairs_of(answers: Answers, node: str) -> list[tuple[str, str]]:
    return [(node, other) for other in answers if other != node]


@pytest.mark.parametrize(
    ("peer", "finding"),
    [
        ({"status": "unreachable", "detail": "packets to it are dropped"},
         "port: n1, n2, n4 cannot reach it on port 23456: packets to it are dropped; open all TCP ports from 20480 on"),
        ({"status": "stranger", "detail": "another program"},
         "port: n1, n2, n4 cannot reach it: on port 23456 answers another program; identify the program"),
        ({"status": "unresolved", "detail": "not known"},
         "names: n1, n2, n4 cannot reach it: the name cannot be looked up (not known); add the name to the DNS"),
        ({"status": "ephemeral", "detail": "packets to it are dropped"},
         "port: n1, n2, n4 cannot reach it on ports of the ephemeral range, which gloo, NCCL and RPC use: packets"),
        ({"status": "absent"}, "port: n1, n2, n4 cannot reach it on port 23456: no connection within 20 s; open"),
    ],
)  # fmt: skip
def test_node_that_no_other_reaches_is_reported(peer: dict[str, Any], finding: str) -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n3"):
        answers[other]["network"]["peers"]["n3"] = peer
    (found,) = messages(request(), answers)
    assert found.startswith(f"failure n3: {finding}")


@pytest.mark.parametrize(
    ("num_nodes", "blocked", "found"),
    [
        (2, ["n1>n2"], ["port: n1 cannot reach n2 on port 23456: connections are refused; open all TCP ports"]),
        (4, ["n3>n1,n2,n4"], ["n3: port: it cannot reach n1, n2, n4 on port 23456: connections are refused; open"]),
        (5, ["n3>n1,n2,n4", "n5>n3"], ["n3: port: it cannot reach n1, n2, n4 on port 23456: connections are"]),
        (4, ["n3>n1"], ["port: n3 cannot reach n1 on port 23456: connections are refused; open"]),
        (6, ["n1,n2,n4,n5,n6>n3", "n1,n2,n3,n4,n6>n5"],
         ["n3: port: n1, n2, n4, n5 and 1 more cannot reach it", "n5: port: n1, n2, n3, n4 and 1 more cannot reach"]),
    ],
)  # fmt: skip
def test_node_is_reported_if_most_of_its_connections_are_blocked(
    num_nodes: int, blocked: list[str], found: list[str]
) -> None:
    answers = healthy(num_nodes)
    block(answers, ["n1"], ["n2"], "busy")  # accepts connections without an answer, for want of processor time
    for ways in blocked:
        sources, _, targets = ways.partition(">")
        block(answers, sources.split(","), targets.split(","), "refused", "connections are refused")
    for line, beginning in zip(messages(request(num_nodes), answers), found, strict=True):
        assert line.startswith(f"failure {beginning}")


@pytest.mark.parametrize(("node", "level"), [("n1", "failure"), ("n3", "warning")])
def test_port_in_use_is_reported_once(node: str, level: str) -> None:
    answers = healthy()
    answers[node]["network"]["port_problem"] = "Address already in use"
    block(answers, [*answers], [node], "stranger", "another program")
    (found,) = messages(request(), answers)
    assert found.startswith(
        f"{level} {node}: port: port 23456 cannot be used: Address already in use; end the program on"
    )


@pytest.mark.parametrize(
    ("num_nodes", "slow", "rate", "level"),
    [(3, {"n1"}, 2.5e6, "failure"), (6, {"n2", "n5"}, 2.5e6, "failure"), (4, {"n3"}, 110e6, "warning")],
)
def test_node_with_a_slow_link_is_reported_and_not_its_partners(
    num_nodes: int, slow: set[str], rate: float, level: str
) -> None:
    answers = healthy(num_nodes)
    for node in slow:
        for _, other in pairs_of(answers, node):
            set_rate(answers, other, node, rate)
    found = findings(request(num_nodes), answers)
    assert {check.node: check.level for check in found} == dict.fromkeys(slow, level)
    text = f"{rate / 1e6:.1f} MB/s to and from it, 1,000 MB/s between the other nodes; check its cable"
    assert found[0].sentence().startswith(f"{found[0].node}: network: {text}")


def test_slow_uplink_of_fast_nodes_is_reported_and_noise_of_a_busy_machine_is_not() -> None:
    answers, behind = healthy(6), {"n2", "n5"}
    for one, other in combinations(answers, 2):
        if len(behind & {one, other}) == 1:
            set_rate(answers, one, other, 50e6)
    found = findings(request(6), answers)
    assert {(check.level, check.node) for check in found} == {("failure", node) for node in behind}
    answers = healthy(8)
    for index, (one, other) in enumerate(combinations(answers, 2)):
        set_rate(answers, one, other, 46e6 + 4e7 * (index % 13))
    assert messages(request(8), answers) == []


def test_slow_link_between_two_nodes_is_a_warning() -> None:
    answers = healthy(3)
    for one, other in combinations(answers, 2):
        set_rate(answers, one, other, 2.5e6)
    assert messages(request(3), answers) == [], "the all-reduce check shows a slow network"
    answers = healthy(2)
    set_rate(answers, "n1", "n2", 2.5e6)
    (found,) = messages(request(2), answers)
    assert found.startswith("warning network: 2.5 MB/s between n1 and n2, too slow for training; check their cables")


@pytest.mark.parametrize(("num_nodes", "wrong"), [(2, "n2"), (4, "n1")])
@pytest.mark.parametrize(
    ("skew_s", "text"),
    [
        (5.0, "warning {}: clock: its clock is 5.0 s ahead of the others: logs and metrics"),
        (-5.0, "warning {}: clock: its clock is 5.0 s behind the others: logs"),
        (40.0, "failure {}: clock: its clock is 40.0 s ahead of the others: a live run could be considered dead; see"),
    ],
)
def test_clock_offset_is_reported_with_its_direction(num_nodes: int, wrong: str, skew_s: float, text: str) -> None:
    answers = healthy(num_nodes)
    for one, other in pairs_of(answers, wrong):
        answers[one]["network"]["peers"][other]["offset_s"] = -skew_s
        answers[other]["network"]["peers"][one]["offset_s"] = skew_s
    (found,) = messages(request(num_nodes), answers)
    assert found.startswith(text.format(wrong))


# --- Probe answers of a healthy cluster, in which tests insert faults.


Answers = dict[str, dict[str, Any]]
#: Bytes that each node sends in an exchange, divisible by small numbers of peers.
EXCHANGE_BYTES = 210 * 2**12


def request(num_nodes: int = 4, **changes: Any) -> ProbeRequest:
    asked = ProbeRequest(
        nodes=tuple(f"n{number}" for number in range(1, num_nodes + 1)),
        port=23456,
        token="t",
        run_folder="/runs/e/r",
        checkpoint_folder="/runs/e/r/checkpoints",
        witness="/runs/e/r/preflight/witness",
    )
    return replace(asked, **changes)


def healthy(num_nodes: int = 4) -> Answers:
    """Return equal answers of nodes n1, n2, …."""
    nodes = request(num_nodes).nodes
    answer: dict[str, Any] = {
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
    for index, node in enumerate(nodes, 1):
        peer = {"status": "ok", "exchange_s": EXCHANGE_BYTES / 1e9, "offset_s": 1e-4}
        network = {
            "addresses": [f"10.0.0.{index}"],
            "exchange_bytes": EXCHANGE_BYTES // (num_nodes - 1),
            "peers": {other: dict(peer) for other in nodes if other != node},
        }
        answers[node] = copy.deepcopy(answer) | {"node": node, "network": network}
    return answers


def messages(asked: ProbeRequest, answers: Answers) -> list[str]:
    """Return the findings with their levels, such as `failure n3: disk: …`."""
    return [f"{check.level} {check.sentence()}" for check in findings(asked, answers)]


def findings(asked: ProbeRequest, answers: Answers) -> list[Check]:
    """Return the results of the checks without the summary."""
    found = check_nodes(asked, answers)
    assert found[-1].level == "ok", "the last result is the summary"
    return found[:-1]
