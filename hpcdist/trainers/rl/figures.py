"""Figures of trainer `rl` in the report of a run."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdist.review.figures import MAX_POINTS, Curves, Histogram, histogram


def returns_curves(environment: str, evaluations: Sequence[tuple[int, float, float, float]]) -> Curves:
    """Return the returns of all evaluations; of many, every n-th and the last one.

    Args:
        evaluations: environment steps and mean, smallest and largest return of each evaluation.
    """
    every = -(-len(evaluations) // (MAX_POINTS - 1)) or 1
    shown = [*evaluations[:-1:every], *evaluations[-1:]]
    names = ("mean", "smallest", "largest")
    return Curves(
        title=f"returns of greedy episodes of {environment}",
        x_label="environment steps",
        y_label="return",
        lines={name: [[float(one[0]), float(one[index])] for one in shown] for index, name in enumerate(names, 1)},
    )


def returns_histogram(returns: Sequence[float]) -> Histogram:
    """Return the distribution of the returns of the last evaluation."""
    return histogram("returns of the last evaluation", returns, x_label="return", y_label="episodes")
