"""What the roles of a run ask of Slurm: alike nodes in groups, and which ranks stand on which of them.

A group of nodes that are alike is a component. One component is a plain job. Several are a heterogeneous job, or,
where a cluster has none of these or the roles differ in nothing but numbers, one allocation in which each rank is
told its node. All of this is pure: `srun.py` and `sbatch.py` make command lines of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

from hpcdist.config.schema import ClusterConfig, Config, RoleRequest, role_device
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.rank.roles import Roles, rank_table
from hpcdist.slurm.command_output import parse_memory_mb

#: Beyond this many nodes the rank table names the first and the last of a component.
NODES_IN_TABLE = 16


@dataclass(frozen=True, kw_only=True)
class JobComponent:
    """Nodes that are alike, for one role, or for neighbouring roles that ask for nothing of their own."""

    roles: tuple[str, ...]
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int
    mem: str | None
    partition: str | None
    constraint: str | None
    sbatch: dict[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tasks_per_node

    @property
    def hardware(self) -> tuple[Any, ...]:
        """What a single allocation would give to all nodes alike."""
        flags = tuple(sorted(self.sbatch.items()))
        return self.gpus_per_node, self.cpus_per_task, self.mem, self.partition, self.constraint, flags

    def __str__(self) -> str:
        ranks = f"{self.nodes} node{'s' * (self.nodes > 1)} × {self.tasks_per_node}"
        more = [
            f"{self.gpus_per_node} GPU{'s' * (self.gpus_per_node > 1)} each" if self.gpus_per_node else "",
            f"partition {self.partition}" if self.partition else "",
            self.constraint or "",
        ]
        return ", ".join([ranks, *filter(None, more)])


def components(config: Config) -> tuple[JobComponent, ...]:
    """What the roles ask for, in rank order. Raises ConfigError where numbers do not fit together."""
    cluster = config.cluster
    if not cluster.roles:
        world_size = cluster.nodes * cluster.tasks_per_node
        roles = Roles.of(config.roles, sum(config.roles.values()) or world_size)
        if roles.world_size != world_size:
            raise ConfigError(
                [
                    f"roles add up to {roles.world_size} ranks ({roles}), but cluster.nodes={cluster.nodes} ×"
                    f" cluster.tasks_per_node={cluster.tasks_per_node} is {world_size}: change one of them, or give"
                    " roles nodes of their own under cluster.roles"
                ]
            )
        return (_component(cluster, roles.names, RoleRequest(), cluster.nodes, cluster.tasks_per_node),)
    found = []
    # A role with an entry stands alone; those without share the nodes that the rest of the section asks for.
    for key, group in groupby(config.roles, key=lambda role: role if role in cluster.roles else ""):
        names = tuple(group)
        request = cluster.roles.get(key, RoleRequest())
        nodes, tasks_per_node = _shape(cluster, request, names, sum(config.roles[name] for name in names))
        found.append(_component(cluster, names, request, nodes, tasks_per_node))
    return tuple(found)


def _component(
    cluster: ClusterConfig, roles: tuple[str, ...], request: RoleRequest, nodes: int, tasks_per_node: int
) -> JobComponent:
    def own(name: str) -> Any:
        value = getattr(request, name)
        return getattr(cluster, name) if value is None else value

    return JobComponent(
        roles=roles,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        gpus_per_node=own("gpus_per_node"),
        cpus_per_task=own("cpus_per_task"),
        mem=own("mem"),
        partition=own("partition"),
        constraint=own("constraint"),
        sbatch=request.sbatch,
    )


def _shape(cluster: ClusterConfig, request: RoleRequest, roles: Sequence[str], count: int) -> tuple[int, int]:
    """Nodes, and ranks on each of them; what is not said follows from the count of ranks."""
    where, whose = f"cluster.roles.{roles[0]}", " + ".join(f"roles.{role}" for role in roles)
    nodes, tasks = request.nodes, request.tasks_per_node
    if nodes is not None and tasks is not None:
        if nodes * tasks != count:
            raise ConfigError(
                [f"{where}: nodes={nodes} × tasks_per_node={tasks} is {nodes * tasks}, but {whose} is {count}"]
            )
        return nodes, tasks
    if nodes is not None:
        if count % nodes:
            raise ConfigError([f"{where}.nodes={nodes}: {whose}={count} ranks cannot be shared out evenly over them"])
        return nodes, count // nodes
    key = f"{where}.tasks_per_node" if tasks is not None else "cluster.tasks_per_node"
    tasks = min(tasks or cluster.tasks_per_node, count)
    if count % tasks:
        raise ConfigError(
            [f"{key}={tasks}: {whose} is {count} ranks, which fill no whole number of nodes; set {where}.nodes"]
        )
    return count // tasks, tasks


def is_het(config: Config) -> bool:
    """Whether this becomes a heterogeneous job: where roles ask for different hardware, unless that is off."""
    parts = components(config)
    if len(parts) == 1 or config.cluster.het is False:
        return False
    return config.cluster.het is True or len({part.hardware for part in parts}) > 1


def allocations(config: Config) -> tuple[JobComponent, ...]:
    """What sbatch is asked for: the components of a heterogeneous job, or one allocation for everything.

    Raises ConfigError for what neither can give.
    """
    parts = components(config)
    if not is_het(config):
        return (merged(parts),)
    for before, part in pairwise(parts):
        if before.mem is not None and part.mem is None:
            # Slurm hands --mem on to the components that follow (22.05).
            raise ConfigError([f"cluster.roles.{part.roles[0]}.mem must be set, since {before.roles[0]} sets it, too"])
    return parts


def merged(parts: Sequence[JobComponent]) -> JobComponent:
    """One allocation that holds all: the sum of the nodes, each with the most that any role asks for."""
    if len(parts) == 1:
        return parts[0]
    for name in ("partition", "sbatch"):
        if any(getattr(part, name) != getattr(parts[0], name) for part in parts):
            raise ConfigError(
                [f"cluster.roles: {name} differs between roles, which only a heterogeneous job can give (cluster.het)"]
            )
    memories = [part.mem for part in parts if part.mem is not None]
    return JobComponent(
        roles=tuple(role for part in parts for role in part.roles),
        nodes=sum(part.nodes for part in parts),
        tasks_per_node=max(part.tasks_per_node for part in parts),
        gpus_per_node=max(part.gpus_per_node for part in parts),
        cpus_per_task=max(part.cpus_per_task for part in parts),
        mem=max(memories, key=_megabytes) if memories else None,
        partition=parts[0].partition,
        constraint=_merged_constraint(parts),
        sbatch=parts[0].sbatch,
    )


def _megabytes(mem: str) -> float:
    size = parse_memory_mb(mem)
    if size is None:
        raise ConfigError([f"cluster.mem must be like 64G, got {mem!r}"])
    return size or float("inf")  # 0 is all that a node has


def _merged_constraint(parts: Sequence[JobComponent]) -> str | None:
    """`[cpu*1&gpu*2]`: so many nodes of each kind."""
    wanted = [part.constraint for part in parts]
    if len(set(wanted)) == 1:
        return wanted[0]
    for constraint in filter(None, wanted):
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", constraint):
            raise ConfigError(
                [f"cluster.roles: constraint {constraint!r} needs a heterogeneous job; without one name one feature"]
            )
    kinds = {kind: sum(part.nodes for part in parts if part.constraint == kind) for kind in filter(None, wanted)}
    return f"[{'&'.join(f'{kind}*{count}' for kind, count in kinds.items())}]"


def place(
    parts: Sequence[JobComponent], nodes: Sequence[str], features: Mapping[str, frozenset[str]]
) -> list[tuple[str, ...]]:
    """Share the nodes of one allocation out: to each component its own, in the allocation's order.

    Components that want a feature choose first, and leave to the next what has more of them.
    Raises HpcdistError when a component does not get the nodes that it needs.
    """
    free = list(nodes)
    chosen: dict[int, tuple[str, ...]] = {}
    differ = len({part.constraint for part in parts}) > 1
    for index, part in sorted(enumerate(parts), key=lambda item: not (differ and item[1].constraint)):
        fitting = [node for node in free if not (differ and part.constraint) or part.constraint in features[node]]
        mine = sorted(fitting, key=lambda node: len(features.get(node, ())))[: part.nodes] if differ else fitting
        mine = [node for node in nodes if node in mine[: part.nodes]]
        if len(mine) < part.nodes:
            raise HpcdistError(
                f"{' and '.join(part.roles)} need {part} but of {', '.join(nodes)} only {len(mine)} are left for that"
            )
        chosen[index] = tuple(mine)
        free = [node for node in free if node not in mine]
    return [chosen[index] for index in range(len(parts))]


def hosts_by_rank(parts: Sequence[JobComponent], nodes: Sequence[Sequence[str]]) -> list[str]:
    """The host of each rank: a component's ranks fill one of its nodes after the other."""
    return [node for part, own in zip(parts, nodes, strict=True) for node in own for _ in range(part.tasks_per_node)]


