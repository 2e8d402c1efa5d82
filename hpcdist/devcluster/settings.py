"""The settings of a dev cluster, the files rendered from them, and the commands of its daemons."""

import ipaddress
import json
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from hpcdist.errors import DevClusterError, shown

# Settings and paths of a dev cluster: values without side effects.

#: Name of the cluster without `--name`.
CLUSTER = "hpcdist"
#: Folder of the cluster CLUSTER; the folders of others are beside it.
STATE = Path("/var/lib/hpcdist-devcluster")
#: With the name, a link or port of a cluster has at most 15 characters: `NAME-n250`, `hpcd-NAME`.
NAME = re.compile(r"[a-z][a-z0-9]{0,9}")
ACCOUNT = "devcluster"
CONTROLLER_PORT, NODE_PORT, ACCOUNTING_PORT = 16817, 16818, 16819
#: Network of the cluster CLUSTER.
NETWORK = "10.213.77.0/24"
#: Networks of other clusters, one each.
FURTHER_NETWORKS = tuple(f"10.213.{number}.0/24" for number in range(78, 94))
#: The network has further addresses for the head and this machine.
MAX_NODES = 250
#: The resources of each node for Slurm. CPUs and memory (MiB) may exceed those of the machine; the GPUs are fake.
CPUS_PER_NODE = 8
MEMORY_MB = 32768
GPUS_PER_NODE = 2
GPU_TYPE = "a100"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a dev cluster, as its settings file records them, and the names that follow from them."""

    num_nodes: int = 4  #: at most MAX_NODES
    proctrack: str = "cgroup"  #: finds the processes of a step; `linuxproc` needs no cgroups
    runtime: str = "none"  #: container runtime that the nodes have beside Slurm
    pyxis_plugin: str = "/usr/local/lib/slurm/spank_pyxis.so"  #: must be built for the installed Slurm
    name: str = CLUSTER  #: also Slurm's ClusterName
    network: str = NETWORK
    #: User who created the cluster, possibly with sudo; None if an earlier version of hpcdist did not record it.
    owner: str | None = field(default=None, compare=False)

    @property
    def title(self) -> str:
        """The name and the owner, for messages."""
        return f"dev cluster {self.name} of {self.owner or 'an unknown user'}"

    @property
    def prefix(self) -> str:
        """Begins the host names of a further cluster: all names are in /etc/hosts."""
        if self.name == CLUSTER:
            return ""
        return f"{self.name}-"

    @property
    def head(self) -> str:
        """Host name of the namespace with the controller, the accounting daemon and the bridge."""
        return f"{self.prefix}devcluster-head"

    @property
    def host(self) -> str:
        """Name of this machine on the nodes, for example for a tracking server."""
        return f"{self.prefix}devcluster-host"

    @property
    def nodes(self) -> list[str]:
        """Host names of the nodes."""
        return [f"{self.prefix}n{number}" for number in range(1, self.num_nodes + 1)]

    @cached_property
    def addresses(self) -> dict[str, str]:
        """Address of every name: nodes from the start of the network, head and host at its end."""
        network = ipaddress.IPv4Network(self.network)
        addresses = {node: str(network[number]) for number, node in enumerate(self.nodes, 1)}
        addresses[self.head] = str(network[-2])  # the last one is for broadcasts
        addresses[self.host] = str(network[-3])
        return addresses

    def batch(self, name: str, device: str) -> str:
        """Return commands of `ip -batch -` that give a device the address of a name."""
        length = ipaddress.IPv4Network(self.network).prefixlen
        return f"addr add {self.addresses[name]}/{length} dev {device}\nlink set {device} up\n"

    def to_json(self) -> str:
        """Return the content of the settings file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the settings file. Raises ValueError for a truncated file or one of another version.

        Earlier versions wrote neither the name, which was always CLUSTER, nor the network and the owner.
        """
        content: Any = json.loads(text)
        keys = {field.name for field in fields(cls)}
        required = keys - {"name", "network", "owner"}
        if not isinstance(content, dict) or not required <= set(content) <= keys:
            raise ValueError("not the settings of a dev cluster of this version")
        return cls(**content)


class Layout:
    """The link and the paths of a cluster, all below its state folder. The path is short, because it contains sockets.

    Args:
        name: of the cluster. Raises DevClusterError if it is not like NAME.
        first: state folder of the cluster CLUSTER.
    """

    def __init__(self, name: str = CLUSTER, first: Path = STATE) -> None:
        if not NAME.fullmatch(name):
            raise DevClusterError(
                f"--name {shown(name)}: the name of a dev cluster has at most 10 lower-case letters and digits and"
                " begins with a letter"
            )
        self.name = name
        self.first = first
        #: The only network interface that the cluster adds to this machine.
        self.link = "hpcdist0" if name == CLUSTER else f"hpcd-{name}"
        self.state = state = first if name == CLUSTER else first.with_name(f"{first.name}-{name}")
        #: Identifies the folder: created first and removed last.
        self.settings_file = state / "devcluster.json"
        self.conf = state / "conf"
        self.slurm_conf = self.conf / "slurm.conf"
        self.munge = state / "munge"
        self.munge_socket = self.munge / "socket"
        self.munge_key = self.munge / "key"
        #: MariaDB's data folder, its socket, and the SQL that it runs at each start. Temporary files lie beside the
        #: socket, because a machine's /tmp may be closed to MariaDB's user.
        self.database = state / "mariadb"
        self.database_temporary = state / "mariadb-run"
        self.database_socket = state / "mariadb-run" / "socket"
        self.database_init = state / "mariadb-run" / "init.sql"
        #: Folder of the fake GPUs' device files, gpu0 and so on.
        self.gpus = state / "gpus"
        #: Mount point of the cluster's cgroup, and the file with the name of that cgroup.
        self.cgroups = state / "cgroup"
        self.cgroup_name = self.cgroups / "name"
        self.spool = state / "spool"
        self.controller = state / "slurmctld"
        #: Exists if all namespaces and links were created.
        self.network_ready = state / "network-ready"
        self.namespaces = state / "netns"
        #: Programs of the container runtime that keep the nodes apart; comes first on the daemons' PATH.
        self.bin = state / "bin"
        #: Folder of enroot's containers.
        self.enroot = state / "enroot"
        self.logs = state / "log"
        self.run = state / "run"

    def command(self, words: str) -> str:
        """Return the command line of `hpcdist devcluster` for this cluster."""
        command = f"hpcdist devcluster {words}"
        if self.name != CLUSTER:
            command += f" --name {self.name}"
        return command

    def namespace(self, name: str) -> Path:
        """Return the file on which the network namespace of a node or the head is mounted."""
        return self.namespaces / name

    def output(self, daemon: str) -> Path:
        """Return the file with a daemon's output. Slurm's daemons also write a .log file with timestamps."""
        return self.logs / f"{daemon}.out"

    def pid_file(self, daemon: str) -> Path:
        return self.run / f"{daemon}.pid"


# The configuration files of a dev cluster, as pure functions of its settings and layout.


def slurm_conf(settings: Settings, layout: Layout) -> str:
    """Return slurm.conf: default behaviour with short timeouts and a fast scheduler."""
    nodes = node_range(settings)
    head = settings.addresses[settings.head]
    return f"""\
