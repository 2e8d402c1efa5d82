"""Checks of the network between nodes: a node is reported if most of its pairs are affected, otherwise the pair."""

from __future__ import annotations

from typing import Any

import pytest
from preflight_answers import Answers, findings, healthy, messages, request


def block(answers: Answers, source: str, target: str, status: str, detail: str = "") -> None:
    """Replace the result of the connection from `source` to `target`."""
    answers[source]["network"]["peers"][target] = {"status": status} | ({"detail": detail} if detail else {})


def set_measured(answers: Answers, one: str, other: str, **values: Any) -> None:
    """Change the measurements of a pair, which are in the answer of its first node."""
    answers[min(one, other)]["network"]["peers"][max(one, other)] |= values


def pairs_of(answers: Answers, node: str) -> list[tuple[str, str]]:
    return [(node, other) for other in answers if other != node]


@pytest.mark.parametrize(
    ("status", "detail", "text"),
    [
        ("silent", "", "port 23456 is blocked: packets to it are dropped; open all TCP ports from 20480 on"),
        ("refused", "", "port 23456 is blocked: connections are refused; open"),
        ("unreachable", "No route to host", "port 23456 is blocked: No route to host; open"),
        ("stranger", "another program", "on port 23456 answers another program; identify the program"),
    ],
)
@pytest.mark.parametrize("num_nodes", [3, 4, 16])
def test_node_that_no_other_reaches_is_reported(num_nodes: int, status: str, detail: str, text: str) -> None:
    answers = healthy(num_nodes)
    for node in answers:
        if node != "n3":
            block(answers, node, "n3", status, detail)
    (found,) = findings(request(num_nodes), answers)
    assert (found.level, found.node) == ("failure", "n3")
    assert found.sentence().startswith(f"n3: port: no other node can reach it: {text}")


def test_node_that_answers_only_some_nodes_is_busy_and_not_reported() -> None:
    answers = healthy()
    block(answers, "n1", "n3", "mute", "a silent program")
    block(answers, "n2", "n3", "mute", "a silent program")
    assert messages(request(), answers) == []
    block(answers, "n4", "n3", "mute", "a silent program")
    (found,) = messages(request(), answers)
    assert found.startswith(
        "failure n3: port: no other node can reach it: on port 23456 answers a silent program; identify"
    )


def test_unreachable_node_of_two_is_reported() -> None:
    answers = healthy(2)
    block(answers, "n1", "n2", "silent")
    (found,) = findings(request(2), answers)
    assert found.node == "n2"
    assert found.sentence().startswith("n2: port: n1 cannot reach it: port 23456 is blocked: packets to it are dropped")


def test_node_that_reaches_no_other_is_reported() -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n3"):
        block(answers, "n3", other, "silent")
    (found,) = messages(request(), answers)
    assert found.startswith("failure n3: port: it cannot reach any other node: port 23456 is blocked: packets to it")


def test_node_blocked_in_both_directions_is_reported_once() -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n3"):
        block(answers, "n3", other, "silent")
        block(answers, other, "n3", "silent")
    (found,) = findings(request(), answers)
    assert found.node == "n3"


def test_single_blocked_pair_is_reported_as_a_pair() -> None:
    answers = healthy()
    block(answers, "n1", "n3", "silent")
    (found,) = findings(request(), answers)
    assert (found.level, found.node) == ("failure", "")
    assert found.sentence().startswith("port: n1 cannot reach n3, though others can: port 23456 is blocked: packets")


def test_two_blocked_nodes_are_both_reported() -> None:
    answers = healthy(6)
    for target in ("n3", "n5"):
        for node in answers:
            if node != target:
                block(answers, node, target, "refused")
    assert [check.node for check in findings(request(6), answers)] == ["n3", "n5"]


def test_unresolved_name_is_reported_under_names() -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n3"):
        block(answers, other, "n3", "unresolved", "Name or service not known")
    (found,) = messages(request(), answers)
    assert found.startswith(
        "failure n3: names: no other node can reach it: its name cannot be looked up (Name or service not known); add"
    )


def test_closed_ephemeral_ports_are_reported() -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n3"):
        answers[other]["network"]["peers"]["n3"]["ephemeral"] = "silent"
    (found,) = messages(request(), answers)
    assert found.startswith(
        "failure n3: port: port 23456 is open, but ports of the ephemeral range, which gloo, NCCL and RPC use, are not:"
        " packets to it are dropped; open"
    )


def test_node_without_an_answer_is_not_also_reported_as_blocked() -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n3"):
        block(answers, other, "n3", "absent")
    del answers["n3"]
    assert [check.name for check in findings(request(), answers)] == ["answer"]


@pytest.mark.parametrize(("node", "level"), [("n1", "failure"), ("n3", "warning")])
def test_port_in_use_is_reported_once(node: str, level: str) -> None:
    answers = healthy()
    answers[node]["network"] |= {"port_problem": "Address already in use", "listener": "pid 7 (nc) of ada"}
    for _, other in pairs_of(answers, node):
        block(answers, other, node, "stranger", "another program")
    (found,) = messages(request(), answers)
    assert found.startswith(f"{level} {node}: port: port 23456 is in use: pid 7 (nc) of ada; end that program")


