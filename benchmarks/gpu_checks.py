"""Parts of a GPU session that run hpcdist itself: facts, tests, trainers, recovery, memory, scripts, doctor, preflight.

    python benchmarks/gpu_checks.py facts|tests|trainers|recovery|memory|scripts|doctor|preflight cuda|cpu FOLDER

Each part prints JSON objects, one per line, as soon as a figure is known. The exit code is 1 if something failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from hpcdist.host.gpu_info import driver_version
from hpcdist.host.machine import num_cores

CHECKOUT = Path(__file__).resolve().parents[1]
GPU_TESTS = (
    "unit/data/test_images.py", "unit/checkpoint/test_saver.py", "unit/checkpoint/test_conversion.py",
    "unit/rank/test_memory_history.py", "unit/rank/test_telemetry.py", "multiproc/test_rpc.py",
)  # fmt: skip
#: Packages of the extra `train` that shipped configs import.
PACKAGES = {
    "ddp_digits": ("sklearn",),
    "pipeline_resnet50": ("sklearn",),
    "rnn_lm": ("tokenizers",),
    "rl_cartpole": ("gymnasium", "matplotlib"),
}
#: Trainers are shortened: each has to compile, communicate, evaluate and save.
SHORT = ("checkpoint.every_steps=20", "tracking.drain_timeout_s=5")


def say(**figures: object) -> None:
    """Print figures as one line of JSON."""
    print(json.dumps(figures), flush=True)


def facts(device: str, folder: Path) -> bool:
    """Print the GPU, the driver and versions."""
    import torch

    del folder
    on_gpu = device == "cuda"
    say(
        gpu=torch.cuda.get_device_name() if on_gpu else "none",
        num_gpus=torch.cuda.device_count() if on_gpu else 0,
        driver=driver_version() or "none",
        torch=torch.__version__,
        cuda=str(torch.version.cuda),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "not used",
        cores=num_cores(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    return True


class Counter:
    """pytest plugin that counts outcomes and keeps the names of failed tests."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: object) -> None:
        outcome, when = getattr(report, "outcome", ""), getattr(report, "when", "")
        if when == "call" or outcome != "passed":
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            if outcome == "failed":
                self.failed.append(getattr(report, "nodeid", "?"))


