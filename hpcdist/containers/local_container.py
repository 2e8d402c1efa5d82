"""The container of a whole run on this machine: `hpcdist run --in docker|podman`."""

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from hpcdist.config.document import parse_value
from hpcdist.config.schema import Config
from hpcdist.config.written import redacted_argument
from hpcdist.containers.engine import EngineName
from hpcdist.containers.inherited import Inherited, inherited
from hpcdist.containers.mounts import Mount
from hpcdist.containers.runtimes import NO_USER_PACKAGES
from hpcdist.errors import UserMistake
from hpcdist.host.image_identity import DIGEST, NAME
from hpcdist.host.machine import CAP_SYS_RESOURCE, has_capability

#: Prefixes of variables that are passed by name, so that no value is in the command line. All others stay outside.
PASSED_PREFIXES = ("MLFLOW_TRACKING_", "NCCL_", "GLOO_", "TORCH_", "HPCDIST_")
#: Variables that the image or the command line sets.
SET_HERE = ("HPCDIST_RUNS_DIR", "HPCDIST_DATA_DIR", NAME, DIGEST)
INFINIBAND = "/dev/infiniband"
#: Start of a config value that is read from an environment variable.
_REFERENCE = "${oc.env:"
_UNLIMITED_MEMLOCK = "memlock=-1"
#: docker's default stack is too small for some threads of torch; this is 64 MiB.
_DOCKER_STACK = "stack=67108864"


@dataclass(frozen=True, kw_only=True)
class LocalContainer:
    """The container of a whole run: the options of `docker run` or `podman run`."""

    engine: EngineName
    image: str
    user: str  #: `UID:GID`
    mounts: tuple[Mount, ...] = ()
    workdir: Path | None = None
    env: tuple[str, ...] = ()  #: variables passed by name
    env_values: Mapping[str, str]  #: variables set to other values than the host's
    gpus: str = ""  #: `all`, comma-separated device numbers, or empty for none
    devices: tuple[str, ...] = ()
    ulimits: tuple[str, ...] = ()
    host_network: bool = False
    terminal: bool = False
    stop_timeout_s: int
    notes: tuple[str, ...] = ()  #: variables that the container does not get, with the reasons


def run_words(container: LocalContainer) -> list[str]:
    """Return the words of `docker run` or `podman run` in front of the arguments of the image's entrypoint."""
    words = [container.engine, "run", "--rm"]
    if container.terminal:
        words += ["--interactive", "--tty"]
    if container.host_network:
        words.append("--network=host")
    words.append("--ipc=host")
    words += [f"--ulimit={limit}" for limit in container.ulimits]
    words += [f"--user={container.user}", f"--stop-timeout={container.stop_timeout_s}"]
    words += [f"--device={device}" for device in container.devices]
    words += [f"--volume={mount.text()}" for mount in container.mounts]
    if container.workdir is not None:
        words.append(f"--workdir={container.workdir}")
    if container.engine == "podman":
        words += _podman_options(container)
    elif container.gpus == "all":
        words.append("--gpus=all")
    elif container.gpus:
        # docker splits at commas before it interprets quotes.
        words.append(f'--gpus="device={container.gpus}"')
    words += [f"--env={name}={value}" for name, value in container.env_values.items()]
    words += [f"--env={name}" for name in container.env]
    return [*words, container.image]


def _podman_options(container: LocalContainer) -> list[str]:
    words = []
    if not container.user.startswith("0:"):
        # Rootless podman would map the caller to another user.
        words.append("--userns=keep-id")
    for gpu in container.gpus.split(","):
        if gpu:
            words.append(f"--device=nvidia.com/gpu={gpu.strip()}")
    return words


