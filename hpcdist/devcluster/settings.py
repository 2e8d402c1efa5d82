"""Settings and paths of a dev cluster: values without side effects."""

from __future__ import annotations

import ipaddress
import json
import re
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from hpcdist.errors import DevClusterError

DEFAULT_STATE = Path("/var/lib/hpcdist-devcluster")
HEAD = "devcluster-head"
"""Host name of the namespace with the controller, the accounting daemon and the bridge."""
HOST = "devcluster-host"
"""Name of this machine on the nodes, for example for a tracking server."""
LINK = "hpcdist0"
"""The only network interface that the cluster adds to this machine."""
ACCOUNT = "devcluster"
CONTROLLER_PORT, NODE_PORT, ACCOUNTING_PORT = 16817, 16818, 16819
PROCTRACK = ("cgroup", "linuxproc")
RUNTIMES = ("none", "apptainer", "docker", "pyxis")
RESERVED_ADDRESSES = 4  # network, broadcast, head and host
#: The state folder contains sockets of Slurm, munge and MariaDB; the path of a socket has at most 107 characters.
MAX_STATE_LENGTH = 60


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a cluster. Raises DevClusterError for invalid values."""

    num_nodes: int = 4
    cpus_per_node: int = 8
    """Number that Slurm assumes; may exceed that of the machine."""
    gpus_per_node: int = 2
    """Number of fake GPUs, which Slurm counts and assigns."""
    memory_mb: int = 32768
    """Memory that Slurm assumes, in MiB; not enforced."""
    grace_time_s: int = 0
    """Seconds between the SIGTERM and the SIGKILL of a job of `main` that `high` preempts."""
    proctrack: str = "cgroup"
    """How Slurm finds the processes of a step: `cgroup` as in production, or `linuxproc`, which needs no cgroups."""
    runtime: str = "none"
    """Container runtime that the nodes have beside Slurm."""
    pyxis_plugin: str = "/usr/local/lib/slurm/spank_pyxis.so"
    """File of the plugin pyxis, which must be built for the installed Slurm; used with the runtime `pyxis` only."""
    subnet: str = "10.213.77.0/24"
    """Private IPv4 network of the nodes; must not overlap other networks of this machine."""

    def __post_init__(self) -> None:
        for name, least in {"num_nodes": 1, "cpus_per_node": 1, "gpus_per_node": 0, "memory_mb": 1}.items():
            if getattr(self, name) < least:
                raise DevClusterError(f"{option(name)} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.grace_time_s < 65534:  # limit of Slurm
            raise DevClusterError(f"--grace-time-s must be from 0 to 65533, got {self.grace_time_s}")
        if self.proctrack not in PROCTRACK:
            raise DevClusterError(f"--proctrack must be {' or '.join(PROCTRACK)}, got {self.proctrack!r}")
        if self.runtime not in RUNTIMES:
            raise DevClusterError(f"--runtime must be one of {', '.join(RUNTIMES)}, got {self.runtime!r}")
        try:
            network = ipaddress.IPv4Network(self.subnet)
        except ValueError as error:
            raise DevClusterError(f"--subnet must be like 10.213.77.0/24: {error}") from None
        if self.num_nodes > network.num_addresses - RESERVED_ADDRESSES:
            room = max(network.num_addresses - RESERVED_ADDRESSES, 0)
            raise DevClusterError(f"--subnet {self.subnet} has room for {room} nodes, not {self.num_nodes}: widen it")

    @cached_property
    def network(self) -> ipaddress.IPv4Network:
        """The network of the virtual nodes."""
        return ipaddress.IPv4Network(self.subnet)

    @cached_property
    def addresses(self) -> dict[str, str]:
        """Address of every name: nodes from the start of the network, head and host at its end."""
        named = {name: str(self.network[number]) for number, name in enumerate(self.nodes, 1)}
        return {**named, HEAD: str(self.network[-2]), HOST: str(self.network[-3])}

    @property
    def nodes(self) -> list[str]:
        """Names of the virtual nodes."""
        return [f"n{number}" for number in range(1, self.num_nodes + 1)]

    def with_prefix(self, name: str) -> str:
        """Return the address of a name with the prefix length, in the format of `ip`."""
        return f"{self.addresses[name]}/{self.network.prefixlen}"

    def to_json(self) -> str:
        """Return the settings as a JSON document."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Parse the settings file. Raises ValueError for a truncated file or one of another version."""
        found: Any = json.loads(text)
        if not isinstance(found, dict) or set(found) != {field.name for field in fields(cls)}:
            raise ValueError("not the settings of a dev cluster of this version")
        return cls(**found)


def option(name: str) -> str:
    """Return the command-line option of a field of Settings."""
    return {"num_nodes": "--nodes", "memory_mb": "--memory-mb"}.get(name, f"--{name.replace('_', '-')}")


class Layout:
    """Paths of a cluster, all below its state folder. Raises DevClusterError for an invalid folder."""

    def __init__(self, state: Path = DEFAULT_STATE) -> None:
        if not re.fullmatch(r"/[A-Za-z0-9_./+-]+", str(state)) or ".." in state.parts:
            raise DevClusterError(f"--state must be an absolute path without blanks or quotes, got {str(state)!r}")
        if len(str(state)) > MAX_STATE_LENGTH:
            raise DevClusterError(
                f"--state must have at most {MAX_STATE_LENGTH} characters, as paths of sockets are short,"
                f" got {len(str(state))}: {state}"
            )
        self.state = state
        #: Identifies the folder: created first and removed last.
        self.settings_file = state / "devcluster.json"
        self.conf = state / "conf"
        self.slurm_conf = self.conf / "slurm.conf"
        self.munge = state / "munge"
        self.munge_socket = self.munge / "socket"
        self.munge_key = self.munge / "key"
        #: MariaDB's data folder, its socket, and the SQL that it runs at each start.
        self.database = state / "mariadb"
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
        #: Folder of the docker daemons' sockets and states, of their images, and of enroot's containers.
        self.docker = state / "docker"
        self.docker_images = state / "docker-images"
        self.enroot = state / "enroot"
        self.logs = state / "log"
        self.run = state / "run"

    def namespace(self, name: str) -> Path:
        """Return the mount point of the network namespace of a node or the head."""
        return self.namespaces / name

    def docker_socket(self, node: str) -> Path:
        """Return the socket of a node's docker daemon."""
        return self.docker / f"{node}.sock"

    def output(self, daemon: str) -> Path:
        """Return the file with a daemon's output. Slurm's daemons also write a .log file with timestamps."""
        return self.logs / f"{daemon}.out"

    def pid_file(self, daemon: str) -> Path:
        """Return the file with the process id of a daemon."""
        return self.run / f"{daemon}.pid"
