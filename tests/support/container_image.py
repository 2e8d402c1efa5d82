"""The image in which Slurm tests start ranks: by name with podman, as a folder with charliecloud."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from containers import Containers


@dataclass(frozen=True)
class ContainerImage:
    name: str  #: name in podman's store
    folder: Path  #: the unpacked image
    containers: Containers

    def podman(self, *arguments: str) -> str:
        return self.containers.podman(*arguments)

    @property
    def env(self) -> dict[str, str]:
        """Return the variables by which podman finds the store of the image."""
        return {name: value for name, value in self.containers.env.items() if name.startswith("CONTAINERS_")}


@contextmanager
def mounted_image(containers: Containers, name: str) -> Iterator[ContainerImage]:
    """Yield an image mounted from podman's store, because a copy of several gigabytes would take minutes."""
    container = containers.podman("create", name).strip()
    try:
        folder = Path(containers.podman("mount", container).strip())
        # The files that `hpcdist image convert` adds.
        (folder / "ch").mkdir()
        (folder / "ch/environment").write_text(
            "".join(f"{line}\n" for line in containers.inspect(name)["Config"]["Env"])
        )
        yield ContainerImage(name, folder, containers)
        containers.podman("unmount", container)
    finally:
        containers.podman("rm", "--force", container)
