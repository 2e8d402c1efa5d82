"""The scripts of benchmarks/, which is no package: the module `run_all`, and a script's JSON and figures."""

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

from containers import CHECKOUT
from hpcdist_runs import finish

FOLDER = CHECKOUT / "benchmarks"
#: A script that does not end by itself, on a busy machine.
TIMEOUT_S = 500.0
#: Arguments of the scripts that `run_all.py` lists, without those that submit jobs.
SMALLEST = {
    "ddp_step": (
        *("--rounds", "1", "--batch-sizes", "8", "--steps", "12"),
        # The contenders that are left out start the script of `bare` with other settings.
        *("--only", "ours;bare;accelerate;lightning"),
    ),
    "startup": ("--rounds", "1", "--ranks", "1", "--no-warm-up"),
    "start_calls": ("--ranks", "1", "2", "--only", "forked"),
    "recovery": ("--rounds", "1", "--kills", "1"),
    "goodput": ("--rounds", "1", "--steps", "30", "--kill-every", "1", "--max-kills", "1"),
    "checkpoint_stall": ("--rounds", "1", "--megabytes", "2"),
    "sharded_checkpoint": ("--rounds", "1", "--megabytes", "2"),
    "lm": ("--rounds", "1", "--steps", "1"),
    "log_record": ("--rounds", "1"),
    "shipping": ("--records", "1000"),
    "timing": ("--pairs", "100"),
    "pipeline": ("--rounds", "1", "--splits", "1", "--image-size", "32", "--without-allocator"),
    "scale": ("--ranks", "8,16", "--seconds", "1"),
    "fork_cost": ("--rounds", "1"),
    "rpc": ("--rounds", "1"),
    "token_windows": ("--rounds", "1"),
    "rl": ("--rounds", "1", "--seconds", "1", "--seeds", "1", "--only", "8 environments", "--updates", "30"),
    "rnn": ("--rounds", "1", "--cases", "toy", "--only", "ours;one process, no RPC"),
    "hybrid": ("--rounds", "1", "--only", "small", "--steps", "60"),
}
#: Arguments of the scripts that submit jobs (tests/slurm).
SMALLEST_JOBS = {
    "slurm_start": ("--rounds", "1", "--no-warm-up"),
    "slurm_recovery": ("--rounds", "1", "--kills", "1", "--tasks", "1"),
}
#: Parts of figures' paths that are not measured in the smallest size, and those that are measured instead.
MEASURED_INSTEAD = {
    "ddp_step": {
        "batch_64": "batch_8",
        "bare, with our MALLOC_*": "bare",
        "bare, without exchange": "bare",
    },
    "startup": {"8": "1"},
    "start_calls": {"each rank imports": "forked"},
    "scale": {"4096": "8", "64": "16"},
}
#: Scripts whose results are in the notes of RESULTS.md, and where their JSON has a figure.
BY_HAND = {
    "elastic": (("--rounds", "1", "--ranks", "2", "--steps", "1"), ("elastic, exact, wide, 2 ranks", "cpu_over_ddp")),
    "million_records": (("--records", "1000", "--stores", "sqlite"), ("rows", "sqlite, shipper", "over_log_batch")),
}
#: Scripts that need a GPU. `gpu.sh` starts them all; its rehearsal on the CPU is a test.
NEED_GPU = {"gpu_session", "gpu_step", "gpu_lm", "gpu_probes", "gpu_checks"}
#: Scripts that no test runs as a whole, with the reason.
NOT_RUN = {
    "run_all": "runs the others; its parts are tested in tests/unit/test_benchmark_results.py",
    "against_checkout": "compares with a second checkout, which has an environment of its own",
}
#: Modules that scripts import.
MODULES = {"harness", "fault_runs", "scale_simulation", "gpu_stages"}
#: Packages that only `make bench` installs, by the part of a figure's path that needs them. Without a package, a script
#: leaves out the contender.
PACKAGES = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "Lightning, ModelCheckpoint": "lightning",
    "ours_over_fabric": "lightning",
}


def load_run_all() -> ModuleType:
    spec = spec_from_file_location("run_all", FOLDER / "run_all.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["run_all"] = module  # which its dataclasses look up
    spec.loader.exec_module(module)
    return module


run_all = load_run_all()
BENCHMARKS = {benchmark.name: benchmark for benchmark in run_all.BENCHMARKS}


def json_of(name: str, *arguments: str) -> dict[str, Any]:
    """Run a script and return the JSON that it prints; the test fails with its output."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments, "--json"]
    process = subprocess.Popen(
        command, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    code, output = finish(process, TIMEOUT_S)
    assert code == 0, f"{' '.join(command)} exited with {code}:\n{output[-4000:]}"
    values: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    return values


def assert_has_figures(name: str, values: Mapping[str, Any]) -> None:
    """Assert that `run_all` finds all figures of a script, and the rows of its table, in the JSON."""
    benchmark = BENCHMARKS[name]
    instead = MEASURED_INSTEAD.get(name, {})
    lost = []
    for figure in benchmark.figures:
        if not are_packages_installed(figure.path):
            continue
        path = tuple(instead.get(key, key) for key in figure.path)
        value = run_all.Figure(figure.title, path).value(values)
        if value is None or not math.isfinite(value):
            lost.append(f"{figure.title}: {' / '.join(path)} is {value}")
    assert lost == []
    result = {"values": values, "date": "2026-01-02 03:04", "commit": "1234abcd"}
    rows = list(run_all.trainer_rows([run_all.Measured(benchmark, 1, result)]))
    assert benchmark.figures or rows, f"{name} has neither figures nor a table of trainers"


def are_packages_installed(path: tuple[str, ...]) -> bool:
    packages = [PACKAGES[part] for part in path if part in PACKAGES]
    return all(importlib.util.find_spec(package) for package in packages)
