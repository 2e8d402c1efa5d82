"""What torch does here, tried in processes of its own: the doctor itself never imports it, and none can hang it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdist.diagnostics.doctor.software import TOGETHER
from hpcdist.machine.check import Check, Level

#: On a network file system that has to wake up the import alone takes most of it.
TRIAL_S = 90.0
#: The steps of `rank/startup_check.py` as people name them.
_STAGES = {
    "torch": "importing torch",
    "torchvision": "importing torchvision",
    "compute": "a small matrix product",
    "meet": "finding each other on loopback",
    "all-reduce": "an all-reduce",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one rank has said: its stages in order, and what it wrote besides them."""

    stages: tuple[Mapping[str, Any], ...]
    errors: str = ""  #: the end of its standard error
    code: int | None = None  #: None where it was still at it when time was over

    def stage(self, name: str) -> Mapping[str, Any]:
        return next((stage for stage in self.stages if stage["stage"] == name), {})


def try_ranks(device: str, backend: str, ranks: int, *, within_s: float = TRIAL_S) -> list[Trial]:
    """Start ranks that meet on loopback, as `hpcdist run` does, and return what each has said."""
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    env = {**os.environ, **loopback, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    words = [sys.executable, "-P", "-m", "hpcdist.rank.startup_check", device, backend]
    # They meet in a file that only this user can reach: torch's own store would listen on all interfaces.
    with tempfile.TemporaryDirectory(prefix="hpcdist-trial-") as folder:
        running = [
            subprocess.Popen(
                [*words, str(rank), str(ranks), f"{folder}/meeting"],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        deadline = time.monotonic() + within_s
        return [_finish(process, deadline) for process in running]


def _finish(process: subprocess.Popen[str], deadline: float) -> Trial:
    code: int | None = None
    try:
        output, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return Trial(stages=tuple(json.loads(line) for line in lines), errors=errors[-2000:], code=code)


def judge_ranks(trials: Sequence[Trial], what: str, *, within_s: float = TRIAL_S) -> list[Check]:
    """One line for ranks that came through, else the first that did not: which, where, and what it said.

    Args:
        what: what was tried, such as `2 ranks, gloo`.
    """
    for rank, trial in enumerate(trials):
        if (problem := _problem(trial, within_s)) is not None:
            text, fix = problem
            # A machine that is busy, or a file system that wakes up, reads slowly; that alone makes no run fail.
            level: Level = "warning" if trial.code is None and not trial.stage("torchvision") else "failure"
            return [Check(name=what, level=level, text=f"rank {rank}: {text}", fix=fix)]
    took = {name: max(trial.stage(name).get("seconds", 0.0) for trial in trials) for name in _STAGES}
    text = f"import {took['torch']:.1f} s, rendezvous {took['meet']:.1f} s, all-reduce right"
    if nccl := trials[0].stage("compute").get("nccl"):
        text += f", NCCL {nccl}"
    return [Check(name=what, level="ok", text=text)]


def _problem(trial: Trial, within_s: float) -> tuple[str, str] | None:
    said = {stage["stage"]: stage for stage in trial.stages}
    failed = next((s for s in trial.stages if "error" in s and s["stage"] != "torchvision"), None)
    if failed is not None:
        return f"{_STAGES[failed['stage']]} fails: {failed['error']}", _fix(failed["stage"], failed["error"])
    missing = next((stage for stage in _STAGES if stage not in said), None)
    if missing is None:
        return None
    if trial.code is None:
        return f"{_STAGES[missing]} did not end within {within_s:g} s", _fix(missing, "")
    last = trial.errors.strip().splitlines()[-1:] or ["nothing more"]
    how = f"signal {-trial.code}" if trial.code < 0 else f"exit code {trial.code}"
    return f"{_STAGES[missing]} ended it by {how}: {last[0][:300]}", _fix(missing, last[0])


def _fix(stage: str, error: str) -> str:
    if stage == "torch":
        return "install it here: `pip install 'hpcdist[train]'`; where reading it is slow, put it on a local disk"
    if stage == "compute" and ("CUDA" in error or "cuda" in error):
        return "`nvidia-smi` shows what the driver sees; CUDA_VISIBLE_DEVICES and the driver's age are the usual causes"
    if stage == "meet":
        return "is the loopback interface up (`ip address show lo`), and no firewall on it? NCCL_DEBUG=INFO tells more"
    if stage == "all-reduce":
        return "NCCL_DEBUG=INFO tells more; too small a /dev/shm and blocked peer access (IOMMU, ACS) are usual causes"
    return "try it by hand: `python -m hpcdist.rank.startup_check cpu gloo 0 1 29500`"


def judge_torch(trials: Sequence[Trial]) -> list[Check]:
    """torch and torchvision as their import shows them."""
    torch, vision = trials[0].stage("torch"), trials[0].stage("torchvision")
    checks = []
    if "version" in torch:
        built = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
        checks.append(Check(name="torch", level="ok", text=f"{torch['version']}, {built}"))
    if "No module named 'torchvision'" in vision.get("error", ""):
        text = "not installed: trainers of images need it"
        checks.append(Check(name="torchvision", level="warning", text=text, fix=TOGETHER))
    elif "error" in vision:
        text = f"cannot be imported beside torch {torch.get('version', '')}: {vision['error']}"
        checks.append(Check(name="torchvision", level="failure", text=text, fix=TOGETHER))
    elif vision:
        checks.append(Check(name="torchvision", level="ok", text=vision["version"]))
    return checks
