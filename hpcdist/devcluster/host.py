"""The machine below a dev cluster: requirements and changes, commands and daemons, cgroups, and container runtimes."""

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from hpcdist.devcluster.settings import (
    BARE_ENV,
    CLUSTER,
    NAME,
    Daemon,
    Layout,
    Settings,
    daemon_command,
    daemon_env,
    taken_names,
)
from hpcdist.errors import DevClusterError, RunFolderError
from hpcdist.host import locks
from hpcdist.host.files import write_atomic
from hpcdist.host.machine import CAP_SYS_RESOURCE, has_capability
from hpcdist.host.time_limits import last_line, run_within

# The dev clusters of this machine, and their processes: those in one of a cluster's network namespaces.
#
# Membership survives crashes, needs no list of process ids, and child processes cannot leave it.

#: Device and inode of a namespace.
Namespace = tuple[int, int]


def others(layout: Layout) -> list[Layout]:
    """Return the other dev clusters of this machine, whether they run or not."""
    prefix = f"{layout.first.name}-"
    folders = layout.first.parent.glob(f"{prefix}*")
    names = {CLUSTER, *(folder.name.removeprefix(prefix) for folder in folders)}
    names.discard(layout.name)
    clusters = [Layout(name, layout.first) for name in sorted(names) if NAME.fullmatch(name)]
    return [cluster for cluster in clusters if cluster.settings_file.exists()]


def mounted_namespaces(layout: Layout) -> dict[str, Namespace]:
    """Return the network namespaces of a cluster by host name; files without a mounted namespace are left out."""
    if not layout.namespaces.is_dir():
        return {}
    device_of_namespaces = os.stat("/proc/self/ns/net").st_dev
    mounted = {}
    for path in layout.namespaces.iterdir():
        identity = _identity(path)
        if identity is not None and identity[0] == device_of_namespaces:
            mounted[path.name] = identity
    return mounted


def _identity(path: Path) -> Namespace | None:
    """Return the namespace of a file; None if it cannot be read: its process has ended, or is another user's."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def members(namespaces: Iterable[Namespace]) -> list[int]:
    """Return the ids of the processes in network namespaces."""
    wanted = set(namespaces)
    return [pid for pid in psutil.pids() if _identity(Path(f"/proc/{pid}/ns/net")) in wanted]


#: A process ends within milliseconds after SIGKILL, unless it waits for a device or a file system.
_KILL_WITHIN_S = 20.0


def kill_members(namespaces: Iterable[Namespace]) -> int:
    """Kill the processes in network namespaces and return their number; raise DevClusterError if some do not end."""
    namespaces = set(namespaces)
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_WITHIN_S
    # Repeat until none is left, because a process may fork before it is killed.
    while True:
        remaining = members(namespaces)
        if not remaining:
            return len(killed)
        if time.monotonic() > deadline:
            raise DevClusterError(f"processes {', '.join(map(str, remaining))} do not end after SIGKILL: see `ps -p`")
        for pid in remaining:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(remaining)
        time.sleep(0.02)


def _name(pid: int) -> str:
    """Return the name of a process; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return ""
        return process.name()
    except psutil.Error:
        return ""


def is_running(layout: Layout, daemon: Daemon) -> bool:
    """Return whether a daemon runs: its process must be in the namespace, so a stale pid file is harmless."""
    pid = _read_pid(layout, daemon)
    namespace = mounted_namespaces(layout).get(daemon.node)
    if pid is None or namespace is None:
        return False
    if os.geteuid() != 0:  # namespaces of root's processes cannot be read
        return _name(pid) != ""
    return _identity(Path(f"/proc/{pid}/ns/net")) == namespace


def pid_of(layout: Layout, daemon: Daemon) -> int | None:
    """Return the process id of a daemon; None if it does not run."""
    if not is_running(layout, daemon):
        return None
    return _read_pid(layout, daemon)


def _read_pid(layout: Layout, daemon: Daemon) -> int | None:
    try:
        return int(layout.pid_file(daemon.name).read_text())
    except (OSError, ValueError):
        return None


# Run commands, start daemons and wait for them.

LOCK_WITHIN_S = 10.0
#: Time limit of a command; most take less than a second.
_COMMAND_WITHIN_S = 120.0
#: MariaDB's first start takes up to 10 s on two busy cores.
_ANSWER_WITHIN_S = 120.0
#: In a folder to which only root can write.
LOCK = Path("/run/hpcdist-devcluster.lock")


