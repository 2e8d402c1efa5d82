"""Identity of the image that this process runs in, recorded as tags of the MLflow run."""

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


def image_facts(env: Mapping[str, str], build_id: Path = BUILD_ID, base: Path = BASE) -> dict[str, str]:
    """Return `image`, `image_digest`, `image_build` and `image_base` of this process's image; empty outside of one."""
    found = {"image": env.get(NAME, ""), "image_digest": env.get(DIGEST, "")}
    for key, file in (("image_build", build_id), ("image_base", base)):
        if file.is_file():
            found[key] = file.read_text().strip()
    return {key: value for key, value in found.items() if value}
