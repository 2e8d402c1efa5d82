"""Start, stop and status of a dev cluster."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcdist.devcluster import argv, cgroups, host, node_runtimes, processes, provision, render
from hpcdist.devcluster.settings import ACCOUNT, NODE_PORT, Layout, Settings, option
from hpcdist.devcluster.system import exclusive, run, start, succeeds, wait_until
from hpcdist.errors import DevClusterError

#: MariaDB's first start takes up to 10 s on two busy cores.
READY_WITHIN_S = 60.0


@dataclass(frozen=True)
class NodeStatus:
    """A virtual node as Slurm reports it."""

    name: str
    address: str
    state: str
    """Slurm's state, such as `idle` or `down*` (the star: it does not answer)."""
    reason: str
    """Why Slurm does not use the node; `none` if it does."""


@dataclass(frozen=True)
class Status:
    """Status of a cluster; `settings` is None without one."""

    settings: Settings | None
    nodes: tuple[NodeStatus, ...] = ()
    dead: tuple[str, ...] = ()
    """Daemons that are not running."""
    controller_answers: bool = False

    @property
    def is_up(self) -> bool:
        """Whether the controller answers and no daemon has ended."""
        return self.controller_answers and not self.dead


def up(
    layout: Layout,
    changes: Mapping[str, Any],
    *,
    users: Iterable[str] = (),
    install: bool = False,
    env: Mapping[str, str],
) -> Settings:
    """Start a cluster, or its missing parts, and return its settings.

    Args:
        changes: the requested fields of Settings; the others are those of the running cluster, or defaults.
        users: users besides root who may submit jobs.
        env: environment of apt-get, such as proxies; container runtimes are searched for on its PATH.

    Raises:
        DevClusterError: a requirement is missing, or something conflicts with the cluster.
    """
    host.require_root("up")
    with exclusive(), _readable_to_all():
        host.refuse_beside_slurm(layout)
        if install:
            host.install(env)
        host.require_commands()
        host.require_namespaces()
        host.require_folder(layout)
        settings = _choose(layout, changes)
        host.require_cgroups(settings)
        host.require_free_network(settings, layout)
        programs = node_runtimes.find_programs(settings, layout, env)
        if recorded_settings(layout) != settings:
            provision.begin(settings, layout)
        if not provision.network_is_ready(settings, layout):
            provision.make_network(settings, layout)
        provision.write_files(settings, layout)
        node_runtimes.write_files(settings, layout, programs)
        cgroups.create(settings, layout)
        host.write_hosts(render.with_hosts_block(host.HOSTS.read_text(), settings))
        _start_daemons(settings, layout, list(users))
    return settings


@contextmanager
def _readable_to_all() -> Iterator[None]:
    """Set a umask that lets users and daemons read the configuration; secrets have stricter modes."""
    previous = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(previous)


def _choose(layout: Layout, changes: Mapping[str, Any]) -> Settings:
    """Return the settings to start. Raises DevClusterError if a cluster with other settings is running."""
    recorded = recorded_settings(layout)
    proctrack = "cgroup" if cgroups.are_usable() else "linuxproc"
    requested = dataclasses.replace(recorded or Settings(proctrack=proctrack), **changes)
    up = recorded is not None and processes.members(processes.mounted_namespaces(layout).values())
    if recorded is not None and up and recorded != requested:
        name = next(name for name in changes if getattr(recorded, name) != getattr(requested, name))
        raise DevClusterError(
            f"a dev cluster is running with {option(name)} {getattr(recorded, name)}, not {getattr(requested, name)}:"
            " `hpcdist devcluster down` first"
        )
    return requested


