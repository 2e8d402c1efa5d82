"""Figures of trainer `hybrid` in the report of a run: ROC curve and calibration of the test set."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcdist.review.figures import Curves

NUM_BINS = 10
_NUM_POINTS = 200
_DIAGONAL = [[0.0, 0.0], [1.0, 1.0]]


def evaluation_figures(scores: Tensor, labels: Tensor) -> dict[str, Curves]:
    """Return the figures of an evaluation by name; none if all labels are equal.

    Args:
        scores: predicted probabilities of a click, [N].
        labels: 1 for a click, else 0, [N].
    """
    if len(labels) == 0 or bool((labels == labels[0]).all()):
        return {}
    return {"calibration": calibration(scores, labels), "roc": roc(scores, labels)}


def calibration(scores: Tensor, labels: Tensor) -> Curves:
    """Return the observed share of clicks over the predicted one, of NUM_BINS equally large groups of samples."""
    order = scores.argsort()
    groups = zip(scores[order].tensor_split(NUM_BINS), labels[order].tensor_split(NUM_BINS), strict=True)
    points = [[float(group.mean()), float(clicks.double().mean())] for group, clicks in groups if len(group)]
    return Curves(
        title=f"calibration of the test set, {NUM_BINS} groups of equal size",
        x_label="predicted share of clicks",
        y_label="observed share of clicks",
        lines={"model": points, "calibrated": [[points[0][0]] * 2, [points[-1][0]] * 2]},
    )


def roc(scores: Tensor, labels: Tensor) -> Curves:
    """Return true over false positive rates, at most about _NUM_POINTS of them; samples of equal score are one step."""
    order = scores.argsort(descending=True)
    sorted_scores, clicks = scores[order], labels[order].double()
    ends = torch.cat([(sorted_scores[1:] != sorted_scores[:-1]).nonzero().flatten(), torch.tensor([len(clicks) - 1])])
    hits, misses = clicks.cumsum(0)[ends], (1 - clicks).cumsum(0)[ends]
    kept = torch.linspace(0, len(ends) - 1, min(_NUM_POINTS, len(ends))).round().long()
    points = torch.stack([misses[kept] / misses[-1], hits[kept] / hits[-1]], dim=1).tolist()
    return Curves(
        title="ROC curve of the test set",
        x_label="false positive rate",
        y_label="true positive rate",
        lines={"model": [[0.0, 0.0], *points], "chance": _DIAGONAL},
    )
