"""The click model in one process, and the AUC."""

from __future__ import annotations

import math

import torch
from sklearn.metrics import roc_auc_score

from hpcdist.trainers.hybrid.train import ClickModel, auc


def test_auc_equals_the_one_of_scikit_learn() -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 2, (500,)).float()
    for scores in (torch.randn(500), torch.randint(0, 5, (500,)).float()):
        assert math.isclose(auc(scores, labels), roc_auc_score(labels, scores), rel_tol=1e-6)
    assert math.isnan(auc(torch.randn(3), torch.ones(3)))


def test_padding_has_no_effect() -> None:
    torch.manual_seed(0)
    model = ClickModel({"a": 4, "b": 3}, dim=2, num_numeric=1, hidden=[3], bag_size=2)
    first = torch.tensor([[0.5, 3, -1, -1, -1], [0.5, 3, 1, 2, 2]], dtype=torch.float64)
    found = model(first)
    weights = {name: table.weight for name, table in model.tables.items()}
    pooled = torch.stack(
        [
            torch.cat([weights["a"][3], torch.zeros(2)]),
            torch.cat([weights["a"][3] + weights["a"][1], 2 * weights["b"][2]]),
        ]
    )
    expected = model.dense(torch.cat([pooled, torch.full((2, 1), 0.5)], dim=1)).squeeze(1).sigmoid()
    torch.testing.assert_close(found, expected)
