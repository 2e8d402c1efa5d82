"""A plain loop with the model of a config of the trainer lm, on one device, without FSDP2: the baseline of `gpu_lm.py`.

    PYTHONPATH=. python benchmarks/baselines/plain_lm.py [--save FOLDER] CONFIG [OVERRIDE …]

The model is a usual module under autocast, with fused AdamW, clipping, and `model.compile` as configured. It trains
`stop.max_steps` steps on one batch of random bytes, and reads the time every `tracking.log_every_steps` steps; the
first interval, which includes compilation, does not count. Prints JSON: tokens per second, and with `--save` the
seconds of `torch.save` for model and optimizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.data import NUM_BYTE_TOKENS
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.trainers.lm import LmConfig
from hpcdist.trainers.lm.model import Decoder
from hpcdist.trainers.lm.train import next_token_loss, parameter_groups


def train(cfg: Config, model: Decoder, optimizer: Optimizer, tokens: Tensor) -> list[float]:
    """Return the tokens per second of each interval, without the first one."""
    loss_of: Callable[[Tensor, Tensor], Tensor] = next_token_loss
    if cfg.model.compile:
        loss_of = torch.compile(next_token_loss)
        for block in model.model.layers:
            block.compile()
    num_tokens = tokens[:, 1:].numel() * cfg.tracking.log_every_steps
    rates = []
    began = time.perf_counter()
    for step in range(1, (cfg.stop.max_steps or 1) + 1):
        with torch.autocast(cfg.launch.device, dtype=torch.bfloat16):
            loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm or 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % cfg.tracking.log_every_steps == 0:
            loss.item()  # waits for the device
            now = time.perf_counter()
            rates.append(num_tokens / (now - began))
            began = now
    return rates[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", type=Path, help="an existing folder")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    cfg = load_config(arguments.config, arguments.overrides)
    lm = cfg.section(LmConfig)
    with torch.device(cfg.launch.device):
        model = Decoder(lm.model, lm.model.padded_vocab_size(NUM_BYTE_TOKENS))
        tokens = torch.randint(NUM_BYTE_TOKENS, (cfg.data.global_batch_size or 1, lm.sequence_length + 1))
    optimizer = build_optimizer(parameter_groups(model, cfg.optim), cfg.optim)
    figures = {"plain_tokens_per_s": statistics.median(train(cfg, model, optimizer, tokens))}
    if cfg.launch.device != "cpu":
        figures["plain_memory_gb"] = torch.accelerator.max_memory_allocated() / 1e9
    if arguments.save is not None:
        began = time.perf_counter()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, arguments.save / "plain.pt")
        figures["torch_save_s"] = time.perf_counter() - began
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
