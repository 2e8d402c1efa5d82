"""A docker daemon on every node of the dev cluster, as on a real one, and a client that uses the node's own daemon."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from containers import CHECKOUT
from hpcdist_runs import wait_for
from slurm_cluster import DevCluster
from small_image import SmallImage

from hpcdist.devcluster import settings

#: Leaves out limits that root may not raise, which would fail every start in a container like CI's.
RUNC = CHECKOUT / "hpcdist/devcluster/runc_within_limits.sh"
#: After the failure of one node a job may start on any two of the others.
NODES = ("n1", "n2", "n3", "n4")


@dataclass(frozen=True)
class DockerNodes:
    cluster: DevCluster
    image: SmallImage
    folder: Path
    group: str = "root"  #: group of users who may use the daemons

    @property
    def bin(self) -> Path:
        """The folder with the client `docker`; on a machine that is no node it speaks to n1's daemon."""
        return self.folder / "bin"

    def data(self, node: str) -> Path:
        """Return the folder in which a node's daemon keeps and mounts images."""
        return self.folder / node / "data"

    def write_client(self) -> None:
        self.bin.mkdir()
        client = self.bin / "docker"
        client.write_text(
            "#!/bin/sh\n"
            f"socket={self.folder}/$(hostname).sock\n"
            f'[ -S "$socket" ] || socket={self.folder}/n1.sock\n'
            f'DOCKER_HOST=unix://$socket exec {shutil.which("docker")} "$@"\n'
        )
        client.chmod(0o755)

    def docker(self, node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DOCKER_HOST": f"unix://{self.folder}/{node}.sock"}
        return subprocess.run(["docker", *arguments], env=env, capture_output=True, text=True, check=False, timeout=120)

    def start_all(self) -> None:
        """Start the daemons that do not run, and import the image where it is missing."""
        for node in NODES:
            if not self._runs(node):
                self._start(node)
            if self.docker(node, "image", "inspect", self.image.name).returncode != 0:
                done = self.docker(node, "import", str(self.image.tar), self.image.name)
                assert done.returncode == 0, done.stderr

    def _start(self, node: str) -> None:
        at = self.folder / node
        for left in (at.with_suffix(".sock"), at.with_suffix(".pid")):
            left.unlink(missing_ok=True)
        self._unmount(at)
        daemon = [
            "dockerd", f"--host=unix://{at}.sock", f"--group={self.group}", f"--pidfile={at}.pid",
            f"--data-root={self.data(node)}",
            f"--exec-root={at}/exec", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false",
            "--bridge=none", "--storage-driver=overlay2", f"--add-runtime=here={RUNC}", "--default-runtime=here",
        ]  # fmt: skip
        with at.with_suffix(".log").open("ab") as log:
            command = ["setsid", "--fork", *settings.on_node(self.cluster.layout, node, daemon)]
            subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)
        try:
            wait_for(lambda: self.docker(node, "version").returncode == 0, "dockerd to answer", timeout_s=60)
        except AssertionError as error:
            lines = at.with_suffix(".log").read_text().splitlines()[-5:]
            raise AssertionError(f"dockerd of {node} does not answer: {lines}") from error

    def _runs(self, node: str) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError, ValueError):
            pid = int((self.folder / f"{node}.pid").read_text())
            return b"dockerd" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    def containers(self, run: Path) -> list[str]:
        """Return the names of a run's containers, including stopped ones; the daemon of a dead node has none."""
        found = []
        for node in filter(self._runs, NODES):
            done = self.docker(node, "ps", "--all", "--filter", f"label=hpcdist.run={run}", "--format", "{{.Names}}")
            assert done.returncode == 0, f"docker ps on {node}: {done.stderr}"
            found += done.stdout.split()
        return found

    @staticmethod
    def _unmount(folder: Path) -> None:
        """Remove what a killed daemon has left mounted below a folder."""
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (place := line.split()[4]).startswith(f"{folder}/"):
                subprocess.run(["umount", "--lazy", place], check=False)

    def stop(self) -> None:
        """Stop all daemons and remove what killed ones left mounted."""
        stopped = []  # all at once: each one takes 10 s to end
        for node in NODES:
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                pid = int((self.folder / f"{node}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                stopped.append(Path(f"/proc/{pid}/cmdline"))
        wait_for(lambda: not any(path.exists() for path in stopped), "the daemons to end", timeout_s=60)
        self._unmount(self.folder)
        for node in NODES:
            shutil.rmtree(self.folder / node, ignore_errors=True)


@contextmanager
def docker_nodes(cluster: DevCluster, image: SmallImage, folder: Path, group: str = "root") -> Iterator[DockerNodes]:
    """Run a daemon with the image on every node of `NODES` for the duration of the block."""
    found = DockerNodes(cluster, image, folder, group)
    found.write_client()
    try:
        found.start_all()
        yield found
    finally:
        found.stop()
