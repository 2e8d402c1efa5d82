"""A run folder, its MLflow database, and the actions of its supervisor and ranks."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from mlflow import MlflowClient
from mlflow.entities import DatasetInput, Experiment, LoggedModelOutput
from mlflow.entities import Run as MlflowEntity

from hpcdist.host.json_files import write_json
from hpcdist.run.folder import RunDir, State
from hpcdist.tracking.delivery import Delivery

CONFIG: dict[str, Any] = {
    "experiment": "exp",
    "name": "",
    "trainer": {"target": "ddp", "script": []},
    "optim": {"lr": 0.001, "max_grad_norm": None},
    "checkpoint": {"monitor": "eval/accuracy", "monitor_mode": "max"},
    "tracking": {"uri": "", "register_as": None, "drain_timeout_s": 20.0, "tags": {"team": "vision"}},
}


class Scene:
    """One run folder and its MLflow database."""

    def __init__(self, root: Path) -> None:
        self.uri = f"sqlite:///{root}/mlflow.db"
        self.run = RunDir.create(root / "runs" / "exp" / "first")
        self.write_config(CONFIG)
        write_json(self.run.environment, {"host": "n1", "user": "ada", "git_commit": "abc", "versions": {"torch": "2"}})
        self.state(status="running", attempt=1)

    def write_config(self, config: dict[str, Any]) -> None:
        self.run.config.write_text(yaml.safe_dump(config))

    def state(self, **changes: Any) -> State:
        state = replace(self.run.read_state(), **changes)
        self.run.write_state(state)
        return state

    def log(self, steps: range | list[int], *, attempt: int = 1, key: str = "loss", offset: float = 0.0) -> None:
        path = self.run.journal / f"attempt-{attempt:03d}.rank-00000.jsonl"
        now = int(time.time() * 1000)
        with open(path, "a") as file:
            for step in steps:
                file.write(json.dumps({"t": now + step, "s": step, "m": {key: step + offset}}) + "\n")

    def file(self, name: str, text: str) -> Path:
        path = self.run.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def shipper(self) -> Delivery:
        return Delivery(self.run, self.uri)

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    @property
    def run_id(self) -> str:
        return str(json.loads(self.run.mlflow.read_text())["run_id"])

    @property
    def entity(self) -> MlflowEntity:
        return self.client.get_run(self.run_id)

    @property
    def experiment(self) -> Experiment:
        found = self.client.get_experiment_by_name("exp")
        assert found is not None
        return found

    @property
    def dataset_inputs(self) -> list[DatasetInput]:
        inputs = self.entity.inputs
        assert inputs is not None
        return inputs.dataset_inputs

    @property
    def model_outputs(self) -> list[LoggedModelOutput]:
        outputs = self.entity.outputs
        assert outputs is not None
        return outputs.model_outputs

    def status(self) -> str:
        return str(self.entity.info.status)

    def steps(self, key: str = "loss") -> list[int]:
        return sorted(metric.step for metric in self.client.get_metric_history(self.run_id, key))

    def artifacts(self, folder: str | None = None) -> set[str]:
        found: set[str] = set()
        for item in self.client.list_artifacts(self.run_id, folder):
            found |= self.artifacts(item.path) if item.is_dir else {item.path}
        return found
