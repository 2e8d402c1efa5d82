"""A dev cluster: its files and networks, start, stop, status, and faults of single nodes."""

import dataclasses
import os
import pwd
import secrets
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.devcluster import host
from hpcdist.devcluster import settings as files
from hpcdist.devcluster.host import exclusive, require_root, run, start, succeeds, wait_until
from hpcdist.devcluster.settings import CLUSTER, Daemon, Layout, Settings, inside, slurmd
from hpcdist.errors import DevClusterError, duration, plural
from hpcdist.host.files import write_atomic
from hpcdist.host.ownership import user_of

# Creation and removal of a dev cluster's files, network namespaces and links.


def write_files(settings: Settings, layout: Layout) -> None:
    """Create folders, configuration, keys and fake devices; existing ones are kept."""
    for folder in (layout.conf, layout.logs, layout.run, layout.gpus, layout.spool, layout.controller):
        folder.mkdir(exist_ok=True)
    for node in settings.nodes:
        (layout.spool / node).mkdir(exist_ok=True)
    for folder, owner in ((layout.munge, "munge"), (layout.database_init.parent, "mysql")):
        folder.mkdir(exist_ok=True)
        _give_to(folder, owner)
    if not layout.munge_key.exists():
        _write_secret(layout.munge_key, secrets.token_bytes(128), "munge")
    password_file = layout.state / "database-password"
    if not password_file.exists():
        _write_secret(password_file, secrets.token_hex(16).encode(), "root")
    password = password_file.read_text()
    _write_secret(layout.database_init, files.database_sql(password).encode(), "mysql")
    _write_secret(layout.conf / "slurmdbd.conf", files.slurmdbd_conf(settings, layout, password).encode(), "root")
    write_atomic(layout.conf / "gres.conf", files.gres_conf(settings, layout))
    write_atomic(layout.conf / "cgroup.conf", files.cgroup_conf(settings, layout))
    write_atomic(layout.slurm_conf, files.slurm_conf(settings, layout))
    _make_gpus(layout)
    if not layout.database.exists():
        _make_database(settings, layout)


def _make_gpus(layout: Layout) -> None:
    """Create the fake GPUs as copies of /dev/null, because Slurm requires devices."""
    null = os.makedev(1, 3)
    for number in range(files.GPUS_PER_NODE):
        device = layout.gpus / f"gpu{number}"
        if not device.exists():
            os.mknod(device, stat.S_IFCHR | 0o666, null)


