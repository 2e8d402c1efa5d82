"""A dev cluster: its files and networks, start, stop, status, and faults of single nodes."""

import dataclasses
import os
import pwd
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.devcluster import host
from hpcdist.devcluster import settings as files
from hpcdist.devcluster.host import exclusive, require_root, run, start, succeeds, wait_until
from hpcdist.devcluster.settings import CLUSTER, HEAD, HOST, LINK, Daemon, Layout, Settings, inside, slurmd
from hpcdist.errors import DevClusterError
from hpcdist.host.files import write_atomic

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
    for number in range(files.GPUS_PER_NODE):
        device = layout.gpus / f"gpu{number}"
        if not device.exists():
            # A copy of /dev/null, because Slurm requires a device.
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    if not layout.database.exists():
        fresh = layout.database.with_name("mariadb-new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        _give_to(fresh, "mysql")
        install = ["mariadb-install-db", "--no-defaults", f"--datadir={fresh}", "--user=mysql"]
        install += ["--auth-root-authentication-method=socket", "--skip-test-db", "--skip-name-resolve"]
        run(inside(layout, HEAD, install))  # in the namespace, so that `down` also finds it
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
    for name in (HEAD, *settings.nodes):
        layout.namespace(name).touch()
        run(["unshare", f"--net={layout.namespace(name)}", "true"])
    link = f"link add {LINK} type veth peer name {files.HOST_PORT} netns {layout.namespace(HEAD)}\n"
    run(["ip", "-batch", "-"], stdin=link + settings.batch(HOST, LINK))
    run(inside(layout, HEAD, ["ip", "-batch", "-"]), stdin=files.head_batch(settings, layout))
    for node in settings.nodes:
        # Without a default route, DNS lookups fail at once instead of after seconds.
        own = "link set lo up\n" + settings.batch(node, "eth0")
        run(inside(layout, node, ["ip", "-batch", "-"]), stdin=own)
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


def remove_network(layout: Layout) -> int:
    """Kill all processes in the namespaces, then remove these and this machine's link."""
    layout.network_ready.unlink(missing_ok=True)
    killed = host.kill_members(host.mounted_namespaces(layout).values())
    if host.mounted_namespaces(layout) and Path(f"/sys/class/net/{LINK}").exists():
        run(["ip", "link", "delete", LINK])
    for _ in range(50):  # the kernel may hold a mount for a moment after its last process has ended
        left = host.mounted_namespaces(layout)
        if not left:
            return killed
        for name in left:
            succeeds(["umount", str(layout.namespace(name))])
        time.sleep(0.02)
    raise DevClusterError(f"{', '.join(left)} in {layout.namespaces} cannot be unmounted: see `findmnt`")


# Start, stop and status of a dev cluster.


@dataclass(frozen=True)
class NodeStatus:
    name: str
    address: str
    state: str  #: of Slurm, such as `idle` or `down*` (the star: it does not answer)
    reason: str  #: why Slurm does not use the node; `none` if it does


@dataclass(frozen=True)
class Status:
    settings: Settings | None  #: None without a cluster
    nodes: tuple[NodeStatus, ...] = ()
    dead: tuple[str, ...] = ()  #: daemons that are not running
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
    """Start a cluster, or its missing parts, and return its settings.

    Args:
        changes: the requested fields of Settings; the others are those of the running cluster, or defaults.
        env: environment of apt-get, such as proxies; container runtimes are searched for on its PATH.
    """
    host.require_root("up")
    with exclusive(), ExitStack() as stack:
        # Users and daemons read the configuration; secrets have stricter modes.
        stack.callback(os.umask, os.umask(0o022))
        host.refuse_beside_slurm(layout)
        if install:
            host.install(env)
        host.require_commands()
        host.require_namespaces()
        settings = _choose(layout, changes)
        host.require_cgroups(settings)
        host.require_free_network(settings, layout)
        programs = host.find_programs(settings, layout, env)
        if recorded_settings(layout) != settings:
            remove(layout)  # the remains of a crash
            layout.state.mkdir()
            write_atomic(layout.settings_file, settings.to_json())
        mounted = host.mounted_namespaces(layout)
        # After a crash during creation or a reboot some are missing.
        if not layout.network_ready.exists() or not mounted.keys() >= {HEAD, *settings.nodes}:
            make_network(settings, layout)
        write_files(settings, layout)
        host.write_files(settings, layout, programs)
        host.create(settings, layout)
        host.write_hosts(files.with_hosts_block(host.HOSTS.read_text(), settings))
        _start_daemons(settings, layout, list(users))
    return settings


def _choose(layout: Layout, changes: Mapping[str, Any]) -> Settings:
    recorded = recorded_settings(layout)
    proctrack = "cgroup" if host.are_usable() else "linuxproc"
    requested = dataclasses.replace(recorded or Settings(proctrack=proctrack), **changes)
    up = recorded is not None and host.members(host.mounted_namespaces(layout).values())
    if recorded is not None and up and recorded != requested:
        name = next(name for name in changes if getattr(recorded, name) != getattr(requested, name))
        option = "--nodes" if name == "num_nodes" else f"--{name.replace('_', '-')}"
        values = f"{option} {getattr(recorded, name)}, not {getattr(requested, name)}"
        raise DevClusterError(f"a dev cluster is running with {values}: `hpcdist devcluster down` first")
    return requested


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
    _add_accounts(layout, users)
    start(layout, slurmctld)
    wait(slurmctld, "scontrol", "ping")
    for node in settings.nodes:
        start(layout, slurmd(node))
    for node in settings.nodes:
        wait_for_node(settings, layout, node, slurmd(node))


def _add_accounts(layout: Layout, users: list[str]) -> None:
    """Add accounts, so that Slurm rejects wrong ones like a real cluster."""
    env = client_env(layout)
    rows = run(["sacctmgr", "-nP", "show", "associations", "format=cluster,account,user"], env=env).splitlines()
    known = {tuple(row.split("|")) for row in rows}
    if CLUSTER not in {row[0] for row in known}:
        run(["sacctmgr", "-i", "add", "cluster", CLUSTER], env=env)
    if (CLUSTER, files.ACCOUNT, "") not in known:
        run(["sacctmgr", "-i", "add", "account", files.ACCOUNT, f"cluster={CLUSTER}"], env=env)
    for user in dict.fromkeys(["root", *users]):
        if (CLUSTER, files.ACCOUNT, user) not in known:
            run(["sacctmgr", "-i", "add", "user", user, f"account={files.ACCOUNT}"], env=env)


def wait_for_node(settings: Settings, layout: Layout, node: str, daemon: Daemon) -> None:
    def answers() -> bool:
        try:
            socket.create_connection((settings.addresses[node], files.NODE_PORT), timeout=1).close()
        except OSError:
            return False
        found = {status.name: status.state for status in _nodes(settings, layout)}
        return not found.get(node, "unknown").endswith(("*", "down", "unknown"))

    wait_until(answers, f"node {node} does not answer", layout, daemon)


def client_env(layout: Layout) -> dict[str, str]:
    return {"SLURM_CONF": str(layout.slurm_conf)}


def _nodes(settings: Settings, layout: Layout) -> tuple[NodeStatus, ...]:
    command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N|%T|%E"]
    rows = (line.split("|", 2) for line in run(command, env=client_env(layout)).splitlines())
    return tuple(NodeStatus(name, settings.addresses[name], state, reason) for name, state, reason in rows)


def status(layout: Layout) -> Status:
    settings = recorded_settings(layout)
    if settings is None:
        return Status(None)
    dead = tuple(daemon.name for daemon in files.daemons(settings, layout) if not host.is_running(layout, daemon))
    answers = succeeds(["scontrol", "ping"], env=client_env(layout))
    return Status(settings, _nodes(settings, layout) if answers else (), dead, answers)


def down(layout: Layout) -> int:
    """Remove a cluster in any state with all its files; return the number of killed processes."""
    host.require_root("down")
    with exclusive():
        killed = remove(layout)
        host.write_hosts(files.without_hosts_block(host.HOSTS.read_text()))
    return killed


# The output of `hpcdist devcluster status`.


def describe(status: Status, layout: Layout) -> Iterator[str]:
    settings = status.settings
    if settings is None:
        yield f"no dev cluster in {layout.state}: `hpcdist devcluster up --nodes 4` makes one"
        return
    if status.dead:
        yield f"not running: {', '.join(status.dead)}; `hpcdist devcluster up` starts what is missing"
    if not status.controller_answers:
        yield f"slurmctld does not answer: see {layout.logs}/slurmctld.log"
        return
    yield f"{'node':<6}{'address':<17}{'state':<12}reason"
    for node in status.nodes:
        yield f"{node.name:<6}{node.address:<17}{node.state:<12}{node.reason}"
    yield "partitions: main (default), high (preempts jobs of main: they are requeued)"
    yield f"the nodes reach this machine as {HOST} ({settings.addresses[HOST]}); logs are in {layout.logs}"
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
    require_root("node kill")
    with exclusive():
        _require_node(layout, node)
        if not keep_link:
            run(inside(layout, HEAD, ["ip", "link", "set", node, "down"]))
        return host.kill_members([host.mounted_namespaces(layout)[node]])


def start_node(layout: Layout, node: str, *, own_mounts: bool = False) -> None:
    """Start a node with its link at full speed; return when Slurm considers it usable.

    Args:
        own_mounts: give the node its own mount namespace, so that a folder can be full or another one on this node
            alone. Nodes have none by default, because they would not see later mounts of the host.
    """
    require_root("node start")
    with exclusive():
        settings = _require_node(layout, node)
        run(inside(layout, HEAD, ["ip", "link", "set", node, "up"]))
        _full_speed(layout, node)
        daemon = slurmd(node, own_mounts=own_mounts, rebooted=True)
        start(layout, daemon)
        wait_for_node(settings, layout, node, daemon)


def slow_node(layout: Layout, node: str, *, rate_mbit: float | None = None) -> None:
    """Slow down both directions of a node's link to `rate_mbit` (Mbit/s), or restore its full speed."""
    require_root("node slow")
    if rate_mbit is not None and rate_mbit <= 0:
        raise DevClusterError(f"--rate-mbit must be > 0, got {rate_mbit:g}")
    with exclusive():
        _require_node(layout, node)
        if rate_mbit is None:
            _full_speed(layout, node)
            return
        shape = ["tbf", "rate", f"{rate_mbit:g}mbit", "burst", "128kb", "latency", "400ms"]
        for name, device in ((node, "eth0"), (HEAD, node)):  # both ends
            run(inside(layout, name, ["tc", "qdisc", "replace", "dev", device, "root", *shape]))


def _full_speed(layout: Layout, node: str) -> None:
    for name, device in ((node, "eth0"), (HEAD, node)):
        # Fails if there is nothing to delete.
        succeeds(inside(layout, name, ["tc", "qdisc", "delete", "dev", device, "root"]))


def _require_node(layout: Layout, node: str) -> Settings:
    settings = recorded_settings(layout)
    if settings is None:
        raise DevClusterError(f"no dev cluster in {layout.state}: `hpcdist devcluster up` creates one")
    if node not in settings.nodes:
        raise DevClusterError(f"no node {node!r} in the dev cluster: it has {', '.join(settings.nodes)}")
    if node not in host.mounted_namespaces(layout):
        raise DevClusterError(f"the dev cluster in {layout.state} is not running: `hpcdist devcluster up`")
    return settings
