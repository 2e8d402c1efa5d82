"""The sections of a config on resources of Slurm, environments and containers: `cluster`, `container`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.section import (
    _CONTROL,
    IS_PATH,
    MAX_PER_NODE,
    MAX_RANKS,
    ConfigSection,
    flags,
    number,
    one_line,
    variables,
)
from hpcdist.errors import shown


def read_price(text: str) -> tuple[str, float, str] | None:
    """Return the text before a price, the price and the text after it; None unless there is one price and a currency.

    Commas are refused, because they separate thousands in some countries and decimals in others.
    """
    match = re.fullmatch(r"([^\d.,+-]*)(\d{1,9}(?:\.\d{1,9})?)([^\d.,+-]*)", text.strip())
    if match is None:
        return None
    before, price, after = match.groups()
    if not before.strip() and not after.strip():
        return None
    return before, float(price), after


def gpu_type(section: ClusterConfig) -> list[str]:
    """Return the mistake in a `gpu_type` that does not name one type of GPU, such as `gpu:a100` or `a100,h100`."""
    kind = section.gpu_type
    if kind is None:
        return []
    if kind != "gpu" and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", kind):
        return []
    return [f"gpu_type must be one type such as a100, got {shown(kind)}: `sinfo -o %G` lists those of the cluster"]


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(ConfigSection):
    """The Python environment of the ranks of a submitted run. It need not contain hpcdist, which is added to it."""

    kind: Literal["none", "venv", "module"] = "none"
    """Source of the environment; `none` starts ranks with the Python that runs hpcdist."""
    path: str = field(default="", metadata=IS_PATH)
    """A virtual environment, at the same path on all nodes."""
    modules: list[str] = field(default_factory=list)
    """Modules to load for the ranks, such as `cuda/13.0`; with `kind: module` they contain the ranks' Python."""

    def problems(self) -> list[str]:
        problems = one_line(self, "path", "modules")
        if self.kind == "venv" and not self.path:
            problems.append("path must name a virtual environment for kind=venv")
        if self.kind == "module" and not self.modules:
            problems.append("modules must name the modules that contain Python for kind=module")
        if self.kind == "none" and self.modules:
            problems.append("modules are not loaded with kind=none: set kind, or use cluster.setup")
        if "" in self.modules:
            problems.append("modules must hold names such as cuda/13.0, got ''")
        return problems


