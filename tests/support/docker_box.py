"""A docker daemon of the tests in namespaces of its own: bridges, published ports and its firewall stay in there.

Its images are kept in `STORE` for the next session, as those of podman are.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from containers import CHECKOUT, RUNTIMES
from hpcdist_runs import wait_for

from hpcdist.supervisor.launcher import Guard

STORE = Path("/var/tmp/hpcdist-tests/docker")
RECIPES = CHECKOUT / "scripts" / "runtimes"
#: Leaves out limits that root may not raise, as in a container.
RUNC = CHECKOUT / "hpcdist/devcluster/runc_within_limits.sh"
#: Where scripts/runtimes/docker.sh installs the docker of Debian sid; without it the installed one is used.
SID = RUNTIMES / "docker"
PLUGINS = SID / "usr/libexec/docker/cli-plugins"
#: `host`: the network of this machine without bridges, for builds that download packages. `own`: bridges, network
#: address translation and published ports in a network namespace without a way to other machines.
Network = Literal["host", "own"]
#: The shell becomes the daemon, process 1 of its namespace: whatever it started ends with it. A new /sys shows the
#: devices of the new network namespace; the control groups below the old one stay.
_IN_NAMESPACES = """
set -e
if [ "$1" = own ]; then
  ip link set lo up
  mount --rbind /sys/fs/cgroup "$2/cgroups"
  mount -t sysfs sysfs /sys
  mount --rbind "$2/cgroups" /sys/fs/cgroup
  echo 1 > /proc/sys/net/ipv4/ip_forward
fi
shift 2
exec "$@"
"""


@dataclass(frozen=True)
class DockerBox:
    """A running docker daemon, and commands that use it."""

    folder: Path  #: socket, log and client configuration
    env: dict[str, str]
    pid: int  #: process id of the daemon on this machine

    def run(self, *command: str, within_s: float = 600, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine that uses the daemon."""
        return subprocess.run(
            command, env={**self.env, **env}, capture_output=True, text=True, timeout=within_s, check=False
        )

    def docker(self, *arguments: str, within_s: float = 600, **env: str) -> str:
        """Run a command of docker, which must succeed. Returns its output and messages."""
        done = self.run("docker", *arguments, within_s=within_s, **env)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"docker {arguments}: {done.returncode}\n{output[-6000:]}\n{self.log()}"
        return output

    def hpcdist(
        self, *arguments: str, cwd: Path, within_s: float = 600, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `hpcdist ARGUMENTS` on this machine."""
        command = [sys.executable, "-m", "hpcdist", *arguments]
        return subprocess.run(
            command, env={**self.env, **env}, cwd=cwd, capture_output=True, text=True, timeout=within_s, check=False
        )

    def inspect(self, name: str, kind: Literal["container", "image"] = "container") -> dict[str, Any]:
        done = self.run("docker", kind, "inspect", name)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)[0]
        return found

    def has(self, image: str) -> bool:
        return self.run("docker", "image", "inspect", image).returncode == 0

    def in_its_network(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the daemon's network namespace, where ports are published."""
        return self.run("nsenter", f"--net=/proc/{self.pid}/ns/net", *command)

    def log(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-10:])


def missing_docker() -> str | None:
    """Return the reason why no daemon can run on this machine; None if it can."""
    if os.getuid() != 0:
        return "a docker daemon needs root"
    path = _path(os.environ)
    missing = [
        name for name in ("dockerd", "docker", "containerd", "runc", "ip") if shutil.which(name, path=path) is None
    ]
    if not missing and not PLUGINS.is_dir():  # the client of Debian 12 has none
        missing = [
            f"docker {name}"
            for name in ("buildx", "compose")
            if subprocess.run(["docker", name, "version"], capture_output=True, check=False).returncode != 0
        ]
    if missing:
        return f"{', '.join(missing)} not installed: bash scripts/runtimes/docker.sh"
    return None


@contextmanager
def docker_box(folder: Path, network: Network, *, store: Path = STORE) -> Iterator[DockerBox]:
    """Start a daemon and end it, with all its containers, after the block or if this process is killed."""
    store.mkdir(parents=True, exist_ok=True, mode=0o711)
    # Not a folder of pytest, whose path may be too long for a socket.
    place = Path("/run", f"hpcdist-docker-{secrets.token_hex(4)}")
    (place / "cgroups").mkdir(parents=True)
    place.chmod(0o755)
    env = {
        **os.environ,
        "PATH": _path(os.environ),
        "DOCKER_HOST": f"unix://{place}/docker.sock",
        "DOCKER_CONFIG": str(folder),
        # Otherwise colours and moving lines in the output of a build.
        "BUILDKIT_PROGRESS": "plain",
    }
    _add_plugins(folder)
    guard = Guard()
    try:
        with (store / "lock").open("w") as lock:  # one daemon at a time can use the store
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = guard.start(_command(place, store, network), env=env, cwd=folder, output=folder / "log")
            daemon = None
            try:
                box = DockerBox(folder, env, 0)
                wait_for(lambda: _answers(box, process), "the docker daemon to answer", timeout_s=120)
                (daemon,) = psutil.Process(process.pid).children()
                yield DockerBox(folder, env, daemon.pid)
            finally:
                if daemon is not None:
                    with suppress(psutil.NoSuchProcess):
                        daemon.send_signal(signal.SIGTERM)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(60)
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                guard.forget(process.pid)
    finally:
        guard.close()
        shutil.rmtree(place, ignore_errors=True)


def _answers(box: DockerBox, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, f"dockerd ended with code {process.returncode}\n{box.log()}"
    return box.run("docker", "version").returncode == 0


def _command(place: Path, store: Path, network: Network) -> list[str]:
    """Return the argv of a daemon in namespaces of its own."""
    namespaces = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
    options = [f"--host=unix://{place}/docker.sock", f"--data-root={store}/data", f"--exec-root={place}/exec"]
    options += [f"--pidfile={place}/pid", "--storage-driver=overlay2"]
    # Root of a container cannot raise limits, which docker does for its containers.
    options += [f"--add-runtime=within-limits={RUNC}", "--default-runtime=within-limits"]
    if network == "host":
        options += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
    else:
        namespaces.append("--net")
        options += ["--bip=172.31.255.1/24", "--default-address-pool=base=172.31.0.0/17,size=24", "--ip6tables=false"]
    return [*namespaces, "sh", "-c", _IN_NAMESPACES, "sh", network, str(place), "dockerd", *options]


def _add_plugins(config: Path) -> None:
    """Make buildx and compose of Debian sid known to the client, which looks for them in the user's configuration."""
    for plugin in sorted(PLUGINS.glob("docker-*")):
        link = config / "cli-plugins" / plugin.name
        link.parent.mkdir(exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(plugin)


def _path(env: Mapping[str, str]) -> str:
    return f"{SID}/usr/sbin:{SID}/usr/bin:{env['PATH']}" if (SID / "usr/sbin/dockerd").exists() else env["PATH"]
