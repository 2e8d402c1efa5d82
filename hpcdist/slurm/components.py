"""The components of a run's job: which nodes the roles request, and which ranks run on which nodes. Pure functions.

A component is a group of nodes with the same request. One component is a plain job. Several components are a
heterogeneous job, or one allocation with a fixed node per rank with `cluster.het=off` or if the roles request the same
hardware.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, pairwise
from typing import Any

from hpcdist.config.launch_schema import ClusterConfig, RoleRequest
from hpcdist.config.schema import Config, role_device
from hpcdist.config.topology import Roles, expand, rank_table
from hpcdist.errors import ConfigError, HpcdistError
from hpcdist.slurm.output import parse_memory_mb

#: Settings that a role inherits from the section `cluster`.
_INHERITED = ("gpus_per_node", "gpu_type", "cpus_per_task", "mem", "partition", "constraint")


@dataclass(frozen=True, kw_only=True)
class JobComponent:
    """Nodes with the same request: of a role with an entry in `cluster.roles`, or of neighbouring roles without one."""

    roles: tuple[str, ...]
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    gpu_type: str | None = None
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
        """The request, without the numbers of nodes and tasks; one allocation has the same for all of its nodes."""
        return (*(getattr(self, name) for name in _INHERITED), tuple(sorted(self.sbatch.items())))

    def __str__(self) -> str:
        ranks = f"{self.nodes} node{'s' * (self.nodes > 1)} × {self.tasks_per_node}"
        kind = f" {self.gpu_type}" if self.gpu_type else ""
        more = [
            f"{self.gpus_per_node}{kind} GPU{'s' * (self.gpus_per_node > 1)} each" if self.gpus_per_node else "",
            f"partition {self.partition}" if self.partition else "",
            self.constraint or "",
        ]
        return ", ".join([ranks, *filter(None, more)])


def components(config: Config) -> tuple[JobComponent, ...]:
    """Return the components in rank order. Raises ConfigError if numbers contradict each other."""
    cluster = config.cluster
    _check_outlives_nodes(config)
    if not cluster.roles:
        world_size = cluster.nodes * cluster.tasks_per_node
        roles = Roles.of(config.roles, sum(config.roles.values()) or world_size)
        if roles.world_size != world_size:
            problem = f"roles add up to {roles.world_size} ranks ({roles}), but cluster.nodes={cluster.nodes} ×"
            problem += f" cluster.tasks_per_node={cluster.tasks_per_node} is {world_size}: change one of them, or"
            raise ConfigError(f"{problem} request nodes for single roles under cluster.roles")
        return (_component(cluster, roles.names, RoleRequest(), cluster.nodes, cluster.tasks_per_node),)
    found = []
    # A role with an entry has a component to itself; neighbouring roles without one share a component.
    for key, group in groupby(config.roles, key=lambda role: role if role in cluster.roles else ""):
        names = tuple(group)
        request = cluster.roles.get(key, RoleRequest())
        nodes, tasks_per_node = _shape(cluster, request, names, sum(config.roles[name] for name in names))
        found.append(_component(cluster, names, request, nodes, tasks_per_node))
    return tuple(found)


def _check_outlives_nodes(config: Config) -> None:
    cluster, min_ranks = config.cluster, config.elastic.min_ranks or 1
    # `cross_check` checks cluster.min_nodes; without it, a run on this machine may have the default cluster.nodes.
    num_ranks = cluster.nodes * cluster.tasks_per_node
    if cluster.min_nodes is None and not config.roles and num_ranks < min_ranks:
        problem = f"cluster.nodes={cluster.nodes} × cluster.tasks_per_node={cluster.tasks_per_node} is less than"
        raise ConfigError(f"{problem} elastic.min_ranks={min_ranks}: raise the first or lower the last")
    if config.roles and cluster.fewest_nodes < cluster.nodes:
        problem = f"cluster.min_nodes={cluster.min_nodes}: a run with roles has a fixed number of ranks: remove it"
        raise ConfigError(problem)
    if cluster.roles and cluster.spare_nodes:
        problem = f"cluster.spare_nodes={cluster.spare_nodes}: a spare node can replace no node of another request:"
        raise ConfigError(f"{problem} remove it, or cluster.roles")


def _component(
    cluster: ClusterConfig, roles: tuple[str, ...], request: RoleRequest, nodes: int, tasks_per_node: int
) -> JobComponent:
    own = {name: getattr(request, name) for name in _INHERITED}
    values = {name: getattr(cluster, name) if value is None else value for name, value in own.items()}
    if values["mem"] is not None and parse_memory_mb(values["mem"]) is None:
        key = "cluster.mem" if request.mem is None else f"cluster.roles.{roles[0]}.mem"
        raise ConfigError(f"{key}={values['mem']} is not a memory size: write 64G, or MiB without a unit")
    return JobComponent(roles=roles, nodes=nodes, tasks_per_node=tasks_per_node, sbatch=request.sbatch, **values)


def _shape(cluster: ClusterConfig, request: RoleRequest, roles: Sequence[str], count: int) -> tuple[int, int]:
    """Return the number of nodes and of ranks per node; a number that is not set follows from `count` ranks."""
    key, summands = f"cluster.roles.{roles[0]}", " + ".join(f"roles.{role}" for role in roles)
    nodes, tasks, problem = request.nodes, request.tasks_per_node, ""
    if nodes is not None and tasks is not None:
        if nodes * tasks != count:
            problem = f"{key}: nodes={nodes} × tasks_per_node={tasks} is {nodes * tasks}, but {summands} is {count}"
    elif nodes is not None:
        tasks, rest = divmod(count, nodes)
        if rest:
            problem = f"{key}.nodes={nodes}: {summands}={count} ranks cannot be distributed evenly over these nodes"
    else:
        tasks_key = "cluster.tasks_per_node" if tasks is None else f"{key}.tasks_per_node"
        tasks = min(tasks or cluster.tasks_per_node, count)
        nodes, rest = divmod(count, tasks)
        if rest:
            problem = f"{tasks_key}={tasks}: {summands} is {count} ranks, not a multiple of that; set {key}.nodes"
    if problem:
        raise ConfigError(problem)
    return nodes, tasks


def is_het(config: Config) -> bool:
    """Return whether the job is heterogeneous: by `cluster.het`, else if roles request different hardware."""
    parts = components(config)
    if len(parts) == 1 or config.cluster.het is False:
        return False
    return config.cluster.het is True or len({part.hardware for part in parts}) > 1


def allocations(config: Config) -> tuple[JobComponent, ...]:
    """Return the request to sbatch: the components of a heterogeneous job, or one allocation for all of them."""
    parts = components(config)
    if not is_het(config):
        return (merged(parts),)
    for before, part in pairwise(parts):
        if before.mem is not None and part.mem is None:
            # Slurm 22.05 applies --mem to the following components as well.
            raise ConfigError(f"cluster.roles.{part.roles[0]}.mem must be set because {before.roles[0]} sets it")
    return parts


def merged(parts: Sequence[JobComponent]) -> JobComponent:
    """Return one allocation for all components: the sum of the nodes, each with the maximum of the requests."""
    if len(parts) == 1:
        return parts[0]
    gpu_types = {part.gpu_type for part in parts if part.gpus_per_node}
    for name in ("partition", "constraint", "sbatch", "gpu_type"):
        values = gpu_types if name == "gpu_type" else [getattr(part, name) for part in parts]
        if any(value != next(iter(values)) for value in values):
            problem = f"cluster.roles: {name} differs between roles, which needs a heterogeneous job (cluster.het)"
            raise ConfigError(problem)
    memories = {part.mem: parse_memory_mb(part.mem) for part in parts if part.mem is not None}
    return replace(
        parts[0],
        roles=tuple(role for part in parts for role in part.roles),
        nodes=sum(part.nodes for part in parts),
        tasks_per_node=max(part.tasks_per_node for part in parts),
        gpus_per_node=max(part.gpus_per_node for part in parts),
        gpu_type=next(iter(gpu_types), None),
        cpus_per_task=max(part.cpus_per_task for part in parts),
        mem=max(memories, key=lambda mem: memories[mem] or float("inf"), default=None),  # 0: all memory of a node
    )


def nodes_of(config: Config, env: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the nodes of each component of the current job, by Slurm's variables.

    The components of one allocation get its nodes one after the other. Raises HpcdistError if it has too few of them.
    """
    parts = components(config)
    if is_het(config):
        return [tuple(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])) for index in range(len(parts))]
    nodes = expand(env["SLURM_JOB_NODELIST"])
    if len(parts) == 1:
        return [tuple(nodes)]
    if len(nodes) < (needed := sum(part.nodes for part in parts)):
        raise HpcdistError(f"the roles need {needed} nodes, but the job has {len(nodes)}: {', '.join(nodes)}")
    left = iter(nodes)
    return [tuple(islice(left, part.nodes)) for part in parts]


