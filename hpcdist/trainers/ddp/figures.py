"""Figures of trainer `ddp` in the report of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcdist.review.figures import Matrix


def confusion_matrix(counts: Sequence[float], class_names: Sequence[str] = ()) -> Matrix:
    """Return the confusion matrix of the test set.

    Args:
        counts: numbers of samples by true and predicted class, row by row, [num_classes × num_classes].
        class_names: names of the classes; their numbers by default.
    """
    size = math.isqrt(len(counts))
    return Matrix(
        title="confusion matrix of the test set",
        row_label="true class",
        column_label="predicted class",
        names=list(class_names) or [str(index) for index in range(size)],
        values=[list(counts[row * size : (row + 1) * size]) for row in range(size)],
    )
