"""Container runtimes of the matrix as an ordinary user starts them: with images and containers of the user."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import small_image
from containers import Containers
from ordinary_user import USER, UserRuns, give_to_user, user_nodes
from runtime_cases import RuntimeCase, prepared


@contextmanager
def prepared_for_user(case: str, containers: Containers, runs: UserRuns, folder: Path) -> Iterator[RuntimeCase]:
    """Prepare a runtime on the nodes for the user for the duration of the block.

    Args:
        folder: an empty folder that all users can enter.
    """
    ready = prepared(case, containers, runs, folder, group=str(USER.pw_gid))
    with ready as found, user_nodes(runs.cluster, folder) as runs.enter:
        found.restore()  # nodes that start again have no docker daemon
        if case == "podman":
            yield from _podman(found, containers, runs)
        elif case == "enroot-folder":  # enroot writes a lock file and mount points into it
            copy = runs.home / "image"
            subprocess.run(["cp", "--archive", str(small_image.build(containers).folder), str(copy)], check=True)
            give_to_user(copy)
            yield _with_image(found, copy)
        else:
            yield found


def _with_image(case: RuntimeCase, image: Path | str) -> RuntimeCase:
    key = "container.image="
    return replace(case, overrides=tuple(f"{key}{image}" if one.startswith(key) else one for one in case.overrides))


def _podman(case: RuntimeCase, containers: Containers, runs: UserRuns) -> Iterator[RuntimeCase]:
    """Yield rootless podman with a store in the user's home folder, which has the image."""
    settings = runs.home / ".config/containers"
    settings.mkdir(parents=True)
    (settings / "containers.conf").write_text(Path(containers.env["CONTAINERS_CONF"]).read_text())
    (settings / "storage.conf").write_text('[storage]\ndriver = "overlay"\n')
    give_to_user(settings.parent)

    def podman(*arguments: str) -> str:
        return runs.run_as_user("podman", *arguments)

    def left(run: Path) -> list[str]:
        """Return the names of a run's containers, and what is mounted in the namespace that podman keeps."""
        found = podman("ps", "--all", "--filter", f"label=hpcdist.run={run}", "--format", "{{.Names}}").split()
        places = [line.split()[4] for line in podman("unshare", "cat", "/proc/self/mountinfo").splitlines()]
        return [*found, *(place for place in places if place.endswith("/merged"))]

    image = small_image.build(containers)
    try:
        podman("import", str(image.tar), image.name)
        yield replace(_with_image(case, image.name), env={}, containers=left)
    finally:
        podman("rm", "--all", "--force")
        # Ends the process that keeps the user's namespaces between two commands.
        podman("system", "migrate")
