"""Logged models and registered models of MLflow."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import yaml

from hpcdist.tracking.client.mlflow_client import MlflowException, entities, translated
from hpcdist.tracking.client.mlflow_run import MlflowRun

MODEL_NAME = "model"
#: Description of a registered model that `register` creates.
_REGISTERED = (
    "Final models of the finished runs of hpcdist, one version each. The alias `best` is the version with the best last"
    " value of the metric that selects checkpoints. It is not the best checkpoint of a run: the description of the run"
    " names that one, and the tab *Models* of the experiment lists all kept checkpoints."
)


def log_model(
    run: MlflowRun,
    folder: Path,
    fingerprint: str,
    step: int,
    *,
    name: str = MODEL_NAME,
    model_type: str | None = None,
    params: Mapping[str, str] | None = None,
    description: str = "",
) -> str:
    """Log a folder in MLflow's model format as a logged model of a run. Returns the id of the model.

    The model loads as `models:/<id>` and `runs:/<run_id>/<name>`, and is listed on the page of the run. Its parameters
    are those of the run if `params` is None. `description` is Markdown for the page of the model.
    """
    with translated(run.uri):
        model = _find_model(run, fingerprint, name) or run.client.create_logged_model(
            run.experiment_id,
            name=name,
            source_run_id=run.run_id,
            tags={"hpcdist.fingerprint": fingerprint} | ({"mlflow.note.content": description} if description else {}),
            params=dict(run.client.get_run(run.run_id).data.params if params is None else params),
            model_type=model_type,
        )
        run.client.log_model_artifacts(model.model_id, str(folder))
        if (folder / "MLmodel").is_file():
            _upload_description(run, model, folder)
        outputs = run.client.get_run(run.run_id).outputs
        if outputs is None or all(item.model_id != model.model_id for item in outputs.model_outputs):
            run.client.log_outputs(run.run_id, [entities.LoggedModelOutput(model.model_id, step=step)])
        run.client.finalize_logged_model(model.model_id, "READY")
        return str(model.model_id)


def _find_model(run: MlflowRun, fingerprint: str, name: str) -> entities.LoggedModel | None:
    found = run.client.search_logged_models([run.experiment_id], f"name = '{name}' AND source_run_id = '{run.run_id}'")
    return next((model for model in found if model.tags.get("hpcdist.fingerprint") == fingerprint), None)


def _upload_description(run: MlflowRun, model: entities.LoggedModel, folder: Path) -> None:
    """Upload the `MLmodel` file with the ids added, as `mlflow.pytorch.log_model` does."""
    ids = {"model_id": model.model_id, "model_uuid": model.model_id, "run_id": run.run_id}
    content = yaml.safe_load((folder / "MLmodel").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary, "MLmodel")
        path.write_text(yaml.safe_dump(content | ids | {"artifact_path": model.artifact_location}))
        run.client.log_model_artifact(model.model_id, str(path))


def register(run: MlflowRun, model_id: str, name: str) -> str:
    """Register a logged model, once. Returns `name/version`."""
    with translated(run.uri):
        model = run.client.get_logged_model(model_id)
        try:
            run.client.create_registered_model(name, description=_REGISTERED)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = run.client.search_model_versions(f"name = '{name}' AND run_id = '{run.run_id}'")
        # A database would look up `models:/<id>` at MLflow's global tracking URI.
        source = model.artifact_location
        found = next((version for version in known if version.source == source), None)
        version = (found or run.client.create_model_version(name, source, run_id=run.run_id, model_id=model_id)).version
        versions = json.dumps([{"name": name, "version": int(version)}])
        run.client.set_logged_model_tags(model_id, {"mlflow.modelVersions": versions})
        return f"{name}/{version}"
