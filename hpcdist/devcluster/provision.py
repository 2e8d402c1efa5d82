"""Creation and removal of a dev cluster's files, network namespaces and links."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import stat
import time
from pathlib import Path

from hpcdist.devcluster import argv, cgroups, processes, render
from hpcdist.devcluster.settings import HEAD, LINK, Layout, Settings
from hpcdist.devcluster.system import run, succeeds
from hpcdist.errors import DevClusterError
from hpcdist.files.atomic import write_atomic

#: The kernel may hold a mount for a moment after its last process has ended.
UNMOUNT_ATTEMPTS = 50


def begin(settings: Settings, layout: Layout) -> None:
    """Create the state folder with its settings file, after removing the remains of a crash."""
    remove(layout)
    layout.state.mkdir()
    write_atomic(layout.settings_file, settings.to_json())


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
    _write_secret(layout.database_init, render.database_sql(password).encode(), "mysql")
    _write_secret(layout.conf / "slurmdbd.conf", render.slurmdbd_conf(settings, layout, password).encode(), "root")
    write_atomic(layout.conf / "gres.conf", render.gres_conf(settings, layout))
    write_atomic(layout.conf / "cgroup.conf", render.cgroup_conf(settings, layout))
    write_atomic(layout.slurm_conf, render.slurm_conf(settings, layout))
    for number in range(settings.gpus_per_node):
        device = layout.gpus / f"gpu{number}"
        if not device.exists():
            os.mknod(
                device, stat.S_IFCHR | 0o666, os.makedev(1, 3)
            )  # a copy of /dev/null, because Slurm requires a device
    if not layout.database.exists():
        fresh = layout.database.with_name("mariadb-new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        _give_to(fresh, "mysql")
        run(argv.inside(layout, HEAD, argv.install_database(fresh)))  # in the namespace, so that `down` also finds it
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


def network_is_ready(settings: Settings, layout: Layout) -> bool:
    """Return whether all namespaces and links exist: no crash during creation, no reboot since."""
    mounted = processes.mounted_namespaces(layout)
    return layout.network_ready.exists() and all(name in mounted for name in (HEAD, *settings.nodes))


def make_network(settings: Settings, layout: Layout) -> None:
    """Create all namespaces and links, after removing the remains of a crash or reboot."""
    remove_network(layout)
    layout.namespaces.mkdir(exist_ok=True)
    for name in (HEAD, *settings.nodes):
        layout.namespace(name).touch()
        run(argv.namespace(layout.namespace(name)))
    run(["ip", "-batch", "-"], stdin=argv.host_batch(settings, layout))
    run(argv.inside(layout, HEAD, ["ip", "-batch", "-"]), stdin=argv.head_batch(settings, layout))
    for node in settings.nodes:
        run(argv.inside(layout, node, ["ip", "-batch", "-"]), stdin=argv.node_batch(settings, node))
    layout.network_ready.touch()


def remove(layout: Layout) -> int:
    """Remove everything except the names in /etc/hosts; return the number of killed processes.

    The settings file, which identifies the folder, is removed last.
    """
    killed = remove_network(layout)
    cgroups.remove(layout)
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
    killed = processes.kill_members(processes.mounted_namespaces(layout).values())
    if processes.mounted_namespaces(layout) and Path(f"/sys/class/net/{LINK}").exists():
        run(["ip", "link", "delete", LINK])
    for _ in range(UNMOUNT_ATTEMPTS):
        left = processes.mounted_namespaces(layout)
        if not left:
            return killed
        for name in left:
            succeeds(["umount", str(layout.namespace(name))])
        time.sleep(0.02)
    raise DevClusterError(f"{', '.join(left)} in {layout.namespaces} cannot be unmounted: see `findmnt`")
