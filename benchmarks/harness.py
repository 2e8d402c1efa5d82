"""Shared parts of the benchmarks: options, environments, commands, processes, journals and medians."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpcdist.supervisor.plan import processor_env
from hpcdist.tracking.journal import read_records

BASELINES = Path(__file__).parent / "baselines"
#: The programs to read beside PyTorch's tutorials, which are baselines as they are.
TUTORIALS = Path(__file__).parents[1] / "examples" / "tutorials"
HPCDIST = [sys.executable, "-m", "hpcdist"]
#: The allocator settings that hpcdist gives its ranks.
MALLOC_ENV = {key: value for key, value in processor_env(1, use_gpus=False).items() if key.startswith("MALLOC_")}
#: Help of an option of benchmarks whose rounds take long.
NO_WARM_UP = "measure without the first round, which does not count"
#: (steps done, Unix time in s)
Readings = list[tuple[int, float]]


def argument_parser(documentation: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--json` and, where a default is given, `--rounds`."""
    parser = argparse.ArgumentParser(description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true", help="print the results as JSON in the last line")
    return parser


def clean_env(*prefixes: str) -> dict[str, str]:
    """Return the environment without the variables that configure hpcdist, MLflow, malloc and OpenMP.

    Without PYTHONDONTWRITEBYTECODE either: in a checkout each process would compile the modules of hpcdist again, which
    an installation does not.
    """
    removed = ("HPCDIST_", "MALLOC_", "MLFLOW_", "OMP_", "PYTHONDONTWRITEBYTECODE", *prefixes)
    return {key: value for key, value in os.environ.items() if not key.startswith(removed)}


def tutorial_env() -> dict[str, str]:
    """Return `clean_env` for a program of TUTORIALS that starts its own ranks: one thread each, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return {**clean_env(), **ranks, "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}


def call(command: Sequence[str], folder: Path | None, env: Mapping[str, str]) -> str:
    """Run a command and return its output; a failure ends the benchmark."""
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def installed(contenders: Iterable[str], packages: Mapping[str, str]) -> list[str]:
    """Return the contenders whose package is installed, or that need none; print a line for each other one."""
    found = []
    for name in contenders:
        if name in packages and importlib.util.find_spec(packages[name]) is None:
            print(f"{name} is left out: {packages[name]} is not installed (pip install '.[bench]')\n")
        else:
            found.append(name)
    return found


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process and all its descendants; ranks lead process groups of their own."""
    import psutil  # imported here, because the GPU benchmarks run without it

    with suppress(psutil.NoSuchProcess):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def commit_all(folder: Path) -> None:
    """Make a folder a git repository with one commit of all its files."""
    identity = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for command in (["init", "--quiet"], ["add", "."], [*identity, "commit", "--quiet", "--message", "start"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


def loss_readings(run: Path) -> Readings:
    """Return the step and time of each loss that rank 0 has logged in the first attempt of a run."""
    path = run / "journal" / "attempt-001.rank-00000.jsonl"
    records = read_records(path)[0] if path.exists() else []
    return [(record.step, record.time_ms / 1000) for record in records if "train/loss" in record.metrics]


def median(values: Sequence[float]) -> float:
    """Return the median of the values that are not NaN; NaN if there are none."""
    valid = [value for value in values if not math.isnan(value)]
    return statistics.median(valid) if valid else math.nan


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios within each round."""
    return median([value / other for value, other in zip(values, base, strict=True)])
