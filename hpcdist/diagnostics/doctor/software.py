"""What is installed, read from files: nothing is imported for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import hpcdist
from hpcdist.machine.check import Check
from hpcdist.machine.cuda_drivers import driver_problem

OLDEST_PYTHON = (3, 11)


def software(*, torch_wanted: bool, cuda: str, driver: str) -> list[Check]:
    """Python, hpcdist and torch, and whether they go together.

    Args:
        torch_wanted: whether a run would be trained by this Python; a login node needs no torch.
        cuda: version that torch is built for, empty where it is built without.
        driver: version of the kernel's NVIDIA driver, empty where there is none.
    """
    return [_python(), _own(), *_torch(torch_wanted, cuda, driver)]


def _python() -> Check:
    text = f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.prefix}"
    if sys.version_info < OLDEST_PYTHON:
        fix = "make a virtual environment with a newer one: `python3.11 -m venv .venv`"
        return Check(name="Python", level="failure", text=f"{text}: hpcdist needs 3.11 or newer", fix=fix)
    return Check(name="Python", level="ok", text=text)


def _own() -> Check:
    folder = Path(hpcdist.__file__).parent
    checkout = folder.parent
    if not (checkout / ".git").exists():
        return Check(name="hpcdist", level="ok", text=f"{hpcdist.__version__}, {folder}")
    changed = 0
    if shutil.which("git") is not None:
        command = ["git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        changed = len(said.stdout.splitlines())
    state = f", {changed} file{'s' * (changed > 1)} changed since the last commit" if changed else ""
    return Check(name="hpcdist", level="ok", text=f"{hpcdist.__version__}, the checkout {checkout}{state}")


def _torch(wanted: bool, cuda: str, driver: str) -> list[Check]:
    version = version_of("torch")
    if not version:
        if not wanted:
            text = "not installed: submitting needs none; the nodes' Python, or the image, does"
            return [Check(name="torch", level="note", text=text)]
        text = "not installed: a run on this machine would fail"
        return [Check(name="torch", level="failure", text=text, fix="`pip install 'hpcdist[train]'`")]
    checks = []
    pinned = _pin("torchvision", "torch")
    if pinned and pinned != version.partition("+")[0]:
        text = f"{version} beside a torchvision {version_of('torchvision')} made for {pinned}: it would not import"
        checks.append(Check(name="torch", level="failure", text=text, fix=TOGETHER))
    if problem := driver_problem(cuda, driver):
        text = f"torch {version} needs {problem}"
        fix = "update the driver, or install a torch for an older CUDA: https://pytorch.org/get-started/locally"
        checks.append(Check(name="driver", level="failure", text=text, fix=fix))
    elif driver:
        checks.append(Check(name="driver", level="ok", text=driver + (f", new enough for CUDA {cuda}" if cuda else "")))
    if driver and not cuda:
        text = f"torch {version} is built without CUDA, and this machine has GPUs: training runs on the CPUs"
        checks.append(Check(name="torch", level="warning", text=text, fix=f"a build with CUDA; {TOGETHER}"))
    return checks


TOGETHER = "install both in one call from one index: `pip install --force-reinstall torch torchvision`"


def version_of(distribution: str) -> str:
    """Its version, empty where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _pin(distribution: str, requirement: str) -> str:
    """The version of a requirement that a distribution asks for exactly; empty where it leaves a choice."""
    if not version_of(distribution):
        return ""
    lines = metadata.requires(distribution) or []
    matches = (re.match(rf"{requirement}\s*\(?==\s*([\w.]+)", line) for line in lines)
    return next((match[1] for match in matches if match), "")
