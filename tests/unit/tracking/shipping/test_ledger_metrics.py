"""The ledger of a run as metrics of MLflow."""

from __future__ import annotations

import pytest
from timed_runs import BEGAN, account, add_attempt
from tracking_scene import Scene

from hpcdist.errors import TrackingError
from hpcdist.host.files import write_json
from hpcdist.review.ledger import CAUSES
from hpcdist.tracking import delivery
from hpcdist.tracking.delivery import LedgerMetrics
from hpcdist.tracking.points import ShippingState

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def new_metrics(scene: Scene) -> LedgerMetrics:
    return LedgerMetrics(scene.run, lambda: None)


def test_ledger_of_an_ended_run_is_logged_once(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40, created=BEGAN - 10)
    for _ in range(2):
        scene.shipper().ship_once()
    logged = {key: value for key, value in scene.entity.data.metrics.items() if key.startswith("usage/")}
    assert logged.keys() == {f"usage/{name}" for name in (*CAUSES, "allocated", "goodput", "queue")}
    # MLflow's list of runs shows every digit.
    assert (logged["usage/allocated"], logged["usage/compute"]) == (round(5 * 37 / 3600, 6), round(4 * 35 / 3600, 6))
    assert logged["usage/goodput"] == round(140 / 185, 6)
    (point,) = scene.client.get_metric_history(scene.run_id, "usage/compute")
    assert (point.step, point.timestamp) == (7, int((BEGAN + 37) * 1000)), "the last training step"


def test_ledger_of_a_running_run_is_logged_in_intervals(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(delivery.time, "monotonic", lambda: now)
    mlflow, ledger, progress = scene.shipper().open_run(), new_metrics(scene), ShippingState()
    scene.state(created=BEGAN)
    numbers = []
    for now in (30, 61, 90, 121):
        add_attempt(scene.run, 1 + now, 21 + now, [account(1 + now, 21 + now)] * 4)
        ledger.ship(scene.run.read_state(), mlflow, progress)
        numbers.append(len(scene.client.get_metric_history(scene.run_id, "usage/compute")))
    assert numbers == [0, 1, 1, 2]
    scene.state(status="failed", ended=BEGAN + 200)
    for _ in range(2):
        ledger.ship(scene.run.read_state(), mlflow, progress)
    history = scene.client.get_metric_history(scene.run_id, "usage/compute")
    times = {point.timestamp for point in history}
    assert len(times) == len(history) == 2, "each time once, and nothing for an equal ledger"
    assert {point.step for point in history} == {7, 8}, "each step once"
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 200}}})
    new_metrics(scene).ship(scene.run.read_state(), mlflow, progress)
    found = scene.entity.data.metrics["usage/allocated"]
    assert found == pytest.approx(200 * 5 / 3600, abs=1e-6), "as accounting says"


def test_ledger_that_accounting_changes_gets_the_next_step_from_the_next_process(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40, created=BEGAN - 10)
    scene.shipper().ship_once()
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": {"began": BEGAN, "ended": BEGAN + 36.04}}})
    for _ in range(2):
        scene.shipper().ship_once()
    points = [(p.step, p.timestamp) for p in scene.client.get_metric_history(scene.run_id, "usage/allocated")]
    ended_ms = int((BEGAN + 37) * 1000)
    assert sorted(points) == [(7, ended_ms), (8, ended_ms + 1)]
    assert scene.entity.data.metrics["usage/allocated"] == pytest.approx(36.04 * 5 / 3600, abs=1e-6)


def test_step_of_the_ledger_grows_after_a_restart(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="stopped", ended=BEGAN + 40, attempt=1)
    mlflow, progress = scene.shipper().open_run(), ShippingState()
    new_metrics(scene).ship(scene.run.read_state(), mlflow, progress)
    progress.ledger_step = 12  # of a record before the restart
    add_attempt(scene.run, 41, 57, [account(41, 57)] * 4)
    scene.state(status="finished", ended=BEGAN + 60, attempt=2)
    new_metrics(scene).ship(scene.run.read_state(), mlflow, progress)
    history = scene.client.get_metric_history(scene.run_id, "usage/allocated")
    assert [point.step for point in sorted(history, key=lambda point: point.timestamp)] == [7, 13]
    assert scene.entity.data.metrics["usage/allocated"] == pytest.approx((37 + 17) * 5 / 3600, abs=1e-6)


def test_ledger_is_logged_after_an_outage(scene: Scene) -> None:
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="stopped", ended=BEGAN + 40)
    mlflow, ledger, progress = scene.shipper().open_run(), new_metrics(scene), ShippingState()

    class Unavailable:
        def log_points(self, points: object) -> int:
            raise TrackingError("the server does not answer")

    with pytest.raises(TrackingError, match="does not answer"):
        ledger.ship(scene.run.read_state(), Unavailable(), progress)  # type: ignore[arg-type]
    ledger.ship(scene.run.read_state(), mlflow, progress)
    assert "usage/goodput" in scene.entity.data.metrics


def test_run_without_a_ledger_has_no_metrics_of_it(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.log([1])
    scene.state(status="finished", ended=BEGAN + 40)
    scene.shipper().ship_once()
    write_json(scene.run.path / "job.json", {"format": 99})
    new_metrics(scene).ship(scene.run.read_state(), scene.shipper().open_run(), ShippingState())
    assert "the ledger of first is not uploaded" in caplog.text
    assert not [key for key in scene.entity.data.metrics if key.startswith("usage/")]


def test_energy_is_logged_where_it_is_known(scene: Scene) -> None:
    start = {"began": BEGAN, "ended": BEGAN + 50, "energy_j": 1.8e6}
    write_json(scene.run.path / "job.json", {"job_id": "1", "starts": {"0": start}})
    add_attempt(scene.run, 1, 37, [account(1, 37)] * 4)
    scene.state(status="finished", ended=BEGAN + 40)
    scene.shipper().ship_once()
    assert scene.entity.data.metrics["usage/energy_kwh"] == pytest.approx(0.5)
