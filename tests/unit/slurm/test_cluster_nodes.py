"""Partitions and nodes parsed from the output of scontrol and sinfo."""

from __future__ import annotations

import pytest

from hpcdist.slurm.output import NodeGroup, NodeState, parse_node_states, parse_partitions, parse_time

PARTITIONS = (
    "PartitionName=gpu AllowGroups=ALL AllowAccounts=ada,bob DenyQos=long Default=YES MaxNodes=4 MinNodes=0"
    " MaxTime=1-00:00:00 State=UP\n"
    "PartitionName=empty AllowGroups=staff AllowAccounts=ALL DenyQos=NONE MaxNodes=UNLIMITED State=DOWN\n"
)
NODES = "gpu|2|64|256000|gpu:a100:4(S:0-1)|mixed|n[1-2]\ngpu|1|16+|64000+|(null)|drained*|n3\nnot a line\n"


def test_partitions_and_their_nodes() -> None:
    gpu, empty = parse_partitions(PARTITIONS, NODES)
    assert gpu.nodes == (
        NodeGroup(partition="gpu", num_nodes=2, cpus=64, memory_mb=256000, gpus=4, usable=True, names="n[1-2]"),
        NodeGroup(partition="gpu", num_nodes=1, cpus=16, memory_mb=64000, gpus=0, usable=False, names="n3"),
    )
    assert (gpu.limit("MaxNodes"), empty.limit("MaxNodes"), empty.limit("MaxMemPerNode")) == (4, None, None)
    assert (gpu.allowed("Accounts"), gpu.allowed("Groups"), empty.allowed("Groups")) == (
        ("ada", "bob"),
        None,
        ("staff",),
    )
    assert (gpu.denied("Qos"), empty.denied("Qos"), gpu.denied("Accounts")) == (("long",), (), ())
    assert (empty.name, empty.nodes) == ("empty", ())


@pytest.mark.parametrize(
    ("gres", "count"),
    [
        ("(null)", 0),
        ("gpu:2", 2),
        ("gpu:4(S:0-1)", 4),
        ("gpu:a100:2,gpu:v100:3(S:1)", 5),
        ("gpu:a100:no_consume:4", 4),
        ("shard:8,gpu:1g.5gb:7", 7),
        ("license:3", 0),
    ],
)
def test_gpus_of_a_node(gres: str, count: int) -> None:
    (partition,) = parse_partitions("PartitionName=p", f"p|1|1|1|{gres}|idle|n1")
    assert partition.nodes[0].gpus == count


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "idle~", "planned", "reserved"])
def test_usable_node_states(state: str) -> None:
    assert usable(state)


@pytest.mark.parametrize("state", ["down", "drained", "draining", "idle*", "fail", "down*"])
def test_unusable_node_states(state: str) -> None:
    assert not usable(state)


def usable(state: str) -> bool:
    (partition,) = parse_partitions("PartitionName=p", f"p|1|1|1|(null)|{state}|n1")
    return partition.nodes[0].usable


def test_node_states_with_reason() -> None:
    """sinfo prints a line per node and partition; a reason may contain the separator."""
    two, one = parse_node_states(
        "n2|drained|(null)|(null)|8|32768|2026-11-20T14:50:00|root|bad DIMM in slot 4 | see ticket\n"
        "n1|idle|a,b|gpu:2|8|32768|Unknown|Unknown|none\nn1|idle|a,b|gpu:2|8|32768|Unknown|Unknown|none\nnot a line\n"
    )
    assert one == NodeState(name="n1", state="idle", hardware="a,b|gpu:2|8|32768")
    assert (two.user, two.reason) == ("root", "bad DIMM in slot 4 | see ticket")
    assert two.since == parse_time("2026-11-20T14:50:00")


def test_lines_and_numbers_of_another_format_are_ignored() -> None:
    (partition,) = parse_partitions(f"PartitionName=p MaxNodes=² MinNodes={'9' * 5000}", "p|n/a|1|1|gpu:1|idle|n1\n")
    assert partition.nodes == ()
    assert (partition.limit("MaxNodes"), partition.limit("MinNodes")) == (None, None)
