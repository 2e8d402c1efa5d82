"""The sections on checkpoints, tracking and the start of ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.schema.checks import MAX_PER_NODE, above, at_least, at_most, check, variables

COMMANDS = ("stop", "save", "profile")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and which are kept."""

    every_steps: int | None = None
    """Save after every so many optimizer steps, in addition to the save at the end of each epoch."""
    keep_last: int = 2
    """Number of newest checkpoints to keep; the best one is always kept."""
    monitor: str = "eval/accuracy"
    """Metric that determines the best checkpoint; empty, the default for code of your own: the newest is the best."""
    monitor_mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower value of `monitor` is better."""

    def __post_init__(self) -> None:
        check(at_least(self, 1, "every_steps") + at_least(self, 2, "keep_last"))


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """What is logged to MLflow, and how often."""

    uri: str = "${oc.env:MLFLOW_TRACKING_URI,''}"
    """URI of the MLflow server or database; empty means the SQLite file `<runs_dir>/mlflow.db`."""
    register_as: str | None = None
    """Name of the final model in MLflow's model registry, where the alias `best` follows `monitor`; null: none."""
    log_every_steps: int = 50
    """Optimizer steps between two values of the training metrics; the last step is logged as well."""
    system_interval_s: float = 10.0
    """Seconds between two values of each node's system metrics; 0 disables them."""
    drain_timeout_s: float = 60.0
    """Seconds that the end of a run waits for MLflow; `hpcdist sync` ships the rest later."""
    commands: list[str] = field(default_factory=list)
    """Commands to obey from the tag `hpcdist.command` in MLflow: stop, save, profile. Needs EDIT permission there."""
    tags: dict[str, str] = field(default_factory=dict)
    """Additional tags of the MLflow run."""

    def __post_init__(self) -> None:
        check(
            at_least(self, 1, "log_every_steps")
            + at_least(self, 0, "system_interval_s", "drain_timeout_s")
            + [
                f"commands: {name!r} must be one of {', '.join(COMMANDS)}"
                for name in self.commands
                if name not in COMMANDS
            ]
        )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How ranks are started, supervised and restarted."""

    num_ranks: int = 0
    """Ranks on this machine; 0 means one per visible GPU, or two without a GPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the ranks; `auto` uses GPUs if there are any."""
    devices: dict[str, str] = field(default_factory=dict)
    """Device by role, if it is not launch.device: `parameter_server: cpu` leaves the GPUs to the other roles."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Backend of torch.distributed; `auto` is nccl if all ranks have GPUs, else gloo."""
    rpc: Literal["zmq", "torch"] = "zmq"
    """RPC of the trainers with roles: ZeroMQ, or torch.distributed.rpc, whose sockets are not authenticated."""
    rpc_trusted_nodes: bool = False
    """Whether `rpc: torch` may open its sockets on nodes where every user and program is trusted."""
    num_threads: int = 0
    """CPU threads per rank (OMP_NUM_THREADS); 0 divides the cores evenly, or uses one with elastic.exact."""
    fork: bool = True
    """Whether a local run imports torch once, in a process that forks the ranks of all attempts (not for scripts)."""
    private_network: bool = True
    """Whether forked ranks of hpcdist's trainers get a network namespace of their own, if no data is downloaded."""
    init_timeout_s: float = 120.0
    """Timeout of the start of the ranks, of the imports before they are forked, and of their rendezvous."""
    hang_timeout_s: float | None = None
    """Time without progress after which a hung run is ended; null: 1800 for trainers, scripts are only warned about."""
    stop_grace_s: float = 120.0
    """Time that ranks have to save and exit after a stop request; half of it for their threads and atexit functions."""
    max_restarts: int = 3
    """Maximum number of restarts from the newest checkpoint after failures."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the ranks; they override those of hpcdist."""
    log_max_mb: float = 1000.0
    """Maximum size of each log in MB, beyond which its middle is removed within a second; 0 means no limit."""
    code_max_mb: float = 50.0
    """Maximum size of the code snapshot in MB."""

    @property
    def hang_s(self) -> float:
        """`hang_timeout_s`, or its default."""
        return 1800.0 if self.hang_timeout_s is None else self.hang_timeout_s

    def __post_init__(self) -> None:
        check(
            at_least(self, 0, "num_ranks", "num_threads", "max_restarts", "log_max_mb")
            + at_most(self, MAX_PER_NODE, "num_ranks", "num_threads")
            + above(self, 0, "init_timeout_s", "hang_timeout_s", "stop_grace_s", "code_max_mb")
            + variables(self, "env")
            + [
                f"devices.{role} must be auto, cpu or cuda, got {device!r}"
                for role, device in self.devices.items()
                if device not in ("auto", "cpu", "cuda")
            ]
        )
