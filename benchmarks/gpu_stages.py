"""Stages of a GPU session (`gpu_session.py`) in order of worth: command, time limit, packages, and figures to show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: What every command of hpcdist imports.
CORE = ("omegaconf", "typer", "rich", "psutil", "pynvml", "jinja2", "zmq")
TORCH = ("torch", "torchvision")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One process of a session."""

    name: str
    purpose: str
    limit_s: float
    #: Arguments of Python for a device (`cuda` or `cpu`) and the folder of the results.
    command: Callable[[str, Path], list[str]]
    needs: tuple[str, ...] = ()  #: modules that must be installed


def check(part: str) -> Callable[[str, Path], list[str]]:
    """Return the command of a part of `gpu_checks.py`."""
    return lambda device, folder: [str(HERE / "gpu_checks.py"), part, device, str(folder)]


def probe(part: str) -> Callable[[str, Path], list[str]]:
    """Return the command of a part of `gpu_probes.py`."""
    return lambda device, folder: [str(HERE / "gpu_probes.py"), part, device]


def step_command(*options: str) -> Callable[[str, Path], list[str]]:
    """Return the command of `gpu_step.py`, in a small size on CPUs."""
    small = ["--device", "cpu", "--model", "resnet18", "--image-size", "64", "--batch-size", "4", "--steps", "18"]

    def command(device: str, folder: Path) -> list[str]:
        del folder
        on_cpu = [*small, "--rounds", "1", "--no-compile"] if device == "cpu" else []
        return [str(HERE / "gpu_step.py"), *options, *on_cpu, "--json"]

    return command


def stall_command(device: str, folder: Path) -> list[str]:
    """Return the command of `checkpoint_stall.py`; checkpoints are written beside the results."""
    small = ["--megabytes", "20", "--rounds", "2"] if device == "cpu" else []
    return [str(HERE / "checkpoint_stall.py"), "--device", device, *small, "--folder", str(folder), "--json"]


STAGES = (
    Stage(name="facts", purpose="GPU, driver and versions", limit_s=60, needs=("torch",), command=check("facts")),
    Stage(name="tests", purpose="tests that need a GPU", limit_s=180,
          needs=("pytest", "pytest_timeout", "xdist", *CORE, *TORCH), command=check("tests")),
    Stage(name="step", purpose="ResNet-50, bf16, channels_last, compiled, over a bare loop", limit_s=420,
          needs=(*CORE, *TORCH), command=step_command("--rounds", "2")),
    Stage(name="lm", purpose="the trainer lm with 1.1 B parameters over a plain loop, and a bf16 matrix product",
          limit_s=300, needs=(*CORE, "torch"), command=lambda device, folder: [str(HERE / "gpu_lm.py"), device]),
    Stage(name="lm_stall", purpose="checkpoint stall of the trainer lm", limit_s=300, needs=(*CORE, "torch"),
          command=lambda device, folder: [str(HERE / "gpu_lm.py"), device, "stall"]),
    Stage(name="stall", purpose="checkpoint stall with pinned buffers", limit_s=120, needs=(*CORE, "torch"),
          command=stall_command),
    Stage(name="trainers", purpose="all trainers from their shipped configs", limit_s=360, needs=(*CORE, *TORCH),
          command=check("trainers")),
    Stage(name="recovery", purpose="a killed rank of each trainer, compared with undisturbed runs", limit_s=240,
          needs=(*CORE, *TORCH), command=check("recovery")),
    Stage(name="memory", purpose="launch.fit_batch after the GPU's memory is exhausted", limit_s=120,
          needs=(*CORE, "torch"), command=check("memory")),
    Stage(name="scripts", purpose="programs of the tutorials", limit_s=240, needs=(*CORE, *TORCH),
          command=check("scripts")),
    Stage(name="timer", purpose="step times by CUDA events against known times", limit_s=60, needs=(*CORE, "torch"),
          command=probe("timer")),
    Stage(name="hang", purpose="stacks and NCCL flight recorder of a hung rank", limit_s=120, needs=(*CORE, "torch"),
          command=probe("hang")),
    Stage(name="history", purpose="training step with the history of allocations over one without", limit_s=60,
          needs=(*CORE, "torch"), command=probe("history")),
    Stage(name="compiled", purpose="first compiled step on a new node, and with the archive of another node",
          limit_s=150, needs=(*CORE, "torch"), command=probe("compiled")),
    Stage(name="sync", purpose="waits for the device during steps", limit_s=150, needs=(*CORE, *TORCH),
          command=step_command("--check-sync")),
    Stage(name="comm", purpose="two ranks on one GPU (gloo), one rank with NCCL, and the refusal of NCCL with two",
          limit_s=150, needs=(*CORE, "torch"), command=probe("comm")),
    Stage(name="doctor", purpose="hpcdist doctor", limit_s=90, needs=CORE, command=check("doctor")),
    Stage(name="preflight", purpose="preflight's facts of this node", limit_s=60, needs=CORE,
          command=check("preflight")),
)  # fmt: skip

Row = tuple[str, str, str]
#: Published rates of one SXM GPU for ResNet-50 with AMP, whose input may be images from files; ours is synthetic.
RESNET50 = "others: 2,790 on an H100, 3,079 on an H200"
#: Of dense models with 1 B parameters on an H100, and of a bf16 product of 8,192³ there.
LM = {"mfu": "others: 0.41 to 0.42", "matmul_tflops": "others: 794"}


def rows(stage: str, figures: Mapping[str, Any]) -> list[Row]:
    """Return the figures of a stage as (name, measured value, target or what others publish)."""
    if stage == "step" and "over_bare" in figures:
        return [
            ("images/s", f"{figures['ours']:.1f}", RESNET50),
            ("images/s over bare loop", f"{figures['over_bare']:.3f}", "≥ 0.99"),
        ]
    if stage in ("lm", "lm_stall"):
        return [(name, _text(value), LM.get(name, "")) for name, value in figures.items()]
    if stage == "stall" and "over_torch_save" in figures:
        over = figures["over_torch_save"]["ours"]
        milliseconds = 1e3 * figures["median_s"]["ours"]
        return [("stall over torch.save", f"{over:.3f}", "≤ 0.25"), ("stall, ms", f"{milliseconds:.1f}", "")]
    if stage == "sync" and "syncs_in_steps" in figures:
        return [("waits in steps, without logging and checkpoints", str(figures["syncs_in_steps"]), "0")]
    return [(name, _text(value), "") for name, value in figures.items()] if stage != "facts" else []


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")[:160]
