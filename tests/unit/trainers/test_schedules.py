from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hpcdist.trainers.pipeline.engine import Action, gpipe, ideal_bubble, one_f_one_b

Schedule = Callable[[int, int, int], list[Action]]


def simulate(schedule: Schedule, forward_s: Sequence[float], backward_s: Sequence[float], num: int) -> float:
    """Return the time at which the last stage is done. Raises AssertionError for a deadlock."""
    num_stages = len(forward_s)
    todo = [schedule(stage, num_stages, num) for stage in range(num_stages)]
    clock = [0.0] * num_stages
    done: dict[tuple[int, str, int], float] = {}
    while any(todo):
        progressed = False
        for stage, actions in enumerate(todo):
            if not actions:
                continue
            kind, number = actions[0]
            is_forward = kind == "forward"
            before = (stage - 1 if is_forward else stage + 1, kind, number)
            if not is_forward and stage == num_stages - 1:
                before = (stage, "forward", number)
            if before[0] >= 0 and before not in done:
                continue
            start = max(clock[stage], done.get(before, 0.0))
            clock[stage] = start + (forward_s if is_forward else backward_s)[stage]
            done[stage, kind, number] = clock[stage]
            actions.pop(0)
            progressed = True
        assert progressed, "deadlock"
    return max(clock)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("num_stages", "num"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 8), (3, 2), (4, 8), (5, 3)])
def test_schedule_has_each_pass_once_and_the_ideal_duration(schedule: Schedule, num_stages: int, num: int) -> None:
    for stage in range(num_stages):
        actions = schedule(stage, num_stages, num)
        for kind in ("forward", "backward"):
            assert [action.micro_batch for action in actions if action.kind == kind] == list(range(num))
        for number in range(num):
            assert actions.index(Action("forward", number)) < actions.index(Action("backward", number))
    step_s = simulate(schedule, [1.0] * num_stages, [2.0] * num_stages, num)
    assert step_s == 3.0 * (num_stages + num - 1)
    assert ideal_bubble(num_stages, num) == pytest.approx(1 - 3.0 * num / step_s)


def test_1f1b_holds_activations_of_fewer_micro_batches() -> None:
    def held(actions: list[Action]) -> int:
        current = maximum = 0
        for kind, _ in actions:
            current += 1 if kind == "forward" else -1
            maximum = max(maximum, current)
        return maximum

    assert [held(gpipe(stage, 4, 8)) for stage in range(4)] == [8, 8, 8, 8]
    assert [held(one_f_one_b(stage, 4, 8)) for stage in range(4)] == [4, 3, 2, 1]
