"""The image that this process runs in, as far as it can know: what reviewers of a run want to see."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

#: Written when the image is built: a hash of everything that went into it. No image can hold its own digest.
BUILD_ID = Path(sys.prefix) / "build-id"
#: Written when the image is built: the digest of its base, else the base's id or name.
BASE = Path(sys.prefix) / "base-image"
#: Set by whoever starts a container and knows its image's name and digest.
NAME, DIGEST = "HPCDIST_IMAGE", "HPCDIST_IMAGE_DIGEST"


def image_facts(env: Mapping[str, str], build_id: Path = BUILD_ID, base: Path = BASE) -> dict[str, str]:
    """`image`, `image_digest`, `image_build`, `image_base` of the image around this process; empty outside of one."""
    found = {"image": env.get(NAME, ""), "image_digest": env.get(DIGEST, "")}
    for key, file in (("image_build", build_id), ("image_base", base)):
        if file.is_file():
            found[key] = file.read_text().strip()
    return {key: value for key, value in found.items() if value}
