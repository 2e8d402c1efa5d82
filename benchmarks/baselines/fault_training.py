"""Data, model and step of the training of `goodput.py` and `recovery.py`, equal for all contenders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from fault_task import Task
from torch import Tensor, nn

from hpcdist.config.training_schema import DataConfig
from hpcdist.data.datasets import PreloadedSplit, SimpleCNN, load_datasets

SEED = 0
NUM_EVAL_SAMPLES = 2_000
#: Layers of the fully connected model, which has 2.6 million parameters.
LAYERS = (784, 1024, 1024, 720, 10)


def build_model(task: Task) -> nn.Module:
    """Return the initial model, equal on all ranks."""
    torch.manual_seed(SEED)
    if task.model == "cnn":
        return SimpleCNN(num_classes=10, in_channels=1, image_size=28)
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(LAYERS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


class Samples:
    """The training batches of a rank by step, and the samples of an evaluation."""

    def __init__(self, task: Task) -> None:
        config = DataConfig(name=task.data, root=task.root)
        loaded = load_datasets(config, seed=SEED)
        assert isinstance(loaded.train, PreloadedSplit)
        assert isinstance(loaded.test, PreloadedSplit)
        self._batch_size = task.batch_size
        self._train, self._test = loaded.train, loaded.test
        self._normalize = loaded.train.normalize

    def batches(self, first_step: int, rank: int, num_ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches from a step on, without end; the order depends on seed and epoch only."""
        joint = self._batch_size * num_ranks
        per_epoch = len(self._train.labels) // joint
        epoch, number = divmod(first_step, per_epoch)
        while True:
            order = torch.randperm(len(self._train.labels), generator=torch.Generator().manual_seed(SEED + epoch))
            for joint_batch in order.split(joint)[number:per_epoch]:
                mine = joint_batch[rank::num_ranks]
                yield self._normalize(self._train.images[mine]), self._train.labels[mine]
            epoch, number = epoch + 1, 0

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the accuracy over the first test samples; the model is left in training mode."""
        model.eval()
        images, labels = self._test.images[:NUM_EVAL_SAMPLES], self._test.labels[:NUM_EVAL_SAMPLES]
        logits = torch.cat([model(self._normalize(part)) for part in images.split(500)])
        model.train()
        return float((logits.argmax(dim=1) == labels).float().mean())
