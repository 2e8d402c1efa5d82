"""Faults on purpose: a node that dies, one that comes back, one whose link is slow."""

from __future__ import annotations

from hpcdist.devcluster import argv, processes
from hpcdist.devcluster.cluster import require_settings, wait_for_node
from hpcdist.devcluster.host import require_root
from hpcdist.devcluster.settings import HEAD, Layout, Settings
from hpcdist.devcluster.system import exclusive, run, start, succeeds
from hpcdist.errors import DevClusterError


def kill_node(layout: Layout, node: str, *, keep_link: bool = False) -> int:
    """End a node as a power cut does; returns how many processes were killed.

    Its link goes first, so that peers see silence. With `keep_link` they see their connections closed, as when
    only the processes of a node are killed.
    """
    require_root("node kill")
    with exclusive():
        _require_node(layout, node)
        if not keep_link:
            _set_link(layout, node, "down")
        return processes.kill_members([processes.mounted_namespaces(layout)[node]])


def start_node(layout: Layout, node: str, *, own_mounts: bool = False) -> None:
    """Bring a node back, with its link at full speed; returns once Slurm counts on it.

    With `own_mounts` a folder can be full, or another one, on this node alone: what is mounted among its processes is
    seen there only, until it dies. Nor need it see what is mounted elsewhere later (podman's images, for one), so it
    is not how nodes are as a rule.
    """
    require_root("node start")
    with exclusive():
        settings = _require_node(layout, node)
        _set_link(layout, node, "up")
        _full_speed(layout, node)
        slurmd = argv.slurmd(node, own_mounts=own_mounts, rebooted=True)
        start(layout, slurmd)
        wait_for_node(settings, layout, node, slurmd)


def slow_node(layout: Layout, node: str, *, rate_mbit: float | None = None, delay_ms: float | None = None) -> None:
    """Slow a node's link, each direction by itself: to `rate_mbit` (Mbit/s), by `delay_ms`. With neither: full speed.

    Raises DevClusterError for values below zero, and where the kernel cannot.
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
        for name, device in _ends(node):
            command = ["tc", "qdisc", "replace", "dev", device, "root", *argv.slow_link(rate_mbit, delay_ms)]
            _shape(argv.inside(layout, name, command))


def _shape(command: list[str]) -> None:
    try:
        run(command)
    except DevClusterError as error:
        if "qdisc kind is unknown" in str(error):
            kind = command[command.index("root") + 1]
            raise DevClusterError(
                f"the kernel has no {kind} (module sch_{kind}): --delay-ms needs netem, --rate-mbit alone tbf"
            ) from None
        raise


def _full_speed(layout: Layout, node: str) -> None:
    for name, device in _ends(node):
        # Fails where there is nothing to delete, which is as good.
        succeeds(argv.inside(layout, name, ["tc", "qdisc", "delete", "dev", device, "root"]))


def _ends(node: str) -> list[tuple[str, str]]:
    """Both ends of a node's link: namespace and device."""
    return [(node, "eth0"), (HEAD, node)]


def _set_link(layout: Layout, node: str, state: str) -> None:
    run(argv.inside(layout, HEAD, ["ip", "link", "set", node, state]))


def _require_node(layout: Layout, node: str) -> Settings:
    """Settings of the cluster. Raises DevClusterError where there is no such node."""
    settings = require_settings(layout)
    if node not in settings.nodes:
        raise DevClusterError(f"no node {node!r} in the dev cluster: it has {', '.join(settings.nodes)}")
    if node not in processes.mounted_namespaces(layout):
        raise DevClusterError(f"the dev cluster in {layout.state} is not up: `hpcdist devcluster up`")
    return settings
