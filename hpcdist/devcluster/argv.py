"""The commands of a dev cluster as pure functions: argument lists, and input of `ip -batch -`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcdist.devcluster.settings import HEAD, HOST, LINK, Layout, Settings

PACKAGES = (
    *("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin"),
    *("munge", "mariadb-server", "iproute2"),
)
"""Debian's packages. The packages of Slurm 24.11 and later only recommend the plugins."""
SERVICES = ("munge", "mariadb", "slurmctld", "slurmd", "slurmdbd")
COMMANDS = (
    *("slurmctld", "slurmd", "slurmdbd", "scontrol", "sinfo", "srun", "sacctmgr", "munged", "munge"),
    *("mariadbd", "mariadb-install-db", "mariadb-admin", "ip", "tc"),
    *("nsenter", "unshare", "setsid", "setpriv", "hostname"),
)
"""Commands that a cluster needs."""

BARE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""Environment of every command, because a caller inside a Slurm job has conflicting variables."""

BRIDGE = "br0"
HOST_PORT = "host"
"""The bridge's end of the link to this machine."""

#: `ip netns exec` would remount /sys, and the cgroup mounts below it with it; nsenter leaves the mounts alone.
_ENTER = 'hostname "$0" && exec "$@"'
_DAEMON = 'hostname "$0" && cd / && umask 022 && echo $$ > "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Daemon:
    """A process that lives as long as the cluster does."""

    name: str
    """Unique; the name of its log and pid file."""
    node: str
    """The node of its network namespace and host name."""
    argv: tuple[str, ...]
    own_mounts: bool = False
    """Whether it has its own mount namespace."""


def namespace(path: Path) -> list[str]:
    """Return the command that creates a network namespace and mounts it on an existing file."""
    return ["unshare", f"--net={path}", "true"]


def inside(layout: Layout, name: str, argv: list[str]) -> list[str]:
    """Wrap a command to run in the network namespace of a node or the head."""
    return ["nsenter", f"--net={layout.namespace(name)}", *argv]


def on_node(layout: Layout, name: str, argv: list[str]) -> list[str]:
    """Wrap a command to run with the network and the host name of a node."""
    return inside(layout, name, ["unshare", "--uts", "sh", "-c", _ENTER, name, *argv])


def daemon(layout: Layout, spec: Daemon) -> list[str]:
    """Return the command that starts a daemon in its own session and writes its pid file."""
    shell = ["sh", "-c", _DAEMON, spec.node, str(layout.pid_file(spec.name)), *spec.argv]
    mounts = ["--mount", "--propagation=slave"] if spec.own_mounts else []
    return ["setsid", "--fork", *inside(layout, spec.node, ["unshare", "--uts", *mounts, *shell])]


def munged(layout: Layout) -> Daemon:
    """Return the daemon of munge, which runs as its own user."""
    files = (
        *("--socket", str(layout.munge_socket), "--key-file", str(layout.munge_key)),
        *("--pid-file", str(layout.munge / "pid"), "--seed-file", str(layout.munge / "seed")),
    )
    user = ("setpriv", "--reuid=munge", "--regid=munge", "--init-groups")
    return Daemon("munged", HEAD, (*user, "munged", "--foreground", "--num-threads=10", *files))


def mariadbd(layout: Layout) -> Daemon:
    """Return MariaDB with little memory and without syncs, because `down` deletes the database."""
    files = (
        f"--datadir={layout.database}",
        f"--socket={layout.database_socket}",
        f"--pid-file={layout.database_socket.parent}/pid",
        f"--init-file={layout.database_init}",
    )
    small = ("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--innodb-lock-wait-timeout=900")
    quick = ("--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--skip-innodb-doublewrite")
    argv = ("mariadbd", "--no-defaults", "--user=mysql", "--skip-networking", *files, *small, *quick)
    return Daemon("mariadbd", HEAD, argv)


def slurmdbd() -> Daemon:
    """Return the daemon of the accounting database."""
    return Daemon("slurmdbd", HEAD, ("slurmdbd", "-D"))


def slurmctld() -> Daemon:
    """Return the controller."""
    return Daemon("slurmctld", HEAD, ("slurmctld", "-D"))


