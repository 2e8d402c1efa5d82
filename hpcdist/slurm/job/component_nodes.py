"""Names of a job's nodes, by component."""

from __future__ import annotations

from collections.abc import Mapping

from hpcdist.config.schema import Config
from hpcdist.slurm import client
from hpcdist.slurm.job_components import assign_nodes, components, is_het
from hpcdist.slurm.nodelist import expand


def nodes_of(config: Config, env: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the names of each component's nodes, from the environment of a job."""
    parts = components(config)
    if is_het(config):
        return [tuple(expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])) for index in range(len(parts))]
    nodes = expand(env["SLURM_JOB_NODELIST"])
    if len(parts) == 1:
        return [tuple(nodes)]
    wants_features = len({part.constraint for part in parts}) > 1
    return assign_nodes(parts, nodes, client.node_features(nodes) if wants_features else {})
