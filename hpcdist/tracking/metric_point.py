"""A point of a metric."""

from typing import NamedTuple


class Point(NamedTuple):
    key: str
    value: float
    time_ms: int
    step: int
