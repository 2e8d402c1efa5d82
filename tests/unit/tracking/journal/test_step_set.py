"""StepSet behaves like a set of Python, with less memory."""

from __future__ import annotations

import random

import pytest

from hpcdist.tracking import points
from hpcdist.tracking.points import StepSet


def sequences() -> dict[str, list[int]]:
    generator = random.Random(3)
    shuffled = list(range(3000))
    generator.shuffle(shuffled)
    late = [*range(0, 20_000, 10), *range(5, 5000, 10), *range(19_999, 0, -37)]
    return {
        "regular": list(range(0, 5000, 5)),
        "decreasing": list(range(3000, -1000, -1)),
        "permutation": shuffled,
        "random": [generator.randrange(-(2**63), 2**63) for _ in range(4000)],
        "two strides and late steps": late,
        "neighbours of a range": [*range(0, 40, 2), *range(39, 0, -2), 50, 49, 41],
        "bursts": [
            base + generator.randrange(20) for base in generator.sample(range(0, 10**6, 20), 500) for _ in "abc"
        ],
    }


@pytest.mark.parametrize("name", sequences())
@pytest.mark.parametrize("max_array", [4, 64, 1024])
def test_step_set_equals_a_set(name: str, max_array: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(points, "MAX_ARRAY", max_array)
    found, expected = StepSet(), set[int]()
    for step in sequences()[name]:
        assert (step in found) == (step in expected)
        found.add(step)
        found.add(step)
        expected.add(step)
        assert step in found
    assert len(found) == len(expected)
    for step in expected:
        assert step in found
        assert all((other in found) == (other in expected) for other in (step - 1, step + 1))


def test_regular_steps_are_one_range() -> None:
    found = StepSet()
    for step in range(0, 100_000, 10):
        found.add(step)
    assert len(found._chunks) == 1
    found.add(5)  # a late step
    assert sum(len(chunk) for chunk in found._chunks if not isinstance(chunk, range)) < 600


def test_irregular_steps_are_in_few_arrays() -> None:
    generator = random.Random(1)
    found = StepSet()
    for _ in range(50_000):
        found.add(generator.randrange(10**9))
    assert len(found._chunks) < 4 * 50_000 / points.MAX_ARRAY