def _make_database(settings: Settings, layout: Layout) -> None:
    """Create an empty database in a new folder, which is renamed when it is complete."""
    fresh = layout.database.with_name("mariadb-new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    _give_to(fresh, "mysql")
    install = [
        "mariadb-install-db",
        "--no-defaults",
        f"--datadir={fresh}",
        "--user=mysql",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
        "--skip-name-resolve",
    ]
    run(inside(layout, settings.head, install))  # in the namespace, so that `down` also finds it
    fresh.rename(layout.database)


def _give_to(path: Path, user: str) -> None:
    entry = pwd.getpwnam(user)
    os.chown(path, entry.pw_uid, entry.pw_gid)


def _write_secret(path: Path, content: bytes, owner: str) -> None:
    """Write a file that only its owner can read, from its creation on."""
    temporary = path.with_name(f"{path.name}.new")
    write_atomic(temporary, content, mode=0o600)
    _give_to(temporary, owner)
    temporary.rename(path)


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


def remove(layout: Layout) -> int:
    """Remove everything except the names in /etc/hosts; return the number of killed processes.

    The settings file, which identifies the folder, is removed last.
    """
    killed = remove_network(layout)
    host.remove(layout)
    if layout.state.exists():
        for path in layout.state.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path != layout.settings_file:
                path.unlink()
        layout.settings_file.unlink(missing_ok=True)
        layout.state.rmdir()
    return killed


#: The kernel may hold a mount for a moment after its last process has ended.
_UNMOUNT_TRIALS = 50
_UNMOUNT_EVERY_S = 0.02


def remove_network(layout: Layout) -> int:
    """Kill all processes in the namespaces, then remove these and this machine's link.

    Returns the number of killed processes. Raises DevClusterError if a namespace cannot be unmounted.
    """
    layout.network_ready.unlink(missing_ok=True)
    killed = host.kill_members(host.mounted_namespaces(layout).values())
    if host.mounted_namespaces(layout) and (host.LINKS / layout.link).exists():
        run(["ip", "link", "delete", layout.link])
    for _ in range(_UNMOUNT_TRIALS):
        mounted = host.mounted_namespaces(layout)
        if not mounted:
            return killed
        for name in mounted:
            succeeds(["umount", str(layout.namespace(name))])
        time.sleep(_UNMOUNT_EVERY_S)
    raise DevClusterError(f"{', '.join(mounted)} in {layout.namespaces} cannot be unmounted: see `findmnt`")


# Start, stop and status of a dev cluster.


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
        programs = host.find_programs(settings, layout, env)
        recorded = recorded_settings(layout)
        if recorded != settings:
            remove(layout)  # the remains of a crash
            layout.state.mkdir()
        if recorded != settings or recorded.owner is None:
            write_atomic(layout.settings_file, settings.to_json())
        mounted = host.mounted_namespaces(layout)
        # After a crash during creation or a reboot some are missing.
        if not layout.network_ready.exists() or not mounted.keys() >= {settings.head, *settings.nodes}:
            make_network(settings, layout)
        write_files(settings, layout)
        host.write_files(settings, layout, programs)
        host.create(settings, layout)
        host.write_hosts(files.with_hosts_block(host.HOSTS.read_text(), settings, layout))
        _start_daemons(settings, layout, [*users, owner])
    return settings


def caller(env: Mapping[str, str]) -> str:
    """Return the user who calls a command, possibly with sudo."""
    return env.get("SUDO_USER") or user_of(os.geteuid())


def require_own(layout: Layout, user: str) -> None:
    """Raise DevClusterError for a cluster of another user, and for a running one whose owner is not known."""
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
    return bool(host.members(host.mounted_namespaces(layout).values()))


def summary(layout: Layout) -> str:
    """Return the name, owner and age of a cluster."""
    title = (recorded_settings(layout) or Settings(name=layout.name)).title
    try:
        created = layout.settings_file.stat().st_mtime  # it is written once
    except FileNotFoundError:
        return title
    return f"{title}, created {duration(max(0.0, time.time() - created))} ago"


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
    proctrack = "cgroup" if host.are_usable() else "linuxproc"
    settings = Settings(name=layout.name, proctrack=proctrack)
    if layout.name == CLUSTER:
        return settings
    recorded = (recorded_settings(other) for other in host.others(layout))
    taken = {other.network for other in recorded if other is not None}
    for network in files.FURTHER_NETWORKS:
        if network not in taken and not host.routes(network):
            return dataclasses.replace(settings, network=network)
    raise DevClusterError(
        f"no network is free for another dev cluster: routes or dev clusters of this machine use"
        f" {files.FURTHER_NETWORKS[0]} to {files.FURTHER_NETWORKS[-1]}"
    )


def recorded_settings(layout: Layout) -> Settings | None:
    """Return the settings in a state folder; None without a cluster, or if a crash truncated the file."""
    try:
        return Settings.from_json(layout.settings_file.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _start_daemons(settings: Settings, layout: Layout, users: list[str]) -> None:
    """Start the daemons that are not running, each after those that it depends on answer."""
    munged, mariadbd, slurmdbd, slurmctld, *_ = files.daemons(settings, layout)
    env = client_env(layout)

    def wait(daemon: Daemon, *question: str) -> None:
        problem = f"{daemon.name} does not answer"
        wait_until(lambda: succeeds(list(question), env=env), problem, layout, daemon)

    start(layout, munged)
    start(layout, mariadbd)
    wait(munged, "munge", "--no-input", f"--socket={layout.munge_socket}")
    wait(mariadbd, "mariadb-admin", "--no-defaults", f"--socket={layout.database_socket}", "ping")
    start(layout, slurmdbd)
    wait(slurmdbd, "sacctmgr", "-nP", "show", "cluster", "format=cluster")
    _add_accounts(settings, layout, users)
    start(layout, slurmctld)
    wait(slurmctld, "scontrol", "ping")
    for node in settings.nodes:
        start(layout, slurmd(node))
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
    others = tuple(f"{summary(other)}: `{other.command('status')}`" for other in host.others(layout))
    if settings is None:
        return Status(None, others=others)
    daemons = files.daemons(settings, layout)
    dead = tuple(daemon.name for daemon in daemons if not host.is_running(layout, daemon))
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


# The output of `hpcdist devcluster status`.


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
        yield f"not running: {', '.join(status.dead)}; `{layout.command('up')}` starts what is missing"
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


# Fault injection: kill a node, start it again, slow down its link.


def kill_node(layout: Layout, node: str, *, keep_link: bool = False) -> int:
    """Kill a node like a power failure and return the number of killed processes.

    Its link goes down first, so that peers receive nothing. With `keep_link` peers see closed connections, as when only
    the processes of a node are killed.
    """
    require_root(layout, f"node kill {node}")
    with exclusive():
        settings = _require_node(layout, node)
        if not keep_link:
            run(inside(layout, settings.head, ["ip", "link", "set", node, "down"]))
        return host.kill_members([host.mounted_namespaces(layout)[node]])


def start_node(layout: Layout, node: str, *, own_mounts: bool = False) -> None:
    """Start a node with its link at full speed; return when Slurm considers it usable.

    Args:
        own_mounts: give the node its own mount namespace, so that a folder can be full or another one on this node
            alone. Nodes have none by default, because they would not see later mounts of the host.
    """
    require_root(layout, f"node start {node}")
    with exclusive():
        settings = _require_node(layout, node)
        run(inside(layout, settings.head, ["ip", "link", "set", node, "up"]))
        _full_speed(settings, layout, node)
        daemon = slurmd(node, own_mounts=own_mounts, rebooted=True)
        start(layout, daemon)
        wait_for_node(settings, layout, node, daemon)


def slow_node(layout: Layout, node: str, *, rate_mbit: float | None = None) -> None:
    """Slow down both directions of a node's link to `rate_mbit` (Mbit/s), or restore its full speed."""
    require_root(layout, f"node slow {node}")
    if rate_mbit is not None and rate_mbit <= 0:
        raise DevClusterError(f"--rate-mbit must be > 0, got {rate_mbit:g}")
    with exclusive():
        settings = _require_node(layout, node)
        if rate_mbit is None:
            _full_speed(settings, layout, node)
            return
        limit = ["tbf", "rate", f"{rate_mbit:g}mbit", "burst", "128kb", "latency", "400ms"]
        for namespace, device in _link_ends(settings, node):
            run(inside(layout, namespace, ["tc", "qdisc", "replace", "dev", device, "root", *limit]))


def _link_ends(settings: Settings, node: str) -> list[tuple[str, str]]:
    """Return the namespace and the device of both ends of a node's link."""
    return [(node, "eth0"), (settings.head, node)]


def _full_speed(settings: Settings, layout: Layout, node: str) -> None:
    for namespace, device in _link_ends(settings, node):
        # Fails if there is nothing to delete.
        succeeds(inside(layout, namespace, ["tc", "qdisc", "delete", "dev", device, "root"]))


def _require_node(layout: Layout, node: str) -> Settings:
    """Return the settings of the running cluster that has a node. Raises DevClusterError without one."""
    settings = recorded_settings(layout)
    if settings is None:
        raise DevClusterError(f"no dev cluster in {layout.state}: `{layout.command('up')}` creates one")
    if node not in settings.nodes:
        raise DevClusterError(f"no node {node!r} in the dev cluster: it has {', '.join(settings.nodes)}")
    if node not in host.mounted_namespaces(layout):
        raise DevClusterError(f"the dev cluster in {layout.state} is not running: `{layout.command('up')}`")
    return settings
