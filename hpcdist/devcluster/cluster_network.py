"""The network of a dev cluster: a namespace for each node, and links between them and this machine."""

import time

from hpcdist.devcluster import cluster_processes, host
from hpcdist.devcluster import settings as files
from hpcdist.devcluster.cluster_commands import run, succeeds
from hpcdist.devcluster.settings import Layout, Settings, inside
from hpcdist.errors import DevClusterError

#: The kernel may hold a mount for a moment after its last process has ended.
_UNMOUNT_TRIALS = 50
_UNMOUNT_EVERY_S = 0.02


def make_network(settings: Settings, layout: Layout) -> None:
    """Create all namespaces and links, after removing the remains of a crash or reboot."""
    remove_network(layout)
    layout.namespaces.mkdir(exist_ok=True)
    for name in (settings.head, *settings.nodes):
        layout.namespace(name).touch()
        run(["unshare", f"--net={layout.namespace(name)}", "true"])
    head = layout.namespace(settings.head)
    link = f"link add {layout.link} type veth peer name {files.HOST_PORT} netns {head}\n"
    run(["ip", "-batch", "-"], stdin=link + settings.batch(settings.host, layout.link))
    run(["ip", "link", "set", layout.link, "alias", settings.title])  # for those who see the link, but not the files
    run(inside(layout, settings.head, ["ip", "-batch", "-"]), stdin=files.head_batch(settings, layout))
    for node in settings.nodes:
        # Without a default route, DNS lookups fail at once instead of after seconds.
        commands = "link set lo up\n" + settings.batch(node, "eth0")
        run(inside(layout, node, ["ip", "-batch", "-"]), stdin=commands)
    layout.network_ready.touch()


def remove_network(layout: Layout) -> int:
    """Kill all processes in the namespaces, then remove these and this machine's link.

    Returns the number of killed processes. Raises DevClusterError if a namespace cannot be unmounted.
    """
    layout.network_ready.unlink(missing_ok=True)
    killed = cluster_processes.kill_members(cluster_processes.mounted_namespaces(layout).values())
    if cluster_processes.mounted_namespaces(layout) and (host.LINKS / layout.link).exists():
        run(["ip", "link", "delete", layout.link])
    for _ in range(_UNMOUNT_TRIALS):
        mounted = cluster_processes.mounted_namespaces(layout)
        if not mounted:
            return killed
        for name in mounted:
            succeeds(["umount", str(layout.namespace(name))])
        time.sleep(_UNMOUNT_EVERY_S)
    raise DevClusterError(f"{', '.join(mounted)} in {layout.namespaces} cannot be unmounted: see `findmnt`")
