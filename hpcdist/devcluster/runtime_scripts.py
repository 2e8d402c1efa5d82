"""Container runtimes of a dev cluster, so that a containerised launch can be tried before it is submitted elsewhere.

The nodes share this machine's files. Scripts in the cluster's `bin` replace the programs of the runtimes. That of
enroot selects the folder of its containers on a node.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcdist.devcluster.settings import BARE_ENV, Layout, Settings
from hpcdist.errors import DevClusterError
from hpcdist.host.files import write_atomic
from hpcdist.host.machine import CAP_SYS_RESOURCE, has_capability

#: Programs of each runtime that must be on the PATH of `up`.
PROGRAMS = {
    "none": (),
    "apptainer": ("apptainer",),
    "pyxis": ("enroot",),
}
_HEAD = "#!/bin/sh\n# Written by `hpcdist devcluster up`; changes are lost.\n"


def find_programs(settings: Settings, layout: Layout, env: Mapping[str, str]) -> dict[str, Path]:
    """Return the paths of the programs of the container runtime, by name.

    Raises DevClusterError if one of them, or pyxis's plugin, is not installed.
    """
    # The caller's PATH may contain the scripts of an earlier `up`.
    folders = [*env.get("PATH", "").split(":"), *BARE_ENV["PATH"].split(":")]
    path = ":".join(folder for folder in folders if folder and Path(folder) != layout.bin)
    programs = {}
    missing = []
    for name in PROGRAMS[settings.runtime]:
        place = shutil.which(name, path=path)
        if place is None:
            missing.append(name)
        else:
            programs[name] = Path(place).absolute()
    if missing:
        raise DevClusterError(f"--runtime {settings.runtime}: {', '.join(missing)} not found on PATH: install it first")
    if settings.runtime == "pyxis" and not Path(settings.pyxis_plugin).is_file():
        raise DevClusterError(
            f"--pyxis-plugin {settings.pyxis_plugin}: no such file: build pyxis for the installed Slurm with"
            " `make install`, or name its spank_pyxis.so"
        )
    return programs


def write_scripts(settings: Settings, layout: Layout, programs: Mapping[str, Path]) -> None:
    """Write the files of the container runtime: scripts, and for pyxis the folder and the plugin's configuration.

    Args:
        programs: see `find_programs`.
    """
    if settings.runtime == "none":
        return
    layout.bin.mkdir(exist_ok=True)
    may_raise_limits = has_capability(CAP_SYS_RESOURCE)
    for name, text in scripts(settings, layout, programs, may_raise_limits=may_raise_limits).items():
        script = layout.bin / name
        write_atomic(script, text)
        script.chmod(0o755)
    if settings.runtime == "pyxis":
        layout.enroot.mkdir(exist_ok=True)
        layout.enroot.chmod(0o1777)
        plugin = f"required {settings.pyxis_plugin} runtime_path={layout.state}/pyxis\n"
        write_atomic(layout.conf / "plugstack.conf", plugin)


def scripts(
    settings: Settings, layout: Layout, programs: Mapping[str, Path], *, may_raise_limits: bool
) -> dict[str, str]:
    """Return the text of the scripts in `bin` by name.

    Args:
        programs: see `find_programs`.
        may_raise_limits: whether root has CAP_SYS_RESOURCE, as on a host.
    """
    if settings.runtime == "apptainer":
        lines = ""
        if not may_raise_limits:
            # apptainer requests all capabilities of root, and does not start without one of them.
            lines = '[ "$(id -u)" != 0 ] || export APPTAINER_DROP_CAPS="${APPTAINER_DROP_CAPS:-CAP_SYS_RESOURCE}"\n'
        return {"apptainer": f'{_HEAD}{lines}exec {programs["apptainer"]} "$@"\n'}
    if settings.runtime == "pyxis":
        folder = f"{layout.enroot}/$(hostname)-$(id -u)"
        paths = " ".join(f"ENROOT_{name}_PATH=$own/{name.lower()}" for name in ("DATA", "RUNTIME", "CACHE"))
        # enroot calls further programs of its folder.
        path = f"PATH=$PATH:{programs['enroot'].parent}"
        return {"enroot": f'{_HEAD}own={folder}\nexport {path} {paths}\nexec {programs["enroot"]} "$@"\n'}
    return {}
