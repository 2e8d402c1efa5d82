"""Fault injection: kill a node, start it again, slow down its link."""

from __future__ import annotations

from hpcdist.devcluster import argv, node_runtimes, processes
from hpcdist.devcluster.cluster import require_settings, wait_for_node
from hpcdist.devcluster.host import require_root
from hpcdist.devcluster.settings import HEAD, Layout, Settings
from hpcdist.devcluster.system import exclusive, run, start, succeeds
from hpcdist.errors import DevClusterError


def kill_node(layout: Layout, node: str, *, keep_link: bool = False) -> int:
    """Kill a node like a power failure and return the number of killed processes.

    Its link goes down first, so that peers receive nothing. With `keep_link` peers see closed connections, as when only
    the processes of a node are killed.
    """
    require_root("node kill")
    with exclusive():
        _require_node(layout, node)
        if not keep_link:
            _set_link(layout, node, "down")
        return processes.kill_members([processes.mounted_namespaces(layout)[node]])


def start_node(layout: Layout, node: str, *, own_mounts: bool = False) -> None:
    """Start a node with its link at full speed; return when Slurm considers it usable.

    Args:
        own_mounts: give the node its own mount namespace, so that a folder can be full or another one on this node
            alone. Nodes have none by default, because they would not see later mounts of the host (podman's images).
    """
    require_root("node start")
    with exclusive():
        settings = _require_node(layout, node)
        _set_link(layout, node, "up")
        _full_speed(layout, node)
        node_runtimes.start_daemon(settings, layout, node)
        node_runtimes.wait_for_daemon(settings, layout, node)
        slurmd = argv.slurmd(node, own_mounts=own_mounts, rebooted=True)
        start(layout, slurmd)
        wait_for_node(settings, layout, node, slurmd)


def slow_node(layout: Layout, node: str, *, rate_mbit: float | None = None, delay_ms: float | None = None) -> None:
    """Slow down both directions of a node's link to `rate_mbit` (Mbit/s) and by `delay_ms`; full speed without both.

    Raises:
        DevClusterError: a value is not positive, or the kernel lacks the feature.
    """
    require_root("node slow")
    for name, value in {"--rate-mbit": rate_mbit, "--delay-ms": delay_ms}.items():
        if value is not None and value <= 0:
            raise DevClusterError(f"{name} must be > 0, got {value:g}")
    with exclusive():
        _require_node(layout, node)
        if rate_mbit is None and delay_ms is None:
            _full_speed(layout, node)
            return
        shape = argv.slow_link(rate_mbit, delay_ms)
        try:
            for name, device in _ends(node):
                run(argv.inside(layout, name, ["tc", "qdisc", "replace", "dev", device, "root", *shape]))
        except DevClusterError as error:
            if "qdisc kind is unknown" not in str(error):
                raise
            raise DevClusterError(
                f"the kernel has no {shape[0]} (module sch_{shape[0]}): --delay-ms needs netem, --rate-mbit alone tbf"
            ) from None


def _full_speed(layout: Layout, node: str) -> None:
    for name, device in _ends(node):
        # Fails if there is nothing to delete.
        succeeds(argv.inside(layout, name, ["tc", "qdisc", "delete", "dev", device, "root"]))


def _ends(node: str) -> list[tuple[str, str]]:
    """Return namespace and device of both ends of a node's link."""
    return [(node, "eth0"), (HEAD, node)]


def _set_link(layout: Layout, node: str, state: str) -> None:
    run(argv.inside(layout, HEAD, ["ip", "link", "set", node, state]))


def _require_node(layout: Layout, node: str) -> Settings:
    """Return the settings of the cluster. Raises DevClusterError if it has no such node."""
    settings = require_settings(layout)
    if node not in settings.nodes:
        raise DevClusterError(f"no node {node!r} in the dev cluster: it has {', '.join(settings.nodes)}")
    if node not in processes.mounted_namespaces(layout):
        raise DevClusterError(f"the dev cluster in {layout.state} is not running: `hpcdist devcluster up`")
    return settings
