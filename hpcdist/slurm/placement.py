"""The placement of a run's ranks on the nodes of its allocation, and the request for that allocation. Pure functions.

A role with an entry in `cluster.roles` has nodes to itself, and neighbouring roles without one share nodes. All roles
are in one allocation, in the order of their ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from hpcdist.config.cluster_schema import ClusterConfig, RoleRequest
from hpcdist.config.roles import Roles, needed_ranks, rank_table
from hpcdist.config.schema import Config, role_device
from hpcdist.config.slurm_notation import expand
from hpcdist.errors import ConfigError, HpcdistError, plural

#: In a job with more nodes, the rank table shows the first and the last node of neighbouring roles only.
MAX_NODES_IN_TABLE = 16


@dataclass(frozen=True, kw_only=True)
class RoleNodes:
    """The nodes of one role with an entry in `cluster.roles`, or of neighbouring roles without one."""

    roles: tuple[str, ...]
    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int

    @property
    def num_ranks(self) -> int:
        return self.nodes * self.tasks_per_node


def role_nodes(config: Config) -> tuple[RoleNodes, ...]:
    """Return the nodes of all roles in rank order. Raises ConfigError if numbers contradict each other."""
    cluster = config.cluster
    _check_node_numbers(config)
    if not cluster.roles:
        world_size = cluster.nodes * cluster.tasks_per_node
        roles = Roles.fit(config.roles, world_size)
        if roles is None:
            raise ConfigError(
                f"{needed_ranks(config.roles)}, but cluster.nodes={cluster.nodes} ×"
                f" cluster.tasks_per_node={cluster.tasks_per_node} is {world_size}: change one of them, or"
                " request nodes for single roles under cluster.roles"
            )
        return (_role_nodes(cluster, roles.names, RoleRequest(), cluster.nodes, cluster.tasks_per_node),)
    parts = []
    # Neighbouring roles without an entry in `cluster.roles` have the same key, "".
    for key, group in groupby(config.roles, key=lambda role: role if role in cluster.roles else ""):
        names = tuple(group)
        request = cluster.roles.get(key, RoleRequest())
        num_ranks = sum(config.roles[name] for name in names)
        nodes, tasks_per_node = _shape(cluster, request, names, num_ranks)
        parts.append(_role_nodes(cluster, names, request, nodes, tasks_per_node))
    return tuple(parts)


def _check_node_numbers(config: Config) -> None:
    cluster = config.cluster
    if config.roles and cluster.fewest_nodes < cluster.nodes:
        raise ConfigError(
            f"cluster.min_nodes={cluster.min_nodes}: a run with roles has a fixed number of ranks: remove it"
        )
    if cluster.roles and cluster.spare_nodes:
        raise ConfigError(
            f"cluster.spare_nodes={cluster.spare_nodes}: a run with cluster.roles has a fixed node for each rank:"
            " remove it, or cluster.roles"
        )


def _role_nodes(
    cluster: ClusterConfig, roles: tuple[str, ...], request: RoleRequest, nodes: int, tasks_per_node: int
) -> RoleNodes:
    gpus, cpus = request.gpus_per_node, request.cpus_per_task
    return RoleNodes(
        roles=roles,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        gpus_per_node=cluster.gpus_per_node if gpus is None else gpus,
        cpus_per_task=cluster.cpus_per_task if cpus is None else cpus,
    )


def _shape(cluster: ClusterConfig, request: RoleRequest, roles: Sequence[str], count: int) -> tuple[int, int]:
    """Return the number of nodes and of ranks per node; a number that is not set follows from `count` ranks."""
    key = f"cluster.roles.{roles[0]}"
    summands = " + ".join(f"roles.{role}" for role in roles)
    nodes = request.nodes
    tasks = request.tasks_per_node
    problem = ""
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


def requested_cluster(config: Config) -> ClusterConfig:
    """Return the section `cluster` with the request for one allocation of all roles.

    It has the sum of the roles' nodes. Each node has the maximum of the other requests.
    """
    parts = role_nodes(config)
    return replace(
        config.cluster,
        nodes=sum(part.nodes for part in parts),
        tasks_per_node=max(part.tasks_per_node for part in parts),
        gpus_per_node=max(part.gpus_per_node for part in parts),
        cpus_per_task=max(part.cpus_per_task for part in parts),
    )


def job_nodes(config: Config, env: Mapping[str, str]) -> list[str]:
    """Return the nodes of the current job, by Slurm's variables. Raises HpcdistError if the roles need more nodes."""
    nodes = expand(env["SLURM_JOB_NODELIST"])
    if not config.cluster.roles:
        return nodes
    needed = sum(part.nodes for part in role_nodes(config))
    if len(nodes) < needed:
        raise HpcdistError(f"the roles need {needed} nodes, but the job has {len(nodes)}: {', '.join(nodes)}")
    return nodes[:needed]


def nodes_by_part(parts: Sequence[RoleNodes], nodes: Sequence[str]) -> Iterator[tuple[RoleNodes, Sequence[str]]]:
    """Yield the nodes of each part: one after the other in the order of the allocation."""
    first = 0
    for part in parts:
        yield part, nodes[first : first + part.nodes]
        first += part.nodes


def hosts_by_rank(parts: Sequence[RoleNodes], nodes: Sequence[str]) -> list[str]:
    """Return the host of each rank: the ranks of a part fill its nodes one after the other."""
    hosts = []
    for part, part_nodes in nodes_by_part(parts, nodes):
        for node in part_nodes:
            hosts += [node] * part.tasks_per_node
    return hosts


def rank_table_lines(config: Config, nodes: Sequence[str] | None = None) -> list[str]:
    """Return the lines of the rank table: ranks, roles, devices, and nodes or, before these are known, the request."""
    parts = role_nodes(config)
    devices = {role: _device(config, part, role) for part in parts for role in part.roles}
    shows_each_node = nodes is not None and len(nodes) <= MAX_NODES_IN_TABLE
    groups = []
    first = 0
    for part, part_nodes in nodes_by_part(parts, nodes or []):
        end = first + part.num_ranks
        if shows_each_node:
            first_ranks = range(first, end, part.tasks_per_node)
            for rank, node in zip(first_ranks, part_nodes, strict=True):
                groups.append((range(rank, rank + part.tasks_per_node), node))
        else:
            groups.append((range(first, end), _place(part_nodes, _request_text(config.cluster, part))))
        first = end
    return rank_table(Roles.of(config.roles, first), groups, devices)


def _place(nodes: Sequence[str], request: str) -> str:
    """Return the nodes of a part in the rank table; the request if they are not known yet."""
    if not nodes:
        return request
    if len(nodes) == 1:
        return nodes[0]
    return f"{nodes[0]} … {nodes[-1]} ({request})"


def _device(config: Config, part: RoleNodes, role: str) -> str:
    device = role_device(config, role)
    if device != "auto":
        return device
    return config.launch.gpu_type if part.gpus_per_node else "cpu"


def _request_text(cluster: ClusterConfig, part: RoleNodes) -> str:
    facts = [f"{plural(part.nodes, 'node')} × {part.tasks_per_node}"]
    if part.gpus_per_node:
        unit = f"{cluster.gpu_type} GPU" if cluster.gpu_type else "GPU"
        facts.append(f"{plural(part.gpus_per_node, unit)} each")
    if cluster.partition:
        facts.append(f"partition {cluster.partition}")
    if cluster.constraint:
        facts.append(cluster.constraint)
    return ", ".join(facts)
