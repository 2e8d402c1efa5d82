"""Start and removal of a dev cluster, and who may do that."""

import dataclasses
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from hpcdist.devcluster import cluster_cgroup, cluster_processes, host, runtime_scripts
from hpcdist.devcluster import settings as files
from hpcdist.devcluster.cluster_commands import exclusive, run, start_daemon, succeeds, wait_until
from hpcdist.devcluster.cluster_files import write_files
from hpcdist.devcluster.cluster_network import make_network, remove_network
from hpcdist.devcluster.cluster_status import client_env, recorded_settings, summary, wait_for_node
from hpcdist.devcluster.settings import CLUSTER, Daemon, Layout, Settings, slurmd
from hpcdist.errors import DevClusterError, plural
from hpcdist.host.files import write_atomic
from hpcdist.host.ownership import user_of


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
        users: who may submit, besides root and the owner.
        env: environment of apt-get, such as proxies; container runtimes are searched for on its PATH. SUDO_USER in it
            becomes the owner of a new cluster.
    """
    host.require_root(layout, "up")
    owner = caller(env)
    with exclusive(), ExitStack() as stack:
        # Users and daemons read the configuration; secrets have stricter modes.
        stack.callback(os.umask, os.umask(0o022))
        require_own(layout, owner)
        host.refuse_beside_slurm(layout)
        if install:
            host.install(env)
        host.require_commands()
        host.require_namespaces()
        settings = dataclasses.replace(_choose(layout, changes), owner=owner)
        host.require_cgroups(settings)
        host.require_free_network(settings, layout)
        programs = runtime_scripts.find_programs(settings, layout, env)
        recorded = recorded_settings(layout)
        if recorded != settings:
            remove(layout)  # the remains of a crash
            layout.state.mkdir()
        if recorded != settings or recorded.owner is None:
            write_atomic(layout.settings_file, settings.to_json())
        mounted = cluster_processes.mounted_namespaces(layout)
        # After a crash during creation or a reboot some are missing.
        if not layout.network_ready.exists() or not mounted.keys() >= {settings.head, *settings.nodes}:
            make_network(settings, layout)
        write_files(settings, layout)
        runtime_scripts.write_scripts(settings, layout, programs)
        cluster_cgroup.create(settings, layout)
        host.write_hosts(files.with_hosts_block(host.HOSTS.read_text(), settings, layout))
        _start_daemons(settings, layout, [*users, owner])
    return settings


def caller(env: Mapping[str, str]) -> str:
    """Return the user who calls a command, possibly with sudo."""
    return env.get("SUDO_USER") or user_of(os.geteuid())


def require_own(layout: Layout, user: str) -> None:
    """Raise DevClusterError for a cluster of another user, and for a running one with an unknown owner."""
    if _is_foreign(layout, user):
        raise DevClusterError(
            f"{summary(layout)}, is not a cluster of {user}: `hpcdist devcluster up --name NAME` starts another one"
            f" beside it; `{layout.command('down')}` removes it"
        )


def _is_foreign(layout: Layout, user: str) -> bool:
    recorded = recorded_settings(layout)
    if recorded is not None and recorded.owner is not None:
        return recorded.owner != user
    return _has_processes(layout)  # otherwise it is the rest of a crash, or of an earlier version


def _has_processes(layout: Layout) -> bool:
    return bool(cluster_processes.members(cluster_processes.mounted_namespaces(layout).values()))


def _choose(layout: Layout, changes: Mapping[str, Any]) -> Settings:
    """Return the recorded settings with the requested changes, which a running cluster does not allow."""
    recorded = recorded_settings(layout)
    requested = dataclasses.replace(recorded or _new(layout), **changes)
    if recorded is not None and recorded != requested and _has_processes(layout):
        name = next(name for name in changes if getattr(recorded, name) != getattr(requested, name))
        option = "--nodes" if name == "num_nodes" else f"--{name.replace('_', '-')}"
        values = f"{option} {getattr(recorded, name)}, not {getattr(requested, name)}"
        raise DevClusterError(f"a dev cluster is running with {values}: `{layout.command('down')}` first")
    return requested


def _new(layout: Layout) -> Settings:
    """Return the settings of a new cluster, by default with the first network that is free."""
    proctrack = "cgroup" if cluster_cgroup.are_usable() else "linuxproc"
    settings = Settings(name=layout.name, proctrack=proctrack)
    if layout.name == CLUSTER:
        return settings
    recorded = (recorded_settings(other) for other in cluster_processes.others(layout))
    taken = {other.network for other in recorded if other is not None}
    for network in files.FURTHER_NETWORKS:
        if network not in taken and not host.routes(network):
            return dataclasses.replace(settings, network=network)
    raise DevClusterError(
        f"no network is free for another dev cluster: routes or dev clusters of this machine use"
        f" {files.FURTHER_NETWORKS[0]} to {files.FURTHER_NETWORKS[-1]}"
    )


def _start_daemons(settings: Settings, layout: Layout, users: list[str]) -> None:
    """Start the daemons that are not running, each after those that it depends on answer."""
    munged, mariadbd, slurmdbd, slurmctld, *_ = files.daemons(settings, layout)
    env = client_env(layout)

    def wait(daemon: Daemon, *question: str) -> None:
        problem = f"{daemon.name} does not answer"
        wait_until(lambda: succeeds(list(question), env=env), problem, layout, daemon)

    start_daemon(layout, munged)
    start_daemon(layout, mariadbd)
    wait(munged, "munge", "--no-input", f"--socket={layout.munge_socket}")
    wait(mariadbd, "mariadb-admin", "--no-defaults", f"--socket={layout.database_socket}", "ping")
    start_daemon(layout, slurmdbd)
    wait(slurmdbd, "sacctmgr", "-nP", "show", "cluster", "format=cluster")
    _add_accounts(settings, layout, users)
    start_daemon(layout, slurmctld)
    wait(slurmctld, "scontrol", "ping")
    for node in settings.nodes:
        start_daemon(layout, slurmd(node))
    for node in settings.nodes:
        wait_for_node(settings, layout, node, slurmd(node))


def _add_accounts(settings: Settings, layout: Layout, users: list[str]) -> None:
    """Add accounts, so that Slurm rejects wrong ones like a real cluster."""
    env = client_env(layout)
    cluster = settings.name
    account = files.ACCOUNT
    rows = run(["sacctmgr", "-nP", "show", "associations", "format=cluster,account,user"], env=env).splitlines()
    associations = {tuple(row.split("|")) for row in rows}
    if cluster not in {association[0] for association in associations}:
        run(["sacctmgr", "-i", "add", "cluster", cluster], env=env)
    if (cluster, account, "") not in associations:
        run(["sacctmgr", "-i", "add", "account", account, f"cluster={cluster}"], env=env)
    for user in dict.fromkeys(["root", *users]):
        if (cluster, account, user) not in associations:
            run(["sacctmgr", "-i", "add", "user", user, f"account={account}"], env=env)


def reasons_to_ask(layout: Layout, user: str) -> list[str]:
    """Return why a user should be asked before `down`: jobs that it would end, or a cluster of another user."""
    reasons = []
    if _is_foreign(layout, user):
        reasons.append(f"it is not a cluster of {user}")
    if _has_processes(layout):
        reasons += _jobs(layout)
    return reasons


def _jobs(layout: Layout) -> list[str]:
    """Return a sentence for each user with jobs, or one that says that they are unknown."""
    if not layout.controller.is_dir() or not any(layout.controller.iterdir()):
        return []  # slurmctld has never run
    env = client_env(layout)
    unknown = ["Slurm does not answer whether it has jobs"]
    try:
        if not succeeds(["scontrol", "ping"], env=env):  # squeue would wait for a dead slurmctld
            return unknown
        rows = run(["squeue", "--noheader", "--array", "--format=%T|%u"], env=env).splitlines()
    except DevClusterError:
        return unknown
    num_jobs: Counter[str] = Counter()
    for row in rows:
        state, _, user = row.partition("|")
        if state != "COMPLETING":
            num_jobs[user] += 1
    return [f"its {plural(number, 'job')} of {user} would end" for user, number in sorted(num_jobs.items())]


def down(layout: Layout) -> int:
    """Remove a cluster in any state with all its files; return the number of killed processes."""
    host.require_root(layout, "down")
    with exclusive():
        killed = remove(layout)
        host.write_hosts(files.without_hosts_block(host.HOSTS.read_text(), layout))
    return killed


def remove(layout: Layout) -> int:
    """Remove everything except the names in /etc/hosts; return the number of killed processes.

    The settings file, which identifies the folder, is removed last.
    """
    killed = remove_network(layout)
    cluster_cgroup.remove(layout)
    if layout.state.exists():
        for path in layout.state.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != layout.settings_file:
                path.unlink()
        layout.settings_file.unlink(missing_ok=True)
        layout.state.rmdir()
    return killed