def local_container(
    engine: EngineName,
    image: str,
    digest: str,
    user: str,
    config: Config,
    cwd: Path,
    *,
    own_code: bool,
    num_gpus: int,
    env: Mapping[str, str],
    rootless_daemon: bool = False,
) -> LocalContainer:
    """Return the container of a whole run, with this machine's devices, limits and user.

    Args:
        digest: digest of the image; empty if it is unknown.
        user: the caller's name.
        own_code: whether the run imports code from `cwd`.
        rootless_daemon: whether docker's daemon runs as the caller; root in its containers is then the caller.
    """
    runs = Path(config.runs_dir).expanduser().absolute()
    data = Path(config.data.root).expanduser().absolute()
    workdir = cwd if own_code else None
    gpus = ""
    if num_gpus and config.launch.device != "cpu":
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").strip() or "all"
    has_rdma = Path(INFINIBAND).is_dir()
    mounts = _mounts(config, runs, data, workdir)
    of_user = inherited(env, (), mounts)
    # Ranks save a checkpoint in the first time, and the supervisor delivers the rest to MLflow in the second one.
    stop_timeout_s = config.launch.stop_grace_s + config.tracking.drain_timeout_s
    return LocalContainer(
        engine=engine,
        image=image,
        user="0:0" if rootless_daemon else f"{os.getuid()}:{os.getgid()}",
        ulimits=_ulimits(engine, has_rdma=has_rdma, rootless_daemon=rootless_daemon),
        devices=(INFINIBAND,) if has_rdma else (),
        gpus=gpus,
        # Ranks use loopback and need no network except to reach an MLflow server on this machine.
        host_network=urlsplit(config.tracking.uri).hostname in ("localhost", "127.0.0.1", "::1"),
        mounts=(*mounts, *of_user.mounts),
        workdir=workdir,
        env=_passed_names(env, of_user),
        env_values={
            **NO_USER_PACKAGES,
            "USER": user,
            NAME: image,
            DIGEST: digest,
            "HPCDIST_RUNS_DIR": str(runs),
            "HPCDIST_DATA_DIR": str(data),
        },
        terminal=os.isatty(0) and os.isatty(1),
        stop_timeout_s=math.ceil(stop_timeout_s),
        notes=tuple(of_user.notes),
    )


def _mounts(config: Config, runs: Path, data: Path, workdir: Path | None) -> list[Mount]:
    """Return the mounts of the folders of runs, data, code and compiled code, each of them once."""
    folders = [runs, data]
    if workdir is not None:
        folders.append(workdir)
    compiled = config.compiled_folder.expanduser().absolute()
    if compiled.is_dir() and not compiled.is_relative_to(runs):
        folders.append(compiled)
    # Paths are the same inside and outside, because MLflow's database and the run folder store them.
    return [Mount(source=str(folder), target=str(folder)) for folder in dict.fromkeys(folders)]


def _passed_names(env: Mapping[str, str], of_user: Inherited) -> tuple[str, ...]:
    """Return the names of the variables that the container gets from the environment.

    Args:
        of_user: those for libraries, such as caches and proxies.
    """
    withheld = {*SET_HERE}
    for names in of_user.left_out.values():
        withheld.update(names)
    passed = {name for name in env if name.startswith(PASSED_PREFIXES)} | {*of_user.names}
    return tuple(sorted(passed - withheld))


def _ulimits(engine: EngineName, *, has_rdma: bool, rootless_daemon: bool) -> tuple[str, ...]:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    may_lock = hard_limit == resource.RLIM_INFINITY or has_capability(CAP_SYS_RESOURCE)
    if engine == "podman":
        # podman without root is bound to the limits of its caller.
        return (_UNLIMITED_MEMLOCK if may_lock else "host",)
    # A daemon without CAP_SYS_RESOURCE (rootless, in a container) cannot raise the limit, and starts no container.
    if has_rdma and (may_lock or not rootless_daemon):
        return (_UNLIMITED_MEMLOCK, _DOCKER_STACK)
    return (_DOCKER_STACK,)


def without_secrets(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the secrets of overrides into variables, because `docker inspect` and `ps` show arguments to other users.

    Returns the overrides with references to the variables, and the variables. Raises UserMistake for a value that holds
    a secret among others.
    """
    arguments = []
    variables: dict[str, str] = {}
    for number, text in enumerate(overrides):
        key, _, raw = text.partition("=")
        if redacted_argument(text) == text or _REFERENCE in raw:
            arguments.append(text)
            continue
        value = parse_value(raw)
        if not isinstance(value, str):
            raise UserMistake(
                f"{key} holds a secret, which the container's command line would show to other users:"
                f" give each by a key of its own, such as {key}.NAME=…"
            )
        name = f"HPCDIST_OVERRIDE_{number}"
        variables[name] = value
        arguments.append(f"{key}={_REFERENCE}{name}}}")
    return arguments, variables
