"""What is asked of a cluster against what its partitions allow and their nodes have: a line for each mistake."""

from __future__ import annotations

import difflib
import grp
import os
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcdist.config.schema import ClusterConfig
from hpcdist.slurm.cluster_nodes import NodeGroup, Partition
from hpcdist.slurm.command_output import parse_memory_mb, parse_minutes

#: Less memory than this for a rank, left to the site's default, is worth a word: importing torch takes half of it.
_SMALL_MB = 1024


@dataclass
class Findings:
    """What checks have found: `wrong` keeps the run from being submitted, `doubts` are said."""

    wrong: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def chosen_of(cluster: ClusterConfig, partitions: Sequence[Partition], found: Findings) -> list[Partition]:
    """The partitions that the run may stand in."""
    if cluster.partition is None:
        return [one for one in partitions if one.facts.get("Default") == "YES"]
    known = {one.name: one for one in partitions}
    chosen = []
    for name in cluster.partition.split(","):
        if name in known:
            chosen.append(known[name])
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        found.wrong.append(f"cluster.partition={name}: no such partition, {hint}there are {', '.join(sorted(known))}")
    return chosen


def check_partitions(cluster: ClusterConfig, chosen: Sequence[Partition], found: Findings) -> None:
    """Of several partitions one that can take the job is enough."""
    each = []
    for partition in chosen:
        one = Findings()
        _check_access(cluster, partition, one)
        _check_size(cluster, partition, one)
        each.append(one)
    if each:
        best = min(each, key=lambda one: (len(one.wrong), len(one.doubts)))
        found.wrong += best.wrong
        found.doubts += best.doubts


def _check_access(cluster: ClusterConfig, partition: Partition, found: Findings) -> None:
    name, state = partition.name, partition.facts.get("State", "UP")
    if state in ("DRAIN", "INACTIVE"):
        found.wrong.append(f"cluster.partition={name} takes no jobs at present (state {state}): choose another")
    elif state != "UP":
        found.doubts.append(f"cluster.partition={name} starts no jobs at present (state {state}): the run will wait")
    for what, key, value in (("Accounts", "account", cluster.account), ("Qos", "qos", cluster.qos)):
        allowed = partition.allowed(what)
        if value is not None and (value in partition.denied(what) or (allowed is not None and value not in allowed)):
            others = f": it takes {', '.join(allowed)}" if allowed else ": choose another"
            found.wrong.append(f"cluster.{key}={value} may not use partition {name}{others}")
    groups = partition.allowed("Groups")
    if os.getuid() == 0:
        return
    if partition.facts.get("RootOnly") == "YES":
        found.wrong.append(f"cluster.partition={name} is for root alone: choose another")
    elif groups is not None and not set(groups) & set(_own_groups()):
        found.wrong.append(
            f"cluster.partition={name} is for groups {', '.join(groups)}, and you are in none of them: choose another"
        )


def _own_groups() -> list[str]:
    me = pwd.getpwuid(os.getuid())
    names = []
    for number in os.getgrouplist(me.pw_name, me.pw_gid):
        try:
            names.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue  # a group without a name
    return names


def _check_size(cluster: ClusterConfig, partition: Partition, found: Findings) -> None:
    name, nodes = partition.name, partition.nodes
    longest = parse_minutes(partition.facts.get("MaxTime", ""))
    if longest is not None and cluster.time_limit_min > longest:
        found.wrong.append(
            f"cluster.time_limit_min={cluster.time_limit_min}: partition {name} allows {longest:g}: lower it;"
            " a run that needs longer saves, requeues itself and goes on"
        )
    total = sum(group.num_nodes for group in nodes)
    most = _most([total], partition.limit("MaxNodes"))
    if nodes and cluster.nodes > most:
        has = f"has {total}" if most == total else f"allows {most} to a job"
        found.wrong.append(f"cluster.nodes={cluster.nodes}: partition {name} {has}: lower it or choose another")
    if cluster.nodes < (least := partition.limit("MinNodes") or 0):
        found.wrong.append(
            f"cluster.nodes={cluster.nodes}: partition {name} wants at least {least}: raise it or choose another"
        )
    _check_node(cluster, partition, found)


def _check_node(cluster: ClusterConfig, partition: Partition, found: Findings) -> None:
    """Whether enough nodes have what is asked of each."""
    name, nodes = partition.name, partition.nodes
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    memory = parse_memory_mb(cluster.mem) if cluster.mem is not None else None
    if cluster.mem is not None and memory is None:
        found.wrong.append(f"cluster.mem={cluster.mem} is no memory size: write 64G, or MiB without a unit")
    short = [
        f"{said}: partition {name} offers at most {most} {unit} on a node: lower it or choose another"
        for said, asked, most, unit in (
            (
                f"cluster.tasks_per_node={cluster.tasks_per_node} × cluster.cpus_per_task={cluster.cpus_per_task}",
                cpus,
                _most((group.cpus for group in nodes), partition.limit("MaxCPUsPerNode")),
                "cores",
            ),
            (
                f"cluster.gpus_per_node={cluster.gpus_per_node}",
                cluster.gpus_per_node,
                _most(g.gpus for g in nodes),
                "GPUs",
            ),
            (
                f"cluster.mem={cluster.mem}",
                memory or 0,
                _most((group.memory_mb for group in nodes), partition.limit("MaxMemPerNode")),
                "MiB",
            ),
        )
        if nodes and asked > most
    ]
    found.wrong += short
    able = [g for g in nodes if g.cpus >= cpus and g.gpus >= cluster.gpus_per_node and g.memory_mb >= (memory or 0)]
    total, up = _count(able), _count([group for group in able if group.usable])
    if short or cluster.nodes > _count(nodes):
        return
    if cluster.nodes > total:
        found.wrong.append(
            f"cluster.nodes={cluster.nodes}: {total} nodes of partition {name} have what is asked of each: lower one"
        )
    elif cluster.nodes > up:
        found.doubts.append(f"only {up} of the {total} nodes of {name} that fit are up at present: the run will wait")
    default = partition.limit("DefMemPerNode") or (partition.limit("DefMemPerCPU") or 0) * cpus
    if cluster.mem is None and 0 < default < _SMALL_MB * cluster.tasks_per_node:
        found.doubts.append(
            f"cluster.mem is not set, and partition {name} then gives {default} MiB a node: that is little"
        )


def _most(offers: Iterable[int], limit: int | None = None) -> int:
    most = max(offers, default=0)
    return most if limit is None else min(most, limit)


def _count(groups: Sequence[NodeGroup]) -> int:
    return sum(group.num_nodes for group in groups)
