"""The image that tests run in containers: one a session, as podman's and as a folder for charliecloud.

A base that debootstrap makes, this checkout's hpcdist in it, and the virtual environment's packages mounted.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
from dataclasses import dataclass
from pathlib import Path

import hpcdist

ROOTFS = "TEST_ROOTFS"
"""Names a root file system to take instead of one that debootstrap makes."""
PACKAGES = "/opt/packages"


@dataclass(frozen=True)
class ContainerImage:
    name: str  #: in podman's store
    folder: Path  #: unpacked
    env: dict[str, str]  #: variables that podman needs here
    mounts: tuple[str, ...]  #: what hpcdist in it needs

    def podman(self, *arguments: str) -> str:
        done = subprocess.run(
            ["podman", *arguments], env={**os.environ, **self.env}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def why_not() -> str | None:
    """Why no image can be made here; None where one can."""
    missing = [tool for tool in ("podman", "runc", "ch-run", "debootstrap") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed: sudo bash scripts/test_packages.sh"
    return None if os.geteuid() == 0 else "making an image needs root"


def make(folder: Path) -> ContainerImage:
    (folder / "containers.conf").write_text('[engine]\nruntime = "runc"\n')
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
    )
    env = {"CONTAINERS_CONF": f"{folder}/containers.conf", "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf"}
    rootfs = folder / "rootfs"
    if base := os.environ.get(ROOTFS):
        subprocess.run(["cp", "--archive", base, str(rootfs)], check=True)
    else:
        include = "--include=python3,python3-venv,ca-certificates"
        subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", str(rootfs)], check=True)
    there = rootfs / "usr/local/lib/python3.11/dist-packages"
    there.mkdir(parents=True, exist_ok=True)
    (there / "packages.pth").write_text(f"{PACKAGES}\n")
    (rootfs / PACKAGES.lstrip("/")).mkdir(exist_ok=True)
    shutil.rmtree(there / "hpcdist", ignore_errors=True)
    shutil.copytree(Path(hpcdist.__file__).parent, there / "hpcdist", ignore=shutil.ignore_patterns("__pycache__"))
    image = ContainerImage("localhost/hpcdist-test:1", rootfs, env, (f"{site.getsitepackages()[0]}:{PACKAGES}",))
    with subprocess.Popen(["tar", "-C", str(rootfs), "-c", "."], stdout=subprocess.PIPE) as tar:
        # A user and an entrypoint of its own, as ours has, are not to matter.
        changes = ["--change=USER 1000:1000", '--change=ENTRYPOINT ["/bin/false"]']
        command = ["podman", "import", *changes, "-", image.name]
        subprocess.run(command, stdin=tar.stdout, env={**os.environ, **env}, capture_output=True, check=True)
    return image
