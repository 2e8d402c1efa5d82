"""Plan of a local run: number of ranks, devices, backend, threads and environment variables; and the commands of ranks
and of the processes that fork them, which Slurm runs use as well.
"""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Self

from hpcdist.config.launch_schema import GPU_BACKENDS, NVIDIA
from hpcdist.config.roles import DEFAULT_ROLE, Roles, needed_ranks
from hpcdist.config.schema import Config, role_device
from hpcdist.config.section import MAX_PER_NODE
from hpcdist.config.topology import port_for
from hpcdist.errors import ConfigError, plural
from hpcdist.host.gpu_info import count_gpus, gpu_device_files, has_amd_driver, selected_gpus, visible_gpus
from hpcdist.host.machine import num_cores
from hpcdist.rank.network_interface import INTERFACE_VARIABLES
from hpcdist.rank.processes import PARENT_MODULE, RANK_MODULE
from hpcdist.run.script_ranks import Spawn

#: All ranks of a local run communicate over the loopback interface; SECURITY.md lists the listening sockets.
LOOPBACK = "127.0.0.1"
#: Ranks of a trainer; of a script there is one, as under torchrun.
RANKS_WITHOUT_GPU = 2
#: Sizes up to which glibc keeps blocks and free memory on ranks without a GPU. By default it returns large blocks to
#: the kernel and faults them in again in each step, which is 1.4 times slower.
_MMAP_THRESHOLD_BYTES = 32 * 2**20
_TRIM_THRESHOLD_BYTES = 2**30
#: Number of ports that are tried: another program may listen on the first one.
_NUM_PORTS = 64


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The processors of this machine that a local run may use."""

    num_cpus: int
    num_gpus: int

    @classmethod
    def inspect(cls, env: Mapping[str, str]) -> Self:
        """Count cores, and GPUs by CUDA_VISIBLE_DEVICES or else by the driver, without torch."""
        # Without an answer of NVIDIA's driver, the device files show whether GPUs exist.
        num_gpus = count_gpus() or gpu_device_files()
        if not num_gpus and has_amd_driver():
            num_gpus = len(selected_gpus(env) or ())  # not counted: only the variable shows them
        return cls(num_cpus=num_cores(), num_gpus=visible_gpus(num_gpus, env))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the ranks of a local run are started."""

    num_ranks: int
    device: str  #: `cpu`, or the type of the GPUs
    backend: str
    threads: int
    #: Variables that all ranks get in addition to the caller's environment.
    env: dict[str, str]
    #: Roles of the config, if it has any, and the device of each role.
    roles: Roles | None = None
    devices: dict[str, str] = field(default_factory=dict)

    def device_of(self, rank: int) -> str:
        """Return `cpu` or the type of the rank's GPU."""
        if self.roles is None:
            return self.device
        role, _ = self.roles.of_rank(rank)
        return self.devices[role]

    def rank_env(self, rank: int, *, job_id: str, attempt: int, master_port: int) -> dict[str, str]:
        """Return `env` and the variables that define the rank's topology (`config/topology.py`)."""
        topology = {
            "RANK": rank,
            "WORLD_SIZE": self.num_ranks,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": self.num_ranks,
            "NODE_RANK": 0,
            "NUM_NODES": 1,
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": master_port,
            "JOB_ID": job_id,
            "ATTEMPT": attempt,
        }
        env: dict[str, str] = {}
        if self.device_of(rank) == "cpu" and self.device != "cpu":
            # A rank without a GPU beside others with one.
            env |= processor_env(self.threads, use_gpus=False)
        env |= self.env
        env |= {f"HPCDIST_{key}": str(value) for key, value in topology.items()}
        return env


