"""Requirements of a dev cluster, and its changes to this machine: packages and /etc/hosts."""

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

from hpcdist.devcluster import cgroups, processes, render
from hpcdist.devcluster.argv import BARE_ENV, COMMANDS, PACKAGES, SERVICES
from hpcdist.devcluster.settings import HEAD, LINK, Layout, Settings
from hpcdist.devcluster.system import run, succeeds
from hpcdist.errors import DevClusterError

HOSTS = Path("/etc/hosts")
SITE_CONF = Path("/etc/slurm/slurm.conf")
POLICY = Path("/usr/sbin/policy-rc.d")
#: invoke-rc.d and deb-systemd-invoke call this script before they start a package's service.
DENY_STARTS = "#!/bin/sh\n# hpcdist devcluster: removed when its packages are installed\nexit 101\n"
DENIED = 101
INSTALL_ATTEMPTS = 3
INSTALL_WITHIN_S = 900.0


def require_root(command: str) -> None:
    """Raise DevClusterError if the user is not root."""
    if os.geteuid() != 0:
        raise DevClusterError(
            f"`hpcdist devcluster {command}` needs root to create network namespaces and to start daemons of several"
            f" users: sudo $(which hpcdist) devcluster {command}"
        )


def missing_commands() -> list[str]:
    """Return the required commands that are not installed."""
    return [name for name in COMMANDS if not _is_installed(name)]


def _is_installed(command: str) -> bool:
    return shutil.which(command, path=BARE_ENV["PATH"]) is not None


def require_commands() -> None:
    """Raise DevClusterError if commands are missing."""
    if missing := missing_commands():
        raise DevClusterError(
            f"{', '.join(missing)} not found: `hpcdist devcluster up --install` installs Debian's packages"
            f" {' '.join(PACKAGES)}"
        )


def refuse_beside_slurm(layout: Layout) -> None:
    """Raise DevClusterError if another Slurm runs on this machine."""
    if found := processes.foreign_slurm(layout):
        pid, name = found[0]
        raise DevClusterError(
            f"{name} (process {pid}) runs on this machine and does not belong to the dev cluster in {layout.state}:"
            " a dev cluster cannot run beside another Slurm"
        )


def require_namespaces() -> None:
    """Raise DevClusterError if the kernel or the surrounding container allows no namespaces."""
    if not succeeds(["unshare", "--net", "--uts", "true"]):
        raise DevClusterError(
            "this machine does not allow root to create network namespaces: start the container with --privileged"
        )


def require_cgroups(settings: Settings) -> None:
    """Raise DevClusterError if the cluster tracks processes by cgroups, and root cannot create any."""
    if settings.proctrack == "cgroup" and not cgroups.are_usable():
        raise DevClusterError(
            f"--proctrack cgroup: root cannot create cgroups of version 1 in {cgroups.ROOT / cgroups.FREEZER}: use"
            " --proctrack linuxproc, or start the container with --privileged"
        )


def require_folder(layout: Layout) -> None:
    """Raise DevClusterError for a state folder with other files, or one that other users cannot reach."""
    if layout.state.exists() and any(layout.state.iterdir()) and not layout.settings_file.exists():
        raise DevClusterError(
            f"--state {layout.state} contains other files than a dev cluster's: choose another folder"
        )
    if not layout.state.parent.is_dir():
        raise DevClusterError(f"--state {layout.state}: its parent folder {layout.state.parent} does not exist")
    for folder in layout.state.parents:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH or (mode & stat.S_IWOTH and not mode & stat.S_ISVTX):
            raise DevClusterError(
                f"--state {layout.state}: {folder} must be accessible to users munge and mysql, and writable by its"
                " owner only, like the default under /var/lib"
            )


def require_free_network(settings: Settings, layout: Layout) -> None:
    """Raise DevClusterError if names, network or interface of the cluster are in use."""
    if taken := render.taken_names(HOSTS.read_text(), settings):
        raise DevClusterError(f"{HOSTS} already names {', '.join(taken)}: the dev cluster needs these names")
    if HEAD not in processes.mounted_namespaces(layout) and Path(f"/sys/class/net/{LINK}").exists():
        raise DevClusterError(
            f"interface {LINK} already exists: stop its dev cluster with its own --state, or `ip link delete {LINK}`"
        )
    if other := overlapping_route(run(["ip", "-json", "-4", "route", "show", "table", "all"]), settings):
        raise DevClusterError(f"--subnet {settings.subnet} overlaps {other} of this machine: choose another")


def overlapping_route(routes: str, settings: Settings) -> str | None:
    """Return the first of this machine's routes (`ip -json route`) that overlaps the cluster's network."""
    for route in json.loads(routes):
        target, device = route["dst"], route.get("dev", "")
        if target != "default" and device != LINK:
            network = ipaddress.IPv4Network(target, strict=False)
            if network.prefixlen and network.overlaps(settings.network):
                return f"{target} ({device or route.get('type', 'route')})"
    return None


def write_hosts(text: str) -> None:
    """Write /etc/hosts in place, because it is a mount in a container and cannot be replaced by a rename."""
    if text == HOSTS.read_text():
        return
    with open(HOSTS, "r+") as file:
        file.write(text)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def install(env: Mapping[str, str]) -> None:
    """Install Debian packages for missing commands without starting or enabling their services.

    Raises:
        DevClusterError: the installation is not possible, or fails `INSTALL_ATTEMPTS` times.
    """
    if not missing_commands():
        return
    if SITE_CONF.exists():
        raise DevClusterError(
            f"{SITE_CONF} belongs to another Slurm on this machine: packages are not installed over it"
        )
    if not _is_installed("apt-get"):
        raise DevClusterError(f"--install supports apt-get only: install {' '.join(PACKAGES)} by the package manager")
    before = {name for name in SERVICES if _is_service(name)}
    with _services_stay_down():
        _apt(["update"], env)
        _apt(["install", "--yes", "--no-install-recommends", *PACKAGES], env)
    new = [name for name in SERVICES if name not in before and _is_service(name)]
    if new and _is_installed("systemctl"):
        run(["systemctl", "disable", *new])  # they must not start at the next boot
    require_commands()


def _is_service(name: str) -> bool:
    return any(Path(folder, f"{name}.service").exists() for folder in ("/lib/systemd/system", "/etc/systemd/system"))


def _apt(arguments: list[str], env: Mapping[str, str]) -> None:
    options = ["-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=120"]
    command = ["apt-get", *options, *arguments]
    full = {**env, **BARE_ENV, "DEBIAN_FRONTEND": "noninteractive"}
    error = ""
    for _ in range(INSTALL_ATTEMPTS):
        done = subprocess.run(
            command, env=full, capture_output=True, text=True, errors="replace", timeout=INSTALL_WITHIN_S, check=False
        )
        if done.returncode == 0:
            return
        error = (done.stderr.strip().splitlines() or ["no error message"])[-1]
    raise DevClusterError(f"`{' '.join(command)}` failed {INSTALL_ATTEMPTS} times: {error}")


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Prevent packages from starting their services during installation."""
    if POLICY.exists() and POLICY.read_text() != DENY_STARTS:
        asked = subprocess.run([POLICY, "slurmctld", "start"], capture_output=True, check=False)
        if asked.returncode != DENIED:
            raise DevClusterError(
                f"{POLICY} lets packages start services: install {' '.join(PACKAGES)} yourself, and stop them"
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
    """Remove the policy of a killed installation."""
    if POLICY.exists() and POLICY.read_text() == DENY_STARTS:
        POLICY.unlink()
