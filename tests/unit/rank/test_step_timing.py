"""Where a step goes, by a clock that a test moves: what counts as data time and compute, and what counts nowhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hpcdist.rank.telemetry import step_timing
from hpcdist.rank.telemetry.step_timing import CudaClock, HostClock, NodeTimes, StepTimer, Totals
from hpcdist.rank.telemetry.timed_ddp import MAX_SEARCHES, LastGradient
from hpcdist.rank.topology import Topology
from hpcdist.run.polling import TIMES_PER_S


class Scene:
    """A timer, and what a trainer does."""

    def __init__(self, clock: Any = None) -> None:
        self.now = 0.0
        self.clock = clock or HostClock()
        if clock is None:
            self.clock.mark = lambda: self.now
        self.timer = StepTimer(self.clock, now=lambda: self.now)
        self.model: Any = SimpleNamespace(training=True, require_backward_grad_sync=True)
        self.timer.step_done()  # the first step counts nowhere

    def forward(self, seconds: float = 0.0) -> None:
        self.timer.before_forward(self.model)
        self.now += seconds

    def backward(self, seconds: float, exchange_s: float = 0.0) -> None:
        self.now += seconds
        self.timer.on_gradient()
        self.now += exchange_s

    def step(self, *, data: float, compute: float, rest: float = 0.0) -> None:
        self.now += data
        self.forward(compute / 2)
        self.backward(compute / 2, rest)
        self.timer.step_done()

    @property
    def sums(self) -> tuple[int, float, int, float, float]:
        totals = self.timer.totals
        return (totals.steps, *(round(value, 9) for value in totals[1:]))  # type: ignore[return-value]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_step_is_data_time_compute_and_waiting_for_the_others(scene: Scene) -> None:
    scene.step(data=1, compute=4, rest=20)
    scene.step(data=2, compute=6, rest=10)
    assert scene.sums == (2, 43, 2, 3, 10)
    assert scene.timer.totals.means_since(Totals()) == {"step_s": 21.5, "data_s": 1.5, "compute_s": 5}


def test_the_first_step_counts_nowhere() -> None:
    timer = StepTimer(HostClock())
    timer.before_forward(SimpleNamespace(training=True, require_backward_grad_sync=True))  # type: ignore[arg-type]
    timer.on_gradient()
    timer.step_done()
    assert timer.totals == Totals()
    assert timer.report() == {}


def test_only_the_last_gradient_of_a_backward_pass_ends_the_compute(scene: Scene) -> None:
    scene.forward(1)
    scene.backward(2)
    scene.backward(3, exchange_s=50)
    scene.timer.step_done()
    assert scene.sums == (1, 56, 1, 0, 6)


def test_micro_batches_are_summed_up_with_the_gaps_between_them(scene: Scene) -> None:
    scene.now += 1
    scene.model.require_backward_grad_sync = False
    scene.forward(2)
    scene.backward(3)
    scene.now += 4  # the next micro-batch
    scene.model.require_backward_grad_sync = True
    scene.forward(5)
    scene.backward(6, exchange_s=70)
    scene.timer.step_done()
    assert scene.sums == (1, 91, 1, 1 + 4, 5 + 11)


def test_a_gap_that_follows_an_exchange_is_not_taken_for_data_time(scene: Scene) -> None:
    for _ in range(2):  # two backward passes a step, both with an exchange, as in adversarial training
        scene.forward(1)
        scene.backward(1, exchange_s=100)
    scene.timer.step_done()
    assert scene.sums == (1, 204, 1, 0, 4)


def test_two_forward_passes_before_a_backward_pass_are_one_computation(scene: Scene) -> None:
    scene.forward(1)
    scene.forward(2)
    scene.backward(3)
    scene.timer.step_done()
    assert scene.sums == (1, 6, 1, 0, 6)


def test_buffers_that_come_from_rank_0_are_waited_for(scene: Scene) -> None:
    scene.now += 1
    scene.timer.before_forward(scene.model)
    scene.now += 30
    scene.timer.buffers_exchanged()
    scene.now += 2
    scene.backward(3)
    scene.timer.step_done()
    assert scene.sums == (1, 36, 1, 1, 5)


def test_an_evaluation_with_the_wrapped_model_spoils_one_step_and_no_more(scene: Scene) -> None:
    scene.model.training = False
    scene.forward(500)
    scene.model.training = True
    scene.step(data=500, compute=1)
    assert scene.sums == (0, 0, 0, 0, 0)
    scene.step(data=1, compute=2)
    assert scene.sums == (1, 3, 1, 1, 2)


def test_a_forward_pass_without_gradients_begins_no_compute(scene: Scene) -> None:
    with torch.no_grad():
        scene.forward(500)
        scene.forward(10)
    scene.step(data=1, compute=2)
    assert scene.sums == (1, 13, 1, 11, 2), "what came before the last of them is nobody's"


def test_what_is_skipped_between_two_steps_belongs_to_none(scene: Scene) -> None:
    scene.now += 1000  # a checkpoint
    scene.timer.skip()
    scene.step(data=1, compute=2)
    assert scene.sums == (1, 3, 1, 1, 2)


def test_a_sign_of_life_in_the_middle_of_a_step_skips_nothing(scene: Scene) -> None:
    scene.forward(1)
    scene.timer.skip()
    scene.backward(2)
    scene.timer.step_done()
    assert scene.sums == (1, 3, 1, 0, 3)


def test_waiting_for_others_before_the_forward_pass_is_no_data_time(scene: Scene) -> None:
    with scene.timer.waiting():
        scene.now += 40
    scene.now += 1
    scene.forward(2)
    with scene.timer.waiting():  # in or after the passes it changes nothing
        scene.backward(1)
    scene.timer.step_done()
    assert scene.sums == (1, 44, 1, 1, 3)


def test_a_step_without_a_model_has_its_length_alone(scene: Scene) -> None:
    scene.now += 3
    scene.timer.step_done()
    assert scene.timer.totals.means_since(Totals()) == {"step_s": 3}


def test_a_step_whose_last_gradient_did_not_come_is_not_guessed_and_the_search_begins_anew(scene: Scene) -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    gradients = LastGradient(model, scene.timer.on_gradient)
    scene.timer.watch(gradients)

    def step(branch: str) -> Totals:
        scene.forward(1)
        model[branch](torch.zeros(1, 2)).sum().backward()
        scene.timer.step_done()
        return scene.timer.totals

    assert step("one").own_steps == 1
    assert len(gradients._handles) == 1
    assert step("two").own_steps == 1, "only the first branch is listened to"
    assert step("two").own_steps == 2
    assert [step("one").own_steps, step("two").own_steps] == [3, 4], "by now both are"
    assert len(gradients._handles) == 2
    for _ in range(2 * MAX_SEARCHES):
        scene.forward(1)
        scene.timer.step_done()  # no backward pass at all
    assert gradients._num_searches == MAX_SEARCHES


def test_the_last_gradient_of_a_deep_model_is_its_first_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.requires_grad_(False)
    gradients = LastGradient(model, lambda _: None)
    model(torch.zeros(1, 2)).sum().backward()
    assert gradients.last is not None
    assert gradients._parameters[gradients.last] is model[0].bias, "which is frozen but for this"


def test_work_of_a_rank_without_steps_is_added_up(scene: Scene) -> None:
    scene.timer.add(compute_s=2)
    scene.timer.add(compute_s=4)
    assert scene.timer.totals.means_since(Totals()) == {"data_s": 0, "compute_s": 3}
    assert scene.timer.report() == {"steps": 0, "step_s": 0, "own_steps": 2, "data_s": 0, "compute_s": 6}


# --- a GPU's clock, without a GPU


HOST_NOW = [0.0]


class FakeEvent:
    """A CUDA event whose device comes to it when the test says so."""

    device_at = 0.0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.made += 1

    def record(self) -> None:
        self.at = HOST_NOW[0]

    def query(self) -> bool:
        return self.at <= FakeEvent.device_at

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query(), "asking before would be an error"
        assert later.query(), "asking before would be an error"
        return 1e3 * (later.at - self.at)


def test_steps_of_a_gpu_are_counted_once_it_has_done_them_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing.torch.cuda, "Event", FakeEvent)
    FakeEvent.made, FakeEvent.device_at = 0, -1.0
    scene = Scene(CudaClock())

    def step() -> None:
        for deed in (
            lambda: scene.timer.before_forward(scene.model),
            scene.timer.on_gradient,
            scene.timer.step_done,
        ):
            HOST_NOW[0] += 1
            deed()

    HOST_NOW[0] = 0.0
    step()
    step()
    assert scene.timer.totals[:3] == (2, 0, 0), "the device has done neither"
    FakeEvent.device_at = 3.0
    step()
    assert scene.timer.totals.own_steps == 1
    FakeEvent.device_at = 1e9
    step()
    assert scene.timer.totals[2:] == (4, 4, 4)
    made = FakeEvent.made
    for _ in range(50):
        step()
    assert FakeEvent.made <= made + 3, "events are used again"
    assert scene.timer.totals[2:] == (54, 54, 54)


# --- what a node logs


def on(rank: int, *, num_nodes: int, per_node: int = 2) -> Topology:
    return Topology(
        rank=rank,
        world_size=num_nodes * per_node,
        local_rank=rank % per_node,
        local_world_size=per_node,
        node_rank=rank // per_node,
        num_nodes=num_nodes,
        master_addr="n1",
        master_port=1,
        launcher="hpcdist",
        job_id="test",
        attempt=1,
    )


def test_one_rank_of_a_node_logs_at_the_logging_interval(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing.socket, "gethostname", lambda: "n2")
    times = [NodeTimes(scene.timer, on(rank, num_nodes=2), log_every=2) for rank in range(4)]
    scene.step(data=1, compute=4, rest=5)
    assert [one.due(1) for one in times] == [{}] * 4
    scene.step(data=3, compute=6, rest=7)
    expected = {"time/n2/step_s": 13, "time/n2/data_s": 2, "time/n2/compute_s": 5}
    assert [one.due(2) for one in times] == [expected, {}, expected, {}]
    scene.step(data=1, compute=1)
    scene.step(data=1, compute=1)
    assert times[0].due(4) == {"time/n2/step_s": 2, "time/n2/data_s": 1, "time/n2/compute_s": 1}, "since the last point"
    assert times[0].due(6) == {}, "no step since"


def test_one_node_needs_no_name(scene: Scene) -> None:
    scene.step(data=1, compute=1)
    assert set(NodeTimes(scene.timer, on(0, num_nodes=1), 1).due(1)) == {"time/step_s", "time/data_s", "time/compute_s"}


def test_the_first_of_a_nodes_ranks_that_has_steps_logs(scene: Scene) -> None:
    scene.step(data=1, compute=1)
    times = [NodeTimes(scene.timer, on(rank, num_nodes=2, per_node=3), 1) for rank in range(6)]
    for one in times:
        one.leave_to([1, 2, 3, 5])  # 0 and 4 are servers
    assert [rank for rank, one in enumerate(times) if one.due(1)] == [1, 3]


def test_many_nodes_log_no_more_together_than_their_file_system_bears(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(step_timing.time, "monotonic", lambda: clock[0])
    times = NodeTimes(scene.timer, on(0, num_nodes=512), 1)
    logged = 0
    for step in range(1000):
        scene.step(data=1, compute=1)
        logged += bool(times.due(step))
        clock[0] += 0.5
    assert logged == pytest.approx(500 / (512 / TIMES_PER_S), abs=1)
