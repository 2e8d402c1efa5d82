"""What is recorded of a run, for `hpcdist rerun`: from its run folder, or from MLflow alone."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdist.config.redaction import redact_text
from hpcdist.errors import UserMistake
from hpcdist.host import retry
from hpcdist.host.files import is_mine, parse_object, read_json, require_trusted
from hpcdist.review.comparison import Values, is_measured
from hpcdist.review.facts import read_facts
from hpcdist.review.text import PATCH
from hpcdist.run.folder import RunDir, require_record
from hpcdist.run.lookup import find_runs, resolve_run
from hpcdist.run.records import DatasetRecord
from hpcdist.run.snapshot import CodeState, code_of
from hpcdist.tracking.points import read_values
from hpcdist.tracking.uri import choose_uri

#: A run's id in MLflow, alone or in a link to its page.
_RUN_ID = re.compile(r"(?:.*/runs/)?([0-9a-f]{32})(?:[/?].*)?")
_FILES = ("config.yaml", "environment.json", PATCH)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    name: str
    experiment: str
    config: Path  #: file with its config
    environment: Mapping[str, Any]  #: content of `environment.json`
    code: CodeState
    patch: bytes = b""  #: uncommitted changes
    world_size: int = 0  #: 0 if no attempt began
    image: str = ""
    image_digest: str = ""
    datasets: tuple[DatasetRecord, ...] = ()
    folder: RunDir | None = None  #: None if only MLflow has the run
    run_id: str = ""  #: of MLflow
    uri: str = ""  #: the MLflow store that it was read from; empty if its folder was read

    def values(self) -> Values:
        """Return the logged values. From MLflow, only those that `rerun` compares by default are read.

        Raises TrackingError if MLflow fails.
        """
        if self.folder is not None:
            return read_values(self.folder)
        from hpcdist.tracking.mlflow_client import open_client, translated

        client = open_client(self.uri)
        with translated(self.uri):
            keys = [key for key in client.get_run(self.run_id).data.metrics if not is_measured(key)]
            history = client.get_metric_history
            return {key: {one.step: one.value for one in history(self.run_id, key)} for key in keys}


def find_recorded(text: str, runs_dir: Path, env: Mapping[str, str], scratch: Path) -> RecordedRun:
    """Return a recorded run by its name or folder, its MLflow id, or the link to its page in MLflow.

    A run of MLflow is read from its folder if that belongs to this user and can be read here, else its files are
    downloaded to the folder `scratch`.
    """
    found = _RUN_ID.fullmatch(text)
    if found is None:
        return _from_folder(resolve_run(text, runs_dir))
    run_id = found[1]
    for run in find_runs(runs_dir):
        if _id_of(run) == run_id:
            return _from_folder(run)
    return _from_mlflow(run_id, choose_uri(env, env.get("MLFLOW_TRACKING_URI", ""), runs_dir), scratch)


def _id_of(run: RunDir) -> str:
    found = (read_json(run.mlflow) or {}).get("run_id")
    return found if isinstance(found, str) else ""


def _from_folder(run: RunDir) -> RecordedRun:
    require_trusted(run.path, "rerun")
    facts = read_facts(run)
    environment = require_record(run.environment)
    return RecordedRun(
        name=run.name,
        experiment=run.experiment,
        config=run.config,
        environment=environment,
        code=code_of(environment, run.environment),
        patch=retry.retry(run.patch.read_bytes, run.patch) if run.patch.is_file() else b"",
        world_size=facts.state.world_size,
        image=facts.image,
        image_digest=facts.image_digest,
        datasets=facts.datasets,
        folder=run,
        run_id=facts.run_id,
    )


def _from_mlflow(run_id: str, uri: str, scratch: Path) -> RecordedRun:
    from hpcdist.tracking.mlflow_client import MlflowException, open_client, translated

    client = open_client(uri)
    shown = redact_text(uri)
    with translated(uri):
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise UserMistake(f"no run {run_id} in MLflow at {shown}: name its store with --tracking-uri") from error
        tags, datasets = run.data.tags, []
        for one in run.inputs.dataset_inputs if run.inputs else ():
            split = next((tag.value for tag in one.tags if tag.key == "mlflow.data.context"), "")
            datasets.append(DatasetRecord(name=one.dataset.name, split=split, digest=one.dataset.digest))
        experiment = client.get_experiment(run.info.experiment_id).name
    # The run folder that MLflow names, if it is this user's and of this run.
    folder = Path(tags.get("hpcdist.folder", ""))
    is_here = folder.is_absolute() and is_mine(folder) and (folder / "state.json").is_file()
    if is_here and _id_of(RunDir(folder)) == run_id:
        return _from_folder(RunDir(folder))
    with translated(uri):
        present = {entry.path for entry in client.list_artifacts(run_id)}
        for name in present.intersection(_FILES):
            client.download_artifacts(run_id, name, str(scratch))
    if absent := [name for name in _FILES[:2] if name not in present]:
        raise UserMistake(
            f"run {run_id} in MLflow at {shown} has no artifact {absent[0]}: it was not started by hpcdist, or it is"
            " not uploaded yet (`hpcdist sync`)"
        )
    path = scratch / "environment.json"
    try:
        environment = parse_object(path.read_bytes())
    except ValueError:
        raise UserMistake(f"environment.json of run {run_id} in MLflow is damaged: it holds no JSON object") from None
    patch, size = scratch / PATCH, tags.get("hpcdist.world_size", "")
    return RecordedRun(
        name=tags.get("hpcdist.folder", run_id).rpartition("/")[2],
        experiment=experiment,
        config=scratch / "config.yaml",
        environment=environment,
        code=code_of(environment, path),
        patch=patch.read_bytes() if patch.is_file() else b"",
        world_size=int(size) if re.fullmatch("[0-9]{1,18}", size) else 0,
        image=tags.get("hpcdist.image", ""),
        image_digest=tags.get("hpcdist.image_digest", ""),
        datasets=tuple(datasets),
        run_id=run_id,
        uri=uri,
    )
