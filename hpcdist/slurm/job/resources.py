"""The GPUs or cores that a job's ranks use, by node. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpcdist.config.schema import Config, role_device
from hpcdist.errors import TopologyError
from hpcdist.rank.roles import Roles
from hpcdist.run.attempt_times import NodeShare, Resources
from hpcdist.slurm.job_components import JobComponent, allocations, components, hosts_by_rank, is_het
from hpcdist.slurm.nodelist import expand, expand_tasks


def job_resources(
    config: Config, nodes: Sequence[Sequence[str]], env: Mapping[str, str], idle: Sequence[str] = ()
) -> Resources:
    """Return the resources of a job: GPUs if it has requested any, otherwise cores.

    Args:
        nodes: names of the nodes with ranks, by component.
        env: environment of the batch step.
        idle: names of the other nodes of a job with one component.
    """
    parts = components(config)
    hosts = hosts_by_rank(parts, nodes)
    own = {host: part for part, names in zip(parts, nodes, strict=True) for host in names}
    ranks: dict[str, list[int]] = {host: [] for host in own}
    if any(part.gpus_per_node for part in parts):
        whole = None if is_het(config) else allocations(config)[0]
        roles = Roles.of(config.roles, len(hosts))
        for rank, host in enumerate(hosts):
            if own[host].gpus_per_node and role_device(config, roles.of_rank(rank)[0]) != "cpu":
                ranks[host].append(rank)
        gpus = {host: (whole or part).gpus_per_node for host, part in own.items()}
        gpus |= dict.fromkeys(idle, parts[0].gpus_per_node)
        shares = {host: _share(count, 1, ranks.get(host, [])) for host, count in gpus.items()}
        return Resources(unit="GPU", nodes=shares, idle=tuple(idle))
    for rank, host in enumerate(hosts):
        ranks[host].append(rank)
    cores = _cores_by_node(env)
    own |= dict.fromkeys(idle, parts[0])
    shares = {
        host: _share(_cores(part, cores.get(host)), part.cpus_per_task, ranks.get(host, []))
        for host, part in own.items()
    }
    return Resources(nodes=shares, idle=tuple(idle))


def _cores(part: JobComponent, found: int | None) -> int:
    return part.tasks_per_node * part.cpus_per_task if found is None else found


def _share(allocated: float, each: float, ranks: list[int]) -> NodeShare:
    return NodeShare(allocated=allocated, share=min(each, allocated / max(1, len(ranks))), ranks=ranks)


def _cores_by_node(env: Mapping[str, str]) -> dict[str, int]:
    """Return the allocated cores of each node, from the variables of a plain or a heterogeneous job."""
    found: dict[str, int] = {}
    for suffix in ("", *(f"_HET_GROUP_{index}" for index in range(int(env.get("SLURM_HET_SIZE") or 0)))):
        names, counts = (env.get(f"SLURM_JOB_{name}{suffix}", "") for name in ("NODELIST", "CPUS_PER_NODE"))
        if names and counts:
            with suppress(TopologyError):
                found |= dict(zip(expand(names), expand_tasks(counts), strict=False))
    return found
