"""Upload of the files of a run: artifacts, and checkpoints and the final model as logged models."""

import logging
import math
import time
from collections.abc import Iterable
from itertools import chain

from hpcdist.config.schema import Config
from hpcdist.errors import TrackingError
from hpcdist.run.folder import CHECKS_PER_S, ENDED, RunDir, State
from hpcdist.tracking import artifacts
from hpcdist.tracking.artifacts import Artifact, CheckpointModels, log_model, move_best, register
from hpcdist.tracking.mlflow_client import MlflowRun
from hpcdist.tracking.upload_state import SentFiles

log = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0
CHECKPOINTS_INTERVAL_S = 10.0
#: Time limit for the artifacts of a running run in one pass: metrics, commands, tags and the status wait.
ARTIFACTS_S = 5.0
#: Interval of saving the state during many uploads. After a crash, the artifacts of this time are uploaded again.
SAVE_S = 2.0
_FINAL_MODEL = """\
Final model of {name}

```python
import mlflow

model = mlflow.pytorch.load_model("runs:/{run_id}/model")
```
"""


class Uploads:
    """Uploads the files of one run that MLflow does not have: artifacts, and checkpoints and the final model as models.

    Like `Delivery`, it may be called again after a TrackingError.
    """

    def __init__(self, run: RunDir, mlflow_run: MlflowRun) -> None:
        self._run = run
        self._mlflow_run = mlflow_run
        self.sent_files = SentFiles.load(run.journal, mlflow_run.run_id)
        self._checkpoints = CheckpointModels(run, mlflow_run, self.sent_files.checkpoints)
        self._checkpoints_shipped = -math.inf
        self._logs_shipped = 0.0
        #: Time of the next search for artifacts of the trainer.
        self._search_at = 0.0
        #: Artifacts that are not uploaded, each of which is reported once.
        self._left_out: set[str] = set()

    def ship(self, state: State, config: Config, last_step: int) -> None:
        """Upload new and changed files; `last_step` is that of the training in MLflow."""
        try:
            documents = artifacts.documents(self._run, patch=config.tracking.patch)
            if state.status in ENDED:
                parts = [documents, artifacts.trainer_artifacts(self._run), artifacts.reports(self._run, ended=True)]
                if state.status != "stopped":
                    parts.append(artifacts.checkpoints(self._run, config.checkpoint))
                self._upload(chain(*parts))
            else:
                self._upload(documents)
                if time.monotonic() >= self._search_at:
                    self._upload_trainer_artifacts()
                if time.monotonic() - self._logs_shipped >= LOG_INTERVAL_S:
                    self._upload(artifacts.reports(self._run, ended=False))
                    self._logs_shipped = time.monotonic()
            is_running = state.status == "running"
            if not is_running or time.monotonic() - self._checkpoints_shipped >= CHECKPOINTS_INTERVAL_S:
                if self._checkpoints.update(all_sent=not is_running):
                    self._save()
                self._checkpoints_shipped = time.monotonic()
            if state.status == "finished" and (self._run.model / "MLmodel").is_file():
                self._ship_final_model(config, last_step)
        except OSError as error:
            raise TrackingError(f"a file of {self._run.name} cannot be uploaded: {error}") from error

    def _upload_trainer_artifacts(self) -> None:
        """Upload artifacts of the trainer for a limited time: metrics do not wait for many files."""
        files = list(artifacts.trainer_artifacts(self._run))
        is_complete = self._upload(files, within_s=ARTIFACTS_S)
        self._search_at = time.monotonic()
        if is_complete:  # the search reads the attributes of each file, which loads the file system
            self._search_at += len(files) / CHECKS_PER_S

    def _upload(self, found: Iterable[Artifact], within_s: float = math.inf) -> bool:
        """Upload the files that MLflow does not have. Returns False if time was too short for all of them."""
        saved_at = time.monotonic()
        until = saved_at + within_s
        is_unsaved = False
        new = [item for item in found if item.fingerprint not in ("", self.sent_files.artifacts.get(item.target))]
        try:
            for number, item in enumerate(new, 1):
                # Checked right before the upload, which follows links.
                reason = artifacts.leaves_folder(item.source, self._run)
                if reason:
                    if item.target not in self._left_out:
                        log.warning("%s: not uploaded", reason)
                    self._left_out.add(item.target)
                else:
                    self._mlflow_run.upload(item.source, item.target)
                    self.sent_files.artifacts[item.target] = item.fingerprint
                    is_unsaved = True
                if time.monotonic() - saved_at >= SAVE_S:  # the state is large if the run has many artifacts
                    self._save()
                    log.info("%s: %d artifacts uploaded", self._run.name, len(self.sent_files.artifacts))
                    saved_at = time.monotonic()
                    is_unsaved = False
                if time.monotonic() >= until:
                    return number == len(new)
        finally:
            if is_unsaved:
                self._save()
        return True

    def _save(self) -> None:
        self.sent_files.save(self._run.journal)

    def _ship_final_model(self, config: Config, last_step: int) -> None:
        model = self.sent_files.model
        mlflow_run = self._mlflow_run
        folder = self._run.model
        fingerprint = artifacts.fingerprint(folder)
        reason = artifacts.leaves_folder(folder, self._run)
        if reason:
            raise TrackingError(f"{reason}: the model is not uploaded")
        if model.get("fingerprint") != fingerprint:
            description = _FINAL_MODEL.format(run_id=mlflow_run.run_id, name=self._run.name)
            model_id = log_model(mlflow_run, folder, fingerprint, last_step, description=description)
            self._checkpoints.log_final_metrics(model_id, last_step)
            model = {"fingerprint": fingerprint, "model_id": model_id}
            self.sent_files.model = model
            self._save()
        name = config.tracking.register_as
        if name and "registered" not in model:
            registered = register(mlflow_run, model["model_id"], name)
            if config.checkpoint.monitor:
                move_best(mlflow_run, name, registered.rpartition("/")[2], config.checkpoint)
            model["registered"] = registered
            self._save()
