"""Checks of the installed software; nothing is imported for them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import hpcdist
from hpcdist.machine.check import Check, failure, note, ok, warning
from hpcdist.machine.cuda_drivers import driver_problem
from hpcdist.machine.installation import install_command

OLDEST_PYTHON = (3, 11)


def software_checks(*, torch_required: bool, cuda: str, driver: str) -> list[Check]:
    """Check Python, hpcdist and torch, and whether their versions are compatible.

    Args:
        torch_required: whether this Python would train; a login node needs no torch.
        cuda: version that torch is built for, empty without CUDA.
        driver: version of the NVIDIA driver, empty without one.
    """
    return [_python(), _own(), *_torch(torch_required, cuda, driver)]


def _python() -> Check:
    text = f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.prefix}"
    if sys.version_info < OLDEST_PYTHON:
        fix = "create a virtual environment with a newer one: `python3.11 -m venv .venv`"
        return failure("Python", f"{text}: hpcdist needs 3.11 or newer", fix)
    return ok("Python", text)


def _own() -> Check:
    folder = Path(hpcdist.__file__).parent
    checkout = folder.parent
    if not (checkout / ".git").exists():
        return ok("hpcdist", f"{hpcdist.__version__}, {folder}")
    changed = 0
    if shutil.which("git") is not None:
        command = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        changed = len(done.stdout.splitlines())
    state = f", {changed} file{'s' * (changed > 1)} changed since the last commit" if changed else ""
    return ok("hpcdist", f"{hpcdist.__version__}, the checkout {checkout}{state}")


def _torch(required: bool, cuda: str, driver: str) -> list[Check]:
    version = version_of("torch")
    if not version:
        if not required:
            text = (
                "not installed: ranks need container.image or cluster.environment, since they use this Python otherwise"
            )
            return [note("torch", text, install_command("train"))]
        return [failure("torch", "not installed: a run on this machine would fail", install_command("train"))]
    checks = []
    pinned = _pin("torchvision", "torch")
    if pinned and pinned != version.partition("+")[0]:
        text = (
            f"{version} beside a torchvision {version_of('torchvision')} built for {pinned}, which cannot be imported"
        )
        checks.append(failure("torch", text, TOGETHER))
    if problem := driver_problem(cuda, driver):
        text = f"torch {version} needs {problem}"
        fix = "update the driver, or install a torch for an older CUDA: https://pytorch.org/get-started/locally"
        checks.append(failure("driver", text, fix))
    elif driver:
        checks.append(ok("driver", driver + (f", supports CUDA {cuda}" if cuda else "")))
    if driver and not cuda:
        text = f"torch {version} is built without CUDA, and this machine has GPUs: training uses the CPUs"
        checks.append(warning("torch", text, f"install a build with CUDA; {TOGETHER}"))
    return checks


TOGETHER = "install both together from one index: `pip install --force-reinstall torch torchvision`"


def version_of(distribution: str) -> str:
    """Return the version of a distribution, empty if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _pin(distribution: str, requirement: str) -> str:
    """Return the version of a requirement that a distribution pins exactly; empty if it pins none."""
    if not version_of(distribution):
        return ""
    lines = metadata.requires(distribution) or []
    matches = (re.match(rf"{requirement}\s*\(?==\s*([\w.]+)", line) for line in lines)
    return next((match[1] for match in matches if match), "")
