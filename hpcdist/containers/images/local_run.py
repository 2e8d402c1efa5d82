"""The line that runs a config in a container on this machine: built by a pure function, shown, then executed."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from hpcdist.config.schema import Config
from hpcdist.config.tree import parse_value
from hpcdist.config.written import redacted_argument
from hpcdist.containers.images.engine import EngineName
from hpcdist.errors import UserMistake
from hpcdist.machine.own_image import DIGEST, NAME

#: Passed on by name where they are set, so that no value stands in the command line. Everything else stays outside.
PASSED = ("MLFLOW_TRACKING_", "NCCL_", "GLOO_", "TORCH_", "HPCDIST_")
#: Ours to set: the image has its own values, or the line gives them.
SET_HERE = ("HPCDIST_RUNS_DIR", "HPCDIST_DATA_DIR", NAME, DIGEST)
_REFERENCE = "${oc.env:"
CAP_SYS_RESOURCE = 24  # capabilities(7)
STATUS = Path("/proc/self/status")


@dataclass(frozen=True, kw_only=True)
class Box:
    """This machine and what of it a container gets."""

    engine: EngineName
    image: str
    digest: str
    uid: int
    gid: int
    user: str
    gpus: str = ""  #: `all`, device numbers with commas between them, or nothing
    devices: tuple[str, ...] = ()  #: `/dev/infiniband` where there is one
    locks_memory: bool = True  #: whether RDMA may lock all the memory that it wants; podman asks its caller's limits
    env_names: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Path, ...] = ()  #: seen at the same paths inside
    workdir: Path | None = None
    host_network: bool = False
    terminal: bool = False
    stop_timeout_s: int = 120

    @classmethod
    def inspect(cls, engine: EngineName, image: str, digest: str, user: str, env: Mapping[str, str]) -> Box:
        """The box that this machine makes for an image, before a config asks for anything."""
        names = [name for name in env if name.startswith(PASSED) and name not in SET_HERE]
        return cls(
            engine=engine,
            image=image,
            digest=digest,
            uid=os.getuid(),
            gid=os.getgid(),
            user=user,
            locks_memory=engine == "docker" or _may_lock_memory(),
            devices=("/dev/infiniband",) if Path("/dev/infiniband").is_dir() else (),
            env_names=tuple(sorted(names)),
            terminal=os.isatty(0) and os.isatty(1),
        )


def furnish(box: Box, config: Config, cwd: Path, *, own_code: bool, num_gpus: int, env: Mapping[str, str]) -> Box:
    """Give a box what a config needs: folders at the paths they have outside, GPUs, time to save when stopped."""
    runs, data = (Path(folder).expanduser().absolute() for folder in (config.runs_dir, config.data.root))
    gpus = ""
    if num_gpus and config.launch.device != "cpu":
        gpus = env.get("CUDA_VISIBLE_DEVICES", "").strip() or "all"
    return replace(
        box,
        gpus=gpus,
        # Ranks meet on loopback and need no network but for an MLflow server on this machine.
        host_network=urlsplit(config.tracking.uri).hostname in ("localhost", "127.0.0.1", "::1"),
        mounts=tuple(dict.fromkeys([runs, data, *([cwd] if own_code else [])])),
        workdir=cwd if own_code else None,
        # The same paths inside and outside: what MLflow's database and the run folder say holds in both.
        env={"HPCDIST_RUNS_DIR": str(runs), "HPCDIST_DATA_DIR": str(data)},
        # Ranks get that long to save; the supervisor then ships what is left.
        stop_timeout_s=math.ceil(config.launch.stop_grace_s + config.tracking.drain_timeout_s),
    )


def with_mount(box: Box, folder: Path) -> Box:
    """The box with one more folder in it."""
    return replace(box, mounts=(*box.mounts, folder))


def folders_in_words(config: Config, default: Config) -> list[str]:
    """Overrides for folders that a config names itself: `~` and relative paths mean something else inside."""
    chosen = {"runs_dir": (config.runs_dir, default.runs_dir), "data.root": (config.data.root, default.data.root)}
    return [f"{key}={value}" for key, (value, usual) in chosen.items() if value != usual]


def without_secrets(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Overrides whose secrets come from variables, and these: `docker inspect` and `ps` show words to other users.

    Raises UserMistake for a secret inside a list or a mapping.
    """
    words, variables = [], {}
    for number, text in enumerate(overrides):
        key, _, raw = text.partition("=")
        if redacted_argument(text) == text or _REFERENCE in raw:
            words.append(text)
            continue
        if not isinstance(value := parse_value(raw), str):
            raise UserMistake(
                f"{key} holds a secret, which the container's command line would show to other users:"
                f" give each by a key of its own, such as {key}.NAME=…"
            )
        name = f"HPCDIST_OVERRIDE_{number}"
        variables[name] = value
        words.append(f"{key}={_REFERENCE}{name}}}")
    return words, variables


def argv(box: Box, words: Sequence[str]) -> list[str]:
    """The engine's whole command line; `words` are those for hpcdist in the image."""
    line: list[str] = [box.engine, "run", "--rm"]
    if box.terminal:
        line += ["--interactive", "--tty"]
    line += _gpu_flags(box)
    line += ["--ipc=host", "--ulimit", "memlock=-1" if box.locks_memory else "host"]
    line += ["--user", f"{box.uid}:{box.gid}"]
    if box.engine == "podman" and box.uid != 0:
        line += ["--userns=keep-id"]  # without root, podman would map the caller to somebody else
    line += ["--stop-timeout", str(box.stop_timeout_s)]
    if box.host_network:
        line += ["--network=host"]
    for device in box.devices:
        line += ["--device", device]
    for path in box.mounts:
        line += ["--volume", f"{path}:{path}"]
    if box.workdir is not None:
        line += ["--workdir", str(box.workdir)]
    values = {"USER": box.user, NAME: box.image, DIGEST: box.digest, **box.env}
    for name, value in values.items():
        line += ["--env", f"{name}={value}"]
    for name in box.env_names:
        line += ["--env", name]
    return [*line, box.image, *words]


def _gpu_flags(box: Box) -> list[str]:
    if not box.gpus:
        return []
    if box.engine == "podman":
        return [word for gpu in box.gpus.split(",") for word in ("--device", f"nvidia.com/gpu={gpu.strip()}")]
    # docker splits at commas before it looks at quotes
    return ["--gpus", "all" if box.gpus == "all" else f'"device={box.gpus}"']


def _may_lock_memory() -> bool:
    """Whether a child of this process may raise its limit: docker's daemon always may, podman without root seldom."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] == resource.RLIM_INFINITY:
        return True
    lines = STATUS.read_text().splitlines()
    effective = next((line.split()[1] for line in lines if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> CAP_SYS_RESOURCE & 1)