def make_plan(config: Config, machine: Machine, spawn: Spawn | None = None) -> Plan:
    """Return the plan of a local run.

    Raises ConfigError if the machine or the roles do not fit the config, or if a script that starts its own ranks would
    be started several times.

    Args:
        spawn: the call by which the script starts its own ranks, if it does.
    """
    if spawn is not None:
        problems = spawn.problems(config, None)
        if problems:
            raise ConfigError(*problems)
    launch = config.launch
    roles = _roles_of(config)
    requested: dict[str, str]
    if roles is None:
        ranks = launch.num_ranks
        requested = {DEFAULT_ROLE: launch.device}
    else:
        ranks = roles.world_size
        requested = {role: role_device(config, role) for role in roles.names}
    if launch.gpu_type != NVIDIA:  # torch alone counts them, in the ranks, which refuse to share a GPU
        machine = replace(machine, num_gpus=ranks or 1)
    gpu_roles = [role for role, device in requested.items() if device != "cpu"]
    use_gpus = machine.num_gpus > 0 and bool(gpu_roles)
    for role, device in requested.items():
        if device in GPU_BACKENDS and not use_gpus:
            key = f"launch.devices.{role}" if role in launch.devices else "launch.device"
            raise ConfigError(f"{key}={device}, but no GPU is visible here: use {key}=auto or cpu")
    if use_gpus and config.data.global_batch_size is not None:
        # An elastic run trains the same on fewer ranks, such as after the loss of a GPU. It has no roles.
        ranks = min(ranks, machine.num_gpus)
    if use_gpus:
        _check_gpus(roles, gpu_roles, ranks, machine.num_gpus)
    num_ranks = ranks
    if not num_ranks:
        num_ranks = _default_ranks(config, machine.num_gpus if use_gpus else 0, spawn)
    if num_ranks > MAX_PER_NODE:
        raise ConfigError(f"roles: one machine runs at most {MAX_PER_NODE} ranks, got {num_ranks}: use fewer ranks")
    # A sum over another number of threads is rounded differently.
    even_threads = 1 if config.elastic.exact else max(1, machine.num_cpus // num_ranks)
    threads = launch.num_threads or even_threads
    gpu = launch.gpu_type if use_gpus else "cpu"
    devices = {}
    if roles is not None:
        devices = {role: gpu if role in gpu_roles else "cpu" for role in roles.names}
    all_gpus = use_gpus and len(gpu_roles) == len(requested)
    return Plan(
        num_ranks=num_ranks,
        device=gpu,
        backend=launch.backend_on(gpus=all_gpus),
        threads=threads,
        env={**processor_env(threads, use_gpus=use_gpus), **launch.env},
        roles=roles,
        devices=devices,
    )


def _default_ranks(config: Config, num_gpus: int, spawn: Spawn | None) -> int:
    """Return the number of ranks of a config that does not set it. `num_gpus`: GPUs that the ranks use."""
    if spawn is not None:
        return 1
    if num_gpus:
        return num_gpus
    if config.trainer.script:
        return 1
    return RANKS_WITHOUT_GPU


def _roles_of(config: Config) -> Roles | None:
    """Return the config's roles; None if it has none. Raises ConfigError if `launch.num_ranks` contradicts them."""
    if not config.roles:
        return None
    num_ranks = config.launch.num_ranks
    roles = Roles.fit(config.roles, num_ranks or sum(config.roles.values()))
    if roles is None:
        raise ConfigError(
            f"{needed_ranks(config.roles)}, but launch.num_ranks={num_ranks}:"
            " leave launch.num_ranks out, or change one of them"
        )
    return roles


def _check_gpus(roles: Roles | None, gpu_roles: Sequence[str], ranks: int, num_gpus: int) -> None:
    """Raise ConfigError if there are fewer GPUs than ranks that use one."""
    if roles is not None:
        with_gpu = Roles(tuple((role, roles.count(role)) for role in gpu_roles))
        if with_gpu.world_size > num_gpus:
            raise ConfigError(
                f"roles: {with_gpu.world_size} ranks need a GPU each ({with_gpu}), but {num_gpus} are"
                f" visible: run some roles without one, as in launch.devices.{with_gpu.names[-1]}=cpu"
            )
    elif ranks > num_gpus:
        are = "is" if num_gpus == 1 else "are"
        visible = f"{plural(num_gpus, 'GPU')} {are} visible"
        raise ConfigError(f"launch.num_ranks={ranks}, but {visible}: lower it, or use launch.device=cpu")


def processor_env(threads: int, *, use_gpus: bool) -> dict[str, str]:
    """Return variables that must be set before a rank starts; `launch.env` overrides them."""
    env = {
        # More threads than cores compete for them: 0.3 instead of 17 steps per second was measured.
        "OMP_NUM_THREADS": str(threads),
        # Also avoids gloo's reverse DNS lookup, which takes 10 s if DNS has no entry.
        **dict.fromkeys(INTERFACE_VARIABLES, "lo"),
        "PYTHONUNBUFFERED": "1",
    }
    if not use_gpus:
        env["MALLOC_MMAP_THRESHOLD_"] = str(_MMAP_THRESHOLD_BYTES)
        env["MALLOC_TRIM_THRESHOLD_"] = str(_TRIM_THRESHOLD_BYTES)
    return env


def rank_command(run_dir: Path, python: str = sys.executable) -> list[str]:
    """Return the command of a rank. `-P` keeps the current folder out of sys.path: code comes from the snapshot."""
    return [python, "-P", "-m", RANK_MODULE, str(run_dir)]


def parent_command(
    run_dir: Path, scope: Literal["all", "task"], rank: Sequence[str], *, fork: bool, limit_s: float
) -> list[str]:
    """Return the command of the parent process of ranks with the command `rank`; see `rank/parent.py`.

    Args:
        fork: whether it forks the ranks after its imports, for which it has `limit_s` seconds.
    """
    how = "fork" if fork else "execute"
    python = rank[0]
    return [python, "-P", "-m", PARENT_MODULE, str(run_dir), scope, how, f"{limit_s:g}", *rank]


def code_env(import_path: Sequence[str], python_path: str | None) -> dict[str, str]:
    """Return the import path of ranks: the run's snapshot first, because a restart must run the same code."""
    return {"PYTHONPATH": os.pathsep.join([*import_path, *filter(None, [python_path])])}


def free_port(job_id: str, attempt: int) -> int:
    """Return a port of the loopback interface on which no program listens, the same one each time if possible.

    Raises ConfigError if programs listen on all ports that are tried.
    """
    for offset in range(_NUM_PORTS):
        port = port_for(job_id, attempt + offset)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        return port
    raise ConfigError(f"no free port for job {job_id} on this machine: `ss -ltnp` lists the listening processes")