def table(config: Config, nodes: Sequence[Sequence[str]] | None = None) -> list[str]:
    """The rank table: who is who, on what, and where; before the nodes are known, what is asked for.

    Args:
        nodes: names of each component's nodes.
    """
    parts = components(config)
    devices = {}
    groups = []
    first = 0
    num_nodes = sum(part.nodes for part in parts)
    for index, part in enumerate(parts):
        asked = f"component {index}: {part}" if is_het(config) else str(part)
        for role in part.roles:
            device = role_device(config, role)
            devices[role] = device if device != "auto" else "cuda" if part.gpus_per_node else "cpu"
        if nodes is not None and num_nodes <= NODES_IN_TABLE:
            for node in nodes[index]:
                groups.append((range(first, first + part.tasks_per_node), node))
                first += part.tasks_per_node
            continue
        if nodes is not None:
            own = nodes[index]
            asked = f"{own[0]} … {own[-1]} ({part})" if len(own) > 1 else own[0]
        groups.append((range(first, first + part.num_ranks), asked))
        first += part.num_ranks
    return rank_table(Roles.of(config.roles, first), groups, devices)


def cluster_for(cluster: ClusterConfig, part: JobComponent) -> ClusterConfig:
    """The section `cluster` as it would be if a component were all there is."""
    return replace(
        cluster,
        nodes=part.nodes,
        tasks_per_node=part.tasks_per_node,
        gpus_per_node=part.gpus_per_node,
        cpus_per_task=part.cpus_per_task,
        mem=part.mem,
        partition=part.partition,
        constraint=part.constraint,
        sbatch={**cluster.sbatch, **part.sbatch},
    )
