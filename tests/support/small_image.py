"""A small image for the matrix of container runtimes: Debian with Python, in every form that a runtime starts.

torch and hpcdist are not in it: `/opt/packages` and `/opt/checkout` are mount points for those of this machine. So it
is built in seconds, and a change of the code needs no new image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from containers import BASE, CHECKOUT, STORE, Containers

#: Kept for the next session, like podman's layers.
FOLDER = STORE.parent / "small-image"
NAME = "localhost/hpcdist-small:test"
#: Python of Debian 12, the base image.
PYTHON = (3, 11)
#: Python reads this file at its start and so finds what is mounted.
_PTH = "import site; site.addsitedir('/opt/checkout'); site.addsitedir('/opt/packages')\n"
#: Changes with every change of the content, so that images of older checkouts are not used.
VERSION = "2"


@dataclass(frozen=True)
class SmallImage:
    containers: Containers
    name: str = NAME  #: in podman's store

    @property
    def folder(self) -> Path:
        return FOLDER / f"rootfs-{VERSION}"

    @property
    def tar(self) -> Path:
        """Archive of the folder, for `docker import`."""
        return self._file("tar", ["tar", "-C", str(self.folder), "-cf"], ["."])

    @property
    def sqsh(self) -> Path:
        options = ["-comp", "zstd", "-Xcompression-level", "3", "-noappend", "-quiet", "-no-progress"]
        # An ordinary user cannot unpack device files, which images of a registry do not have.
        return self._file("no-devices.sqsh", ["mksquashfs", str(self.folder)], [*options, "-wildcards", "-e", "dev/*"])

    def sif(self, apptainer: str) -> Path:
        """Return the image for apptainer; `apptainer` is the path of the program."""
        quick = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1"]
        return self._file("sif", [apptainer, "--quiet", "build", "--force", *quick], [str(self.folder)])

    def _file(self, suffix: str, before: Sequence[str], after: Sequence[str]) -> Path:
        """Return a form of the image, which `BEFORE FILE AFTER` writes on first use."""
        path = FOLDER / f"small-{VERSION}.{suffix}"
        with self.containers.locked():
            if not path.exists():
                partial = path.with_name(f"partial-{path.name}")
                partial.unlink(missing_ok=True)
                _run([*before, str(partial), *after])
                partial.chmod(0o644)
                partial.rename(path)
        return path


def mismatch() -> str | None:
    """Return the reason why packages of this Python cannot be used in the image; None if they can."""
    if sys.version_info[:2] == PYTHON:
        return None
    return (
        f"the test image has Python {PYTHON[0]}.{PYTHON[1]}, this one has {sys.version_info[0]}.{sys.version_info[1]}"
    )


def mount_flags(runtime: str) -> list[str]:
    """Return the flags (`container.extra_args`) by which the image gets hpcdist and its packages.

    `container.mounts` would not do: the check of the image starts it without mounts.
    """
    sources = {"/opt/checkout": str(CHECKOUT), "/opt/packages": sysconfig.get_path("purelib")}
    pairs = [(source, target) for target, source in sources.items()]
    if runtime == "pyxis":
        return [f"--container-mounts={','.join(f'{source}:{target}:ro' for source, target in pairs)}"]
    form = {
        "podman": "--volume={}:{}:ro",
        "docker": "--volume={}:{}:ro",
        "apptainer": "--bind={}:{}:ro",
        "charliecloud": "--bind={}:{}",
        "enroot": "--mount={}:{}:none:x-create=auto,rbind,ro",
    }[runtime]
    return [form.format(*pair) for pair in pairs]


def build(containers: Containers) -> SmallImage:
    """Return the image as a folder and in podman's store; other forms are made on first use."""
    image = SmallImage(containers)
    with containers.locked():
        if not image.folder.exists():
            _unpack(containers, image.folder)
        if not containers.has(f"{NAME}-{VERSION}"):
            with subprocess.Popen(["tar", "-C", str(image.folder), "-c", "."], stdout=subprocess.PIPE) as packed:
                command = ["podman", "import", "-", f"{NAME}-{VERSION}"]
                subprocess.run(command, env=containers.env, stdin=packed.stdout, capture_output=True, check=True)
    return SmallImage(containers, f"{NAME}-{VERSION}")


def _unpack(containers: Containers, folder: Path) -> None:
    """Unpack the base image and add the mount points."""
    partial = folder.with_name(f"partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    container = containers.podman("create", BASE, "true").strip()
    try:
        command = ["podman", "export", container]
        with subprocess.Popen(command, env=containers.env, stdout=subprocess.PIPE) as exported:
            subprocess.run(["tar", "-C", str(partial), "-x"], stdin=exported.stdout, check=True)
    finally:
        containers.podman("rm", "--force", container)
    for unused in ("usr/share/doc", "usr/share/locale", "usr/share/man", "var/lib/apt/lists"):
        shutil.rmtree(partial / unused)
    for mount_point in ("opt/checkout", "opt/packages"):
        (partial / mount_point).mkdir()
    (partial / "usr/lib/python3/dist-packages/mounted.pth").write_text(_PTH)
    for path in (FOLDER, partial):
        path.chmod(0o755)
    partial.rename(folder)


def _run(command: Sequence[str]) -> None:
    env = {**os.environ, "APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