@dataclass(frozen=True, kw_only=True)
class RoleRequest(ConfigSection):
    """Nodes of one role's ranks inside the allocation, and its resources; null keeps the value of `cluster`."""

    nodes: int | None = number(None, least=1, most=MAX_RANKS)
    """Number of nodes for this role; null derives it from its number of ranks and tasks_per_node."""
    tasks_per_node: int | None = number(None, least=1, most=MAX_PER_NODE)
    """Ranks of this role on each of its nodes; null derives it from its number of ranks and nodes."""
    gpus_per_node: int | None = number(None, least=0)
    """GPUs on each of its nodes; 0 also hides the GPUs of a shared machine from its ranks."""
    cpus_per_task: int | None = number(None, least=1)
    """CPU cores per rank."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(ConfigSection):
    """Resources to request from Slurm. `configs/cluster/NAME.yaml` holds a site's values for `--cluster NAME`."""

    partition: str | None = None
    """Slurm partition; null uses Slurm's default."""
    account: str | None = None
    """Slurm account to charge."""
    qos: str | None = None
    """Quality of service."""
    nodes: int = number(1, least=1, most=MAX_RANKS)
    """Number of nodes. A range, `2-8`, also sets min_nodes."""
    min_nodes: int | None = number(None, least=1)
    """Minimum number of nodes to start or continue; null requires all of them."""
    spare_nodes: int = number(0, least=0, most=MAX_RANKS)
    """Additional nodes of the allocation that stay idle until they replace a failed node."""
    tasks_per_node: int = number(1, least=1, most=MAX_PER_NODE)
    """Ranks on each node; with GPUs, usually one per GPU."""
    gpus_per_node: int = number(0, least=0, most=MAX_PER_NODE)
    """GPUs on each node. `a100:4` also sets gpu_type; a number keeps it."""
    gpu_type: str | None = None
    """Type of the GPUs as the cluster names it (`sinfo -o %G`); null requests any."""
    cpus_per_task: int = number(1, least=1)
    """CPU cores per rank."""
    mem: str | None = None
    """Memory per node in Slurm's notation, `64G`; null uses the partition's default."""
    time_limit_min: int = number(60, least=1)
    """Time limit of the job in minutes; a longer run saves a checkpoint, requeues itself and continues."""
    signal_lead_s: int = number(120, least=0)
    """Seconds before the end of the allocation at which the ranks are asked to save and exit."""
    constraint: str | None = None
    """Required node features (`sbatch --constraint`)."""
    exclude: str | None = None
    """Nodes to exclude (`sbatch --exclude`)."""
    roles: dict[str, RoleRequest] = field(default_factory=dict)
    """Nodes of single roles in the allocation. Each node has the largest of the requests of all roles."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Additional options of sbatch by their long names: `mail-type: FAIL`, or `exclusive: true` without a value."""
    srun: dict[str, str] = field(default_factory=dict)
    """Additional options of srun, in the same form, except those that hpcdist sets itself."""
    price_per_gpu_hour: str | None = None
    """Price of an hour of a GPU with its currency, `2.50 EUR` or `$2.50`; the cost of runs then shows money."""
    price_per_core_hour: str | None = None
    """Price of an hour of a core, in the same form, for runs without GPUs."""
    co2_g_per_kwh: float | None = number(None, least=0)
    """Grams of CO₂ per kWh of electricity; the cost of runs with measured energy then shows CO₂."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job and its ranks. Secrets are not written to the batch script."""
    setup: list[str] = field(default_factory=list)
    """Shell commands at the start of the batch script, such as `module load cuda`, without the secrets of `env`."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def problems(self) -> list[str]:
        problems = one_line(self, "partition", "account", "qos", "mem", "constraint", "exclude", "sbatch", "srun")
        problems += flags(self, "sbatch", "srun") + variables(self, "env") + gpu_type(self)
        for key in ("price_per_gpu_hour", "price_per_core_hour"):
            price = getattr(self, key)
            if price is not None and (read_price(price) is None or _CONTROL.search(price)):
                problems.append(
                    f"{key} must be one price with its currency, such as '2.50 EUR' or '$2.50', got {shown(price)}"
                )
        if self.fewest_nodes > self.nodes:
            problems.append(f"min_nodes must be at most nodes={self.nodes}, got {self.min_nodes}")
        return problems

    @property
    def gpu_request(self) -> str | None:
        """The value of `--gpus-per-node`: `4` or `a100:4`; None without GPUs."""
        if not self.gpus_per_node:
            return None
        if not self.gpu_type:
            return str(self.gpus_per_node)
        return f"{self.gpu_type}:{self.gpus_per_node}"

    @property
    def outlives_nodes(self) -> bool:
        """Whether the run continues in its allocation after the loss of a node."""
        return self.spare_nodes > 0 or self.fewest_nodes < self.nodes

    @property
    def fewest_nodes(self) -> int:
        """The least number of nodes with which the run may start or continue."""
        if self.min_nodes is None:
            return self.nodes
        return self.min_nodes


@dataclass(frozen=True, kw_only=True)
class ContainerConfig(ConfigSection):
    """The container of the ranks of a submitted run. A site's profile may contain this section as well."""

    runtime: Literal["none", "apptainer", "enroot", "pyxis"] = "none"
    """Container runtime on the nodes; `none` starts ranks without one. On one machine: `run --in docker|podman`."""
    image: str = ""
    """A `.sif` (apptainer), a `.sqsh` (enroot, pyxis), a folder (apptainer, enroot), or an image reference (pyxis)."""
    mounts: list[str] = field(default_factory=list)
    """`SOURCE`, `SOURCE:TARGET` or `SOURCE:TARGET:ro`, in addition to the run folder, the code and `data.root`."""
    env: list[str] = field(default_factory=list)
    """Additional variables to pass, by name or as `NAME_*`; those of Slurm, NCCL and this config are passed."""
    extra_args: list[str] = field(default_factory=list)
    """Additional options of the runtime (of srun with pyxis), which override those of hpcdist."""

    def problems(self) -> list[str]:
        problems = []
        for mount in self.mounts:
            if not re.fullmatch(r"[/~][^:,]*(:/[^:,]*)?(:(ro|rw))?", mount):
                problems.append(
                    f"mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, got {mount!r}"
                )
        for variable in self.env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", variable):
                name = variable.partition("=")[0]
                problems.append(f"env must hold names such as WANDB_MODE or UCX_*, never values, got {name!r}")
        problems += one_line(self, "image", "mounts", "extra_args")
        if self.runtime != "none" and not self.image:
            problems.append("image must name the image to start")
        return problems