def slurmd(node: str, *, own_mounts: bool = False, rebooted: bool = False) -> Daemon:
    """Return a node's slurmd. With `rebooted` it reports a reboot, because the machine's boot time does not change."""
    return Daemon(f"slurmd-{node}", node, ("slurmd", "-D", *["-b"] * rebooted, "-N", node), own_mounts)


def dockerd(layout: Layout, node: str) -> Daemon:
    """Return a node's docker daemon, whose containers have the node's network.

    It has its own process ids and mounts, so that its containers and their mounts end when it is killed.
    """
    apart = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--propagation=slave")
    files = (
        f"--host=unix://{layout.docker_socket(node)}",
        f"--pidfile={layout.docker}/{node}.pid",
        f"--exec-root={layout.docker}/{node}",
        f"--data-root={layout.docker_images}/{node}",
    )
    network = ("--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false")
    return Daemon(f"dockerd-{node}", node, (*apart, str(layout.bin / "dockerd"), *files, *network))


def node_runtimes(settings: Settings, layout: Layout) -> list[Daemon]:
    """Return the daemons of the nodes' container runtime, which has none but docker."""
    return [dockerd(layout, node) for node in settings.nodes] if settings.runtime == "docker" else []


def daemons(settings: Settings, layout: Layout) -> list[Daemon]:
    """Return all daemons of a cluster in the order of their start."""
    runtimes = node_runtimes(settings, layout)
    return [munged(layout), mariadbd(layout), slurmdbd(), slurmctld(), *runtimes, *map(slurmd, settings.nodes)]


def daemon_env(layout: Layout) -> dict[str, str]:
    """Return the whole environment of daemons, so that the caller's environment reaches neither them nor jobs."""
    return {
        **BARE_ENV,
        "PATH": f"{layout.bin}:{BARE_ENV['PATH']}",
        "SLURM_CONF": str(layout.slurm_conf),
        # slurmdbd's configuration has no key for the socket; MariaDB's client library asks this variable.
        "MYSQL_UNIX_PORT": str(layout.database_socket),
    }


def install_database(folder: Path) -> list[str]:
    """Return the command that creates MariaDB's system tables in a folder of user mysql."""
    options = ["--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"]
    return ["mariadb-install-db", "--no-defaults", f"--datadir={folder}", "--user=mysql", *options]


def head_batch(settings: Settings, layout: Layout) -> str:
    """Return the links of the head: a bridge with an address, and a port for this machine and each node.

    The bridge is in the head's namespace, because a firewall for bridged packets on the host (such as Docker's) would
    drop packets between nodes.
    """
    ports = [
        line
        for node in settings.nodes
        for line in (
            f"link add {node} type veth peer name eth0 netns {layout.namespace(node)}",
            f"link set {node} master {BRIDGE} up",
        )
    ]
    own = [
        "link set lo up",
        f"link add {BRIDGE} type bridge",
        f"addr add {settings.with_prefix(HEAD)} dev {BRIDGE}",
        f"link set {BRIDGE} up",
        f"link set {HOST_PORT} master {BRIDGE} up",
    ]
    return "\n".join([*own, *ports, ""])


def host_batch(settings: Settings, layout: Layout) -> str:
    """Return the link of this machine to the head's bridge."""
    return (
        f"link add {LINK} type veth peer name {HOST_PORT} netns {layout.namespace(HEAD)}\n"
        f"addr add {settings.with_prefix(HOST)} dev {LINK}\n"
        f"link set {LINK} up\n"
    )


def node_batch(settings: Settings, node: str) -> str:
    """Return the addresses of a node. Without a default route, DNS lookups fail at once instead of after seconds."""
    return f"link set lo up\naddr add {settings.with_prefix(node)} dev eth0\nlink set eth0 up\n"


def slow_link(rate_mbit: float | None, delay_ms: float | None) -> list[str]:
    """Return arguments of `tc qdisc replace dev … root` for one direction of a link.

    A rate alone uses tbf, which more kernels have than netem.
    """
    if delay_ms is None:
        return ["tbf", "rate", f"{rate_mbit:g}mbit", "burst", "128kb", "latency", "400ms"]
    rate = [] if rate_mbit is None else ["rate", f"{rate_mbit:g}mbit"]
    return ["netem", "delay", f"{delay_ms:g}ms", *rate]