def run(command: list[str], *, env: Mapping[str, str] | None = None, stdin: str = "") -> str:
    """Run a command and return its output; raise DevClusterError with its last line if it fails or does not exist.

    Args:
        env: variables besides BARE_ENV.
    """
    done = _call(command, env, stdin)
    if done.returncode != 0:
        error = last_line(done.stderr) or last_line(done.stdout) or f"exit code {done.returncode}"
        raise DevClusterError(f"`{shlex.join(command)}` failed: {error}")
    return done.stdout


def succeeds(command: list[str], *, env: Mapping[str, str] | None = None) -> bool:
    """Run a command and return whether it succeeds; raise DevClusterError if it does not exist."""
    return _call(command, env, "").returncode == 0


def _call(command: list[str], env: Mapping[str, str] | None, stdin: str) -> subprocess.CompletedProcess[str]:
    try:
        return run_within(command, _COMMAND_WITHIN_S, env={**BARE_ENV, **(env or {})}, stdin=stdin)
    except FileNotFoundError:
        raise DevClusterError(f"{command[0]} not found: is the package that brings it installed?") from None


def start(layout: Layout, daemon: Daemon) -> None:
    """Start a daemon that outlives this process, unless it is running."""
    if is_running(layout, daemon):
        return
    layout.pid_file(daemon.name).unlink(missing_ok=True)
    command = daemon_command(layout, daemon)
    env = daemon_env(layout)
    with open(layout.output(daemon.name), "ab") as log:
        subprocess.run(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)


def wait_until(
    condition: Callable[[], bool],
    problem: str,
    layout: Layout,
    daemon: Daemon,
    timeout_s: float = _ANSWER_WITHIN_S,
) -> None:
    """Wait for a condition; raise `problem` after the time limit or the daemon's end, with its last line of output."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        has_ended = _read_pid(layout, daemon) is not None and not is_running(layout, daemon)
        if has_ended or time.monotonic() > deadline:
            reason = f"{daemon.name} ended at once" if has_ended else f"{problem} within {timeout_s:g} s"
            log = layout.output(daemon.name)
            last = last_line(log.read_text(errors="replace")) or "nothing"
            raise DevClusterError(f"{reason}; {log} ends with: {last}")
        time.sleep(0.1)


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock of `up`, `down` and `node`; after a killed `up`, its child holds it for a moment."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.exclusive(LOCK, within_s=LOCK_WITHIN_S))
        except RunFolderError:
            raise DevClusterError("another `hpcdist devcluster` is at work on this machine: wait for it") from None
        yield


# The cgroup below which Slurm tracks the processes of steps; it belongs to the cluster and is mounted in its folder.
#
# Only version 1 is used. For version 2, Slurm asks systemd for its cgroups, and cannot be kept apart from the
# machine's.

ROOT = Path("/sys/fs/cgroup")
#: The hierarchy of version 1 that proctrack/cgroup uses.
FREEZER = "freezer"


def are_usable() -> bool:
    """Return whether cgroups of version 1 can be created: a container often has a read-only view of its machine's."""
    freezer = ROOT / FREEZER
    if not (freezer / "tasks").exists():
        return False
    # Not os.access: a mount may be read-only for root as well.
    probe = freezer / f"hpcdist-devcluster-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    probe.rmdir()
    return True


def create(settings: Settings, layout: Layout) -> None:
    """Create and mount the cluster's cgroup if it tracks processes with cgroups."""
    target = layout.cgroups / FREEZER
    if settings.proctrack != "cgroup" or target.is_mount():
        return
    target.mkdir(parents=True, exist_ok=True)
    name = f"hpcdist-devcluster-{secrets.token_hex(4)}"
    write_atomic(layout.cgroup_name, name)
    cgroup = ROOT / FREEZER / name
    cgroup.mkdir()
    run(["mount", "--bind", str(cgroup), str(target)])


def remove(layout: Layout) -> None:
    """Unmount and remove the cluster's cgroup with those below it."""
    target = layout.cgroups / FREEZER
    if target.is_mount():
        succeeds(["umount", str(target)])
    if not layout.cgroup_name.exists():
        return
    top = ROOT / FREEZER / layout.cgroup_name.read_text()
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):  # a process of another program has moved into it
            os.rmdir(folder)  # the files in it vanish with it and cannot be deleted


# Requirements of a dev cluster, and its changes to this machine: packages and /etc/hosts.

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
    namespaces: list[Namespace] = []
    for cluster in (layout, *others(layout)):
        namespaces += mounted_namespaces(cluster).values()
    own_pids = set(members(namespaces))
    for pid in psutil.pids():
        if pid in own_pids:
            continue
        name = _name(pid)
        if name in _SLURM_DAEMONS:
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
    if settings.proctrack == "cgroup" and not are_usable():
        raise DevClusterError(
            f"--proctrack cgroup: root cannot create cgroups of version 1 in {ROOT / FREEZER}: use"
            " --proctrack linuxproc, or start the container with --privileged"
        )


