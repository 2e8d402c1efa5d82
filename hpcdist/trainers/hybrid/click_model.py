"""A click model: embedding bags of categorical features, numeric features, and an MLP on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def dense_part(num_inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Return an MLP with ReLU that maps pooled embeddings and numeric features [B, num_inputs] to [B, 1]."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, 1))


class ClickModel(nn.Module):
    """The whole model in one process, named as its checkpoints: `tables.<name>.weight`, `dense.<layer>.weight`.

    The input is float64 [B, num_numeric + tables × bag_size] (exact for ids up to 2^53): numeric features, then the
    ids of each table, padded with -1. The output is the probability of a click, [B].

    Args:
        tables: number of rows by name.
        bag_size: maximum number of ids of a sample in one table.
    """

    def __init__(
        self, tables: Mapping[str, int], *, dim: int, num_numeric: int, hidden: Sequence[int], bag_size: int
    ) -> None:
        super().__init__()
        self.num_numeric = num_numeric
        self.bag_size = bag_size
        self.tables = nn.ModuleDict({name: nn.EmbeddingBag(rows, dim, mode="sum") for name, rows in tables.items()})
        self.dense = dense_part(len(tables) * dim + num_numeric, hidden)

    def forward(self, samples: Tensor) -> Tensor:
        numeric = samples[:, : self.num_numeric].float()
        ids = samples[:, self.num_numeric :].long().unflatten(1, (len(self.tables), self.bag_size))
        pooled = []
        for number, table in enumerate(self.tables.values()):
            bags = ids[:, number]
            pooled.append(table(bags.clamp(min=0), per_sample_weights=(bags >= 0).float()))
        logits: Tensor = self.dense(torch.cat([*pooled, numeric], dim=1))
        return logits.squeeze(1).sigmoid()


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the area under the ROC curve of scores and labels, [N] each; ties count half.

    It is NaN if all labels are equal. Computed from ranks (Mann and Whitney, 1947).
    """
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)  # sorted
    rank = (counts.cumsum(0) - (counts - 1) / 2.0)[place]
    clicks = labels > 0.5
    num, others = int(clicks.sum()), int((~clicks).sum())
    if num == 0 or others == 0:
        return float("nan")
    return float((rank[clicks].double().sum() - num * (num + 1) / 2) / (num * others))
