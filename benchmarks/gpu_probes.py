"""Parts of a GPU session that test single mechanisms: step timer, hang diagnostics, history of memory, communication.

    python benchmarks/gpu_probes.py timer|hang|history|compiled|comm cuda|cpu

Each part prints JSON objects, one per line, as soon as a figure is known. The exit code is 1 if something failed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcdist.host.json_files import read_json
from hpcdist.rank import memory_history
from hpcdist.rank.step_timing import EventClock, HostClock, StepTimer, TimedDDP
from hpcdist.review.known_failures import first_match
from hpcdist.run.folder import RunDir

#: Times that the device is kept busy in each step, in seconds: before the forward pass and in it.
DATA_S, COMPUTE_S = 0.010, 0.020
#: A measured time may differ from the known one by this part, and by the time of the other kernels of a step.
TOLERANCE, OVERHEAD_S = 0.05, 0.004
#: Longer than a start takes, also beside other work.
HANG_TIMEOUT_S = {"cuda": 30, "cpu": 60}
#: A rank queues an all-reduce behind a kernel that does not end, and waits for its result.
HUNG_TRAINER = """
import threading
import torch
import torch.distributed as dist


def train(ctx, cfg):
    values = torch.ones(1024, device=ctx.device)
    for step in range(1, 1000):
        if step == 15 and ctx.rank == ctx.world_size - 1:
            if ctx.device.type == "cuda":
                torch.cuda._sleep(10**12)  # minutes
            else:
                threading.Event().wait()
        dist.all_reduce(values)
        values.fill_(values.mean().item())
        ctx.log({"train/loss": 1 / step}, step)
        if ctx.should_stop(step, 1000):
            return
"""


def say(**figures: object) -> None:
    """Print figures as one line of JSON."""
    print(json.dumps(figures), flush=True)


# --- step timer


class Busy:
    """Keeps a device busy for a known time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._cycles_per_s = self._measure() if self._on_gpu else 0.0

    def _measure(self) -> float:
        cycles = 200_000_000
        readings: list[float] = []
        for _ in range(4):  # the first one raises the clock
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
            readings.append(cycles / begin.elapsed_time(end) * 1e3)
        return statistics.median(readings[1:])

    def __call__(self, seconds: float) -> None:
        if self._on_gpu:
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
        else:
            time.sleep(seconds)


class BusyModel(nn.Module):
    """A model whose forward pass takes a known time."""

    def __init__(self, busy: Busy) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self._busy = busy

    def forward(self, values: Tensor) -> Tensor:
        self._busy(COMPUTE_S)
        result: Tensor = self.layer(values)
        return result


