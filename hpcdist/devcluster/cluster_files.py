"""The files of a dev cluster in its state folder: configuration, keys, fake GPUs and the database of accounting."""

import os
import pwd
import secrets
import shutil
import stat
from pathlib import Path

from hpcdist.devcluster import settings as files
from hpcdist.devcluster.cluster_commands import run
from hpcdist.devcluster.settings import Layout, Settings, inside
from hpcdist.host.files import write_atomic


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
        f"--tmpdir={layout.database_temporary}",
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