def recorded_settings(layout: Layout) -> Settings | None:
    """Return the settings in a state folder; None without a cluster, or if a crash truncated the file."""
    try:
        return Settings.from_json(layout.settings_file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def require_settings(layout: Layout) -> Settings:
    """Return the settings of the cluster. Raises DevClusterError without one."""
    settings = recorded_settings(layout)
    if settings is None:
        raise DevClusterError(f"no dev cluster in {layout.state}: `hpcdist devcluster up` creates one")
    return settings


def _start_daemons(settings: Settings, layout: Layout, users: list[str]) -> None:
    """Start the daemons that are not running, each after those that it depends on answer."""
    munged, mariadbd, slurmdbd, slurmctld, *_ = argv.daemons(settings, layout)
    start(layout, munged)
    start(layout, mariadbd)
    credential = ["munge", "--no-input", f"--socket={layout.munge_socket}"]
    wait_until(lambda: succeeds(credential), "munged does not answer", layout, munged, READY_WITHIN_S)
    ping = ["mariadb-admin", "--no-defaults", f"--socket={layout.database_socket}", "ping"]
    wait_until(lambda: succeeds(ping), "MariaDB does not answer", layout, mariadbd, READY_WITHIN_S)
    start(layout, slurmdbd)
    env = client_env(layout)
    clusters = ["sacctmgr", "-nP", "show", "cluster", "format=cluster"]
    wait_until(lambda: succeeds(clusters, env=env), "slurmdbd does not answer", layout, slurmdbd, READY_WITHIN_S)
    _add_accounts(layout, users)
    start(layout, slurmctld)
    ping = ["scontrol", "ping"]
    wait_until(lambda: succeeds(ping, env=env), "slurmctld does not answer", layout, slurmctld, READY_WITHIN_S)
    for node in settings.nodes:
        node_runtimes.start_daemon(settings, layout, node)
    for node in settings.nodes:
        node_runtimes.wait_for_daemon(settings, layout, node)
        start(layout, argv.slurmd(node))
    for node in settings.nodes:
        wait_for_node(settings, layout, node, argv.slurmd(node))


def _add_accounts(layout: Layout, users: list[str]) -> None:
    """Add accounts and users, so that Slurm rejects wrong accounts like a real cluster."""
    env = client_env(layout)
    rows = run(["sacctmgr", "-nP", "show", "associations", "format=cluster,account,user"], env=env).splitlines()
    known = {tuple(row.split("|")) for row in rows}
    if render.CLUSTER not in {row[0] for row in known}:
        run(["sacctmgr", "-i", "add", "cluster", render.CLUSTER], env=env)
    if (render.CLUSTER, ACCOUNT, "") not in known:
        run(["sacctmgr", "-i", "add", "account", ACCOUNT, f"cluster={render.CLUSTER}"], env=env)
    for user in dict.fromkeys(["root", *users]):
        if (render.CLUSTER, ACCOUNT, user) not in known:
            run(["sacctmgr", "-i", "add", "user", user, f"account={ACCOUNT}"], env=env)


def wait_for_node(settings: Settings, layout: Layout, node: str, slurmd: argv.Daemon) -> None:
    """Wait until a node's slurmd listens and Slurm considers the node usable."""

    def answers() -> bool:
        try:
            socket.create_connection((settings.addresses[node], NODE_PORT), timeout=1).close()
        except OSError:
            return False
        found = {status.name: status.state for status in _nodes(settings, layout)}
        return not found.get(node, "unknown").endswith(("*", "down", "unknown"))

    wait_until(answers, f"node {node} does not answer", layout, slurmd, READY_WITHIN_S)


def client_env(layout: Layout) -> dict[str, str]:
    """Return the environment variables of the cluster's clients."""
    return {"SLURM_CONF": str(layout.slurm_conf)}


def _nodes(settings: Settings, layout: Layout) -> tuple[NodeStatus, ...]:
    """Return the nodes' states in Slurm."""
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N|%T|%E"]
    rows = (line.split("|", 2) for line in run(command, env=client_env(layout)).splitlines())
    return tuple(NodeStatus(name, settings.addresses[name], state, reason) for name, state, reason in rows)


def status(layout: Layout) -> Status:
    """Return the status of the cluster; needs no root."""
    settings = recorded_settings(layout)
    if settings is None:
        return Status(None)
    daemons = argv.daemons(settings, layout)
    dead = tuple(daemon.name for daemon in daemons if not processes.is_running(layout, daemon))
    answers = succeeds(["scontrol", "ping"], env=client_env(layout))
    return Status(settings, _nodes(settings, layout) if answers else (), dead, answers)


def set_grace_time(layout: Layout, seconds: int) -> None:
    """Set the grace time of preempted jobs in the partition `main` until the next `up`."""
    run(["scontrol", "update", "PartitionName=main", f"GraceTime={seconds}"], env=client_env(layout))


def down(layout: Layout) -> int:
    """Remove a cluster in any state with all its files; return the number of killed processes.

    Raises:
        DevClusterError: the state folder is not one of a dev cluster.
    """
    host.require_root("down")
    with exclusive():
        host.require_folder(layout)
        host.remove_left_policy()
        killed = provision.remove(layout)
        host.write_hosts(render.without_hosts_block(host.HOSTS.read_text()))
    return killed
