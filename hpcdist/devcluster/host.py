"""What this machine must offer, and the few places of it that a dev cluster touches."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from hpcdist.devcluster import processes, render
from hpcdist.devcluster.argv import BARE_ENV, COMMANDS, PACKAGES, SERVICES
from hpcdist.devcluster.settings import HEAD, LINK, Layout, Settings
from hpcdist.devcluster.system import run, succeeds
from hpcdist.errors import DevClusterError

HOSTS = Path("/etc/hosts")
SITE_CONF = Path("/etc/slurm/slurm.conf")
POLICY = Path("/usr/sbin/policy-rc.d")
#: invoke-rc.d and systemd's helper ask this script before a package may start its service.
DENY_STARTS = "#!/bin/sh\n# hpcdist devcluster: removed when its packages are installed\nexit 101\n"
DENIED = 101
INSTALL_ATTEMPTS = 3
INSTALL_WITHIN_S = 900.0


def require_root(command: str) -> None:
    """Raises DevClusterError unless this is root."""
    if os.geteuid() != 0:
        raise DevClusterError(
            f"`hpcdist devcluster {command}` needs root, to make network namespaces and to start daemons of several"
            f" users: sudo $(which hpcdist) devcluster {command}"
        )


def missing_commands() -> list[str]:
    return [name for name in COMMANDS if not _is_there(name)]


def _is_there(command: str) -> bool:
    return shutil.which(command, path=BARE_ENV["PATH"]) is not None


def require_commands() -> None:
    """Raises DevClusterError, with the way to get them, where commands are missing."""
    if missing := missing_commands():
        raise DevClusterError(
            f"{', '.join(missing)} not found: `hpcdist devcluster up --install` installs Debian's packages"
            f" {' '.join(PACKAGES)}"
        )


def refuse_beside_slurm(layout: Layout) -> None:
    """Raises DevClusterError where a Slurm runs on this machine that is not ours."""
    if found := processes.foreign_slurm(layout):
        pid, name = found[0]
        raise DevClusterError(
            f"{name} (process {pid}) runs on this machine and is not of the dev cluster in {layout.state}:"
            " a dev cluster never stands beside another Slurm"
        )


def require_namespaces() -> None:
    """Raises DevClusterError where the kernel, or the container this is, allows no namespaces."""
    if not succeeds(["unshare", "--net", "--uts", "true"]):
        raise DevClusterError(
            "this machine does not allow root to make network namespaces: in a container, run that with --privileged"
        )


def require_folder(layout: Layout) -> None:
    """Raises DevClusterError for a state folder that is somebody else's, or that other users cannot reach."""
    if layout.state.exists() and any(layout.state.iterdir()) and not layout.settings_file.exists():
        raise DevClusterError(f"--state {layout.state} holds files that are not of a dev cluster: name another folder")
    if not layout.state.parent.is_dir():
        raise DevClusterError(f"--state {layout.state}: there is no folder {layout.state.parent} to make it in")
    for folder in layout.state.parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH or (mode & stat.S_IWOTH and not mode & stat.S_ISVTX):
            raise DevClusterError(
                f"--state {layout.state}: {folder} must be open to users munge and mysql, and writable by its owner"
                " alone; the default under /var/lib is"
            )


def require_free_network(settings: Settings, layout: Layout) -> None:
    """Raises DevClusterError where names, network or interface of the cluster are somebody else's."""
    if taken := render.taken_names(HOSTS.read_text(), settings):
        raise DevClusterError(f"{HOSTS} already names {', '.join(taken)}: the dev cluster needs these names")
    if HEAD not in processes.mounted_namespaces(layout) and Path(f"/sys/class/net/{LINK}").exists():
        raise DevClusterError(
            f"interface {LINK} is there already: take the dev cluster it belongs to down, with its own --state,"
            f" or `ip link delete {LINK}`"
        )
    if other := overlapping_route(run(["ip", "-json", "-4", "route", "show", "table", "all"]), settings):
        raise DevClusterError(f"--subnet {settings.subnet} overlaps {other} of this machine: choose another")


def overlapping_route(routes: str, settings: Settings) -> str | None:
    """The first of the machine's own routes (`ip -json route`) into the cluster's network, as network and device."""
    for route in json.loads(routes):
        target, device = route["dst"], route.get("dev", "")
        if target != "default" and device != LINK:
            network = ipaddress.IPv4Network(target, strict=False)
            if network.prefixlen and network.overlaps(settings.network):
                return f"{target} ({device or route.get('type', 'route')})"
    return None


def write_hosts(text: str) -> None:
    """Write /etc/hosts in place: in a container it is a mount, which no rename replaces."""
    if text == HOSTS.read_text():
        return
    with open(HOSTS, "r+") as file:
        file.write(text)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def install(env: Mapping[str, str]) -> None:
    """Install Debian's packages where commands are missing, without starting or enabling any of their services.

    Raises DevClusterError where that may not be, or fails `INSTALL_ATTEMPTS` times.
    """
    if not missing_commands():
        return
    if SITE_CONF.exists():
        raise DevClusterError(f"{SITE_CONF} shows a Slurm of this machine's own: packages are not installed over it")
    if not _is_there("apt-get"):
        raise DevClusterError(f"--install knows apt-get alone: install {' '.join(PACKAGES)} by this system's own means")
    before = {name for name in SERVICES if _is_service(name)}
    with _services_stay_down():
        _apt(["update"], env)
        _apt(["install", "--yes", "--no-install-recommends", *PACKAGES], env)
    new = [name for name in SERVICES if name not in before and _is_service(name)]
    if new and _is_there("systemctl"):
        run(["systemctl", "disable", *new])  # nor do they start at the next boot
    require_commands()


def _is_service(name: str) -> bool:
    return any(Path(folder, f"{name}.service").exists() for folder in ("/lib/systemd/system", "/etc/systemd/system"))


def _apt(arguments: list[str], env: Mapping[str, str]) -> None:
    options = ["-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=120"]
    command = ["apt-get", *options, *arguments]
    full = {**env, **BARE_ENV, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for _ in range(INSTALL_ATTEMPTS):
        done = subprocess.run(
            command, env=full, capture_output=True, text=True, errors="replace", timeout=INSTALL_WITHIN_S, check=False
        )
        if done.returncode == 0:
            return
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    raise DevClusterError(f"`{' '.join(command)}` failed {INSTALL_ATTEMPTS} times: {said}")


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Hold back the services of packages that are being installed."""
    if POLICY.exists() and POLICY.read_text() != DENY_STARTS:
        asked = subprocess.run([POLICY, "slurmctld", "start"], capture_output=True, check=False)
        if asked.returncode != DENIED:
            raise DevClusterError(
                f"{POLICY} lets packages start their services: install {' '.join(PACKAGES)} yourself, and stop these"
            )
        yield
        return
    POLICY.write_text(DENY_STARTS)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def remove_left_policy() -> None:
    """Remove what an installation that was killed has left."""
    if POLICY.exists() and POLICY.read_text() == DENY_STARTS:
        POLICY.unlink()
