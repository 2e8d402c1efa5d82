"""Speed of the trainer lm with 1.1 B parameters on one GPU, sharded by FSDP2 and plain, and the stall of a checkpoint.

    PYTHONPATH=. python benchmarks/gpu_lm.py cuda|cpu [stall]

The sizes are those of `configs/lm_1b.yaml`, the step is the trainer's: bf16, torch.compile, fused AdamW, clipping, on
random tokens. Before it, the rate of a bf16 product of random matrices, which bounds every model on this GPU. `plain`
is the same model as a usual module under autocast. MFU counts the FLOPs of `LmModelConfig.flops_per_token` over those
of the data sheet. With `stall`, it saves model and optimizer (13 GB) by `ctx.save` and by `torch.save` instead. Prints
one JSON object per line, as soon as a figure is known.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpcdist import Config, Context
from hpcdist.config.loading import load_config
from hpcdist.rank.peak_flops import measured_flops, specified_flops
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.trainers.lm import LmConfig, LmModelConfig
from hpcdist.trainers.lm.model import Decoder
from hpcdist.trainers.lm.parallel import parallelize
from hpcdist.trainers.lm.train import Pass, next_token_loss, parameter_groups, train_step

WARM_UP, STEPS = 6, 24
#: Rows of the embedding, by the type of the device.
VOCAB_SIZES = {"cuda": 32_768, "cpu": 256}
#: On a CPU, to try the program.
SMALL = LmModelConfig(hidden_size=64, num_layers=2, intermediate_size=128)
#: The first save allocates host memory; the last one counts.
NUM_SAVES = 3


def build(ctx: Context, cfg: Config, sizes: LmModelConfig, *, is_sharded: bool) -> tuple[Decoder, Optimizer]:
    """Return the model with its weights, and its optimizer."""
    on_gpu = ctx.device.type == "cuda"
    with torch.device("meta"):
        model = Decoder(sizes, VOCAB_SIZES[ctx.device.type])
    if is_sharded:
        mesh = ctx.mesh(replicate=1, shard=-1, tensor=1)
        parallelize(model, mesh, in_bf16=True, is_compiled=on_gpu)
    elif on_gpu:
        for block in model.model.layers:
            block.forward = torch.compile(block.forward)
    model.to_empty(device=ctx.device)
    model.init_weights(0)
    return model, build_optimizer(parameter_groups(model, cfg.optim), cfg.optim)


def step_seconds(ctx: Context, cfg: Config, lm: LmConfig, model: Decoder, optimizer: Optimizer) -> float:
    """Return the median time of a step."""
    loss_of = next_token_loss
    if ctx.device.type == "cuda":
        loss_of = torch.compile(next_token_loss)
    tokens = torch.randint(model.vocab_size, (lm.micro_batch_size or 1, lm.sequence_length + 1), device=ctx.device)
    passes = [Pass(tokens, len(tokens), 1.0)]
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        loss_sum, _, _ = train_step(model, optimizer, passes, loss_of, cfg.optim.max_grad_norm)
        value = loss_sum.item()  # waits for the device
        ctx.log({"train/loss": value}, step)
        if step > WARM_UP:
            seconds.append(time.perf_counter() - began)
        ctx.should_stop(step, STEPS)
    return statistics.median(seconds)


def plain_step_seconds(ctx: Context, cfg: Config, lm: LmConfig, model: Decoder, optimizer: Optimizer) -> float:
    """Return the median time of a step of a usual loop under autocast."""
    loss_of: Callable[[Tensor, Tensor], Tensor] = next_token_loss
    if ctx.device.type == "cuda":
        loss_of = torch.compile(next_token_loss)
    tokens = torch.randint(model.vocab_size, (lm.micro_batch_size or 1, lm.sequence_length + 1), device=ctx.device)
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if step > WARM_UP:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def speed(ctx: Context, cfg: Config, lm: LmConfig, report: Callable[[dict[str, Any]], None]) -> None:
    """Report tokens per second and MFU, sharded and plain."""
    vocab_size = VOCAB_SIZES[ctx.device.type]
    flops = lm.model.flops_per_token(vocab_size, lm.sequence_length)
    bound = measured_flops(ctx.device, torch.bfloat16)
    report({"matmul_tflops": round(bound / 1e12, 1)})
    if ctx.device.type == "cuda":
        bound = specified_flops(torch.cuda.get_device_name()) or bound
    num_tokens = (lm.micro_batch_size or 1) * lm.sequence_length
    rates = []
    for is_sharded in (True, False):
        model, optimizer = build(ctx, cfg, lm.model, is_sharded=is_sharded)
        measure = plain_step_seconds
        if is_sharded:
            measure = step_seconds
        rate = num_tokens / measure(ctx, cfg, lm, model, optimizer)
        rates.append(rate)
        figures = {"tokens_per_s": round(rate), "model_tflops": round(rate * flops / 1e12, 1),
                   "mfu": round(rate * flops / bound, 3)}  # fmt: skip
        if ctx.device.type == "cuda":
            figures["memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
            torch.cuda.reset_peak_memory_stats()
        if not is_sharded:
            figures = {f"plain_{name}": value for name, value in figures.items()}
        report({"parameters": lm.model.num_parameters(vocab_size), **figures})
        del model, optimizer
        if ctx.device.type == "cuda":
            torch.cuda.empty_cache()
    report({"fsdp2_over_plain": round(rates[0] / rates[1], 3)})


def stall(ctx: Context, cfg: Config, lm: LmConfig, report: Callable[[dict[str, Any]], None]) -> None:
    """Report how long `ctx.save` and `torch.save` stop the training."""
    model, optimizer = build(ctx, cfg, lm.model, is_sharded=True)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    for step in range(1, NUM_SAVES + 1):
        began = time.perf_counter()
        ctx.save(step, model=model, optimizer=optimizer)
        seconds = time.perf_counter() - began
        manifest = ctx.run.checkpoints / f"step-{step:08d}"
        while not manifest.exists():  # until it is on disk
            time.sleep(0.1)
            ctx.timer.alive()
        report({f"save_{step}_s": round(seconds, 3), "until_durable_s": round(time.perf_counter() - began, 2)})
    began = time.perf_counter()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, ctx.run.path / "plain.pt")
    torch_seconds = time.perf_counter() - began
    (ctx.run.path / "plain.pt").unlink()
    report({"torch_save_s": round(torch_seconds, 2), "over_torch_save": round(seconds / torch_seconds, 4)})


def train(ctx: Context, cfg: Config) -> None:
    """Append the figures to `params.out`."""
    lm = load_config("lm_1b").section(LmConfig)
    if ctx.device.type == "cpu":
        lm = LmConfig(model=SMALL, sequence_length=64, micro_batch_size=2)

    def report(figures: dict[str, Any]) -> None:
        with Path(cfg.params["out"]).open("a") as file:
            file.write(json.dumps(figures) + "\n")

    measure = speed
    if cfg.params["part"] == "stall":
        measure = stall
    measure(ctx, cfg, lm, report)


def main() -> int:
    device = sys.argv[1]
    part = "speed"
    if "stall" in sys.argv:
        part = "stall"
    with tempfile.TemporaryDirectory(prefix="gpu_lm-") as name:
        folder, out = Path(name), Path(name, "figures.jsonl")
        (folder / "gpu_lm.py").write_text(Path(__file__).read_text())
        (folder / "lm.yaml").write_text(
            "experiment: lm\ntrainer: gpu_lm:train\nlaunch: {max_restarts: 0, num_ranks: 1}\n"
            "optim: {name: adamw, lr: 0.0001, max_grad_norm: 1.0}\ncheckpoint: {keep_last: 2}\n"
        )
        options = [f"launch.device={device}", f"params.out={out}", f"params.part={part}", f"runs_dir={folder}/runs"]
        command = [sys.executable, "-m", "hpcdist", "run", "lm.yaml", *options, "tracking.uri=''"]
        done = subprocess.run(command, cwd=folder, check=False)
        if out.exists():
            print(out.read_text(), flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
