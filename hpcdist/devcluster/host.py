"""The requirements of a dev cluster on this machine, and its changes: packages and /etc/hosts."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from hpcdist.devcluster import cluster_cgroup, cluster_processes
from hpcdist.devcluster.cluster_commands import run, succeeds
from hpcdist.devcluster.settings import BARE_ENV, Layout, Settings, taken_names
from hpcdist.errors import DevClusterError
from hpcdist.host.time_limits import last_line, run_within

#: Debian's packages. The packages of Slurm 24.11 and later only recommend the plugins.
PACKAGES = (
    *("slurmctld", "slurmd", "slurmdbd", "slurm-client", "slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin"),
    *("munge", "mariadb-server", "iproute2"),
)
SERVICES = ("munge", "mariadb", "slurmctld", "slurmd", "slurmdbd")
#: Commands that a cluster needs.
COMMANDS = (
    *("slurmctld", "slurmd", "slurmdbd", "scontrol", "sinfo", "srun", "sacctmgr", "munged", "munge"),
    *("mariadbd", "mariadb-install-db", "mariadb-admin", "ip", "tc"),
    *("nsenter", "unshare", "setsid", "setpriv", "hostname"),
)
HOSTS = Path("/etc/hosts")
LINKS = Path("/sys/class/net")
SITE_CONF = Path("/etc/slurm/slurm.conf")
POLICY = Path("/usr/sbin/policy-rc.d")
#: invoke-rc.d and deb-systemd-invoke call this script before they start a package's service.
DENY_STARTS = "#!/bin/sh\n# hpcdist devcluster: removed when its packages are installed\nexit 101\n"


def require_root(layout: Layout, words: str) -> None:
    """Raise DevClusterError unless root calls `hpcdist devcluster WORDS`."""
    if os.geteuid() != 0:
        command = layout.command(words)
        raise DevClusterError(
            f"`{command}` needs root to create network namespaces and to start daemons of several users:"
            f" sudo $(which hpcdist){command.removeprefix('hpcdist')}"
        )


def require_commands() -> None:
    """Raise DevClusterError if a command that a cluster needs is not installed."""
    missing = [name for name in COMMANDS if not _is_installed(name)]
    if missing:
        raise DevClusterError(
            f"{', '.join(missing)} not found: `hpcdist devcluster up --install` installs Debian's packages"
            f" {' '.join(PACKAGES)}"
        )


def _is_installed(command: str) -> bool:
    return shutil.which(command, path=BARE_ENV["PATH"]) is not None


#: Daemons of Slurm, by which another cluster on this machine is recognised.
_SLURM_DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd", "sackd")


def refuse_beside_slurm(layout: Layout) -> None:
    """Raise DevClusterError if a daemon of Slurm runs on this machine that belongs to no dev cluster."""
    names = {pid: cluster_processes.name_of(pid) for pid in psutil.pids()}
    daemons = {pid: name for pid, name in names.items() if name in _SLURM_DAEMONS}
    # The namespaces of a cluster exist before its daemons do, which may have started or forked only now.
    own: set[cluster_processes.Namespace] = set()
    for cluster in (layout, *cluster_processes.others(layout)):
        own |= set(cluster_processes.mounted_namespaces(cluster).values())
    for pid, name in daemons.items():
        namespace = cluster_processes.namespace_of(pid)
        if namespace is not None and namespace not in own:
            raise DevClusterError(
                f"{name} (process {pid}) runs on this machine and does not belong to a dev cluster in"
                f" {layout.first.parent}: a dev cluster cannot run beside another Slurm"
            )


def require_namespaces() -> None:
    """Raise DevClusterError if root may not create network namespaces, as in most containers."""
    if not succeeds(["unshare", "--net", "--uts", "true"]):
        raise DevClusterError(
            "this machine does not allow root to create network namespaces: start the container with --privileged"
        )


def require_cgroups(settings: Settings) -> None:
    """Raise DevClusterError if the settings require cgroups and root cannot create them."""
    if settings.proctrack == "cgroup" and not cluster_cgroup.are_usable():
        folder = cluster_cgroup.ROOT / cluster_cgroup.FREEZER
        raise DevClusterError(
            f"--proctrack cgroup: root cannot create cgroups of version 1 in {folder}: use"
            " --proctrack linuxproc, or start the container with --privileged"
        )


def require_free_network(settings: Settings, layout: Layout) -> None:
    """Raise DevClusterError if names, the interface or addresses of a cluster are in use by something else."""
    taken = taken_names(HOSTS.read_text(), settings, layout)
    if taken:
        raise DevClusterError(f"{HOSTS} already names {', '.join(taken)}: the dev cluster needs these names")
    if settings.head not in cluster_processes.mounted_namespaces(layout) and (LINKS / layout.link).exists():
        # Its cluster runs: the kernel removes a link when one of its namespaces ends.
        owner = _text(LINKS / layout.link / "ifalias") or "an unknown dev cluster"
        raise DevClusterError(
            f"interface {layout.link} belongs to {owner} outside of {layout.state}, such as in another container:"
            " `hpcdist devcluster up --name NAME` starts a cluster with an interface of its own"
        )
    foreign = [route for route in routes(settings.network) if layout.link not in route.split()]
    if foreign:
        raise DevClusterError(
            f"this machine uses addresses of {settings.network}, the dev cluster's network: {foreign[0]}"
        )


def routes(network: str) -> list[str]:
    """Return this machine's routes to parts of a network.

    Larger networks do not matter: the cluster's addresses are a more specific route.
    """
    lines = run(["ip", "-4", "route", "show", "table", "all", "root", network]).splitlines()
    return [line.strip() for line in lines]


def _text(path: Path) -> str:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


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
    """Install Debian packages for missing commands without starting or enabling their services."""
    if all(map(_is_installed, COMMANDS)):
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
    """Return whether systemd knows a service."""
    return any(Path(folder, f"{name}.service").exists() for folder in ("/lib/systemd/system", "/etc/systemd/system"))


#: Time limit of apt-get, which downloads packages and may wait for another apt-get.
_APT_WITHIN_S = 900.0


def _apt(arguments: list[str], env: Mapping[str, str]) -> None:
    options = ["-q", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=120"]
    command = ["apt-get", *options, *arguments]
    full_env = {**env, **BARE_ENV, "DEBIAN_FRONTEND": "noninteractive"}
    done = run_within(command, _APT_WITHIN_S, env=full_env)
    if done.returncode != 0:
        error = last_line(done.stderr) or "no error message"
        raise DevClusterError(f"`{' '.join(command)}` failed: {error}")


@contextmanager
def _services_stay_down() -> Iterator[None]:
    """Prevent that packages start their services when they are installed."""
    if POLICY.exists() and POLICY.read_text() != DENY_STARTS:
        yield  # that of a container image denies starts as well
        return
    POLICY.write_text(DENY_STARTS)
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
