"""The container runtimes of Slurm: the command line and the environment that start a container in a task of srun.

A command line is composed in three places: `container_words` puts the runtime's words in front of the command,
`job/srun.py` puts srun's words in front of these, and `node_wrapper.sh` adds the words that depend on the node.

All three runtimes start containers as child processes of the Slurm step, so Slurm signals and ends them.

docs/reference/tested-versions.md lists the tested versions. The command lines follow the runtimes' documentation:
https://apptainer.org/docs/user/main/cli/apptainer_exec.html,
https://github.com/NVIDIA/enroot/blob/master/doc/cmd/start.md, https://github.com/NVIDIA/pyxis/wiki/Usage
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from hpcdist.containers.spec import WITHHELD, ContainerSpec

NODE_WRAPPER = Path(__file__).with_name("node_wrapper.sh")
#: Job name of the Slurm steps that check an image or remove containers.
CONTAINERS_STEP = "hpcdist-containers"
#: Slurm sends SIGUSR2 ahead of the time limit; a rank that has no handler yet must not die of it.
IGNORE_USR2 = ("sh", "-c", "trap '' USR2; exec \"$@\"", "sh")
#: Folder that exists on nodes with InfiniBand or RoCE adapters.
INFINIBAND = Path("/dev/infiniband")
#: Variables that runtimes and srun need on the host.
_OF_THE_HOST = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_*", "APPTAINER_*", "SINGULARITY_*", "ENROOT_*", "NVIDIA_*",
    "MELLANOX_*",
)  # fmt: skip
#: Without it, packages of ~/.local replace those of the image if the home folder is mounted.
NO_USER_PACKAGES = {"PYTHONNOUSERSITE": "1"}
#: enroot's login shell reads /etc/profile, which resets PATH in Debian's images and so hides the image's own Python.
_NO_LOGIN_SHELL = {"ENROOT_LOGIN_SHELL": "no"}
_PYXIS_MOUNTS = "--container-mounts="


def container_words(spec: ContainerSpec, command: Sequence[str]) -> list[str]:
    """Return the words behind srun's own options that run `command` in a container in each task."""
    inside = [*IGNORE_USR2, *command]
    if spec.runtime == "pyxis":  # a plugin of Slurm: its words are further options of srun
        return [*pyxis(spec), *inside]
    return ["sh", str(NODE_WRAPPER), *_RUNTIMES[spec.runtime](spec), *inside]


def apptainer(spec: ContainerSpec) -> list[str]:
    """Return the words of `apptainer exec`, which shares the host's network, /dev, /dev/shm and limits by default."""
    words = ["apptainer", "exec", "--no-home"]
    words += [f"--bind={mount.text()}" for mount in spec.mounts]
    words.append(f"--pwd={spec.workdir}")
    if spec.uses_gpus:
        words.append("--nv")
    return [*words, *spec.extra_args, spec.image]


def enroot(spec: ContainerSpec) -> list[str]:
    """Return the words of `enroot start`; our script replaces the command script that starts the image's entrypoint.

    enroot starts a folder by its name below ENROOT_DATA_PATH, which `outer_env` sets.
    """
    words = ["enroot", "start", f"--rc={NODE_WRAPPER}"]
    for mount in spec.mounts:
        words.append(f"--mount={mount.text(':none:x-create=auto,rbind,ro', ':none:x-create=auto,rbind,rw')}")
    image = Path(spec.image).name if spec.is_folder else spec.image
    return [*words, *spec.extra_args, image, "in", str(spec.workdir)]


def pyxis(spec: ContainerSpec) -> list[str]:
    """Return the options of srun by which its plugin pyxis starts the container."""
    # srun keeps only the last of several lists of mounts, and refuses an empty one.
    mounts = [mount.text() for mount in spec.mounts]
    options = []
    for text in spec.extra_args:
        if text.startswith(_PYXIS_MOUNTS):
            mounts.append(text.removeprefix(_PYXIS_MOUNTS))
        else:
            options.append(text)
    words = [f"--container-image={spec.image}"]
    if mounts:
        words.append(f"{_PYXIS_MOUNTS}{','.join(mounts)}")
    words.append(f"--container-workdir={spec.workdir}")
    words += ["--no-container-entrypoint", "--no-container-mount-home", "--no-container-remap-root"]
    return [*words, *options]


_RUNTIMES: dict[str, Callable[[ContainerSpec], list[str]]] = {"apptainer": apptainer, "enroot": enroot}


def outer_env(spec: ContainerSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which the runtime is started.

    Containers inherit it, so it has only the variables that the ranks and the runtime need.
    """
    allowed = (*spec.env, *_OF_THE_HOST)
    withheld = {*WITHHELD}
    for names in spec.inherited.left_out.values():
        withheld.update(names)
    kept = dict(NO_USER_PACKAGES)
    for name, value in env.items():
        if name not in withheld and any(fnmatchcase(name, pattern) for pattern in allowed):
            kept[name] = value
    if spec.runtime == "apptainer":
        return kept
    if spec.is_folder:
        kept["ENROOT_DATA_PATH"] = str(Path(spec.image).parent)
    return {**_NO_LOGIN_SHELL, **kept, **_enroot_devices(spec)}


def _enroot_devices(spec: ContainerSpec) -> dict[str, str]:
    """Return the variables by which enroot's hooks, also below pyxis, add GPUs and InfiniBand devices.

    The InfiniBand hook fails on a node without an adapter. For enroot, `node_wrapper.sh` checks on the node itself.
    pyxis runs no script on the node, so the host of the batch step is checked instead of each node.
    """
    variables = {"NVIDIA_VISIBLE_DEVICES": "void"}
    if spec.uses_gpus:
        variables = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    if spec.runtime == "pyxis" and INFINIBAND.exists():
        variables["MELLANOX_VISIBLE_DEVICES"] = "all"
    return variables


def remove_command(job_id: str) -> list[str]:
    """Return the command that removes the containers that pyxis has left on a node for a job."""
    return ["sh", str(NODE_WRAPPER), "remove", job_id]
