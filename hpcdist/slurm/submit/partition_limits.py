"""Checks of a request against the limits of the partitions and the hardware of their nodes."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcdist.config.schema import ClusterConfig
from hpcdist.errors import suggestion
from hpcdist.slurm.cluster_nodes import Partition, count_nodes
from hpcdist.slurm.command_output import parse_memory_mb, parse_minutes

#: A site's default memory below this, per rank, is reported: importing torch takes half of it.
_SMALL_MB = 1024


@dataclass
class Findings:
    """Results of checks."""

    errors: list[str] = field(default_factory=list)  #: prevent the submission
    warnings: list[str] = field(default_factory=list)


def requested_partitions(
    cluster: ClusterConfig, partitions: Sequence[Partition], findings: Findings
) -> list[Partition]:
    """Return the partitions that the job may run in; unknown ones become errors."""
    if cluster.partition is None:
        return [partition for partition in partitions if partition.facts.get("Default") == "YES"]
    known = {partition.name: partition for partition in partitions}
    found = []
    for name in cluster.partition.split(","):
        if name in known:
            found.append(known[name])
            continue
        hint = suggestion(name, known, f"the cluster has {', '.join(sorted(known))}")
        findings.errors.append(f"cluster.partition={name}: no such partition, {hint}")
    return found


def check_partitions(cluster: ClusterConfig, partitions: Sequence[Partition], findings: Findings) -> None:
    """Add the findings of the partition that fits best: one that can run the job is enough."""
    results = []
    for partition in partitions:
        result = Findings()
        _check_access(cluster, partition, result)
        _check_size(cluster, partition, result)
        results.append(result)
    if results:
        best = min(results, key=lambda result: (len(result.errors), len(result.warnings)))
        findings.errors += best.errors
        findings.warnings += best.warnings


def _check_access(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name, state = partition.name, partition.facts.get("State", "UP")
    if state in ("DRAIN", "INACTIVE"):
        findings.errors.append(f"cluster.partition={name} accepts no jobs (state {state}): choose another")
    elif state != "UP":
        findings.warnings.append(f"cluster.partition={name} starts no jobs (state {state}): the run will wait")
    for kind, key, value in (("Accounts", "account", cluster.account), ("Qos", "qos", cluster.qos)):
        allowed = partition.allowed(kind)
        if value is not None and (value in partition.denied(kind) or (allowed is not None and value not in allowed)):
            fix = f"use {', '.join(allowed)}" if allowed else "choose another"
            findings.errors.append(f"cluster.{key}={value} may not use partition {name}: {fix}")
    groups = partition.allowed("Groups")
    if os.getuid() == 0:
        return
    if partition.facts.get("RootOnly") == "YES":
        findings.errors.append(f"cluster.partition={name} is reserved for root: choose another")
    elif groups is not None and not set(groups) & set(_own_groups()):
        findings.errors.append(
            f"cluster.partition={name} is reserved for groups {', '.join(groups)}, and you are in none of them:"
            " choose another"
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


def _check_size(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    name, nodes = partition.name, partition.nodes
    max_min = parse_minutes(partition.facts.get("MaxTime", ""))
    if max_min is not None and cluster.time_limit_min > max_min:
        findings.errors.append(
            f"cluster.time_limit_min={cluster.time_limit_min}: partition {name} allows {max_min:g}: lower it;"
            " a longer run saves, requeues itself and continues"
        )
    total = count_nodes(nodes)
    most = _max([total], partition.limit("MaxNodes"))
    asked, fewest = _requested(cluster)
    if nodes and fewest > most:
        limit = f"has {total}" if most == total else f"allows {most} per job"
        findings.errors.append(f"{asked}: partition {name} {limit}: lower it or choose another")
    if cluster.nodes + cluster.spare_nodes < (least := partition.limit("MinNodes") or 0):
        findings.errors.append(
            f"cluster.nodes={cluster.nodes}: partition {name} requires at least {least}: raise it or choose another"
        )
    _check_nodes(cluster, partition, findings)


def _requested(cluster: ClusterConfig) -> tuple[str, int]:
    """Return the keys and values of the least number of nodes that a job needs, and that number."""
    asked = f"cluster.nodes={cluster.nodes}" if cluster.min_nodes is None else f"cluster.min_nodes={cluster.min_nodes}"
    spare = f" and cluster.spare_nodes={cluster.spare_nodes}" if cluster.spare_nodes else ""
    return asked + spare, cluster.fewest_nodes + cluster.spare_nodes


def _check_nodes(cluster: ClusterConfig, partition: Partition, findings: Findings) -> None:
    """Check whether enough nodes have the cores, GPUs and memory that are requested per node."""
    name, nodes = partition.name, partition.nodes
    cpus = cluster.tasks_per_node * cluster.cpus_per_task
    memory = parse_memory_mb(cluster.mem) if cluster.mem is not None else None
    if cluster.mem is not None and memory is None:
        findings.errors.append(f"cluster.mem={cluster.mem} is not a memory size: write 64G, or MiB without a unit")
    tasks = f"cluster.tasks_per_node={cluster.tasks_per_node} × cluster.cpus_per_task={cluster.cpus_per_task}"
    max_cpus = _max((group.cpus for group in nodes), partition.limit("MaxCPUsPerNode"))
    max_gpus = _max(group.gpus for group in nodes)
    max_memory = _max((group.memory_mb for group in nodes), partition.limit("MaxMemPerNode"))
    too_large = [
        f"{request}: partition {name} offers at most {most} {unit} per node: lower it or choose another"
        for request, requested, most, unit in (
            (tasks, cpus, max_cpus, "cores"),
            (f"cluster.gpus_per_node={cluster.gpus_per_node}", cluster.gpus_per_node, max_gpus, "GPUs"),
            (f"cluster.mem={cluster.mem}", memory or 0, max_memory, "MiB"),
        )
        if nodes and requested > most
    ]
    findings.errors += too_large
    asked, fewest = _requested(cluster)
    if too_large or fewest > count_nodes(nodes):
        return
    fitting = [g for g in nodes if g.cpus >= cpus and g.gpus >= cluster.gpus_per_node and g.memory_mb >= (memory or 0)]
    total, up = count_nodes(fitting), count_nodes([group for group in fitting if group.usable])
    if fewest > total:
        findings.errors.append(
            f"{asked}: {total} nodes of partition {name} have the requested hardware: lower the number or the request"
        )
    elif fewest > up:
        findings.warnings.append(f"only {up} of the {total} matching nodes of {name} are up: the run will wait")
    _check_default_memory(cluster, partition, cpus, findings)


def _check_default_memory(cluster: ClusterConfig, partition: Partition, cpus: int, findings: Findings) -> None:
    default = partition.limit("DefMemPerNode") or (partition.limit("DefMemPerCPU") or 0) * cpus
    if cluster.mem is None and 0 < default < _SMALL_MB * cluster.tasks_per_node:
        findings.warnings.append(
            f"cluster.mem is not set, and the default of partition {partition.name} is only {default} MiB per node"
        )


def _max(values: Iterable[int], limit: int | None = None) -> int:
    most = max(values, default=0)
    return most if limit is None else min(most, limit)
