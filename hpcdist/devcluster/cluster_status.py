"""The status of a dev cluster: its recorded settings, its daemons, and its nodes as Slurm sees them."""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from hpcdist.devcluster import cluster_processes
from hpcdist.devcluster import settings as files
from hpcdist.devcluster.cluster_commands import run, succeeds, wait_until
from hpcdist.devcluster.settings import Daemon, Layout, Settings
from hpcdist.errors import duration


@dataclass(frozen=True)
class NodeStatus:
    """A node as Slurm sees it."""

    name: str
    address: str
    state: str  #: of Slurm, such as `idle` or `down*` (the star: it does not answer)
    reason: str  #: why Slurm does not use the node; `none` if it does


@dataclass(frozen=True)
class Status:
    """A cluster and its parts that are running."""

    settings: Settings | None  #: None without a cluster
    nodes: tuple[NodeStatus, ...] = ()
    dead: tuple[str, ...] = ()  #: daemons that are not running
    controller_answers: bool = False
    summary: str = ""  #: name, owner and age
    others: tuple[str, ...] = ()  #: the same of the other clusters of this machine

    @property
    def is_up(self) -> bool:
        """Whether all daemons are running and the controller answers; a node may be down nevertheless."""
        return self.controller_answers and not self.dead


def recorded_settings(layout: Layout) -> Settings | None:
    """Return the settings in a state folder; None without a cluster, or if a crash truncated the file."""
    try:
        return Settings.from_json(layout.settings_file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def summary(layout: Layout) -> str:
    """Return the name, owner and age of a cluster."""
    title = (recorded_settings(layout) or Settings(name=layout.name)).title
    try:
        created = layout.settings_file.stat().st_mtime  # it is written once
    except FileNotFoundError:
        return title
    return f"{title}, created {duration(max(0.0, time.time() - created))} ago"


def wait_for_node(settings: Settings, layout: Layout, node: str, daemon: Daemon) -> None:
    """Return when a node's slurmd answers and Slurm can use the node; raise DevClusterError after the time limit."""

    def answers() -> bool:
        address = (settings.addresses[node], files.NODE_PORT)
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            return False
        states = {status.name: status.state for status in _nodes(settings, layout)}
        return not states.get(node, "unknown").endswith(("*", "down", "unknown"))

    wait_until(answers, f"node {node} does not answer", layout, daemon)


def client_env(layout: Layout) -> dict[str, str]:
    """Return the environment with which Slurm's commands reach the cluster."""
    return {"SLURM_CONF": str(layout.slurm_conf)}


def _nodes(settings: Settings, layout: Layout) -> tuple[NodeStatus, ...]:
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N|%T|%E"]
    nodes = []
    for row in run(command, env=client_env(layout)).splitlines():
        name, state, reason = row.split("|", 2)
        nodes.append(NodeStatus(name, settings.addresses[name], state, reason))
    return tuple(nodes)


def status(layout: Layout) -> Status:
    """Return the status of a cluster, and the summaries of the other clusters of this machine."""
    settings = recorded_settings(layout)
    others = tuple(f"{summary(other)}: `{other.command('status')}`" for other in cluster_processes.others(layout))
    if settings is None:
        return Status(None, others=others)
    daemons = files.daemons(settings, layout)
    dead = tuple(daemon.name for daemon in daemons if not cluster_processes.is_running(layout, daemon))
    controller_answers = succeeds(["scontrol", "ping"], env=client_env(layout))
    nodes = _nodes(settings, layout) if controller_answers else ()
    return Status(
        settings,
        nodes=nodes,
        dead=dead,
        controller_answers=controller_answers,
        summary=summary(layout),
        others=others,
    )


def describe(status: Status, layout: Layout) -> Iterator[str]:
    """Yield the lines that `hpcdist devcluster status` prints."""
    if status.settings is None:
        yield f"no dev cluster in {layout.state}: `{layout.command('up --nodes 4')}` makes one"
    else:
        yield status.summary
        yield from _describe_cluster(status, status.settings, layout)
    for other in status.others:
        yield f"another {other}"


def _describe_cluster(status: Status, settings: Settings, layout: Layout) -> Iterator[str]:
    if status.dead:
        yield f"not running: {', '.join(status.dead)}; `{layout.command('up')}` starts the missing parts"
    if not status.controller_answers:
        yield f"slurmctld does not answer: see {layout.logs}/slurmctld.log"
        return
    width = len(f"{settings.prefix}n{files.MAX_NODES}") + 2
    yield f"{'node':<{width}}{'address':<17}{'state':<12}reason"
    for node in status.nodes:
        yield f"{node.name:<{width}}{node.address:<17}{node.state:<12}{node.reason}"
    yield "partitions: main (default), high (preempts jobs of main: they are requeued)"
    address = settings.addresses[settings.host]
    yield f"the nodes reach this machine as {settings.host} ({address}); logs are in {layout.logs}"
    yield "use it:"
    yield f"  export SLURM_CONF={layout.slurm_conf}"
    if settings.runtime != "none":
        yield f"  export PATH={layout.bin}:$PATH"
    yield f"  srun --nodes={settings.num_nodes} hostname"
