"""A point of a metric."""

from typing import NamedTuple


class Point(NamedTuple):
    """A value of a metric at a step, as MLflow gets it."""

    key: str
    value: float
    time_ms: int
    step: int