# Written by `hpcdist devcluster up`; changes are lost.
ClusterName={settings.name}
SlurmUser=root
SlurmctldHost={settings.head}({head})
SlurmctldPort={CONTROLLER_PORT}
SlurmdPort={NODE_PORT}
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
StateSaveLocation={layout.controller}
SlurmdSpoolDir={layout.spool}/%n
SlurmctldPidFile={layout.run}/slurm-slurmctld.pid
SlurmdPidFile={layout.run}/slurm-slurmd-%n.pid
SlurmctldLogFile={layout.logs}/slurmctld.log
SlurmdLogFile={layout.logs}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/{settings.proctrack}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Nodes may claim more than this machine has.
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=15
KillWait=5
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={head}
AccountingStoragePort={ACCOUNTING_PORT}
AccountingStoragePass={layout.munge_socket}
AccountingStorageEnforce=associations
AccountingStorageTRES=gres/gpu
NodeName={nodes} CPUs={CPUS_PER_NODE} RealMemory={MEMORY_MB} Gres=gpu:{GPU_TYPE}:{GPUS_PER_NODE}
PartitionName=main Nodes={nodes} Default=YES PriorityTier=1 DefaultTime=01:00:00 MaxTime=1-00:00:00
PartitionName=high Nodes={nodes} PriorityTier=10 PreemptMode=OFF DefaultTime=01:00:00 MaxTime=1-00:00:00
"""


def gres_conf(settings: Settings, layout: Layout) -> str:
    """Return gres.conf, in which each GPU is a fake device file."""
    files = f"{layout.gpus}/gpu[0-{GPUS_PER_NODE - 1}]"
    return f"NodeName={node_range(settings)} Name=gpu Type={GPU_TYPE} File={files}\n"


def cgroup_conf(settings: Settings, layout: Layout) -> str:
    """Return cgroup.conf, which selects version 1 of cgroups.

    The default, autodetect, stops slurmd without a mounted cgroup file system, and requests a scope from systemd over
    D-Bus for version 2. The plugin of version 1 touches no cgroups until they are used.
    """
    mounted = f"CgroupMountpoint={layout.cgroups}\n" if settings.proctrack == "cgroup" else ""
    return f"CgroupPlugin=cgroup/v1\n{mounted}"


def slurmdbd_conf(settings: Settings, layout: Layout, password: str) -> str:
    """Return slurmdbd.conf with the database's password, which must not be empty."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
