"""An image's labels and other facts, and whether it fits this machine and this version of hpcdist."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import hpcdist
from hpcdist.containers.images.engine import Engine, error_line
from hpcdist.errors import ImageError
from hpcdist.files.bounded_json import parse_json
from hpcdist.machine.cuda_drivers import driver_problem

TITLE = "org.opencontainers.image.title"
VERSION = "org.opencontainers.image.version"
CUDA = "hpcdist.cuda"
BASE_NAME = "org.opencontainers.image.base.name"
BASE_DIGEST = "org.opencontainers.image.base.digest"
BASE_ID = "hpcdist.base.id"
#: Label with the path of the bill of materials in the image.
SBOM = "hpcdist.sbom"
ENTRYPOINT = ("tini", "--", "hpcdist")
#: Processor architectures: the kernel's name, and the name in images.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """An image as reported by `image inspect`."""

    name: str
    digest: str  #: `sha256:…` of its config: the same in every registry and before a push
    architecture: str
    entrypoint: tuple[str, ...]
    user: str
    labels: Mapping[str, str]
    env: tuple[str, ...]  #: `NAME=value`
    size_bytes: int

    @property
    def version(self) -> str:
        """Version of hpcdist in the image; empty if the labels name none."""
        return self.labels.get(VERSION, "") if self.labels.get(TITLE) == "hpcdist" else ""

    @property
    def base(self) -> str:
        """The base image with its digest, or its id if it has no digest; empty if the labels name none."""
        pinned = self.labels.get(BASE_DIGEST) or self.labels.get(BASE_ID, "")
        return " ".join(filter(None, [self.labels.get(BASE_NAME, ""), pinned]))


def inspect(engine: Engine, image: str) -> ImageFacts:
    """Read the facts of a local image. Raises ImageError if there is no image of that name."""
    done = engine.run("image", "inspect", image)
    if done.returncode:
        error = error_line(done.stderr)
        if any(words in error.lower() for words in ("no such image", "image not known", "no such object")):
            raise ImageError(
                f"{engine.name} has no image {image!r}: `hpcdist image build` makes one here,"
                f" `{engine.name} pull {image}` fetches one"
            )
        raise ImageError(f"{engine.name} cannot inspect image {image!r}: {error}")
    return parse(image, inspected(engine, image, done.stdout))


def inspected(engine: Engine, image: str, answer: str) -> Mapping[str, Any]:
    """Return the description in the answer of `image inspect`. Raises ImageError if it is not one."""
    try:
        (found,) = parse_json(answer)
        if isinstance(found["Id"], str) and isinstance(found.get("Config") or {}, dict):
            return dict(found)
        raise ValueError("its Id or Config has another type")
    except (ValueError, TypeError, LookupError) as error:
        raise ImageError(f"{engine.name} gives no valid description of image {image}: {error}") from error


def parse(name: str, raw: Mapping[str, Any]) -> ImageFacts:
    """Return the facts in one entry of `docker image inspect` or `podman image inspect`. Raises ImageError."""
    config = raw.get("Config") or {}
    labels, env, entrypoint = config.get("Labels") or {}, config.get("Env") or [], config.get("Entrypoint") or []
    if not (isinstance(labels, dict) and isinstance(env, list) and isinstance(entrypoint, list)):
        raise ImageError(f"the description of image {name} has labels, variables or an entrypoint of another type")
    identity = str(raw["Id"])
    return ImageFacts(
        name=name,
        digest=identity if ":" in identity else f"sha256:{identity}",
        architecture=str(raw.get("Architecture", "")),
        entrypoint=tuple(map(str, entrypoint)),
        user=str(config.get("User") or ""),
        labels={key: str(value) for key, value in labels.items()},
        env=tuple(map(str, env)),
        size_bytes=size if isinstance(size := raw.get("Size"), int) else 0,
    )


def read_sbom(engine: Engine, facts: ImageFacts) -> str:
    """Return an image's bill of materials in CycloneDX's JSON. Raises ImageError when the image has none."""
    path = facts.labels.get(SBOM)
    if not path:
        raise ImageError(
            f"image {facts.name} has no bill of materials (no label {SBOM!r}): build it again with"
            " `hpcdist image build`"
        )
    return engine.output("run", "--rm", "--entrypoint", "cat", facts.name, path)


def require_fit(facts: ImageFacts, *, machine: str = "") -> None:
    """Raise ImageError if an image is for another architecture or has another version of hpcdist."""
    here = ARCHITECTURES.get(machine or platform.machine(), machine or platform.machine())
    if facts.architecture != here:
        raise ImageError(
            f"image {facts.name} is for {facts.architecture}, this machine is {here}: build or pull it for {here}"
        )
    if not facts.version:
        raise ImageError(
            f"image {facts.name} holds no hpcdist (its label {TITLE!r} does not name it): build it with"
            " `hpcdist image build`, or FROM an image that was"
        )
    if facts.version != hpcdist.__version__:
        raise ImageError(
            f"image {facts.name} holds hpcdist {facts.version}, and this is {hpcdist.__version__}: build it again with"
            f" `hpcdist image build`, or use hpcdist {facts.version} here"
        )


def require_driver(facts: ImageFacts, driver: str) -> None:
    """Raise ImageError if this machine's driver is too old for an image's CUDA."""
    if problem := driver_problem(facts.labels.get(CUDA, ""), driver):
        raise ImageError(
            f"image {facts.name} needs {problem} here: update the driver, use an image with an older torch,"
            " or launch.device=cpu"
        )
