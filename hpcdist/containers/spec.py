"""The container of a run's ranks on Slurm: from config to ContainerSpec, and its checks before a submission."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdist.config.schema import Config
from hpcdist.config.written import secrets_of
from hpcdist.containers.inherited import FOR_LIBRARIES, Inherited, inherited
from hpcdist.containers.mounts import Mount, without_nested
from hpcdist.errors import UserMistake
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import git_root
from hpcdist.slurm.placement import requested_cluster

#: Python of the image, a command on the image's PATH.
IMAGE_PYTHON = "python3"
#: Environment variables that a rank needs, as names and patterns. All others of the job stay outside the container.
PASSED = (
    "SLURM_*", "SLURMD_NODENAME", "PMI*", "CUDA_VISIBLE_DEVICES", "HPCDIST_*", "NCCL_*", "GLOO_*", "TP_*", "TORCH_*",
    "UCX_*", "FI_*", "OMP_*", "MKL_*", "MALLOC_*", "PYTHONPATH", "PYTHONUNBUFFERED", "RES_OPTIONS", "TZ", "LANG",
    "LC_*", *FOR_LIBRARIES,
)  # fmt: skip
#: Variables that are never passed: the tracking URI may hold a password that ranks do not need, and SLURM_JWT is a key
#: to Slurm itself.
WITHHELD = ("HPCDIST_TRACKING_URI", "SLURM_JWT")
#: Folders that are mounted only if the config names them: as current folder they would hide the image's own programs.
_OF_THE_IMAGE = {"/", "/bin", "/dev", "/etc", "/lib", "/opt", "/proc", "/sbin", "/sys", "/usr", "/var"}
NOTHING_INHERITED = Inherited(names=(), mounts=(), left_out={})


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """The container of a run's ranks on Slurm."""

    runtime: str  #: apptainer, enroot or pyxis
    image: str
    is_folder: bool = False  #: whether the image is an unpacked root file system
    mounts: tuple[Mount, ...] = ()
    workdir: Path
    env: tuple[str, ...] = PASSED  #: variables to pass, by name or pattern (`NCCL_*`)
    #: Of these, the ones that the container inherits from the user's environment.
    inherited: Inherited = NOTHING_INHERITED
    uses_gpus: bool = False
    extra_args: tuple[str, ...] = ()  #: options of the runtime, with pyxis of srun


def rank_container(
    config: Config, run: RunDir, env: Mapping[str, str], *, cwd: Path, root: Path
) -> ContainerSpec | None:
    """Return the container of a run's ranks; None if `container.runtime` is `none`.

    Args:
        env: the environment that the container's is made of.
        cwd: the ranks' current folder.
        root: the top folder of the code around `cwd`.
    """
    container = config.container
    if container.runtime == "none":
        return None
    names = [*config.cluster.env, *config.launch.env, *secrets_of(config)]
    passed = [*PASSED, *container.env, *(name for name in names if name not in WITHHELD)]
    mounts = _mounts(config, [run.path, root, cwd])
    of_user = inherited(env, {*container.env, *names}, mounts)
    return ContainerSpec(
        runtime=container.runtime,
        image=container.image,
        is_folder=Path(container.image).is_dir(),
        mounts=without_nested([*mounts, *of_user.mounts]),
        workdir=cwd,
        env=tuple(dict.fromkeys(passed)),
        inherited=of_user,
        uses_gpus=requested_cluster(config).gpus_per_node > 0 and config.launch.device != "cpu",
        extra_args=tuple(container.extra_args),
    )


def _mounts(config: Config, folders: Sequence[Path]) -> tuple[Mount, ...]:
    """Return the mounts of the config, and of folders of the run. The paths of these are the same inside as outside."""
    mounts = [Mount.parse(text) for text in config.container.mounts]
    taken = {mount.target for mount in mounts} | _OF_THE_IMAGE
    paths = list(folders)
    for folder in (Path(config.data.root), config.compiled_folder):
        if folder.is_dir():
            paths.append(folder)
    script = config.trainer.script_file
    if script is not None:
        paths.append(script.parent)
    for path in paths:
        if str(path) not in taken:
            mounts.append(Mount(source=str(path), target=str(path)))
    return without_nested(mounts)


def planned_container(config: Config, cwd: Path, env: Mapping[str, str]) -> ContainerSpec | None:
    """Return the container of a run that has no folder yet."""
    run = RunDir(Path(config.runs_dir) / config.experiment / (config.name or "probe"))
    return rank_container(config, run, env, cwd=cwd, root=git_root(cwd) or cwd)


def container_problems(config: Config, cwd: Path) -> list[str]:
    """Return the problems of `container` that this machine shows without starting the image."""
    problems = []
    for text in config.container.mounts:
        source = Mount.parse(text).source
        if not Path(source).exists():
            problems.append(
                f"container.mounts: {source} does not exist here; mount folders that only the nodes have by"
                " container.extra_args"
            )
    try:
        spec = planned_container(config, cwd, {})
    except UserMistake as error:
        return [*problems, str(error)]
    if spec is not None:
        problem = _image_problem(spec)
        if problem:
            problems.append(problem)
    return problems


def _image_problem(spec: ContainerSpec) -> str:
    """Return why this machine cannot start an image; empty if it can or cannot know."""
    # pyxis takes a name that begins with `/` or `.` as a file. This machine cannot know whether a registry has an image
    # of another name: the nodes fetch it with credentials and mirrors of their own.
    if spec.runtime == "pyxis" and not spec.image.startswith(("/", ".")):
        return ""
    if "://" in spec.image:
        return f"container.image: {spec.image} would be fetched by every rank: convert it to a file first"
    path = Path(spec.image)
    if not path.exists():
        return f"container.image: no such file or folder: {spec.image}"
    if spec.runtime == "pyxis" and spec.is_folder:
        return f"container.image: {spec.image} is a folder, and pyxis needs a .sqsh file or an image reference"
    if spec.is_folder and not ((path / "usr").is_dir() and (path / "dev").is_dir()):
        return f"container.image: {spec.image} holds no root file system (no usr and dev in it)"
    return ""
