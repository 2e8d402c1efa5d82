"""Bringing a dev cluster up and down, and telling how it stands."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hpcdist.devcluster import argv, host, processes, provision, render
from hpcdist.devcluster.settings import ACCOUNT, NODE_PORT, Layout, Settings, option
from hpcdist.devcluster.system import exclusive, run, start, succeeds, wait_until
from hpcdist.errors import DevClusterError

#: Generous: on two busy cores MariaDB's first start has taken 10 s.
READY_WITHIN_S = 60.0


@dataclass(frozen=True)
class NodeStatus:
    name: str
    address: str
    state: str
    """Slurm's word, such as `idle` or `down*` (the star: it does not answer)."""
    reason: str
    """Why Slurm does not use it; `none` when it does."""


@dataclass(frozen=True)
class Status:
    """How a cluster stands; `settings` is None where there is none."""

    settings: Settings | None
    nodes: tuple[NodeStatus, ...] = ()
    dead: tuple[str, ...] = ()
    """Daemons that do not run."""
    controller_answers: bool = False

    @property
    def is_up(self) -> bool:
        return self.controller_answers and not self.dead


def up(
    layout: Layout,
    changes: Mapping[str, Any],
    *,
    users: Iterable[str] = (),
    install: bool = False,
    env: Mapping[str, str],
) -> Settings:
    """Bring a cluster up, or what is missing of it; returns its settings.

    `changes` are the fields of Settings that were asked for; the others are the running cluster's, else defaults.
    `users` may submit jobs besides root; `env` is what apt-get gets (proxies, say). Raises DevClusterError with what
    is missing or in the way.
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
        host.require_free_network(settings, layout)
        if recorded_settings(layout) != settings:
            provision.begin(settings, layout)
        if not provision.network_is_ready(settings, layout):
            provision.make_network(settings, layout)
        provision.write_files(settings, layout)
        host.write_hosts(render.with_hosts_block(host.HOSTS.read_text(), settings))
        _start_daemons(settings, layout, list(users))
    return settings


@contextmanager
def _readable_to_all() -> Iterator[None]:
    """Users and daemons read the configuration, also where root's umask is strict; secrets have modes of their own."""
    previous = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(previous)


def _choose(layout: Layout, changes: Mapping[str, Any]) -> Settings:
    """The settings to bring up. Raises DevClusterError when a cluster of another shape is up."""
    recorded = recorded_settings(layout)
    wanted = dataclasses.replace(recorded or Settings(), **changes)
    up = recorded is not None and processes.members(processes.mounted_namespaces(layout).values())
    if recorded is not None and up and recorded != wanted:
        name = next(name for name in changes if getattr(recorded, name) != getattr(wanted, name))
        raise DevClusterError(
            f"a dev cluster is up with {option(name)} {getattr(recorded, name)}, not {getattr(wanted, name)}:"
            " `hpcdist devcluster down` first"
        )
    return wanted


def recorded_settings(layout: Layout) -> Settings | None:
    """Settings of the cluster in a state folder; None where there is none, or where a crash has cut them short."""
    try:
        return Settings.from_json(layout.settings_file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def require_settings(layout: Layout) -> Settings:
    """Settings of the cluster that is there. Raises DevClusterError where none is."""
    settings = recorded_settings(layout)
    if settings is None:
        raise DevClusterError(f"no dev cluster in {layout.state}: `hpcdist devcluster up` makes one")
    return settings


def _start_daemons(settings: Settings, layout: Layout, users: list[str]) -> None:
    """Start what does not run, each when what it needs answers."""
    munged, mariadbd, slurmdbd, slurmctld, *slurmds = argv.daemons(settings, layout)
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
    for slurmd in slurmds:
        start(layout, slurmd)
    for node, slurmd in zip(settings.nodes, slurmds, strict=True):
        wait_for_node(settings, layout, node, slurmd)


def _add_accounts(layout: Layout, users: list[str]) -> None:
    """Let users submit. Without it an account would not be checked, and a wrong one not told as on a real cluster."""
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
    """Wait until a node's slurmd listens, and Slurm counts on it."""

    def answers() -> bool:
        try:
            socket.create_connection((settings.addresses[node], NODE_PORT), timeout=1).close()
        except OSError:
            return False
        found = {status.name: status.state for status in _nodes(settings, layout)}
        return not found.get(node, "unknown").endswith(("*", "down", "unknown"))

    wait_until(answers, f"node {node} does not answer", layout, slurmd, READY_WITHIN_S)


def client_env(layout: Layout) -> dict[str, str]:
    """What a command needs to speak with the cluster."""
    return {"SLURM_CONF": str(layout.slurm_conf)}


def _nodes(settings: Settings, layout: Layout) -> tuple[NodeStatus, ...]:
    """What Slurm thinks of its nodes."""
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N|%T|%E"]
    rows = (line.split("|", 2) for line in run(command, env=client_env(layout)).splitlines())
    return tuple(NodeStatus(name, settings.addresses[name], state, reason) for name, state, reason in rows)


def status(layout: Layout) -> Status:
    """How the cluster stands; needs no root."""
    settings = recorded_settings(layout)
    if settings is None:
        return Status(None)
    dead = tuple(processes.dead_daemons(layout, argv.daemons(settings, layout)))
    answers = succeeds(["scontrol", "ping"], env=client_env(layout))
    return Status(settings, _nodes(settings, layout) if answers else (), dead, answers)


def set_grace_time(layout: Layout, seconds: int) -> None:
    """Change how long a preempted job of `main` may live on, until the next `up`."""
    run(["scontrol", "update", "PartitionName=main", f"GraceTime={seconds}"], env=client_env(layout))


def down(layout: Layout) -> int:
    """Take a cluster away with all that it has made, whatever state it is in; returns how many processes were killed.

    Raises DevClusterError where the state folder is not a dev cluster's.
    """
    host.require_root("down")
    with exclusive():
        host.require_folder(layout)
        host.remove_left_policy()
        killed = provision.remove(layout)
        host.write_hosts(render.without_hosts_block(host.HOSTS.read_text()))
    return killed
