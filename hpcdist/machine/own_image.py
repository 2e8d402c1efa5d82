"""The container that this process runs in, and the identity of its image, recorded as tags of the MLflow run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

#: Written by the image build: a hash of the build's inputs, because an image cannot contain its own digest.
BUILD_ID = Path(sys.prefix) / "build-id"
#: Written by the image build: the digest of the base image, else its id or name.
BASE = Path(sys.prefix) / "base-image"
#: Variables that the starter of a container sets to the image's name and digest.
NAME, DIGEST = "HPCDIST_IMAGE", "HPCDIST_IMAGE_DIGEST"

#: Files that runtimes leave in a container.
_MARKS = {
    ".dockerenv": "docker",
    "run/.containerenv": "podman",
    ".singularity.d": "apptainer",
    "ch/environment": "charliecloud",
}


def container_runtime(root: Path = Path("/")) -> str:
    """Return the runtime whose files are in this process's root file system; empty outside of a container.

    The files alone prove nothing: the disk of a virtual machine may have been made of an image.
    """
    found = next((runtime for mark, runtime in _MARKS.items() if (root / mark).exists()), "")
    return "" if found and _is_root_of_machine(root / "proc/self/mountinfo") else found


def _is_root_of_machine(mounts: Path) -> bool:
    """Return whether a process has a whole disk as its root."""
    try:
        fields = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return False
    # The fields are described in proc(5): root within the file system, mount point, …, -, type, source, options.
    source = next((mount[mount.index("-") + 2] for mount in fields if mount[3:5] == ["/", "/"]), "")
    return source.startswith("/dev/") and not source.startswith("/dev/loop")


def image_facts(
    env: Mapping[str, str], build_id: Path = BUILD_ID, base: Path = BASE, root: Path = Path("/")
) -> dict[str, str]:
    """Return `image`, `image_digest`, `image_build`, `image_base` and `container_runtime` of this process's container.

    Facts that are not recorded in the container are omitted; the result is empty outside of one.
    """
    found = {"image": env.get(NAME, ""), "image_digest": env.get(DIGEST, "")}
    for key, file in (("image_build", build_id), ("image_base", base)):
        if file.is_file():
            found[key] = file.read_text().strip()
    found["container_runtime"] = container_runtime(root)
    return {key: value for key, value in found.items() if value}
