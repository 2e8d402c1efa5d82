"""The sections of a config on resources and start of the ranks, and the checks that sections share."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, cast

from hpcdist.errors import shown

# Checks that several sections use. Each returns a list with one line per mistake.

#: Ranks of a run, and ranks, threads or cores on one machine: beyond any cluster, and far below what exhausts one.
MAX_RANKS, MAX_PER_NODE = 262_144, 1024
_BOUNDS = {"least": (">=", operator.ge), "above": (">", operator.gt), "most": ("<=", operator.le)}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def number(default: Any, *, least: float | None = None, above: float | None = None, most: float | None = None) -> Any:
    """Return the field of a number with bounds; null is within them, NaN is not."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


@dataclass(frozen=True, kw_only=True)
class ConfigSection:
    """A section of a config. Its construction raises one ValueError with a line per mistake, which begins with the key;
    config/conversion.py adds the section's name.
    """

    def __post_init__(self) -> None:
        problems = []
        for one in fields(self):
            value = getattr(self, one.name)
            for name, (sign, holds) in _BOUNDS.items():
                bound = one.metadata.get(name)
                if value is not None and bound is not None and not holds(value, bound):
                    problems.append(f"{one.name} must be {sign} {bound:g}, got {value}")
        if problems := problems + self.problems():
            raise ValueError("\n".join(problems))

    def problems(self) -> list[str]:
        """Return the mistakes besides numbers beyond their bounds."""
        return []


def read_price(text: str) -> tuple[str, float, str] | None:
    """Return the text before a price, the price and the text after it; None unless there is one price and a currency.

    With commas it would be uncertain what they separate.
    """
    found = re.fullmatch(r"([^\d.,+-]*)(\d{1,9}(?:\.\d{1,9})?)([^\d.,+-]*)", text.strip())
    return (found[1], float(found[2]), found[3]) if found and (found[1] + found[3]).strip() else None


def variables(section: object, name: str) -> list[str]:
    return [
        f"{name}: {shown(key)} is not a valid variable name: use letters, digits and '_', not starting with a digit"
        for key in getattr(section, name)
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(key))
    ]


def flags(section: object, *names: str) -> list[str]:
    """Return the names that are not options of Slurm, which would change the meaning of a script or command."""
    return [
        f"{name}: {shown(key)} is not an option: use its long name without dashes, such as mail-type"
        for name in names
        for key in getattr(section, name)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]+", str(key))
    ]


