"""The sections of a config on the start of the ranks: `launch`, `notify`, `preflight`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hpcdist.config.section import IS_PATH, MAX_PER_NODE, ConfigSection, address_problem, number, variables

#: Types of GPUs by torch's name, and the backend of collectives between them; AMD's GPUs have NVIDIA's names in torch.
GPU_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}
NVIDIA = "cuda"
#: Default of `hang_timeout_s`.
_HANG_TIMEOUT_S = 1800.0
#: Default of `idle_timeout_s` in a job: other users could use its nodes.
_IDLE_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(ConfigSection):
    """How ranks are started, supervised and restarted."""

    num_ranks: int = number(0, least=0, most=MAX_PER_NODE)
    """Ranks on this machine; 0: one per visible GPU, else two; scripts without a GPU, or that start ranks, have one."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Device of the ranks; `auto` uses GPUs of NVIDIA or AMD (`cuda`) if there are any."""
    devices: dict[str, str] = field(default_factory=dict)
    """Device by role, if it is not launch.device: `parameter_server: cpu` leaves the GPUs to the other roles."""
    num_threads: int = number(0, least=0, most=MAX_PER_NODE)
    """CPU threads per rank (OMP_NUM_THREADS); 0 divides the cores evenly, or uses one with elastic.exact."""
    fork: bool = True
    """Fork ranks, except of scripts, from a process that has imported torch; false if a library cannot be forked."""
    init_timeout_s: float = number(120.0, above=0)
    """Timeout of the start of the ranks, of the imports before they are forked, and of their rendezvous."""
    hang_timeout_s: float | None = number(None, above=0)
    """Time without progress after which a hung run is ended; null: 1800 for trainers, scripts are only warned about."""
    idle_timeout_s: float | None = number(None, least=0)
    """Time without step, output, use of CPU, GPU or files that stops a run; 0: never; null: 3600 in jobs, else 0."""
    stop_grace_s: float = number(120.0, above=0)
    """Time that ranks have to save and exit after a stop request; half of it for their threads and atexit functions."""
    max_restarts: int = number(3, least=0)
    """Maximum number of restarts after failures; after an exception of the code only if something was saved."""
    fit_batch: bool = False
    """Halve the micro-batches of an elastic run after CUDA out of memory, and restart; the global batch stays."""
    cache_dir: str = field(default="", metadata=IS_PATH)
    """Folder of your own for the code that torch.compile compiles; empty: `.hpcdist-compiled` in runs_dir."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the ranks; they override those of hpcdist."""

    @property
    def hang_s(self) -> float:
        """`hang_timeout_s`, or its default."""
        if self.hang_timeout_s is None:
            return _HANG_TIMEOUT_S
        return self.hang_timeout_s

    def idle_s(self, *, in_job: bool) -> float | None:
        """Return `idle_timeout_s`, or its default; None if idle runs are not stopped."""
        if self.idle_timeout_s is None:
            return _IDLE_TIMEOUT_S if in_job else None
        return self.idle_timeout_s or None

    @property
    def gpu_type(self) -> str:
        """Type of the GPUs of this run: the first one that the config names, else NVIDIA."""
        for device in (self.device, *self.devices.values()):
            if device in GPU_BACKENDS:
                return device
        return NVIDIA

    def backend_on(self, *, gpus: bool) -> str:
        """Return the backend of collectives. `gpus`: whether all of their ranks have GPUs."""
        if gpus:
            return GPU_BACKENDS[self.gpu_type]
        return "gloo"

    def problems(self) -> list[str]:
        problems = variables(self, "env")
        known = ("auto", "cpu", *GPU_BACKENDS)
        expected = f"{', '.join(known[:-1])} or {known[-1]}"
        for role, device in self.devices.items():
            if device not in known:
                problems.append(f"devices.{role} must be {expected}, got {device!r}")
        return problems


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
        elif self.webhook.startswith("http") and address_problem(self.webhook):
            problems.append(f"webhook {address_problem(self.webhook)}")
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