def hosts_by_rank(parts: Sequence[JobComponent], nodes: Sequence[Sequence[str]]) -> list[str]:
    """Return the host of each rank: a component's ranks fill its nodes one after the other."""
    return [node for part, own in zip(parts, nodes, strict=True) for node in own for _ in range(part.tasks_per_node)]


def rank_table_lines(config: Config, nodes: Sequence[Sequence[str]] | None = None) -> list[str]:
    """Return the lines of the rank table: ranks, roles, devices, and nodes or, before these are known, the request."""
    parts = components(config)
    devices, groups, first = {}, [], 0
    num_nodes = sum(part.nodes for part in parts)
    for index, part in enumerate(parts):
        request = f"component {index}: {part}" if is_het(config) else str(part)
        for role in part.roles:
            device = role_device(config, role)
            devices[role] = device if device != "auto" else config.launch.gpu_type if part.gpus_per_node else "cpu"
        # With more nodes, the table shows the first and the last node of a component only.
        if nodes is not None and num_nodes <= 16:
            for node in nodes[index]:
                groups.append((range(first, first + part.tasks_per_node), node))
                first += part.tasks_per_node
            continue
        if nodes is not None:
            own = nodes[index]
            request = f"{own[0]} … {own[-1]} ({part})" if len(own) > 1 else own[0]
        groups.append((range(first, first + part.num_ranks), request))
        first += part.num_ranks
    return rank_table(Roles.of(config.roles, first), groups, devices)


def component_cluster(cluster: ClusterConfig, part: JobComponent) -> ClusterConfig:
    values = {name: getattr(part, name) for name in ("nodes", "tasks_per_node", *_INHERITED)}
    return replace(cluster, sbatch={**cluster.sbatch, **part.sbatch}, **values)
