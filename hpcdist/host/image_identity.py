"""The container that this process runs in, and the identity of its image, recorded as tags of the MLflow run."""

import sys
from collections.abc import Mapping
from pathlib import Path

from hpcdist.host.machine import text_of

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
}


def container_runtime(root: Path = Path("/")) -> str:
    """Return the runtime with files in this process's root file system; empty outside of a container.

    The files alone prove nothing: the disk of a virtual machine, which is its root, may have been made of an image.
    """
    # The fields are described in proc(5): root within the file system, mount point, …, -, type, source, options.
    mounts = [line.split() for line in text_of(root / "proc/self/mountinfo").splitlines()]
    sources_of_root = [mount[mount.index("-") + 2] for mount in mounts if mount[3:5] == ["/", "/"]]
    source = next(iter(sources_of_root), "")
    if source.startswith("/dev/") and not source.startswith("/dev/loop"):
        return ""
    for mark, runtime in _MARKS.items():
        if (root / mark).exists():
            return runtime
    return ""


def image_facts(
    env: Mapping[str, str], build_id: Path = BUILD_ID, base: Path = BASE, root: Path = Path("/")
) -> dict[str, str]:
    """Return the known ones of `image`, `image_digest`, `image_build`, `image_base` and `container_runtime`."""
    facts = {"image": env.get(NAME, ""), "image_digest": env.get(DIGEST, "")}
    for key, file in (("image_build", build_id), ("image_base", base)):
        if file.is_file():
            facts[key] = file.read_text().strip()
    facts["container_runtime"] = container_runtime(root)
    return {key: value for key, value in facts.items() if value}


def install_command(*extras: str) -> str:
    """Return the command that installs hpcdist with optional dependencies; it is not on a package index."""
    return f"`pip install '.[{','.join(extras)}]'` in a checkout of hpcdist"
