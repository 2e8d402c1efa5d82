"""`hpcdist run --in docker|podman`: the container of a whole run on this machine."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from hpcdist.config.schema import Config
from hpcdist.config.tree import parse_value
from hpcdist.config.written import redacted_argument
from hpcdist.containers.images.engine import EngineName
from hpcdist.containers.spec import ContainerSpec, Mount
from hpcdist.errors import UserMistake
from hpcdist.machine.capabilities import CAP_SYS_RESOURCE, has_capability
from hpcdist.machine.own_image import DIGEST, NAME

#: Prefixes of variables that are passed by name, so that no value is in the command line. All others stay outside.
PASSED_PREFIXES = ("MLFLOW_TRACKING_", "NCCL_", "GLOO_", "TORCH_", "HPCDIST_")
#: Variables that the image or the command line sets.
SET_HERE = ("HPCDIST_RUNS_DIR", "HPCDIST_DATA_DIR", NAME, DIGEST)
_REFERENCE = "${oc.env:"


def host_container(
    engine: EngineName, image: str, digest: str, user: str, env: Mapping[str, str], *, rootless_daemon: bool = False
) -> ContainerSpec:
    """Return the container of an image with this machine's devices, limits and user, before a config is applied.

    Args:
        rootless_daemon: whether docker's daemon belongs to the caller. Its containers then map root to the caller, and
            the caller's own user id to another user, who cannot write to the caller's folders.
    """
    has_rdma = Path("/dev/infiniband").is_dir()
    if engine == "docker":
        # A daemon without CAP_SYS_RESOURCE (rootless, in a container) cannot raise the limit, and starts no container.
        ulimits = ("memlock=-1",) if has_rdma and (not rootless_daemon or _may_lock_memory()) else ()
    else:
        # podman without root is bound to the limits of its caller.
        ulimits = ("memlock=-1" if _may_lock_memory() else "host",)
    return ContainerSpec(
        runtime=engine,
        image=image,
        user="0:0" if rootless_daemon else f"{os.getuid()}:{os.getgid()}",
        ulimits=ulimits,
        devices=("/dev/infiniband",) if has_rdma else (),
        env=tuple(sorted(name for name in env if name.startswith(PASSED_PREFIXES) and name not in SET_HERE)),
        env_values={"USER": user, NAME: image, DIGEST: digest},
        host_network=False,
        terminal=os.isatty(0) and os.isatty(1),
    )


def for_config(
    spec: ContainerSpec, config: Config, cwd: Path, *, own_code: bool, num_gpus: int, env: Mapping[str, str]
) -> ContainerSpec:
    """Add what a config needs: folders, GPUs, network, and the time to save a checkpoint when the container stops.

    Args:
        own_code: whether the run imports code from `cwd`.
    """
    runs, data = (Path(folder).expanduser().absolute() for folder in (config.runs_dir, config.data.root))
    gpus = ""
    if num_gpus and config.launch.device != "cpu":
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").strip() or "all"
    folders = dict.fromkeys([runs, data, *([cwd] if own_code else [])])
    return replace(
        spec,
        gpus=gpus,
        # Ranks use loopback and need no network except to reach an MLflow server on this machine.
        host_network=urlsplit(config.tracking.uri).hostname in ("localhost", "127.0.0.1", "::1"),
        # Paths are the same inside and outside, because MLflow's database and the run folder store them.
        mounts=tuple(Mount(source=str(folder), target=str(folder)) for folder in folders),
        workdir=cwd if own_code else None,
        env_values={**spec.env_values, "HPCDIST_RUNS_DIR": str(runs), "HPCDIST_DATA_DIR": str(data)},
        # Ranks need the first to save a checkpoint, the supervisor the second to deliver the rest to MLflow.
        stop_timeout_s=math.ceil(config.launch.stop_grace_s + config.tracking.drain_timeout_s),
    )


def with_mount(spec: ContainerSpec, folder: Path) -> ContainerSpec:
    """Return the container with one more folder mounted at its own path."""
    return replace(spec, mounts=(*spec.mounts, Mount(source=str(folder), target=str(folder))))


def folder_overrides(config: Config, default: Config) -> list[str]:
    """Return overrides with absolute paths for the folders that a config sets: `~` and relative paths differ inside."""
    chosen = {"runs_dir": (config.runs_dir, default.runs_dir), "data.root": (config.data.root, default.data.root)}
    return [f"{key}={value}" for key, (value, usual) in chosen.items() if value != usual]


def without_secrets(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the secrets of overrides into variables, because `docker inspect` and `ps` show arguments to other users.

    Returns:
        The overrides, which refer to the variables, and the variables.

    Raises:
        UserMistake: a secret is inside a list or a mapping.
    """
    arguments, variables = [], {}
    for number, text in enumerate(overrides):
        key, _, raw = text.partition("=")
        if redacted_argument(text) == text or _REFERENCE in raw:
            arguments.append(text)
            continue
        if not isinstance(value := parse_value(raw), str):
            raise UserMistake(
                f"{key} holds a secret, which the container's command line would show to other users:"
                f" give each by a key of its own, such as {key}.NAME=…"
            )
        name = f"HPCDIST_OVERRIDE_{number}"
        variables[name] = value
        arguments.append(f"{key}={_REFERENCE}{name}}}")
    return arguments, variables


def _may_lock_memory() -> bool:
    """Return whether a child of this process may lock unlimited memory, as RDMA must."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        return True
    return has_capability(CAP_SYS_RESOURCE)
