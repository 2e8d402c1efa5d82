"""Tokens per second and model FLOPs utilisation of a decoder with 1 B parameters, trained by hpcdist on one GPU.

    PYTHONPATH=. python benchmarks/gpu_lm.py cuda|cpu

bf16 autocast, torch.compile, fused AdamW, sequences of 2,048 random tokens. Before it, the rate of a bf16 product of
random matrices of 8,192², which bounds every model on this GPU. MFU counts 6 FLOPs per parameter and token, and 12 per
layer, position and hidden unit for attention, half of it as it is causal (PaLM, https://arxiv.org/abs/2204.02311,
appendix B), over the data sheet's 989 TFLOPS of an H100 or H200 SXM. Prints one JSON object per line, as soon as a
figure is known.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpcdist import Config, Context

DATA_SHEET_TFLOPS = 989.0  #: bf16 without sparsity
WARM_UP, STEPS = 6, 24


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder and of a batch."""

    hidden: int
    layers: int
    vocabulary: int
    batch: int
    sequence: int
    head: int = 128


SHAPES = {"cuda": Shape(2048, 18, 32_000, 8, 2048), "cpu": Shape(128, 2, 100, 2, 64)}


class Block(nn.Module):
    """A pre-norm layer of causal attention and an MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.head = shape.hidden, shape.head
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        heads = self.qkv(self.norms[0](hidden)).view(batch, length, 3, -1, self.head).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        added: Tensor = self.down(F.gelu(self.up(self.norms[1](hidden)), approximate="tanh"))
        return hidden + added


class Decoder(nn.Module):
    """Returns the mean loss of the next tokens of `tokens` [batch, sequence + 1]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(ctx: Context, cfg: Config) -> None:
    """Train on random tokens; write the figures to `params.out`."""
    shape = SHAPES[ctx.device.type]
    on_gpu = ctx.device.type == "cuda"
    module = Decoder(shape).to(ctx.device)
    num_parameters = sum(one.numel() for one in module.parameters())
    if on_gpu:
        module.compile()
    model = ctx.wrap(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence + 1), device=ctx.device)
    seconds = []
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()  # waits for the device
        ctx.log({"train/loss": value}, step)
        if step > WARM_UP:
            seconds.append(time.perf_counter() - began)
        if ctx.should_stop(step, STEPS):
            return
    num_tokens = shape.batch * shape.sequence
    attention = 12 * shape.layers * shape.hidden * shape.sequence // 2
    rate = num_tokens / statistics.median(seconds)
    tflops = rate * (6 * num_parameters + attention) / 1e12
    figures = {"parameters": num_parameters, "tokens_per_s": round(rate), "model_tflops": round(tflops, 1),
               "mfu": round(tflops / DATA_SHEET_TFLOPS, 3)}  # fmt: skip
    Path(cfg.params["out"]).write_text(json.dumps(figures))


def matmul_tflops(size: int = 8192, repeat: int = 30) -> float:
    """Return the median rate of a bf16 product of random matrices on the current GPU."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates: list[float] = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        left @ right
        end.record()
        end.synchronize()
        rates.append(2 * size**3 / begin.elapsed_time(end) / 1e9)
    return statistics.median(rates[5:])


def main() -> int:
    device = sys.argv[1]
    if device == "cuda":
        print(json.dumps({"matmul_tflops": round(matmul_tflops(), 1)}), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu_lm-") as name:
        folder, out = Path(name), Path(name, "figures.json")
        (folder / "gpu_lm.py").write_text(Path(__file__).read_text())
        (folder / "lm.yaml").write_text("experiment: lm\ntrainer: gpu_lm:train\nlaunch: {max_restarts: 0}\n")
        options = [f"launch.device={device}", f"params.out={out}", f"runs_dir={folder}/runs", "tracking.uri=''"]
        command = [sys.executable, "-m", "hpcdist", "run", "lm.yaml", *options]
        done = subprocess.run(command, cwd=folder, check=False)
        if done.returncode == 0:
            print(out.read_text(), flush=True)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
