"""Faults of single nodes of a dev cluster: kill a node, start it again, slow down its link."""

from hpcdist.devcluster import cluster_processes
from hpcdist.devcluster.cluster_commands import exclusive, run, start_daemon, succeeds
from hpcdist.devcluster.cluster_status import recorded_settings, wait_for_node
from hpcdist.devcluster.host import require_root
from hpcdist.devcluster.settings import Layout, Settings, inside, slurmd
from hpcdist.errors import DevClusterError


def kill_node(layout: Layout, node: str, *, keep_link: bool = False) -> int:
    """Kill a node like a power failure and return the number of killed processes.

    Its link goes down first, so that peers receive nothing. With `keep_link` peers see closed connections, as when only
    the processes of a node are killed.
    """
    require_root(layout, f"node kill {node}")
    with exclusive():
        settings = _require_node(layout, node)
        if not keep_link:
            run(inside(layout, settings.head, ["ip", "link", "set", node, "down"]))
        return cluster_processes.kill_members([cluster_processes.mounted_namespaces(layout)[node]])


def start_node(layout: Layout, node: str, *, own_mounts: bool = False) -> None:
    """Start a node with its link at full speed; return when Slurm considers it usable.

    Args:
        own_mounts: give the node its own mount namespace, so that a folder can be full or another one on this node
            alone. Nodes have none by default, because they would not see later mounts of the host.
    """
    require_root(layout, f"node start {node}")
    with exclusive():
        settings = _require_node(layout, node)
        run(inside(layout, settings.head, ["ip", "link", "set", node, "up"]))
        _full_speed(settings, layout, node)
        daemon = slurmd(node, own_mounts=own_mounts, rebooted=True)
        start_daemon(layout, daemon)
        wait_for_node(settings, layout, node, daemon)


def slow_node(layout: Layout, node: str, *, rate_mbit: float | None = None) -> None:
    """Slow down both directions of a node's link to `rate_mbit` (Mbit/s), or restore its full speed."""
    require_root(layout, f"node slow {node}")
    if rate_mbit is not None and rate_mbit <= 0:
        raise DevClusterError(f"--rate-mbit must be > 0, got {rate_mbit:g}")
    with exclusive():
        settings = _require_node(layout, node)
        if rate_mbit is None:
            _full_speed(settings, layout, node)
            return
        limit = ["tbf", "rate", f"{rate_mbit:g}mbit", "burst", "128kb", "latency", "400ms"]
        for namespace, device in _link_ends(settings, node):
            run(inside(layout, namespace, ["tc", "qdisc", "replace", "dev", device, "root", *limit]))


def _link_ends(settings: Settings, node: str) -> list[tuple[str, str]]:
    """Return the namespace and the device of both ends of a node's link."""
    return [(node, "eth0"), (settings.head, node)]


def _full_speed(settings: Settings, layout: Layout, node: str) -> None:
    for namespace, device in _link_ends(settings, node):
        # Fails if there is nothing to delete.
        succeeds(inside(layout, namespace, ["tc", "qdisc", "delete", "dev", device, "root"]))


def _require_node(layout: Layout, node: str) -> Settings:
    """Return the settings of the running cluster that has a node. Raises DevClusterError without one."""
    settings = recorded_settings(layout)
    if settings is None:
        raise DevClusterError(f"no dev cluster in {layout.state}: `{layout.command('up')}` creates one")
    if node not in settings.nodes:
        raise DevClusterError(f"no node {node!r} in the dev cluster: it has {', '.join(settings.nodes)}")
    if node not in cluster_processes.mounted_namespaces(layout):
        raise DevClusterError(f"the dev cluster in {layout.state} is not running: `{layout.command('up')}`")
    return settings