def timer(device: torch.device, folder: Path) -> bool:
    """Compare the step timer with steps of known data and compute time."""
    meet(device, folder)
    busy = Busy(device)
    steps = StepTimer(EventClock(device) if device.type == "cuda" else HostClock())
    model = TimedDDP(BusyModel(busy).to(device), steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = torch.ones(4, 8, device=device)
    for step in range(1, 31):
        busy(DATA_S)
        model(values).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.step_done(step)
        if device.type == "cuda" and step % 5 == 0:
            torch.cuda.synchronize()
    dist.destroy_process_group()
    totals = steps.totals
    data_s, compute_s = totals.data_s / totals.own_steps, totals.compute_s / totals.own_steps
    say(
        steps=totals.own_steps, data_ms=1e3 * data_s, known_data_ms=1e3 * DATA_S, compute_ms=1e3 * compute_s,
        known_compute_ms=1e3 * COMPUTE_S,
    )  # fmt: skip
    # A loaded CPU sleeps longer, never shorter.
    at_most = float("inf") if device.type == "cpu" else 1 + TOLERANCE
    return all(
        known * (1 - TOLERANCE) <= measured <= known * at_most + OVERHEAD_S
        for measured, known in ((data_s, DATA_S), (compute_s, COMPUTE_S))
    )


def meet(device: torch.device, folder: Path, *, backend: str = "", rank: int = 0, world_size: int = 1) -> None:
    """Initialise the process group through a file in the folder."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend or ("nccl" if device.type == "cuda" else "gloo"), init_method=f"file://{folder}/meet", rank=rank,
        world_size=world_size, timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" and backend != "gloo" else None,
    )  # fmt: skip


# --- hang


def hang(device: torch.device, folder: Path) -> bool:
    """Run a trainer that hangs, and check the stacks and the flight records that hpcdist collects."""
    (folder / "hung_trainer.py").write_text(HUNG_TRAINER)
    runs = folder / "runs"
    name = f"hangs-{os.getpid()}"
    config = folder / "hangs.yaml"
    config.write_text("experiment: hangs\ntrainer: hung_trainer:train\n")
    options = [
        f"name={name}",
        f"runs_dir={runs}",
        "tracking.drain_timeout_s=5",
        "launch.max_restarts=0",
        f"launch.device={device.type}",
    ]
    options += [
        f"launch.hang_timeout_s={HANG_TIMEOUT_S[device.type]}",
        *(["launch.num_ranks=2"] if device.type == "cpu" else []),
    ]
    command = [sys.executable, "-m", "hpcdist", "run", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    lines = (done.stdout + done.stderr).strip().splitlines()
    print("\n".join(lines[-30:]), flush=True)
    (attempt,) = RunDir(runs / "hangs" / name).attempts()
    stacks = attempt.stacks_summary.read_text() if attempt.stacks_summary.exists() else ""
    backend = "nccl" if device.type == "cuda" else "gloo"
    recorders = (read_json(attempt.flight(0)) or {}).get("recorders", {})
    entries = recorders.get(backend, {}).get("entries", [])
    waiting = [entry["profiling_name"] for entry in entries if not entry["retired"]]
    say(
        exit_code=done.returncode, message=lines[-1] if lines else "",
        trainer_in_stacks="hung_trainer.py" in stacks, recorded=len(entries), waiting=waiting[-1:],
    )  # fmt: skip
    said = bool(lines) and "made no progress" in lines[-1]
    return done.returncode == 1 and said and "hung_trainer.py" in stacks and bool(waiting)


# --- history of a GPU's memory


#: Sizes of a training step: width, depth, samples, and steps of a round.
HISTORY_SIZES = {"many small kernels": (64, 8, 2, 60), "large kernels": (2048, 8, 16, 12)}
#: The history is on in every other round; the first two warm up.
HISTORY_ROUNDS = 14


def history(device: torch.device, folder: Path) -> bool:
    """Measure a training step with the history of allocations over one without, in turn."""
    del folder
    sizes, num_rounds = HISTORY_SIZES, HISTORY_ROUNDS
    if device.type == "cpu":
        sizes, num_rounds = {"many small kernels": (16, 1, 1, 2)}, 4
    for name, (width, depth, batch, num_steps) in sizes.items():
        step = training_step(device, width, depth, batch)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(num_rounds):
            with_history = number % 2 == 0
            set_history(device, on=with_history)
            taken = timed_steps(device, step, num_steps)
            if number >= 2:
                seconds[with_history].append(taken)
        set_history(device, on=False)
        with_s, without_s = statistics.median(seconds[True]), statistics.median(seconds[False])
        pairs = [on / off for on, off in zip(seconds[True], seconds[False], strict=True)]
        say(**{
            f"{name}: step, ms": 1e3 * without_s,
            f"{name}: with history over without": with_s / without_s,
            f"{name}: ratios of pairs": [round(pair, 4) for pair in sorted(pairs)],
            f"{name}: allocations a step": allocations(device, step),
        })  # fmt: skip
    return True


def training_step(device: torch.device, width: int, depth: int, batch: int) -> Callable[[], None]:
    """Return a step of a transformer in bf16, without compilation: each operator allocates its result."""
    layers = [nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randn(batch, 512, width, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def set_history(device: torch.device, *, on: bool) -> None:
    """Turn the history of allocations on, as in a rank, or off."""
    if device.type == "cuda" and on:
        memory_history.begin()
    elif device.type == "cuda":
        torch.cuda.memory._record_memory_history(None)


def timed_steps(device: torch.device, step: Callable[[], None], number: int) -> float:
    """Return the seconds of a step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(number):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / number


def allocations(device: torch.device, step: Callable[[], None]) -> int:
    """Return the number of allocations of a step; 0 on a CPU."""
    if device.type == "cpu":
        return 0
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    step()
    return int(torch.cuda.memory_stats()["allocation.all.allocated"] - before)


# --- compiled code


#: The first step of a rank: the import of torch is over, the cache of this process and its archive are folders.
COMPILED_STEP = """
import json, os, sys, time
from pathlib import Path
import torch
from torch import nn
from hpcdist.rank.compile_cache import kept
store, local, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
device = torch.device(kind)
torch.zeros(1, device=device)
model, tokens = nn.Linear(8, 8), torch.randn(4, 8)
if kind == "cuda":
    layers = [nn.TransformerEncoderLayer(1024, 8, dropout=0.0, batch_first=True) for _ in range(8)]
    model, tokens = nn.Sequential(*layers).to(device), torch.randn(4, 128, 1024, device=device)
began = time.perf_counter()
with kept(store, local):
    loss = torch.compile(model)(tokens).square().mean()
    loss.backward()
    if kind == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    from torch._dynamo.utils import counters
    found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    found |= {f"autograd_{name}": counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss")}
saved_s = time.perf_counter() - began - seconds
kernels = len([*local.rglob("*.cubin"), *local.rglob("*.so")])
print(json.dumps({
    "seconds": seconds, "caches": found, "kernels": kernels, "saved_s": saved_s,
    "archive_mb": sum(path.stat().st_size for path in store.glob("*.zip")) / 1e6,
}))
"""


def compiled(device: torch.device, folder: Path) -> bool:
    """Measure the first compiled step on a new node, on another node with the archive, and on a third one without."""
    for name in ("store", "empty", "first", "second", "third"):
        (folder / name).mkdir(mode=0o700)
    # Another process may have compiled for this machine: all caches are in new folders.
    env = {**os.environ, "TMPDIR": str(folder)}
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        env.pop(variable, None)
    found = {}
    for name, store, local in (
        ("cold", "store", "first"),
        ("archive", "store", "second"),
        ("cold again", "empty", "third"),
    ):
        command = [sys.executable, "-c", COMPILED_STEP, str(folder / store), str(folder / local), device.type]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        print(done.stdout + done.stderr, flush=True)
        if done.returncode != 0:
            return False
        found[name] = json.loads(done.stdout.splitlines()[-1])
        say(**{f"{name}: {key}": value for key, value in found[name].items()})
    say(archive_over_cold=found["archive"]["seconds"] / found["cold"]["seconds"])
    return all(found["archive"]["caches"][name] == 0 for name in ("miss", "autograd_miss"))


# --- communication


#: One rank of a measurement; the arguments are the backend, the device, the folder, the rank and the world size.
COMM_RANK = """
import sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[6])
from gpu_probes import all_reduce_rates, meet, say
import torch.distributed as dist
backend, device, folder = sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3])
rank, world_size = map(int, sys.argv[4:6])
meet(device, folder, backend=backend, rank=rank, world_size=world_size)
rates = all_reduce_rates(device)
if rank == 0:
    say(**{f"{backend}, {world_size} rank(s) on one device, {size}": rate for size, rate in rates.items()})
dist.destroy_process_group()
"""


def all_reduce_rates(device: torch.device, sizes_mb: Sequence[int] = (1, 16, 64), repeat: int = 8) -> dict[str, str]:
    """Return the median rate of an all-reduce by size, in GB/s of the buffer."""
    found = {}
    for megabytes in sizes_mb:
        values = torch.ones(megabytes * 2**18, device=device)
        seconds = []
        for _ in range(repeat + 2):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        found[f"{megabytes} MiB"] = f"{values.nbytes / statistics.median(seconds[2:]) / 1e9:.3g} GB/s"
    return found


def comm(device: torch.device, folder: Path) -> bool:
    """Measure all-reduce on one device, and check the message of NCCL for two ranks on one GPU."""
    good = measure_comm("gloo", device, folder, 2)[0]
    if device.type == "cuda":
        good &= measure_comm("nccl", device, folder, 1)[0]
        refused, output = measure_comm("nccl", device, folder, 2)
        found = first_match(output.splitlines())
        say(two_ranks_with_nccl="accepted" if refused else (found[0].cause if found else output.strip()[-200:]))
    return good


def measure_comm(backend: str, device: torch.device, folder: Path, world_size: int) -> tuple[bool, str]:
    """Run the ranks of a measurement; return whether all succeeded, and their output."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", COMM_RANK, backend, str(device), place, str(rank), str(world_size),
                 str(Path(__file__).parent)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        outputs = []
        for process in ranks:
            try:
                outputs.append(process.communicate(timeout=90)[0])
            except subprocess.TimeoutExpired:
                for one in ranks:
                    with suppress(ProcessLookupError):
                        one.kill()
                outputs.append(process.communicate()[0])
    output = "\n".join(outputs)
    print(output, flush=True)
    return all(process.returncode == 0 for process in ranks), output


PARTS: dict[str, Callable[[torch.device, Path], bool]] = {
    "timer": timer, "hang": hang, "history": history, "compiled": compiled, "comm": comm,
}  # fmt: skip


def main() -> int:
    _, part, kind, *_ = sys.argv
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    # Not in the folder of the results, which git ignores: the code of a run is copied from what git does not ignore.
    with tempfile.TemporaryDirectory(prefix=f"{part}-") as folder:
        return 0 if PARTS[part](device, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