DbdHost={settings.head}
DbdAddr={settings.addresses[settings.head]}
DbdPort={ACCOUNTING_PORT}
CommunicationParameters=NoInAddrAny
SlurmUser=root
PidFile={layout.run}/slurm-slurmdbd.pid
LogFile={layout.logs}/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


def database_sql(password: str) -> str:
    """Return the statements that create Slurm's accounting database and its user, if they do not exist."""
    return f"""\
CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS slurm@localhost IDENTIFIED BY '{password}';
GRANT ALL ON slurm.* TO slurm@localhost;
"""


def node_range(settings: Settings) -> str:
    """Return the names of the nodes in Slurm's notation, such as `n[1-4]`."""
    if settings.num_nodes == 1:
        return f"{settings.prefix}n1"
    return f"{settings.prefix}n[1-{settings.num_nodes}]"


def with_hosts_block(text: str, settings: Settings, layout: Layout) -> str:
    """Return /etc/hosts with the cluster's names in a marked block at its end; an existing block is replaced."""
    text = without_hosts_block(text, layout)
    if text and not text.endswith("\n"):
        text += "\n"
    begin, end = _hosts_markers(layout)
    names = [f"{address} {name}" for name, address in settings.addresses.items()]
    return text + "\n".join([begin, *names, end]) + "\n"


def without_hosts_block(text: str, layout: Layout) -> str:
    """Return /etc/hosts without the block of a cluster."""
    begin, end = map(re.escape, _hosts_markers(layout))
    return re.sub(rf"^{begin}$.*?^{end}$\n?", "", text, flags=re.MULTILINE | re.DOTALL)


def _hosts_markers(layout: Layout) -> tuple[str, str]:
    """Return the first and the last line of a cluster's block in /etc/hosts."""
    title = "hpcdist devcluster"
    if layout.name != CLUSTER:
        title += f" {layout.name}"
    return f"# >>> {title}: removed by `{layout.command('down')}`", f"# <<< {title}"


def taken_names(text: str, settings: Settings, layout: Layout) -> list[str]:
    """Return the cluster's names that /etc/hosts already contains outside the block."""
    taken: set[str] = set()
    for line in without_hosts_block(text, layout).splitlines():
        entry, _, _ = line.partition("#")
        taken.update(entry.split()[1:])  # the names follow the address
    return [name for name in settings.addresses if name in taken]


# The commands of a dev cluster as pure functions: argument lists, and input of `ip -batch -`.

#: Environment of every command, because a caller inside a Slurm job has conflicting variables.
BARE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
BRIDGE = "br0"
#: The bridge's end of the link to this machine.
HOST_PORT = "host"
_DAEMON = 'hostname "$0" && cd / && umask 022 && echo $$ > "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Daemon:
    """A process that lives as long as the cluster does."""

    name: str  #: of its log and pid file
    node: str  #: of its network namespace and host name
    argv: tuple[str, ...]
    own_mounts: bool = False  #: whether it has its own mount namespace