def gpu_type(section: ClusterConfig) -> list[str]:
    """Return the problem of a type that is not one of a GPU, such as `gpu:a100` or `a100,h100`."""
    kind = section.gpu_type
    if kind is None or (kind != "gpu" and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", kind)):
        return []
    return [f"gpu_type must be one type such as a100, got {shown(kind)}: `sinfo -o %G` lists those of the cluster"]


def one_line(section: object, *names: str) -> list[str]:
    """Return the texts with a control character; a newline would end a line of the batch script."""
    texts: list[tuple[str, object]] = []
    for name in names:
        value = getattr(section, name)
        if isinstance(value, Mapping):
            texts += [(f"{name}.{key}", text) for key, text in value.items()]
        else:
            texts += [(name, text) for text in (value if isinstance(value, list) else [value])]
    return [
        f"{key} must be one line without control characters, got {shown(str(text))}"
        for key, text in texts
        if _CONTROL.search(str(text))
    ]


S = TypeVar("S")
#: The metadata of a field that holds a path or a list of paths. Loading a config makes them absolute.
IS_PATH = {"is_path": True}


def map_paths(section: S, prefix: str, absolute: Callable[[str, str], str]) -> S:
    """Return a section in which `absolute(key, path)` replaces each path that is not empty."""
    changes: dict[str, str | list[str]] = {}
    for one in fields(cast(Any, section)):
        value = getattr(section, one.name)
        if not one.metadata.get("is_path") or not value:
            continue
        key = f"{prefix}{one.name}"
        changes[one.name] = [absolute(key, path) for path in value] if isinstance(value, list) else absolute(key, value)
    return cast(S, replace(cast(Any, section), **changes))


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
        found = one_line(self, "path", "modules")
        if self.kind == "venv" and not self.path:
            found.append("path must name a virtual environment for kind=venv")
        if self.kind == "module" and not self.modules:
            found.append("modules must name the modules that contain Python for kind=module")
        if self.kind == "none" and self.modules:
            found.append("modules are not loaded with kind=none: set kind, or use cluster.setup")
        if "" in self.modules:
            found.append("modules must hold names such as cuda/13.0, got ''")
        return found


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
    """Nodes of single roles in the allocation, each of which has the maximum of what the roles request."""
    sbatch: dict[str, str] = field(default_factory=dict)
    """Additional options of sbatch by their long names: `mail-type: FAIL`, or `exclusive: true` without a value."""
    srun: dict[str, str] = field(default_factory=dict)
    """Additional options of srun, in the same form, except those that hpcdist sets itself."""
    price_per_gpu_hour: str | None = None
    """Price of an hour of a GPU with its currency, `2.50 EUR` or `$2.50`; the cost of runs then shows money."""
    price_per_core_hour: str | None = None
    """Price of an hour of a core, in the same form, for runs without GPUs."""
    co2_g_per_kwh: float | None = number(None, least=0)
    """Grams of CO₂ per kWh of electricity; the cost of runs whose energy was measured then shows CO₂."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the job and its ranks. Secrets are not written to the batch script."""
    setup: list[str] = field(default_factory=list)
    """Shell commands at the start of the batch script, such as `module load cuda`, without the secrets of `env`."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)

    def problems(self) -> list[str]:
        problems = one_line(self, "partition", "account", "qos", "mem", "constraint", "exclude", "sbatch", "srun")
        problems += flags(self, "sbatch", "srun") + variables(self, "env") + gpu_type(self)
        problems += [
            f"{key} must be one price with its currency, such as '2.50 EUR' or '$2.50', got {shown(price)}"
            for key in ("price_per_gpu_hour", "price_per_core_hour")
            if (price := getattr(self, key)) is not None and (read_price(price) is None or _CONTROL.search(price))
        ]
        if self.fewest_nodes > self.nodes:
            problems.append(f"min_nodes must be at most nodes={self.nodes}, got {self.min_nodes}")
        return problems

    @property
    def gpu_request(self) -> str | None:
        """The value of `--gpus-per-node`: `4` or `a100:4`; None without GPUs."""
        number = str(self.gpus_per_node)
        return None if not self.gpus_per_node else f"{self.gpu_type}:{number}" if self.gpu_type else number

    @property
    def outlives_nodes(self) -> bool:
        """Whether the run continues in its allocation after the loss of a node."""
        return self.spare_nodes > 0 or self.fewest_nodes < self.nodes

    @property
    def fewest_nodes(self) -> int:
        """The least number of nodes with which the run may start or continue."""
        return self.nodes if self.min_nodes is None else self.min_nodes


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
        return (
            [
                f"mounts must be SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with absolute paths, got {mount!r}"
                for mount in self.mounts
                if not re.fullmatch(r"[/~][^:,]*(:/[^:,]*)?(:(ro|rw))?", mount)
            ]
            + [
                f"env must hold names such as WANDB_MODE or UCX_*, never values, got {name.partition('=')[0]!r}"
                for name in self.env
                if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*\*?", name)
            ]
            + one_line(self, "image", "mounts", "extra_args")
            + (["image must name the image to start"] if self.runtime != "none" and not self.image else [])
        )


COMMANDS = ("stop", "save", "profile")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ConfigSection):
    """When checkpoints are saved, and which are kept."""

    every_steps: int | None = number(None, least=1)
    """Save after every so many optimizer steps, in addition to the save at the end of each epoch."""
    keep_last: int = number(2, least=2)
    """Number of newest checkpoints to keep; the best one is always kept."""
    monitor: str = "eval/accuracy"
    """Metric that determines the best checkpoint; empty, the default for code of your own: the newest is the best."""
    monitor_mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower value of `monitor` is better."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig(ConfigSection):
    """What is logged to MLflow, and how often."""

    uri: str = "${oc.env:MLFLOW_TRACKING_URI,''}"
    """URI of the MLflow server or database; empty means the SQLite file `<runs_dir>/mlflow.db`."""
    register_as: str | None = None
    """Name of the final model in MLflow's model registry, where the alias `best` follows `monitor`; null: none."""
    log_every_steps: int = number(50, least=1)
    """Optimizer steps between two values of the training metrics; the last step is logged as well."""
    patch: bool = False
    """Whether `code.patch`, the uncommitted changes of the code, is uploaded to MLflow as it is, secrets included."""
    system_interval_s: float = number(10.0, least=0)
    """Seconds between two values of each node's system metrics; 0 disables them."""
    drain_timeout_s: float = number(60.0, least=0)
    """Seconds that the end of a run waits for MLflow; 0: not at all. `hpcdist sync` ships the rest later."""
    commands: list[str] = field(default_factory=list)
    """Commands to obey from the tag `hpcdist.command` in MLflow: stop, save, profile. Needs EDIT permission there."""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional tags of the MLflow run."""

    def problems(self) -> list[str]:
        unknown = (name for name in self.commands if name not in COMMANDS)
        return [f"commands: {name!r} must be one of {', '.join(COMMANDS)}" for name in unknown]


#: Types of GPUs by torch's name, and the backend of collectives between them; AMD's GPUs have NVIDIA's names in torch.
GPU_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
NVIDIA = "cuda"


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(ConfigSection):
    """How ranks are started, supervised and restarted."""

    num_ranks: int = number(0, least=0, most=MAX_PER_NODE)
    """Ranks on this machine; 0 means one per visible GPU, or two without a GPU."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Device of the ranks; `auto` uses GPUs of NVIDIA or AMD (`cuda`) if there are any."""
    devices: dict[str, str] = field(default_factory=dict)
    """Device by role, if it is not launch.device: `parameter_server: cpu` leaves the GPUs to the other roles."""
    num_threads: int = number(0, least=0, most=MAX_PER_NODE)
    """CPU threads per rank (OMP_NUM_THREADS); 0 divides the cores evenly, or uses one with elastic.exact."""
    fork: bool = True
    """Fork ranks, except those of scripts, from a process that has imported torch; false if a library breaks in it."""
    init_timeout_s: float = number(120.0, above=0)
    """Timeout of the start of the ranks, of the imports before they are forked, and of their rendezvous."""
    hang_timeout_s: float | None = number(None, above=0)
    """Time without progress after which a hung run is ended; null: 1800 for trainers, scripts are only warned about."""
    stop_grace_s: float = number(120.0, above=0)
    """Time that ranks have to save and exit after a stop request; half of it for their threads and atexit functions."""
    max_restarts: int = number(3, least=0)
    """Maximum number of restarts from the newest checkpoint after failures."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the ranks; they override those of hpcdist."""

    @property
    def hang_s(self) -> float:
        """`hang_timeout_s`, or its default."""
        return 1800.0 if self.hang_timeout_s is None else self.hang_timeout_s

    @property
    def gpu_type(self) -> str:
        """Type of the GPUs of this run: the one that is asked for, or that of `auto`."""
        return next((one for one in (self.device, *self.devices.values()) if one in GPU_BACKENDS), NVIDIA)

    def backend_on(self, *, gpus: bool) -> str:
        """Return the backend of ranks that all have GPUs, or do not."""
        return GPU_BACKENDS[self.gpu_type] if gpus else "gloo"

    def problems(self) -> list[str]:
        known = ("auto", "cpu", *GPU_BACKENDS)
        return variables(self, "env") + [
            f"devices.{role} must be {', '.join(known[:-1])} or {known[-1]}, got {device!r}"
            for role, device in self.devices.items()
            if device not in known
        ]


@dataclass(frozen=True, kw_only=True)
class NotifyConfig(ConfigSection):
    """The webhook or the command that receives the events of a run."""

    webhook: str = ""
    """URL to which events are posted as JSON, as '${oc.env:MY_WEBHOOK}'; it is a secret and is shown as `***`."""
    command: str = field(default="", metadata=IS_PATH)
    """Executable file that is called with event, run and status, and reads the JSON from its standard input."""

    def problems(self) -> list[str]:
        problems = []
        if self.webhook and not self.webhook.startswith(("http://", "https://", "***")):
            problems.append("webhook must be an address that begins with https:// or http://")  # without the secret
        if self.webhook and self.command:
            problems.append("webhook and command exclude each other: set one of them")
        return problems


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """`preflight: off` is short for `preflight: {mode: off}`."""

    mode: Literal["off", "on"] = "on"
    """Whether the nodes of a Slurm run are checked; runs on one machine are not."""
    on_failure: Literal["stop", "exclude"] = "stop"
    """Reaction to a failed node: end the run, or requeue its Slurm job without that node."""
