"""Figures of the trainers in the report of a run."""

from __future__ import annotations

import torch

from hpcdist.review.figures import MAX_POINTS
from hpcdist.trainers.ddp.train import confusion_matrix
from hpcdist.trainers.hybrid.train import NUM_BINS, calibration, evaluation_figures, roc
from hpcdist.trainers.rl.train import returns_curves, returns_histogram


def test_confusion_matrix_has_a_row_per_true_class() -> None:
    matrix = confusion_matrix([5, 1, 2, 6])
    assert (matrix.names, matrix.values) == (["0", "1"], [[5, 1], [2, 6]])
    assert confusion_matrix([5, 1, 2, 6], ("cat", "dog")).names == ["cat", "dog"]


def test_calibration_compares_shares_of_groups() -> None:
    scores = torch.linspace(0, 1, 1000, dtype=torch.float64)
    labels = (torch.arange(1000) % 2 == 0).float()
    points = calibration(scores, labels).lines["model"]
    assert len(points) == NUM_BINS
    torch.testing.assert_close(
        torch.tensor(points, dtype=torch.float64),
        torch.stack([scores.view(10, 100).mean(1), torch.full((10,), 0.5, dtype=torch.float64)], 1),
    )


def test_roc_curve_of_known_scores() -> None:
    """Two samples of equal score are one step."""
    curve = roc(torch.tensor([0.9, 0.8, 0.8, 0.1]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert curve.lines["model"] == [[0.0, 0.0], [0.0, 0.5], [0.5, 1.0], [1.0, 1.0]]
    long = roc(torch.linspace(0, 1, 5000), (torch.arange(5000) % 3 == 0).float()).lines["model"]
    assert len(long) <= 201
    assert long[-1] == [1.0, 1.0]


def test_evaluation_with_one_class_has_no_figures() -> None:
    assert evaluation_figures(torch.rand(4), torch.ones(4)) == {}
    assert evaluation_figures(torch.rand(0), torch.ones(0)) == {}
    assert set(evaluation_figures(torch.rand(3), torch.tensor([0.0, 1.0, 1.0]))) == {"calibration", "roc"}


def test_returns_of_many_evaluations_are_thinned() -> None:
    curves = returns_curves("CartPole-v1", [(step, 1.0 * step, 0.0, 2.0 * step) for step in range(5000)])
    assert {name: line[-1] for name, line in curves.lines.items()} == {
        "mean": [4999, 4999], "smallest": [4999, 0], "largest": [4999, 9998],
    }  # fmt: skip
    assert all(len(line) <= MAX_POINTS for line in curves.lines.values())
    assert len(returns_curves("e", [(1, 1.0, 1.0, 1.0)]).lines["mean"]) == 1
    assert sum(returns_histogram([1.0, 2.0, 2.5]).counts) == 3