@pytest.mark.parametrize("num_nodes", [3, 4, 8])
@pytest.mark.parametrize("slow", ["n1", "n3"])
def test_node_with_a_slow_link_is_reported_and_not_its_partners(num_nodes: int, slow: str) -> None:
    answers = healthy(num_nodes)
    for one, other in pairs_of(answers, slow):
        set_measured(answers, one, other, received_bytes_s=2.5e6)
    (found,) = findings(request(num_nodes), answers)
    assert (found.level, found.node) == ("failure", slow)
    assert found.sentence().startswith(
        f"{slow}: network: 2.5 MB/s to and from it, 1,000 MB/s between the other nodes; check its cable, port and"
    )


def test_two_slow_nodes_are_both_reported() -> None:
    answers = healthy(6)
    for slow in ("n2", "n5"):
        for one, other in pairs_of(answers, slow):
            set_measured(answers, one, other, sent_bytes_s=2.5e6)
    assert {check.node for check in findings(request(6), answers)} == {"n2", "n5"}


def test_nodes_behind_a_slow_uplink_are_reported_although_they_are_fast_among_themselves() -> None:
    answers = healthy(6)
    behind = {"n2", "n5"}
    for one, other in ((a, b) for a in answers for b in answers if a < b):
        if len(behind & {one, other}) == 1:
            set_measured(answers, one, other, sent_bytes_s=50e6)
    found = findings(request(6), answers)
    assert {(check.level, check.node) for check in found} == {("failure", node) for node in behind}


def test_very_slow_pair_of_a_node_with_sufficient_other_pairs_is_reported() -> None:
    answers = healthy(6)
    for one, other in pairs_of(answers, "n2"):
        set_measured(answers, one, other, sent_bytes_s=200e6)
    set_measured(answers, "n2", "n5", sent_bytes_s=1e6)
    (found,) = messages(request(6), answers)
    assert found.startswith("warning network: 1.0 MB/s between n2 and n5, 1,000 MB/s in the median pair; check the")


def test_moderately_slow_link_is_a_warning() -> None:
    answers = healthy(4)
    for one, other in pairs_of(answers, "n3"):
        set_measured(answers, one, other, sent_bytes_s=110e6)
    (found,) = findings(request(), answers)
    assert (found.level, found.node) == ("warning", "n3")


def test_noise_of_a_busy_machine_is_not_reported() -> None:
    answers = healthy(8)
    for index, (one, other) in enumerate((a, b) for a in answers for b in answers if a < b):
        set_measured(answers, one, other, sent_bytes_s=46e6 + 4e7 * (index % 13), latency_s=1e-4 + 3e-4 * (index % 11))
    assert messages(request(8), answers) == []


def test_node_with_high_latency_is_reported() -> None:
    answers = healthy()
    for one, other in pairs_of(answers, "n2"):
        set_measured(answers, one, other, latency_s=50e-3)
    (found,) = messages(request(), answers)
    assert found.startswith("failure n2: network: 50.0 ms round trip, 0.05 ms between the other nodes; check")
    for one, other in pairs_of(answers, "n2"):
        set_measured(answers, one, other, latency_s=6e-3)
    (found,) = messages(request(), answers)
    assert found.startswith("warning n2: network: 6.0 ms")


def test_slow_pair_of_healthy_nodes_is_reported_as_a_pair() -> None:
    answers = healthy(6)
    set_measured(answers, "n2", "n5", sent_bytes_s=5e6)
    (found,) = messages(request(6), answers)
    assert found.startswith("warning network: 5.0 MB/s between n2 and n5, 1,000 MB/s in the median pair; check the")


def test_slow_link_of_two_nodes_is_reported_as_a_pair() -> None:
    answers = healthy(2)
    set_measured(answers, "n1", "n2", sent_bytes_s=2.5e6)
    (found,) = messages(request(2), answers)
    assert found.startswith("warning network: 2.5 MB/s between n1 and n2, too slow for training")


def test_lost_large_packets_are_reported() -> None:
    answers = healthy()
    for _, other in pairs_of(answers, "n4"):
        answers[other]["network"]["peers"]["n4"] = {"status": "ok", "stalled": True}
    (found,) = messages(request(), answers)
    assert found.startswith("failure n4: network: small messages arrive, large ones do not on the way to or from it")
    answers = healthy()
    answers["n1"]["network"]["peers"]["n4"] = {"status": "ok", "stalled": True}
    (found,) = messages(request(), answers)
    assert found.startswith("failure network: n1 – n4: small messages arrive, large ones do not; compare the MTUs")


@pytest.mark.parametrize(("num_nodes", "wrong"), [(2, "n2"), (3, "n3"), (4, "n1"), (16, "n7")])
@pytest.mark.parametrize(
    ("skew_s", "text"),
    [
        (
            5.0,
            "warning {}: clock: its clock is 5.0 s ahead of the others: logs and metrics",
        ),
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


def test_small_clock_offset_is_ignored() -> None:
    answers = healthy()
    answers["n1"]["network"]["peers"]["n2"]["offset_s"] = 0.5
    assert messages(request(), answers) == []