def tests(device: str, folder: Path) -> bool:
    """Run the tests that are skipped on machines without a GPU."""
    import pytest

    del folder
    counter = Counter()
    files = [str(CHECKOUT / "tests" / name) for name in GPU_TESTS]
    code = pytest.main(
        [*files, "-k", "gpu or cuda", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"], plugins=[counter]
    )
    say(**counter.counts, **({"failed_tests": counter.failed} if counter.failed else {}))
    # In a rehearsal the tests that need a GPU are skipped.
    return code == 0 and (counter.counts.get("skipped", 0) == 0) == (device == "cuda")


def trainer_commands(num_gpus: int) -> dict[str, list[str]]:
    """Return the arguments of `hpcdist run` by name; with one GPU, roles beyond the first one use the CPU."""
    ddp = ["ddp_digits", "stop.max_epochs=2"]
    # In smaller images, whose last convolutions see one pixel, torch 2.11 assumes other strides than cuDNN returns.
    images = [*ddp, "model.name=resnet18", "data.image_size=64", "stop.max_epochs=1"]
    found = {
        "ddp": ddp,
        "ddp, bf16, channels_last, compiled": [
            *images, "precision.dtype=bf16", "model.channels_last=true", "model.compile=true",
        ],
        "ddp, fp16": [*images, "precision.dtype=fp16"],
        "rnn": ["rnn_lm", "stop.max_steps=60", "launch.devices.parameter_server=cpu"],
        "hybrid": ["hybrid_clicks", "stop.max_steps=60", f"roles.trainer={min(2, max(1, num_gpus))}"],
        # On many cores it is solved after 10 steps, before a rank is killed: no return is higher than 500.
        "rl": [
            "rl_cartpole", "stop.max_epochs=5", "stop.threshold=501", "launch.device=auto",
            "launch.devices.observer=cpu",
        ],
        "pipeline": ["pipeline_resnet50", "stop.max_epochs=1"],
    }  # fmt: skip
    if (data := os.environ.get("HPCDIST_DATA_DIR")) and Path(data, "MNIST", "raw").is_dir():
        found["ddp, mnist"] = ["ddp_mnist", "stop.max_epochs=1"]
    return found


def missing_packages(config: str) -> list[str]:
    """Return the packages that a shipped config needs besides torch and that are not installed."""
    return [name for name in PACKAGES.get(config, ()) if importlib.util.find_spec(name) is None]


def trainers(device: str, folder: Path) -> bool:
    """Run each trainer from its shipped config, and print seconds or the reason of a failure."""
    import torch

    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    runs = folder / "runs" / datetime.now(UTC).strftime("%H%M%S")
    wanted = {}
    for name, arguments in trainer_commands(num_gpus).items():
        if missing := missing_packages(arguments[0]):
            say(**{name: f"not run: not installed: {', '.join(missing)}"})
        elif device == "cuda" and name == "pipeline" and num_gpus < 2:
            say(**{name: "not run: two stages need two GPUs"})
        elif device == "cuda":
            wanted[name] = arguments
        elif "fp16" not in name:
            wanted[name] = on_cpu([word for word in arguments if word != "model.compile=true"])

    def run(name: str) -> bool:
        began = time.monotonic()
        good, last = finishes([*wanted[name], *SHORT, "launch.max_restarts=0", f"runs_dir={runs}"], folder)
        say(**{name: f"{time.monotonic() - began:.1f} s" if good else f"failed: {last}"})
        return good

    with beside_each_other() as pool:
        good = dict(zip(wanted, pool.map(run, wanted), strict=True))
    if failed := [name for name in good if not good[name]]:
        print(f"failed: {', '.join(failed)}", flush=True)
    return all(good.values())


def on_cpu(arguments: list[str]) -> list[str]:
    """Return the arguments of a run without its devices, for a rehearsal."""
    return [*(word for word in arguments if not word.startswith("launch.device")), "launch.device=cpu"]


def beside_each_other() -> ThreadPoolExecutor:
    """Return the executor of runs that are not timed: a run has three processes and threads of its own."""
    return ThreadPoolExecutor(max_workers=max(1, num_cores() // 4))


def finishes(arguments: list[str], folder: Path) -> tuple[bool, str]:
    """Start a run and wait for it; return whether it finished, and the last line of its output."""
    command = [sys.executable, "-m", "hpcdist", "run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    lines = (done.stdout + done.stderr).strip().splitlines()
    print("\n".join(lines[-30:]), flush=True)
    good = done.returncode == 0 and any(line.startswith("finished") for line in lines)
    return good, lines[-1] if lines else "no output"


#: A shipped trainer with algorithms that repeat bit by bit, the first rank of which is killed once.
KILLED_ONCE = """
import importlib, os, signal
import torch


def train(ctx, cfg):
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    ask = ctx.should_stop

    def should_stop(step, total_steps=None):
        if (ctx.topology.attempt, step) == (1, cfg.params["kill_at"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return ask(step, total_steps)

    ctx.should_stop = should_stop
    importlib.import_module(f"hpcdist.trainers.{cfg.params['shipped']}.train").train(ctx, cfg)
"""
#: Of `trainer_commands`; these names are those of the trainers, too.
KILLED = ("ddp", "rnn", "hybrid", "rl")
#: After the first checkpoint, and before the end of the shortest run.
KILL_STEP = 30


def recovery(device: str, folder: Path) -> bool:
    """Kill a rank of each trainer, and compare the last checkpoint with that of an undisturbed run bit by bit."""
    import torch

    num_gpus = torch.cuda.device_count() if device == "cuda" else 0
    good = True
    # Not in the folder of the results, which git ignores: the code of a run is copied from what git does not ignore.
    with tempfile.TemporaryDirectory(prefix="recovery-") as place:
        (Path(place) / "killed_once.py").write_text(KILLED_ONCE)
        jobs = {}
        with beside_each_other() as pool:
            for name in KILLED:
                arguments = trainer_commands(num_gpus)[name]
                if missing_packages(arguments[0]):
                    continue
                if device == "cpu":
                    arguments = on_cpu(arguments)
                for case, step in (("control", 0), ("killed", KILL_STEP)):
                    added = [f"name={name}-{case}", f"runs_dir={place}/runs", "launch.max_restarts=1"]
                    added += ["trainer=killed_once:train", f"params.shipped={name}", f"params.kill_at={step}"]
                    jobs[name, case] = pool.submit(finishes, [*arguments, *SHORT, *added], Path(place))
        for name in dict.fromkeys(name for name, _ in jobs):
            ended = [jobs[name, case].result() for case in ("control", "killed")]
            runs = [next(Path(place, "runs").glob(f"*/{name}-{case}")) for case in ("control", "killed")]
            if not all(finished for finished, _ in ended):
                verdict = next(last for finished, last in ended if not finished)
            elif len([*runs[1].glob("attempts/[0-9]*")]) != 2:
                verdict = "failed: no rank was killed"
            else:
                left, right = map(last_checkpoint, runs)
                verdict = difference(left, right) or "equal bit by bit"
            good &= verdict.startswith("equal")
            say(**{name: verdict})
    return good


def last_checkpoint(run: Path) -> dict[str, object]:
    """Return the content of a run's newest checkpoint."""
    import torch

    folder = max(path for path in (run / "checkpoints").glob("step-*") if (path / "manifest.json").exists())
    return {path.name: torch.load(path, weights_only=True, map_location="cpu") for path in sorted(folder.glob("*.pt"))}


def difference(left: object, right: object, path: str = "checkpoint") -> str:
    """Return the first place at which two nested states differ, or an empty text."""
    import torch

    if isinstance(left, dict) and isinstance(right, dict) and left.keys() == right.keys():
        return next(filter(None, (difference(left[key], right[key], f"{path}.{key}") for key in left)), "")
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return next(filter(None, (difference(*pair, f"{path}[{index}]") for index, pair in pairs)), "")
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.shape == right.shape:
        return "" if torch.equal(left, right) else f"{path} differs by {(left - right).abs().max():.3g}"
    return "" if left == right else f"{path} differs"


#: A micro-batch of all 8 samples needs 1.5 times the memory of the GPU, half of it fits.
TOO_LARGE = """
import torch


def train(ctx, cfg):
    free, total = torch.cuda.mem_get_info()
    num_values = int(1.5 * total / 8 / 4)
    model = ctx.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in ctx.steps(3, model=model, optimizer=optimizer):
        for micro in ctx.elastic.micro_batches(model, step, 8):
            activations = torch.ones(len(micro.indices), num_values, device=ctx.device)
            (model(activations[:, :1].contiguous()).mean() * micro.weight).backward()
            del activations
        optimizer.step()
        ctx.log({"train/loss": 0.0})
"""
#: A script that keeps the output of each step, and with it the graph of autograd.
KEEPS_OUTPUTS = """
import torch


def build():
    return torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(8))).cuda()


def step(model, optimizer):
    output = model(torch.randn(4096, 8192, device="cuda"))
    output.square().mean().backward(retain_graph=True)
    optimizer.step()
    return output


model = build()
optimizer = torch.optim.AdamW(model.parameters())
outputs = []
while True:
    outputs.append(step(model, optimizer))
"""


def memory(device: str, folder: Path) -> bool:
    """Exhaust the GPU's memory in a script, in a run with `launch.fit_batch`, and in one without it as the control."""
    del folder
    if device == "cpu":
        say(memory="not run: needs a GPU")
        return True
    with tempfile.TemporaryDirectory(prefix="memory-") as place:
        (Path(place) / "too_large.py").write_text(TOO_LARGE)
        arguments = ["trainer=too_large:train", "data.global_batch_size=8", "elastic.micro_batches=1"]
        arguments += ["launch.num_ranks=1", "launch.max_restarts=0", f"runs_dir={place}/runs", "tracking.uri=''"]
        (Path(place) / "memory.yaml").write_text("experiment: memory\ntrainer: too_large:train\n")
        control, reason = finishes(["memory.yaml", "name=control", *arguments], Path(place))
        fitted, last = finishes(["memory.yaml", "name=fitted", *arguments, "launch.fit_batch=true"], Path(place))
        number = json.loads(next(Path(place, "runs").glob("*/fitted/fitted_batch.json")).read_text()) if fitted else {}
        (Path(place) / "keeps_outputs.py").write_text(KEEPS_OUTPUTS)
        script = ["trainer.script=[keeps_outputs.py]", "name=script", "launch.num_ranks=1", "launch.max_restarts=0"]
        full, _ = finishes([*script, f"runs_dir={place}/runs", "tracking.uri=''"], Path(place))
        held = {name: memory_lines(Path(place, "runs"), name) for name in ("control", "script")}
    say(**{f"memory of {name}": lines for name, lines in held.items()})
    say(without_fit_batch="finished" if control else f"failed: {reason}", with_fit_batch=last, fitted=number)
    named = any("step (keeps_outputs.py:10)" in line for line in held["script"])
    return fitted and not control and not full and named


def memory_lines(runs: Path, name: str) -> list[str]:
    """Return what `hpcdist explain` says about the memory of a run's GPU."""
    (run,) = runs.glob(f"*/{name}")
    command = [sys.executable, "-m", "hpcdist", "explain", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout + done.stderr, flush=True)
    lines: list[str] = json.loads(done.stdout)["memory"]
    return lines


def scripts(device: str, folder: Path) -> bool:
    """Run programs of the tutorials: DDP on one GPU, and those that choose their devices themselves."""
    good = True
    ranks = {"tutorial_ddp_mnist": ["launch.num_ranks=1"], "tutorial_collectives": [], "tutorial_pipeline_resnet50": []}
    for config, options in ranks.items():
        arguments = [config, *options, f"runs_dir={folder}/runs", f"name=gpu-{config}", "tracking.uri=''"]
        if device == "cpu":
            arguments = on_cpu(arguments)
        began = time.monotonic()
        finished, last = finishes(arguments, folder)
        say(**{config: f"{time.monotonic() - began:.1f} s" if finished else f"failed: {last}"})
        good &= finished
    return good


def doctor(device: str, folder: Path) -> bool:
    """Run `hpcdist doctor`, and print its failures and warnings, and what it says of the GPUs."""
    command = [sys.executable, "-m", "hpcdist", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    print(done.stdout + done.stderr, flush=True)
    checks = json.loads(done.stdout)["checks"]
    found = {f"{one['level']}: {one['name']}": one["text"] for one in checks if one["level"] != "ok"}
    on_gpu = {
        one["name"]: one["text"] for one in checks if "gpu" in one["name"].lower() or "cuda" in one["name"].lower()
    }
    say(checks=len(checks), **on_gpu, **found)
    return device == "cpu" or not any(one["level"] == "failure" and "GPU" in one["name"] for one in checks)


def preflight(device: str, folder: Path) -> bool:
    """Print what the preflight reads on a node: versions and GPUs."""
    from hpcdist.checks.node_facts import read_hardware

    del folder
    began = time.monotonic()
    hardware = read_hardware(os.environ)
    say(seconds=round(time.monotonic() - began, 2), **{key: hardware[key] for key in sorted(hardware)})
    return device == "cpu" or bool(hardware["gpus"])


PARTS: dict[str, Callable[[str, Path], bool]] = {
    "facts": facts,
    "tests": tests,
    "trainers": trainers,
    "recovery": recovery,
    "memory": memory,
    "scripts": scripts,
    "doctor": doctor,
    "preflight": preflight,
}

if __name__ == "__main__":
    _, part, wanted, results = sys.argv
    sys.exit(0 if PARTS[part](wanted, Path(results).absolute()) else 1)
