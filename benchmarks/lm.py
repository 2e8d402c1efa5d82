"""CPU time per token of the trainer lm on two ranks, with everything on, over a bare FSDP2 loop.

    PYTHONPATH=. python benchmarks/lm.py [--rounds 8] [--steps 4] [--json]

10 M parameters, two windows of 128 tokens per rank, single precision, clipping and fused AdamW in both. The loop of
hpcdist reads windows from a file, logs each step and saves a checkpoint in each round. The bare loop has torch's
functions alone, and its tokens in memory. Both run in the same two ranks and do one round in turn. CPU seconds of both
ranks, with all threads, resolve more than times on a shared machine. The ratio is computed within each round; the
result is the median.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from harness import HPCDIST, argument_parser, clean_env
from torch import nn
from torch.distributed.fsdp import fully_shard

from hpcdist import Config, Context
from hpcdist.config.training_schema import DataConfig
from hpcdist.data.windows import TokenWindows
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.trainers.lm import LmConfig, LmModelConfig
from hpcdist.trainers.lm.model import Decoder
from hpcdist.trainers.lm.parallel import parallelize
from hpcdist.trainers.lm.train import Batches, next_token_loss, parameter_groups, train_step

VOCAB_SIZE = 4096
SIZES = LmModelConfig(hidden_size=320, num_layers=6, num_heads=5, intermediate_size=864)
WINDOWS_PER_RANK, LENGTH = 2, 128
NUM_RANKS = 2
NUM_WINDOWS = 1000
LR = 1e-3


def hpcdist_round(ctx: Context, cfg: Config, num_rounds: int, num_steps: int) -> Callable[[], None]:
    """Return a function that does the steps of a round with the trainer's own functions."""
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
    steps = ctx.steps(num_rounds * num_steps, model=model, optimizer=optimizer)

    def run() -> None:
        for step in steps.until(steps.step + num_steps):
            passes = batches.of_step(step, ctx.device)
            loss_sum, num_windows, norm = train_step(model, optimizer, passes, next_token_loss, cfg.optim.max_grad_norm)
            ctx.log({"train/loss": float(loss_sum) / num_windows, "train/grad_norm": norm})
        steps.save({"eval/loss": 0.0})

    return run


def bare_round(cfg: Config, num_steps: int) -> Callable[[], None]:
    """Return a function that does the steps of a round with torch's functions."""
    model = Decoder(SIZES, VOCAB_SIZE)
    model.init_weights(0)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    tokens = torch.randint(VOCAB_SIZE, (WINDOWS_PER_RANK, LENGTH + 1))

    def run() -> None:
        for _ in range(num_steps):
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm or 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def train(ctx: Context, cfg: Config) -> None:
    """Write the CPU seconds of both ranks by contender and round to `params.out`."""
    num_rounds, num_steps = cfg.params["rounds"] + 1, cfg.params["steps"]
    contenders = {"ours": hpcdist_round(ctx, cfg, num_rounds, num_steps), "bare": bare_round(cfg, num_steps)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(num_rounds):
        names = list(contenders)
        if number % 2:
            names.reverse()
        for name in names:
            ctx.groups.barrier()
            began = time.process_time()
            contenders[name]()
            (total,) = ctx.groups.sum([time.process_time() - began])
            if number:  # the first round does not count
                seconds[name].append(total)
    if ctx.is_main:
        Path(cfg.params["out"]).write_text(json.dumps(seconds))


def main() -> int:
    parser = argument_parser(__doc__, rounds=8)
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lm-") as name:
        folder, out = Path(name), Path(name, "seconds.json")
        (folder / "lm_loop.py").write_text(Path(__file__).read_text())
        (folder / "harness.py").write_text(Path(__file__).with_name("harness.py").read_text())
        (folder / "lm.yaml").write_text(
            "experiment: lm\ntrainer: lm_loop:train\n"
            f"launch: {{max_restarts: 0, num_ranks: {NUM_RANKS}, device: cpu}}\n"
            f"optim: {{name: adamw, lr: {LR}, max_grad_norm: 1.0}}\ncheckpoint: {{monitor: eval/loss}}\n"
        )
        values = [f"params.out={out}", f"params.rounds={options.rounds}", f"params.steps={options.steps}"]
        command = [*HPCDIST, "run", "lm.yaml", *values, f"runs_dir={folder}/runs", "tracking.uri=''"]
        done = subprocess.run(command, cwd=folder, env=clean_env(), capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return done.returncode
        seconds = json.loads(out.read_text())
    num_tokens = options.steps * NUM_RANKS * WINDOWS_PER_RANK * LENGTH
    ours, bare = (round(1e6 * median(seconds[name]) / num_tokens) for name in ("ours", "bare"))
    ratio = median(base / own for own, base in zip(seconds["ours"], seconds["bare"], strict=True))
    print(f"CPU µs per token: {ours}, of the bare loop {bare}")
    print(f"speed over the bare loop: {ratio:.3f}")
    if options.json:
        figures = {"ours_cpu_us_per_token": ours, "bare_cpu_us_per_token": bare, "bare_over_ours": round(ratio, 3)}
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
