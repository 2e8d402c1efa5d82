"""Parameters of a script in MLflow: its arguments, and what it logs itself."""

from __future__ import annotations

import pytest
from tracking_scene import CONFIG, Scene

from hpcdist.run.records import Origin, write_origin
from hpcdist.tracking.journal import EventWriter

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")


def test_arguments_and_logged_parameters_are_there_once(scene: Scene) -> None:
    script = ["/a/train.py", "--lr", "5e-5", "--fp16", "--batch-size=8"]
    scene.write_config(CONFIG | {"trainer": {"target": "ddp", "script": script}})
    write_origin(scene.run, Origin(config="train.yaml", values={}, written=["trainer.script"]))
    events = EventWriter(scene.run.journal, 1, 0)
    for name, value in {"lr": "5e-05", "fp16": "True", "batch_size": "16", "optim.lr": "0.1"}.items():
        events.pair("param", name, value)
    events.close()
    scene.shipper().ship_once()
    found = scene.entity.data.params
    assert found.pop("trainer.script").startswith('["/a/train.py", ')
    assert found == {"lr": "5e-5", "fp16": "true", "batch_size": "8", "script.batch_size": "16", "optim.lr": "0.1"}
    assert not [tag for tag in scene.entity.data.tags if "changed" in tag]
