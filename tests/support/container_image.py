"""Our image as ranks on Slurm are started in it: by its name with podman, as a folder with charliecloud."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from containers import Containers


@dataclass(frozen=True)
class ContainerImage:
    name: str  #: in podman's store
    folder: Path  #: the same, unpacked
    containers: Containers

    def podman(self, *arguments: str) -> str:
        return self.containers.podman(*arguments)

    @property
    def env(self) -> dict[str, str]:
        """Variables that let podman find the image's store."""
        return {name: value for name, value in self.containers.env.items() if name.startswith("CONTAINERS_")}


@contextmanager
def unpacked(containers: Containers, name: str) -> Iterator[ContainerImage]:
    """An image of podman's store, its files mounted from there: a copy of several gigabytes would take minutes."""
    container = containers.podman("create", name).strip()
    try:
        folder = Path(containers.podman("mount", container).strip())
        # As `hpcdist image convert` leaves it.
        (folder / "ch").mkdir()
        (folder / "ch/environment").write_text(
            "".join(f"{line}\n" for line in containers.inspect(name)["Config"]["Env"])
        )
        yield ContainerImage(name, folder, containers)
        containers.podman("unmount", container)
    finally:
        containers.podman("rm", "--force", container)
