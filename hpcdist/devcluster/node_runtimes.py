"""Container runtimes of a dev cluster, so that a containerised launch can be tried before it is submitted elsewhere.

The nodes share this machine's files. Scripts in the cluster's `bin` replace the programs of the runtimes. They select
the docker daemon of a node, and the folder of enroot's containers on it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcdist.devcluster import argv, processes
from hpcdist.devcluster.settings import Layout, Settings
from hpcdist.devcluster.system import start, succeeds, wait_until
from hpcdist.errors import DevClusterError
from hpcdist.files.atomic import write_atomic
from hpcdist.machine.capabilities import CAP_SYS_RESOURCE, has_capability

PROGRAMS = {
    "none": (),
    "apptainer": ("apptainer",),
    "docker": ("dockerd", "docker", "containerd", "runc"),
    "pyxis": ("enroot",),
}
"""Programs of each runtime that must be on the PATH of `up`."""
_SOURCES = {
    "apptainer": "install the package that the project apptainer publishes for this release",
    "docker": "install Debian's package docker.io",
    "pyxis": "install the package that the project enroot publishes",
}
#: A daemon creates its database and networks when it starts for the first time.
READY_WITHIN_S = 120.0
_WITHIN_LIMITS = Path(__file__).with_name("runc_within_limits.sh")
_HEAD = "#!/bin/sh\n# Written by `hpcdist devcluster up`; changes are lost.\n"


def find_programs(settings: Settings, layout: Layout, env: Mapping[str, str]) -> dict[str, Path]:
    """Return the runtime's programs by name.

    Raises:
        DevClusterError: some are not installed, or the plugin pyxis does not exist.
    """
    # The caller's PATH may contain the scripts of an earlier `up`.
    folders = [*env.get("PATH", "").split(":"), *argv.BARE_ENV["PATH"].split(":")]
    path = ":".join(folder for folder in folders if folder and Path(folder) != layout.bin)
    found = {name: shutil.which(name, path=path) for name in PROGRAMS[settings.runtime]}
    if missing := [name for name, place in found.items() if place is None]:
        raise DevClusterError(
            f"--runtime {settings.runtime}: {', '.join(missing)} not found on PATH: {_SOURCES[settings.runtime]}"
        )
    if settings.runtime == "pyxis" and not Path(settings.pyxis_plugin).is_file():
        raise DevClusterError(
            f"--pyxis-plugin {settings.pyxis_plugin}: no such file: build pyxis for the installed Slurm with"
            " `make install`, or name its spank_pyxis.so"
        )
    return {name: Path(place).absolute() for name, place in found.items() if place is not None}


def write_files(settings: Settings, layout: Layout, programs: Mapping[str, Path]) -> None:
    """Create the runtime's scripts, folders and configuration."""
    if settings.runtime == "none":
        return
    layout.bin.mkdir(exist_ok=True)
    may_raise_limits = has_capability(CAP_SYS_RESOURCE)
    for name, text in scripts(settings, layout, programs, may_raise_limits=may_raise_limits).items():
        write_atomic(layout.bin / name, text)
        (layout.bin / name).chmod(0o755)
    if settings.runtime == "docker":
        layout.docker.mkdir(exist_ok=True)
        layout.docker_images.mkdir(exist_ok=True)
    if settings.runtime == "pyxis":
        layout.enroot.mkdir(exist_ok=True)
        layout.enroot.chmod(0o1777)
        write_atomic(layout.conf / "plugstack.conf", plugstack_conf(settings, layout))


def plugstack_conf(settings: Settings, layout: Layout) -> str:
    """Return Slurm's list of plugins, with pyxis' files in the state folder."""
    return f"required {settings.pyxis_plugin} runtime_path={layout.state}/pyxis\n"


def scripts(
    settings: Settings, layout: Layout, programs: Mapping[str, Path], *, may_raise_limits: bool
) -> dict[str, str]:
    """Return the text of the scripts in `bin` by name.

    Args:
        may_raise_limits: whether root has CAP_SYS_RESOURCE, which it lacks in a container.
    """
    if settings.runtime == "apptainer":
        # It requests all capabilities of root, and does not start without one of them.
        drop = '[ "$(id -u)" != 0 ] || export APPTAINER_DROP_CAPS="${APPTAINER_DROP_CAPS:-CAP_SYS_RESOURCE}"\n'
        return {"apptainer": f'{_HEAD}{"" if may_raise_limits else drop}exec {programs["apptainer"]} "$@"\n'}
    if settings.runtime == "docker":
        folders = ":".join(dict.fromkeys(str(program.parent) for program in programs.values()))
        client = (
            f"{_HEAD}socket={layout.docker}/$(hostname).sock\n"
            f'[ -S "$socket" ] || socket={layout.docker_socket(settings.nodes[0])} # this machine is no node\n'
            f'DOCKER_HOST=unix://$socket exec {programs["docker"]} "$@"\n'
        )
        daemon = f"{_HEAD}PATH={folders}:$PATH exec {programs['dockerd']}"
        if may_raise_limits:
            return {"docker": client, "dockerd": f'{daemon} "$@"\n'}
        own = f"--add-runtime=within-limits={layout.bin}/within-limits --default-runtime=within-limits"
        return {"docker": client, "dockerd": f'{daemon} {own} "$@"\n', "within-limits": _WITHIN_LIMITS.read_text()}
    if settings.runtime == "pyxis":
        own = f"{layout.enroot}/$(hostname)-$(id -u)"
        paths = " ".join(f"ENROOT_{name}_PATH=$own/{name.lower()}" for name in ("DATA", "RUNTIME", "CACHE"))
        # enroot calls further programs of its folder.
        path = f"PATH=$PATH:{programs['enroot'].parent}"
        return {"enroot": f'{_HEAD}own={own}\nexport {path} {paths}\nexec {programs["enroot"]} "$@"\n'}
    return {}


def start_daemon(settings: Settings, layout: Layout, node: str) -> None:
    """Start the runtime's daemon of a node, if it has one, unless it is running."""
    if settings.runtime != "docker":
        return
    daemon = argv.dockerd(layout, node)
    if not processes.is_running(layout, daemon):
        # A killed daemon and its containerd leave their process ids, which exist again in the new namespace.
        (layout.docker / f"{node}.pid").unlink(missing_ok=True)
        shutil.rmtree(layout.docker / node, ignore_errors=True)
    start(layout, daemon)


def wait_for_daemon(settings: Settings, layout: Layout, node: str) -> None:
    """Wait until the runtime's daemon of a node, if it has one, answers."""
    if settings.runtime == "docker":
        version = [str(layout.bin / "docker"), f"--host=unix://{layout.docker_socket(node)}", "version"]
        problem = f"dockerd of {node} does not answer"
        wait_until(lambda: succeeds(version), problem, layout, argv.dockerd(layout, node), READY_WITHIN_S)
