"""The digest of a build's base image, so that a later build uses the same base."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdist.containers.images.engine import Engine, error_line
from hpcdist.containers.images.labels import inspected
from hpcdist.errors import ImageError

_DEFAULT = re.compile(r"^ARG BASE_IMAGE=(\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A base image and its digest, if one was found."""

    name: str  #: as the user or the Dockerfile names it, tag included
    digest: str = ""  #: `sha256:…` of its manifest in a registry
    id: str = ""  #: `sha256:…` of its config, for a local image without a registry digest
    problem: str = ""  #: why there is no digest, in one line

    @property
    def reference(self) -> str:
        """The name to build from, with the digest if it is known."""
        return f"{repository(self.name)}@{self.digest}" if self.digest else self.name


def default_base(dockerfile: Path) -> str:
    """Return the base image that a Dockerfile names itself."""
    found = _DEFAULT.search(dockerfile.read_text())
    if found is None:
        raise ImageError(f"{dockerfile} names no base image (no line `ARG BASE_IMAGE=…`): restore the file")
    return found[1]


def repository(name: str) -> str:
    """Return the name of an image without tag and digest; a colon before a slash belongs to a port."""
    name = name.partition("@")[0]
    head, slash, tail = name.rpartition("/")
    return f"{head}{slash}{tail.partition(':')[0]}"


def look_up(engine: Engine, name: str, *, pull: bool) -> Base:
    """Find the digest of a base image: in its name, in the engine's store, or by pulling the image as the build would.

    Args:
        pull: whether the image may be pulled; a dry run pulls nothing.
    """
    _, _, digest = name.partition("@")
    if digest:
        return Base(name=name, digest=digest)
    if engine.name == "buildah":
        return Base(name=name, problem="buildah reports no digests; docker and podman do")
    found = _inspect(engine, name)
    if found is None and pull:
        done = engine.run("pull", "--quiet", name)
        if done.returncode:
            return Base(name=name, problem=f"{engine.name} cannot pull it: {error_line(done.stderr)}")
        found = _inspect(engine, name)
    if found is None:
        return Base(name=name, problem=f"{engine.name} does not have it here, and a dry run pulls nothing")
    return _of(name, found)


def _inspect(engine: Engine, name: str) -> Mapping[str, object] | None:
    done = engine.run("image", "inspect", name)
    return None if done.returncode else inspected(engine, name, done.stdout)


def _of(name: str, found: Mapping[str, object]) -> Base:
    """Return the Base of an image that the engine has in its store.

    podman lists a digest of its own for images that were never in a registry, under `localhost`.
    """
    listed = found.get("RepoDigests")
    digests = [str(entry).partition("@") for entry in listed] if isinstance(listed, list) else []
    own = _full(repository(name))
    for repo, _, digest in digests:
        if _full(repo) == own and not own.startswith("localhost/"):
            return Base(name=name, digest=digest)
    identity = str(found["Id"])
    return Base(
        name=name,
        id=identity if ":" in identity else f"sha256:{identity}",
        problem="a local image without a digest of a registry",
    )


def _full(repo: str) -> str:
    """Return a repository with the registry and the folder that docker leaves out: `debian`, `nvidia/cuda`."""
    if "/" not in repo:
        return f"docker.io/library/{repo}"
    first = repo.partition("/")[0]
    if "." not in first and ":" not in first and first != "localhost":
        return f"docker.io/{repo}"
    return repo