def inside(layout: Layout, name: str, argv: list[str]) -> list[str]:
    """Wrap a command to run in the network namespace of a node or the head.

    `ip netns exec` would remount /sys, and the cgroup mounts below it with it; nsenter leaves the mounts alone.
    """
    return ["nsenter", f"--net={layout.namespace(name)}", *argv]


def daemon_command(layout: Layout, spec: Daemon) -> list[str]:
    """Return the command that starts a daemon in the background, in the namespaces of its node."""
    shell = ["sh", "-c", _DAEMON, spec.node, str(layout.pid_file(spec.name)), *spec.argv]
    unshare = ["unshare", "--uts"]
    if spec.own_mounts:
        unshare += ["--mount", "--propagation=slave"]
    return ["setsid", "--fork", *inside(layout, spec.node, [*unshare, *shell])]


def munged(settings: Settings, layout: Layout) -> Daemon:
    """Return the daemon that authenticates users and daemons of Slurm."""
    user = ("setpriv", "--reuid=munge", "--regid=munge", "--init-groups")
    files = (
        *("--socket", str(layout.munge_socket)),
        *("--key-file", str(layout.munge_key)),
        *("--pid-file", str(layout.munge / "pid")),
        *("--seed-file", str(layout.munge / "seed")),
    )
    return Daemon("munged", settings.head, (*user, "munged", "--foreground", "--num-threads=10", *files))


def mariadbd(settings: Settings, layout: Layout) -> Daemon:
    """Return MariaDB with little memory and without syncs, because `down` deletes the database."""
    files = (
        f"--datadir={layout.database}",
        f"--socket={layout.database_socket}",
        f"--pid-file={layout.database_socket.parent}/pid",
        f"--tmpdir={layout.database_temporary}",
        f"--init-file={layout.database_init}",
    )
    small = ("--innodb-buffer-pool-size=64M", "--innodb-log-file-size=8M", "--innodb-lock-wait-timeout=900")
    quick = ("--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--skip-innodb-doublewrite")
    argv = ("mariadbd", "--no-defaults", "--user=mysql", "--skip-networking", *files, *small, *quick)
    return Daemon("mariadbd", settings.head, argv)


def slurmdbd(settings: Settings) -> Daemon:
    """Return the accounting daemon."""
    return Daemon("slurmdbd", settings.head, ("slurmdbd", "-D"))


def slurmctld(settings: Settings) -> Daemon:
    """Return the controller."""
    return Daemon("slurmctld", settings.head, ("slurmctld", "-D"))


def slurmd(node: str, *, own_mounts: bool = False, rebooted: bool = False) -> Daemon:
    """Return a node's slurmd. With `rebooted` it reports a reboot, because the machine's boot time does not change."""
    argv = ["slurmd", "-D"]
    if rebooted:
        argv.append("-b")
    argv += ["-N", node]
    return Daemon(f"slurmd-{node}", node, tuple(argv), own_mounts)


def daemons(settings: Settings, layout: Layout) -> list[Daemon]:
    """Return the daemons in the order of their start."""
    head = [munged(settings, layout), mariadbd(settings, layout), slurmdbd(settings), slurmctld(settings)]
    return [*head, *map(slurmd, settings.nodes)]


def daemon_env(layout: Layout) -> dict[str, str]:
    """Return the whole environment of daemons: the caller's reaches neither them nor jobs."""
    return {
        **BARE_ENV,
        "PATH": f"{layout.bin}:{BARE_ENV['PATH']}",
        "SLURM_CONF": str(layout.slurm_conf),
        # slurmdbd's configuration has no key for the socket; MariaDB's client library asks this variable.
        "MYSQL_UNIX_PORT": str(layout.database_socket),
    }


def head_batch(settings: Settings, layout: Layout) -> str:
    """Return the links of the head: a bridge with an address, and a port for this machine and each node.

    The bridge is in the head's namespace, because a firewall for bridged packets on the host (such as Docker's) would
    drop packets between nodes.
    """
    text = f"link set lo up\nlink add {BRIDGE} type bridge\n"
    text += settings.batch(settings.head, BRIDGE)
    text += f"link set {HOST_PORT} master {BRIDGE} up\n"
    for node in settings.nodes:
        text += f"link add {node} type veth peer name eth0 netns {layout.namespace(node)}\n"
        text += f"link set {node} master {BRIDGE} up\n"
    return text
