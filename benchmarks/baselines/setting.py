"""Arguments, training set and clock of all contenders of `ddp_step.py`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from torch import Tensor

from hpcdist.config.training_schema import DataConfig
from hpcdist.data.datasets import PreloadedSplit, load_datasets


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="data.name")
    parser.add_argument("--root", default="", help="data.root")
    parser.add_argument("--num-samples", type=int, default=2048, help="data.num_samples")
    parser.add_argument("--image-size", type=int, default=28, help="data.image_size")
    parser.add_argument("--batch-size", type=int, required=True, help="samples per rank")
    parser.add_argument("--steps", type=int, required=True, help="number of steps; less than an epoch")
    parser.add_argument("--window", type=int, required=True, help="steps between two readings of the clock")
    parser.add_argument("--out", type=Path, required=True, help="file for the readings of rank 0")
    return parser.parse_args()


def training_tensors(arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Return the training set of hpcdist: normalised images float32 [N, C, H, W] and labels int64 [N]."""
    data = DataConfig(
        name=arguments.data,
        root=arguments.root,
        num_samples=arguments.num_samples,
        image_size=arguments.image_size,
    )
    split = load_datasets(data, seed=0).train
    assert isinstance(split, PreloadedSplit)
    return split.normalize(split.images), split.labels


class Clock:
    """Reads the time every `window` steps; rank 0 writes the readings as JSON."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self._arguments = arguments
        self._rank = rank
        self._readings: list[tuple[int, float]] = []
        self._step = 0

    def tick(self) -> bool:
        """Count a step; return whether all steps are done."""
        self._step += 1
        if self._step % self._arguments.window == 0:
            self._readings.append((self._step, time.time()))
        done: bool = self._step >= self._arguments.steps
        if done and self._rank == 0:
            self._arguments.out.write_text(json.dumps(self._readings))
        return done