def require_free_network(settings: Settings, layout: Layout) -> None:
    """Raise DevClusterError if names, the interface or addresses of a cluster are in use by something else."""
    taken = taken_names(HOSTS.read_text(), settings, layout)
    if taken:
        raise DevClusterError(f"{HOSTS} already names {', '.join(taken)}: the dev cluster needs these names")
    if settings.head not in mounted_namespaces(layout) and (LINKS / layout.link).exists():
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


# Container runtimes of a dev cluster, so that a containerised launch can be tried before it is submitted elsewhere.
#
# The nodes share this machine's files. Scripts in the cluster's `bin` replace the programs of the runtimes. That of
# enroot selects the folder of its containers on a node.

#: Programs of each runtime that must be on the PATH of `up`.
PROGRAMS = {
    "none": (),
    "apptainer": ("apptainer",),
    "pyxis": ("enroot",),
}
_HEAD = "#!/bin/sh\n# Written by `hpcdist devcluster up`; changes are lost.\n"


def find_programs(settings: Settings, layout: Layout, env: Mapping[str, str]) -> dict[str, Path]:
    """Return the paths of the programs of the container runtime, by name.

    Raises DevClusterError if one of them, or pyxis's plugin, is not installed.
    """
    # The caller's PATH may contain the scripts of an earlier `up`.
    folders = [*env.get("PATH", "").split(":"), *BARE_ENV["PATH"].split(":")]
    path = ":".join(folder for folder in folders if folder and Path(folder) != layout.bin)
    programs = {}
    missing = []
    for name in PROGRAMS[settings.runtime]:
        place = shutil.which(name, path=path)
        if place is None:
            missing.append(name)
        else:
            programs[name] = Path(place).absolute()
    if missing:
        raise DevClusterError(f"--runtime {settings.runtime}: {', '.join(missing)} not found on PATH: install it first")
    if settings.runtime == "pyxis" and not Path(settings.pyxis_plugin).is_file():
        raise DevClusterError(
            f"--pyxis-plugin {settings.pyxis_plugin}: no such file: build pyxis for the installed Slurm with"
            " `make install`, or name its spank_pyxis.so"
        )
    return programs


def write_files(settings: Settings, layout: Layout, programs: Mapping[str, Path]) -> None:
    """Write the files of the container runtime: scripts, and for pyxis the folder and the plugin's configuration.

    Args:
        programs: see `find_programs`.
    """
    if settings.runtime == "none":
        return
    layout.bin.mkdir(exist_ok=True)
    may_raise_limits = has_capability(CAP_SYS_RESOURCE)
    for name, text in scripts(settings, layout, programs, may_raise_limits=may_raise_limits).items():
        script = layout.bin / name
        write_atomic(script, text)
        script.chmod(0o755)
    if settings.runtime == "pyxis":
        layout.enroot.mkdir(exist_ok=True)
        layout.enroot.chmod(0o1777)
        plugin = f"required {settings.pyxis_plugin} runtime_path={layout.state}/pyxis\n"
        write_atomic(layout.conf / "plugstack.conf", plugin)


def scripts(
    settings: Settings, layout: Layout, programs: Mapping[str, Path], *, may_raise_limits: bool
) -> dict[str, str]:
    """Return the text of the scripts in `bin` by name.

    Args:
        programs: see `find_programs`.
        may_raise_limits: whether root has CAP_SYS_RESOURCE, as on a host.
    """
    if settings.runtime == "apptainer":
        lines = ""
        if not may_raise_limits:
            # apptainer requests all capabilities of root, and does not start without one of them.
            lines = '[ "$(id -u)" != 0 ] || export APPTAINER_DROP_CAPS="${APPTAINER_DROP_CAPS:-CAP_SYS_RESOURCE}"\n'
        return {"apptainer": f'{_HEAD}{lines}exec {programs["apptainer"]} "$@"\n'}
    if settings.runtime == "pyxis":
        folder = f"{layout.enroot}/$(hostname)-$(id -u)"
        paths = " ".join(f"ENROOT_{name}_PATH=$own/{name.lower()}" for name in ("DATA", "RUNTIME", "CACHE"))
        # enroot calls further programs of its folder.
        path = f"PATH=$PATH:{programs['enroot'].parent}"
        return {"enroot": f'{_HEAD}own={folder}\nexport {path} {paths}\nexec {programs["enroot"]} "$@"\n'}
    return {}
