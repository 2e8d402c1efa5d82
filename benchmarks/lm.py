"""CPU time per token of the trainer lm on two ranks, with everything on, over a bare FSDP2 loop and Lightning Fabric.

    python benchmarks/lm.py [--rounds 8] [--steps 5] [--json]

10 M parameters, two windows of 128 tokens per rank, single precision, clipping and fused AdamW in all. The loop of
hpcdist reads windows from a file, sums losses, sets the learning rate, logs once in a round and saves checkpoints. The
bare loop has torch's functions alone, and its tokens in memory. Fabric shards by the same calls
(ModelParallelStrategy); its loop has a data loader over tokens in memory, logs once in a round by its CSVLogger, and
saves sharded checkpoints by `fabric.save`.

The trainer keeps the gathered weights of so small a model from the forward to the backward pass. The bare loop and
Fabric's, which is that of its documentation, do what `fully_shard` does by default: they gather the weights twice. The
loop `bare_kept` is the bare one with `reshard_after_forward=False`.

All run in the same two ranks and do one round of steps in turn. A save is measured apart, after the steps of its round,
until it is on disk; a token has its share of it with a save every 100 steps, as `lm_small` does. CPU seconds of both
ranks, with all threads, resolve more than times on a shared machine. To those of hpcdist, the CPU time of its other
processes during its steps is added: supervisor, and shipper with MLflow. The ratios are computed within each round; the
results are medians.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from harness import HPCDIST, argument_parser, clean_env, installed, median, median_ratio
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from hpcdist import Config, Context
from hpcdist.config.training_schema import DataConfig
from hpcdist.data.windows import TokenWindows
from hpcdist.rank.training_loop import Meter, build_optimizer, lr_factor, set_lr
from hpcdist.trainers.lm import LmConfig
from hpcdist.trainers.lm.model import Decoder
from hpcdist.trainers.lm.parallel import parallelize
from hpcdist.trainers.lm.sizes import LmModelConfig
from hpcdist.trainers.lm.train import Batches, next_token_loss, parameter_groups, train_step

VOCAB_SIZE = 4096
SIZES = LmModelConfig(hidden_size=320, num_layers=6, num_heads=5, intermediate_size=864)
WINDOWS_PER_RANK, LENGTH = 2, 128
NUM_RANKS = 2
NUM_WINDOWS = 1000
LR = 1e-3
CONTENDERS = ("ours", "bare", "bare_kept", "fabric")
#: The package of a contender that needs one.
PACKAGES = {"fabric": "lightning"}
#: Steps between two saves, as in configs/lm_small.yaml.
STEPS_PER_SAVE = 100


class Contender(NamedTuple):
    """One of the loops."""

    do_steps: Callable[[], None]  #: the steps of a round
    save: Callable[[], None]  #: saves a checkpoint, and waits until it is on disk


def hpcdist_loop(ctx: Context, cfg: Config, num_rounds: int, num_steps: int) -> Contender:
    """Return the loop with the trainer's own functions."""
    mesh = ctx.mesh(replicate=1, shard=-1, tensor=1)
    with torch.device("meta"):
        model = Decoder(SIZES, VOCAB_SIZE)
    parallelize(model, mesh)
    model.to_empty(device=ctx.device)
    model.init_weights(0)
    optimizer = build_optimizer(parameter_groups(model, cfg.optim), cfg.optim)
    file = ctx.run.path / f"tokens-{ctx.rank}.npy"
    tokens = np.random.default_rng(0).integers(VOCAB_SIZE, size=NUM_WINDOWS * LENGTH + 1)
    np.save(file, tokens.astype(np.uint16))
    data = DataConfig(global_batch_size=WINDOWS_PER_RANK * NUM_RANKS)
    lm = LmConfig(model=SIZES, sequence_length=LENGTH)
    batches = Batches(Config(data=data, sections={"lm": lm}), mesh, TokenWindows(file, LENGTH, seed=0))
    meter = Meter(None, ctx.device)
    total_steps = num_rounds * num_steps
    steps = ctx.steps(total_steps, model=model, optimizer=optimizer, local=meter)

    def do_steps() -> None:
        for step in steps.until(steps.step + num_steps):
            set_lr(optimizer, cfg.optim.lr * lr_factor(step, total_steps, cfg.schedule))
            passes = batches.of_step(step, ctx.device)
            loss_sum, num_windows, norm = train_step(model, optimizer, passes, next_token_loss, cfg.optim.max_grad_norm)
            meter.add(loss_sum=loss_sum, num_windows=num_windows)
            if steps.log_is_due:
                sums = ctx.groups.sum([float(meter.sums["loss_sum"]), meter.sums["num_windows"]])
                ctx.log({"train/loss": sums[0] / sums[1], "train/grad_norm": norm})
                meter.reset()

    def save() -> None:
        steps.save({"eval/loss": 0.0})
        ctx._saves.wait()

    return Contender(do_steps, save)


