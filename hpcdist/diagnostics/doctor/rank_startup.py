"""Test of torch and the start of ranks, in child processes: doctor never imports torch, and a hang cannot block it."""

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
from hpcdist.machine.check import Check, Level, failure, ok, warning
from hpcdist.machine.installation import install_command

#: On a slow network file system, the import of torch takes most of this time.
TRIAL_S = 90.0
#: The steps of `rank/startup_check.py` with their names in the report.
_STAGES = {
    "torch": "importing torch",
    "torchvision": "importing torchvision",
    "compute": "a small matrix product",
    "meet": "the rendezvous on loopback",
    "all-reduce": "an all-reduce",
}
_FIXES = {
    "torch": f"run {install_command('train')}; if the import is slow, install on a local disk",
    "meet": "check the loopback interface (`ip address show lo`) and its firewall; NCCL_DEBUG=INFO shows details",
    "all-reduce": "NCCL_DEBUG=INFO shows details; usual causes: small /dev/shm, blocked peer access (IOMMU, ACS)",
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Output of one rank: its stages in order, and its errors."""

    stages: tuple[Mapping[str, Any], ...]
    errors: str = ""  #: the end of its standard error
    code: int | None = None  #: None if it was still running at the timeout

    def stage(self, name: str) -> Mapping[str, Any]:
        """Return the result of a stage; empty if the trial did not reach it."""
        return next((stage for stage in self.stages if stage["stage"] == name), {})


def try_ranks(device: str, backend: str, ranks: int, *, within_s: float = TRIAL_S) -> list[Trial]:
    """Start ranks that meet on loopback, as `hpcdist run` does, and return the output of each."""
    loopback = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    env = {**os.environ, **loopback, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-P", "-m", "hpcdist.rank.startup_check", device, backend]
    # The rendezvous uses a file of this user, because torch's own store would listen on all interfaces.
    with tempfile.TemporaryDirectory(prefix="hpcdist-trial-") as folder:
        running = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/meeting"],
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


def rank_checks(trials: Sequence[Trial], name: str, *, within_s: float = TRIAL_S) -> list[Check]:
    """Return one result: the times of all ranks, or the error of the first rank that failed.

    Args:
        name: name of the test, such as `2 ranks, gloo`.
    """
    for rank, trial in enumerate(trials):
        if (problem := _problem(trial, within_s)) is not None:
            text, fix = problem
            # A timeout during imports is a slow file system, which makes no run fail.
            level: Level = "warning" if trial.code is None and not trial.stage("torchvision") else "failure"
            return [Check(name=name, level=level, text=f"rank {rank}: {text}", fix=fix)]
    took = {name: max(trial.stage(name).get("seconds", 0.0) for trial in trials) for name in _STAGES}
    text = f"import {took['torch']:.1f} s, rendezvous {took['meet']:.1f} s, all-reduce correct"
    if nccl := trials[0].stage("compute").get("nccl"):
        text += f", NCCL {nccl}"
    return [ok(name, text)]


def _problem(trial: Trial, within_s: float) -> tuple[str, str] | None:
    failed = next((s for s in trial.stages if "error" in s and s["stage"] != "torchvision"), None)
    if failed is not None:
        return f"{_STAGES[failed['stage']]} fails: {failed['error']}", _fix(failed["stage"], failed["error"])
    missing = next((stage for stage in _STAGES if not trial.stage(stage)), None)
    if missing is None:
        return None
    if trial.code is None:
        return f"{_STAGES[missing]} did not finish within {within_s:g} s", _fix(missing, "")
    last = trial.errors.strip().splitlines()[-1:] or ["no error message"]
    how = f"signal {-trial.code}" if trial.code < 0 else f"exit code {trial.code}"
    return f"{_STAGES[missing]} ended the rank with {how}: {last[0][:300]}", _fix(missing, last[0])


def _fix(stage: str, error: str) -> str:
    if stage == "compute" and "cuda" in error.lower():
        return "see `nvidia-smi`; the usual causes are CUDA_VISIBLE_DEVICES and an old driver"
    return _FIXES.get(stage, "run it by hand: `python -m hpcdist.rank.startup_check cpu gloo 0 1 $(mktemp -u)`")


def torch_checks(trials: Sequence[Trial]) -> list[Check]:
    """Return the results of importing torch and torchvision."""
    torch, vision = trials[0].stage("torch"), trials[0].stage("torchvision")
    checks = []
    if "version" in torch:
        built = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"
        checks.append(ok("torch", f"{torch['version']}, {built}"))
    if "No module named 'torchvision'" in vision.get("error", ""):
        checks.append(warning("torchvision", "not installed: image trainers need it", TOGETHER))
    elif "error" in vision:
        text = f"cannot be imported with torch {torch.get('version', '')}: {vision['error']}"
        checks.append(failure("torchvision", text, TOGETHER))
    elif vision:
        checks.append(ok("torchvision", vision["version"]))
    return checks
