"""Images per second of the DDP trainer on GPUs, compared with a bare loop: ResNet50, 224², bf16, torch.compile.

    PYTHONPATH=. python benchmarks/gpu_step.py [--rounds 3] [--json]
    PYTHONPATH=. python benchmarks/gpu_step.py --check-sync
    PYTHONPATH=. python benchmarks/gpu_step.py --device cpu --model resnet18 --image-size 64 --batch-size 4 --steps 6

One rank per visible GPU, or two without GPUs. hpcdist is the real trainer with all parts of a rank: journal,
heartbeats, stop agreement, system metrics, asynchronous checkpoints, and batches from images on the device. The
supervisor and MLflow are separate processes and are left out, so torch is the only requirement. The bare loop trains on
one fixed batch on the device and does nothing else.

hpcdist is measured between its own log records, which wait for the device; the bare loop waits as often. Compilation
and evaluation do not count: the first epoch, and intervals that contain the end of an epoch, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import argument_parser, median_ratio
from torch.nn.parallel import DistributedDataParallel

from hpcdist.config.launch_schema import LaunchConfig
from hpcdist.config.record_schema import TrackingConfig
from hpcdist.config.schema import Config
from hpcdist.config.topology import Topology
from hpcdist.config.training_schema import DataConfig, ModelConfig, OptimConfig, PrecisionConfig, StopConfig
from hpcdist.data import datasets
from hpcdist.data.datasets import build_model
from hpcdist.rank.context import Context, close
from hpcdist.rank.device import bind_to_cpus, cpus_beside, select_device
from hpcdist.rank.process_group import process_groups, seed_everything
from hpcdist.rank.processes import StopFlag
from hpcdist.rank.stopping import StopAgreement
from hpcdist.rank.telemetry import Heartbeat
from hpcdist.run.folder import RunDir
from hpcdist.run.rank_requests import RequestReader
from hpcdist.supervisor.plan import LOOPBACK, Machine, Plan, free_port, make_plan
from hpcdist.tracking.journal import read_records
from hpcdist.tracking.rank_records import RankRecords
from hpcdist.trainers.ddp import train

NUM_EPOCHS = 3
NUM_CLASSES = 1000
INTERVALS_PER_EPOCH = 6


def make_config(arguments: argparse.Namespace, num_ranks: int) -> Config:
    """Return the config of both contenders; an epoch is a third of all steps."""
    per_epoch = arguments.steps // NUM_EPOCHS
    return Config(
        experiment="gpu_step",
        name="run",
        model=ModelConfig(name=arguments.model, channels_last=True, compile=arguments.compile),
        data=DataConfig(
            name="synthetic",
            root="",
            image_size=arguments.image_size,
            batch_size=arguments.batch_size,
            num_samples=per_epoch * arguments.batch_size * num_ranks,
            num_classes=NUM_CLASSES,
        ),
        optim=OptimConfig(name="sgd", lr=0.01),
        precision=PrecisionConfig(dtype="bf16"),
        stop=StopConfig(max_epochs=NUM_EPOCHS),
        tracking=TrackingConfig(
            uri="", log_every_steps=max(1, per_epoch // INTERVALS_PER_EPOCH), system_interval_s=2.0
        ),
        launch=LaunchConfig(device=arguments.device, num_ranks=num_ranks),
    )


# --- ranks


def run_ours(config: Config, run: RunDir, *, check_sync: bool) -> None:
    """Run the trainer as the worker does, without the parts that need other packages than torch."""
    topology = Topology.from_env(os.environ)
    attempt = run.attempt(topology.attempt)
    heartbeat = Heartbeat(attempt, topology.rank, topology.world_size, config.launch.hang_s)
    device = select_device(config, topology, os.environ)
    seed_everything(config.seed)
    # Compilation and the first steps wait for the device; they do not count as training steps here either.
    first = config.data.num_samples // config.data.batch_size // topology.world_size
    syncs = SyncCounter(device.device, lambda: heartbeat.step >= first) if check_sync else None
    with ExitStack() as stack:
        groups = stack.enter_context(
            process_groups(
                topology,
                device.device,
                device.backend,
                attempt.read_key(),
                attempt.path,
                init_timeout_s=120,
                timeout_s=1800,
                on_expiry=lambda: os._exit(1),
            )
        )
        beside = (topology.node_rank, cpus_beside(device))
        bind_to_cpus(beside[1], groups.all_gather(beside).count(beside), os.environ)
        records = RankRecords(run, attempt=attempt.number, rank=topology.rank, pid=os.getpid())
        stack.callback(records.close)
        try:
            import pynvml  # noqa: F401  # the monitor imports it later

            from hpcdist.rank.system_metrics import monitored_node
        except ModuleNotFoundError as error:
            print(f"{error.name} is not installed: no system metrics", file=sys.stderr)
        else:
            stack.enter_context(monitored_node(config, run, topology, records.journal))
        ctx = Context(
            config=config,
            run=run,
            attempt=attempt,
            topology=topology,
            device=device.device,
            groups=groups,
            stop=StopAgreement(groups.control, StopFlag(), RequestReader(attempt) if topology.rank == 0 else None),
            records=records,
            heartbeat=heartbeat,
        )
        if syncs is not None:
            stack.enter_context(syncs)
        datasets.PRELOAD_MAX_BYTES = 1 << 40  # all images are on the device, as the batch of the bare loop
        train.train(ctx, config)
        close(ctx)
    if syncs is not None and topology.rank == 0:
        (run.path / "syncs.json").write_text(json.dumps(syncs.places))


#: Functions that the training loop of `ddp` calls in a step.
PARTS_OF_LOOP = ("interval_metrics", "save", "train_step", "epoch_steps", "add", "should_stop")


class SyncCounter:
    """Counts waits of the host for the device during training steps, by function of the trainer.

    Source: https://docs.pytorch.org/docs/stable/generated/torch.cuda.set_sync_debug_mode.html
    """

    def __init__(self, device: torch.device, counts: Callable[[], bool]) -> None:
        self._on_gpu = device.type == "cuda"
        self._counts = counts
        self._catch = warnings.catch_warnings()
        #: Number of waits by "function, file:line" of the innermost frame in hpcdist.
        self.places: Counter[str] = Counter()

    def __enter__(self) -> None:
        self._catch.__enter__()
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("warn")

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self._catch.__exit__(None, None, None)

    def _note(self, message: Warning | str, *_: object, **__: object) -> None:
        if "synchronizing" not in str(message) or not self._counts():
            return
        frames = [frame for frame in traceback.extract_stack() if f"{os.sep}hpcdist{os.sep}" in frame.filename]
        names = {frame.name for frame in frames}
        part = next((name for name in PARTS_OF_LOOP if name in names), None)
        if part is None or frames[-1].name == "epoch_indices":
            return
        self.places[f"{part}: {Path(frames[-1].filename).name}:{frames[-1].lineno}"] += 1


def run_bare(config: Config, out: Path) -> None:
    """Train on one fixed batch; write [steps done, Unix time in s] for each interval."""
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    on_gpu = config.launch.device == "cuda"
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)
    size = config.data.image_size
    assert size is not None
    module = build_model(config.model.name, num_classes=NUM_CLASSES, in_channels=3, image_size=size)
    module = module.to(device).to(memory_format=torch.channels_last)
    if config.model.compile:
        module.compile()
    model = DistributedDataParallel(module, device_ids=[device] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(config.data.batch_size, 3, size, size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, NUM_CLASSES, (config.data.batch_size,), device=device)

    num_steps = config.data.num_samples // config.data.batch_size // dist.get_world_size() * NUM_EPOCHS
    readings = []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if step % config.tracking.log_every_steps == 0:
            loss.item()
            readings.append((step, time.time()))
    if rank == 0:
        out.write_text(json.dumps(readings))
    dist.destroy_process_group()


# --- measurement


def start_ranks(plan: Plan, arguments: list[str], env: Mapping[str, str]) -> None:
    """Start this file once per rank and wait; a failed rank ends the benchmark."""
    port = free_port("gpu_step", 1)
    torchrun = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(plan.num_ranks)}
    processes = []
    for rank in range(plan.num_ranks):
        own = plan.rank_env(rank, job_id="gpu_step", attempt=1, master_port=port)
        rank_env = {**env, **own, **torchrun, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(subprocess.Popen([sys.executable, __file__, *arguments], env=rank_env))
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("a rank failed: see above")


def images_per_s(readings: list[tuple[int, float]], config: Config, num_ranks: int) -> float:
    """Return the rate over the intervals that lie within one epoch, without the first epoch."""
    per_epoch = config.data.num_samples // config.data.batch_size // num_ranks
    steps, seconds = 0, 0.0
    for (begin, began), (end, ended) in pairwise(readings):
        if begin > per_epoch and begin % per_epoch != 0 and begin // per_epoch == (end - 1) // per_epoch:
            steps, seconds = steps + end - begin, seconds + ended - began
    return steps * config.data.batch_size * num_ranks / seconds


def measure(plan: Plan, config: Config, contender: str, arguments: list[str]) -> tuple[float, dict[str, int]]:
    """Return the images per second of a contender, and with `--check-sync` its waits for the device by place."""
    with tempfile.TemporaryDirectory(prefix="gpu_step_") as name:
        folder = Path(name)
        run = RunDir.create(folder / "gpu_step" / "run")
        attempt = run.new_attempt()
        out = folder / "readings.json"
        start_ranks(plan, [*arguments, "--rank-of", contender, "--folder", name], os.environ)
        if contender == "bare":
            return images_per_s(json.loads(out.read_text()), config, plan.num_ranks), {}
        records, _ = read_records(run.journal / f"attempt-{attempt.number:03d}.rank-00000.jsonl")
        readings = [(record.step, record.time_ms / 1000) for record in records if "train/loss" in record.metrics]
        syncs = run.path / "syncs.json"
        return (
            images_per_s(readings, config, plan.num_ranks),
            json.loads(syncs.read_text()) if syncs.exists() else {},
        )


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256, help="images per rank")
    parser.add_argument("--steps", type=int, default=300, help="steps in total; a third of them warms up")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--check-sync", action="store_true", help="count waits for the device instead of time")
    parser.add_argument("--rank-of", choices=("ours", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.rank_of:
        config = make_config(arguments, int(os.environ["WORLD_SIZE"]))
        if arguments.rank_of == "bare":
            run_bare(config, arguments.folder / "readings.json")
        else:
            run_ours(config, RunDir(arguments.folder / "gpu_step" / "run"), check_sync=arguments.check_sync)
        return
    machine = Machine.inspect(os.environ)
    launch = LaunchConfig(device=arguments.device)
    plan = make_plan(Config(launch=launch, tracking=TrackingConfig(uri="")), machine)
    config = make_config(arguments, plan.num_ranks)
    passed_on = [argument for argument in sys.argv[1:] if argument != "--json"]
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "no GPU"
    head = f"{plan.num_ranks} rank(s), {gpu}, torch {torch.__version__}, {arguments.model}, {arguments.image_size}²"
    print(f"{head}, batch {arguments.batch_size} per rank, {arguments.steps} steps")

    result: dict[str, object] = {"benchmark": "gpu_step", "device": gpu, "num_ranks": plan.num_ranks}
    if arguments.check_sync:
        _, syncs = measure(plan, config, "ours", passed_on)
        print(f"waits for the device in the last two thirds of {arguments.steps} training steps:")
        for place, count in syncs.items():
            print(f"    {count:6}  {place}")
        # Waits that occur once per epoch, such as the copy of its indices to the device, are not part of a step.
        in_step = sum(
            n for place, n in syncs.items() if n > NUM_EPOCHS and not place.startswith(("interval_metrics", "save"))
        )
        print(f"in steps, without logging and checkpoints: {in_step}")
        result |= {"syncs": syncs, "syncs_in_steps": in_step}
    else:
        speeds: dict[str, list[float]] = {"bare": [], "ours": []}
        for _ in range(arguments.rounds):
            for contender, values in speeds.items():
                values.append(measure(plan, config, contender, passed_on)[0])
        over = median_ratio(speeds["ours"], speeds["bare"])
        for contender, values in speeds.items():
            print(f"{contender:8}{statistics.median(values):10.1f} images/s  ({min(values):.1f} … {max(values):.1f})")
        print(f"ours over bare: {over:.3f}")
        result |= {key: statistics.median(values) for key, values in speeds.items()} | {"over_bare": over}
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
