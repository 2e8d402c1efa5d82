"""Partitions and nodes of a cluster, parsed from the output of `scontrol` and `sinfo`. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpcdist.slurm.command_output import parse_count, parse_records, parse_text, parse_time

#: States in which a node takes no jobs (`sinfo`'s long names); `*` after a state marks a node that does not respond.
_UNUSABLE = ("down", "drain", "fail", "error", "inval", "unknown", "future")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)*:([0-9]{1,9})")
#: Formats of `sinfo` for the nodes of all partitions, and for single nodes.
PARTITION_FORMAT = "%R|%D|%c|%m|%G|%T|%N"
NODE_FORMAT = "%N|%T|%f|%G|%c|%m|%H|%u|%E"


@dataclass(frozen=True, kw_only=True)
class NodeGroup:
    """Nodes of one partition with the same hardware and state."""

    partition: str
    num_nodes: int
    cpus: int
    memory_mb: int
    gpus: int
    usable: bool
    names: str  #: nodelist as Slurm writes it, `n[1-4]`


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition."""

    name: str
    facts: Mapping[str, str]  #: the record that `scontrol show partition` prints
    nodes: tuple[NodeGroup, ...]

    def limit(self, key: str) -> int | None:
        """Return a numeric limit, or None without a limit."""
        return parse_count(self.facts.get(key, ""))

    def allowed(self, kind: str) -> tuple[str, ...] | None:
        """Return the `Accounts`, `Groups` or `Qos` that may use the partition; None if all but the denied may."""
        text = self.facts.get(f"Allow{kind}", "ALL")
        return None if text.upper() in ("ALL", "(NULL)", "") else tuple(text.split(","))

    def denied(self, kind: str) -> tuple[str, ...]:
        """Return the `Accounts` or `Qos` that may not use the partition."""
        text = self.facts.get(f"Deny{kind}", "")
        return tuple(name for name in text.split(",") if name and name.upper() not in ("NONE", "(NULL)"))


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """State and hardware of one node."""

    name: str
    state: str  #: long name: idle, mixed, allocated, down*, …
    hardware: str  #: features, GPUs and other GRES, cores and memory, as `sinfo` prints them
    since: float | None = None  #: time of the reason, in seconds since the epoch
    user: str = ""  #: the user who set the reason
    reason: str = ""  #: the reason why the node is down or drained

    @property
    def has_failed(self) -> bool:
        """Whether the node is down, has failed or does not respond; a drained node that responds has not failed."""
        return self.state.startswith(("down", "fail")) or self.state.endswith("*")


def count_nodes(groups: Iterable[NodeGroup]) -> int:
    """Return the number of nodes in groups."""
    return sum(group.num_nodes for group in groups)


def parse_partitions(partitions: str, nodes: str) -> list[Partition]:
    """Return the partitions of `scontrol show partition --oneliner` with their nodes, from PARTITION_FORMAT lines."""
    groups = [group for line in nodes.splitlines() if (group := _node_group(line)) is not None]
    found = []
    for facts in parse_records(partitions):
        if name := facts.get("PartitionName"):
            own = tuple(group for group in groups if group.partition == name)
            found.append(Partition(name=name, facts=facts, nodes=own))
    return found


def _node_group(line: str) -> NodeGroup | None:
    """Return the nodes of a line of sinfo; None for a line of another form."""
    if line.count("|") != 6:
        return None
    partition, count, cpus, memory, gres, state, names = line.split("|")
    # sinfo prints `16+` if the nodes of one line differ.
    counts = [parse_count(text.removesuffix("+")) for text in (count, cpus, memory)]
    if None in counts:
        return None
    num_nodes, num_cpus, memory_mb = (count or 0 for count in counts)
    return NodeGroup(
        partition=partition,
        num_nodes=num_nodes,
        cpus=num_cpus,
        memory_mb=memory_mb,
        gpus=sum(map(int, _GPUS.findall(gres))),
        usable=not (state.startswith(_UNUSABLE) or state.endswith("*")),
        names=names,
    )


def parse_node_states(text: str) -> list[NodeState]:
    """Return the nodes of `sinfo --Node` lines in NODE_FORMAT, each once: sinfo has a line per node and partition."""
    found = {}
    for line in text.splitlines():
        words = line.strip().split("|", 8)
        if len(words) == 9:
            name, state, *hardware, since, user, reason = words
            found[name] = NodeState(
                name=name,
                state=state,
                hardware="|".join(hardware),
                since=parse_time(since),
                user=parse_text(user),
                reason="" if reason.strip().lower() == "none" else reason.strip(),
            )
    return list(found.values())


def parse_node_features(text: str) -> dict[str, frozenset[str]]:
    """Return the active features by node from `scontrol show node --oneliner`."""
    return {
        record["NodeName"]: frozenset(record.get("ActiveFeatures", "").split(",")) - {"", "(null)"}
        for record in parse_records(text)
        if "NodeName" in record
    }


def parse_boot_times(text: str) -> dict[str, float]:
    """Return the boot time by node from `scontrol show node --oneliner`, if Slurm knows it."""
    times = ((record.get("NodeName"), parse_time(record.get("BootTime"))) for record in parse_records(text))
    return {name: booted for name, booted in times if name is not None and booted is not None}
