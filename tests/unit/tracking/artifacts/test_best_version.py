"""The alias `best` of a registered model in a real MLflow database."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import ENDPOINT_NOT_FOUND
from tracking_scene import CONFIG, Scene

from hpcdist.config.written import Monitor
from hpcdist.run.folder import RunDir
from hpcdist.tracking.artifacts import move_best
from hpcdist.tracking.delivery import Delivery
from hpcdist.tracking.mlflow_run import MlflowRun

# MLflow 3.17 uses a loader option that SQLAlchemy 2.1 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

NAME = "digits"
METRIC = "eval/accuracy"
#: Registers a version of a run with this value of the metric, without moving the alias. Returns run and version.
Register = Callable[[float | None], tuple[MlflowRun, str]]


@pytest.fixture
def register(scene: Scene) -> Register:
    scene.client.create_registered_model(NAME)

    def create(value: float | None) -> tuple[MlflowRun, str]:
        number = len(list(scene.run.path.parent.iterdir()))
        opened = MlflowRun(RunDir.create(scene.run.path.parent / f"run-{number}"), scene.uri)
        if value is not None:
            opened.client.log_metric(opened.run_id, METRIC, value, step=1)
        version = opened.client.create_model_version(NAME, f"{scene.uri}/{number}", run_id=opened.run_id)
        return opened, str(version.version)

    return create


def best(scene: Scene) -> str:
    aliases = scene.client.get_registered_model(NAME).aliases
    return str(aliases.get("best", ""))


def test_alias_moves_to_strictly_better_versions_only(scene: Scene, register: Register) -> None:
    seen = []
    for value in (0.8, 0.7, 0.8, None, float("nan"), 0.9):
        move_best(*register(value)[:1], NAME, str(_newest(scene)), Monitor(METRIC))
        seen.append(best(scene))
    assert seen == ["1", "1", "1", "1", "1", "6"]
    move_best(register(0.1)[0], NAME, "7", Monitor(METRIC, "min"))
    assert best(scene) == "7"
    tags = scene.client.get_model_version(NAME, "6").tags
    assert tags == {"hpcdist.monitor": METRIC, "hpcdist.monitor_value": "0.9"}


def test_alias_that_a_user_has_set_is_compared_by_its_run(scene: Scene, register: Register) -> None:
    _, strong = register(0.95)  # registered without hpcdist: no tags
    _, unknown = register(None)
    scene.client.set_registered_model_alias(NAME, "best", strong)
    run, version = register(0.9)
    move_best(run, NAME, version, Monitor(METRIC))
    assert best(scene) == strong
    scene.client.set_registered_model_alias(NAME, "best", unknown)
    move_best(run, NAME, version, Monitor(METRIC))
    assert best(scene) == version


def test_process_that_overtakes_another_is_compared_again(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worse version sets the alias with an outdated comparison, after a better one has set it."""
    (worse, first), (better, second) = register(0.8), register(0.9)
    set_alias, calls = MlflowClient.set_registered_model_alias, []

    def overtaken(client: MlflowClient, name: str, alias: str, version: str) -> None:
        calls.append(version)
        if len(calls) == 1:
            move_best(better, NAME, second, Monitor(METRIC))
            assert best(scene) == second
        set_alias(client, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", overtaken)
    move_best(worse, NAME, first, Monitor(METRIC))
    assert calls == [first, second, second]
    assert best(scene) == second


def test_alias_that_never_settles_ends_with_a_warning(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, version = register(0.8)
    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", lambda *_: None)
    move_best(run, NAME, version, Monitor(METRIC))
    assert "the alias best of digits is moved by other processes all the time" in caplog.text


def test_server_without_aliases_is_skipped_with_a_debug_line(
    scene: Scene, register: Register, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: Any) -> None:
        raise MlflowException("No such endpoint", error_code=ENDPOINT_NOT_FOUND)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", missing)
    caplog.set_level(logging.DEBUG)
    run, version = register(0.8)
    move_best(run, NAME, version, Monitor(METRIC))
    assert [record.levelname for record in caplog.records if "alias best is not moved" in record.message] == ["DEBUG"]


def test_delivery_registers_the_model_and_sets_the_alias(scene: Scene) -> None:
    config = {**CONFIG, "checkpoint": {"monitor": "eval/loss", "monitor_mode": "min"}}
    config["tracking"] = {"register_as": NAME}
    for number, loss in enumerate((3, 2, 4), start=1):
        run = scene.run = RunDir.create(scene.run.path.parent / f"number-{number}")
        scene.write_config(config)
        scene.log([loss], key="eval/loss")
        scene.file("model/MLmodel", json.dumps({"flavors": {}, "number": number}))
        scene.state(status="finished", attempt=1, ended=2e9)
        Delivery(run, scene.uri).ship_once()
    version = scene.client.get_model_version_by_alias(NAME, "best")
    assert (int(version.version), version.tags["hpcdist.monitor_value"]) == (2, "2.0")


def _newest(scene: Scene) -> int:
    return max(int(version.version) for version in scene.client.search_model_versions(f"name = '{NAME}'"))