def sharded_by_hand(model: Decoder, *, keeps_gathered: bool = False) -> Decoder:
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=not keeps_gathered)
    fully_shard(model)
    return model


def bare_loop(cfg: Config, num_steps: int, *, keeps_gathered: bool = False) -> Contender:
    """Return the loop with torch's functions, which saves nothing."""
    model = Decoder(SIZES, VOCAB_SIZE)
    model.init_weights(0)
    sharded_by_hand(model, keeps_gathered=keeps_gathered)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tokens = torch.randint(VOCAB_SIZE, (WINDOWS_PER_RANK, LENGTH + 1))

    def do_steps() -> None:
        for _ in range(num_steps):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm or 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return Contender(do_steps, save=lambda: None)


def fabric_loop(ctx: Context, cfg: Config, num_steps: int) -> Contender:
    """Return the loop with Lightning Fabric, as in its documentation.

    Source: https://lightning.ai/docs/fabric/stable/advanced/model_parallel/tp_fsdp.html
    """
    from lightning.fabric import Fabric
    from lightning.fabric.loggers.csv_logs import CSVLogger
    from lightning.fabric.strategies.model_parallel import ModelParallelStrategy

    warnings.filterwarnings("ignore")  # the folder of the checkpoint exists, the loader has no workers
    strategy = ModelParallelStrategy(
        lambda model, _mesh: sharded_by_hand(model), data_parallel_size=NUM_RANKS, tensor_parallel_size=1
    )
    logger = CSVLogger(ctx.run.path, flush_logs_every_n_steps=1)
    os.environ["LOCAL_RANK"] = str(ctx.rank)  # with it, Fabric takes this process as a rank instead of starting its own
    fabric = Fabric(accelerator="cpu", devices=NUM_RANKS, strategy=strategy, loggers=logger)
    fabric.launch()
    decoder = Decoder(SIZES, VOCAB_SIZE)
    decoder.init_weights(0)
    model = fabric.setup_module(decoder)
    optimizer: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=LR, fused=True))
    windows = torch.randint(VOCAB_SIZE, (NUM_WINDOWS, LENGTH + 1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(windows), batch_size=WINDOWS_PER_RANK, shuffle=True))

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()
    step = 0

    def do_steps() -> None:
        nonlocal step
        for _ in range(num_steps):
            (tokens,) = next(batches)
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            fabric.backward(loss)
            norm: Any = fabric.clip_gradients(model, optimizer, max_norm=cfg.optim.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % num_steps == 0:
                fabric.log_dict({"train/loss": loss, "train/grad_norm": norm.full_tensor()}, step)

    def save() -> None:
        fabric.save(ctx.run.path / "fabric", {"model": model, "optimizer": optimizer, "step": step})

    return Contender(do_steps, save)


def seconds_of_others() -> float:
    """Return the CPU seconds so far of the run's processes that are no ranks, and no parent of ranks."""
    parent = psutil.Process(os.getppid())
    supervisor = parent.parent()
    assert supervisor is not None
    total = 0.0
    for process in (supervisor, *supervisor.children()):
        if process != parent:
            times = process.cpu_times()
            total += times.user + times.system
    return total


def train(ctx: Context, cfg: Config) -> None:
    """Write the CPU seconds of both ranks for steps and save, by contender and round, to `params.out`."""
    num_rounds, num_steps = cfg.params["rounds"] + 1, cfg.params["steps"]
    contenders = {
        "ours": hpcdist_loop(ctx, cfg, num_rounds, num_steps),
        "bare": bare_loop(cfg, num_steps),
        "bare_kept": bare_loop(cfg, num_steps, keeps_gathered=True),
    }
    if "fabric" in cfg.params["contenders"]:
        contenders["fabric"] = fabric_loop(ctx, cfg, num_steps)

    def cpu_seconds(work: Callable[[], None], *, is_ours: bool) -> float:
        ctx.groups.barrier()
        others_began = seconds_of_others()
        began = time.process_time()
        work()
        own = time.process_time() - began
        others = 0.0
        if is_ours and ctx.is_main:
            others = seconds_of_others() - others_began
        (total,) = ctx.groups.sum([own + others])
        return total

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        names = list(contenders)
        if number % 2:
            names.reverse()
        for name in names:
            is_ours = name == "ours"
            times = (
                cpu_seconds(contenders[name].do_steps, is_ours=is_ours),
                cpu_seconds(contenders[name].save, is_ours=is_ours),
            )
            if number:  # the first round does not count
                seconds[name].append(times)
    if ctx.is_main:
        Path(cfg.params["out"]).write_text(json.dumps(seconds))


def main() -> int:
    parser = argument_parser(__doc__, rounds=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lm-") as name:
        folder, out = Path(name), Path(name, "seconds.json")
        (folder / "lm_loop.py").write_text(Path(__file__).read_text())
        (folder / "harness.py").write_text(Path(__file__).with_name("harness.py").read_text())
        (folder / "lm.yaml").write_text(
            "experiment: lm\ntrainer: lm_loop:train\n"
            f"launch: {{max_restarts: 0, num_ranks: {NUM_RANKS}, device: cpu}}\n"
            f"optim: {{name: adamw, lr: {LR}, max_grad_norm: 1.0}}\ncheckpoint: {{monitor: eval/loss}}\n"
            f"tracking: {{log_every_steps: {options.steps}, uri: 'sqlite:///{folder}/mlflow.db'}}\n"
        )
        names = installed(CONTENDERS, PACKAGES)
        values = [f"params.out={out}", f"params.rounds={options.rounds}", f"params.steps={options.steps}"]
        values.append(f"params.contenders=[{','.join(names)}]")
        command = [*HPCDIST, "run", "lm.yaml", *values, f"runs_dir={folder}/runs"]
        done = subprocess.run(command, cwd=folder, env=clean_env(), capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return done.returncode
        seconds = json.loads(out.read_text())
    tokens_per_step = NUM_RANKS * WINDOWS_PER_RANK * LENGTH
    figures: dict[str, float] = {}
    per_token: dict[str, list[float]] = {}  # by contender, of each round, in µs
    for name in names:
        per_token[name] = []
        for of_steps, of_save in seconds[name]:
            of_step = of_steps / options.steps + of_save / STEPS_PER_SAVE
            per_token[name].append(1e6 * of_step / tokens_per_step)
        figures[f"{name}_cpu_us_per_token"] = median(per_token[name])
        figures[f"{name}_save_cpu_ms"] = 1e3 * median([of_save for _, of_save in seconds[name]])
        if name != "ours":
            figures[f"ours_over_{name}"] = median_ratio(per_token["ours"], per_token[name])
    for name, value in figures.items():
        print(f"{name:24}{value:10.3f}")
    if options.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
