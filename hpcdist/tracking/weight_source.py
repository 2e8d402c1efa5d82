"""Find the weights that `model.init_from` names: a file, a folder, a checkpoint, a run, or a model in MLflow.

This happens once, before the run exists, so that a mistake is an error of the command. Ranks read the copy in the run's
folder (`run/weight_files.py`). No torch is needed: a login node may have none.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hpcdist.config.schema import Config
from hpcdist.config.training_schema import HUGGING_FACE_CONFIG, NOT_SET, WEIGHT_SUFFIXES
from hpcdist.config.written import read_stored
from hpcdist.errors import ConfigError, RunFolderError, TrackingError, few
from hpcdist.host.json_files import read_json
from hpcdist.review.facts import CheckpointFacts, best_checkpoint, read_checkpoints
from hpcdist.run.checkpoint_files import MANIFEST_FILE, PROGRAM_FILE, script_files
from hpcdist.run.folder import RunDir
from hpcdist.run.lookup import resolve_run
from hpcdist.run.weight_files import (
    KEY,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    TOKENIZER_FOLDER,
    WEIGHT_FILES_OF_CHECKPOINT,
    LocalWeights,
    WeightOrigin,
    WeightSource,
    hugging_face_weights,
    weight_file,
)
from hpcdist.tracking.uri import resolve_uri

if TYPE_CHECKING:
    from hpcdist.tracking.mlflow_client import MlflowClient

_MODEL_URI = "models:/"
_ALIAS = re.compile(r"models:/([^/@]+)@([^/@]+)")
_VERSION = re.compile(r"models:/([^/@]+)/([0-9]+)")
_LOGGED_MODEL = re.compile(r"models:/(m-[0-9a-f]+)")
#: Codes of MLflow for a run that is gone, and for one that this user may not read.
_UNREADABLE = ("RESOURCE_DOES_NOT_EXIST", "PERMISSION_DENIED")


def find_weights(config: Config, env: Mapping[str, str]) -> WeightSource | None:
    """Return the weights from which a new run starts; None if it starts from random ones.

    Args:
        env: the environment, in which the address of MLflow may be.

    Raises ConfigError if they do not exist or cannot be read.
    """
    source = config.model.init_from
    if not source:
        return None
    if source == NOT_SET:
        raise ConfigError(f"{KEY} is not set: add {KEY}=..., the weights to start from, which this config needs")
    if source.startswith(_MODEL_URI):
        return _find_model(source, resolve_uri(config, env))
    path = Path(source)
    if path.is_file() or path.suffix in WEIGHT_SUFFIXES:
        return weight_file(source)
    if (path / MANIFEST_FILE).is_file():
        return checkpoint_weights(source, path)
    if (path / HUGGING_FACE_CONFIG).is_file():
        return hugging_face_weights(source)
    try:
        run = resolve_run(source, Path(config.runs_dir))
    except RunFolderError as error:
        raise ConfigError(f"{KEY}: {error}") from error
    return _weights_of_run(source, run)


def _weights_of_run(source: str, run: RunDir) -> LocalWeights:
    """Return the weights of the checkpoint that `hpcdist export` chooses: the best, else the newest."""
    checkpoints = read_checkpoints(run)
    if not checkpoints:
        names = script_files(run)
        advice = "choose another run"
        if names:
            advice = f"its script has saved {few(names)} in {run.checkpoints}: give the path of a file"
        raise ConfigError(f"{KEY}: run {run.name} has no checkpoint: {advice}")
    chosen = best_checkpoint(checkpoints, read_stored(run.config).config.checkpoint) or checkpoints[-1]
    name = f"run {run.experiment}/{run.name}, checkpoint of step {chosen.step}"
    return checkpoint_weights(source, chosen.path, found=name, facts=chosen)


def checkpoint_weights(
    source: str, folder: Path, *, found: str = "", facts: CheckpointFacts | None = None
) -> LocalWeights:
    """Return the weights in the folder of a checkpoint, or in a copy of one, and the tokenizer of its run.

    Raises ConfigError if its manifest is damaged.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = read_json(path) or {}
        step = int(manifest["step"])
        sha256 = {}
        for name, record in manifest["files"].items():
            if WEIGHT_FILES_OF_CHECKPOINT.fullmatch(name):
                sha256[name] = str(record["sha256"])
    except (RunFolderError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read ({type(error).__name__}: {error})") from error
    origin = WeightOrigin(
        source=source,
        found=found or f"checkpoint {folder} of step {step}",
        step=step,
        sha256=facts.sha256 if facts is not None else "",
    )
    files = {name: folder / name for name in sha256}
    return LocalWeights(origin=origin, files={**files, **_tokenizer_files(folder)}, sha256=sha256)


def _tokenizer_files(checkpoint: Path) -> dict[str, Path]:
    """Return the files of the tokenizer of a checkpoint's run, by name; none if the folder is not in a run."""
    folder = checkpoint.absolute()
    run = RunDir(folder.parent.parent)
    if folder.parent != run.checkpoints:
        return {}
    paths = [run.artifacts / TOKENIZER_FOLDER / name for name in (TOKENIZER_FILE, TOKENIZER_CONFIG)]
    return {path.name: path for path in paths if path.is_file()}


@dataclass(frozen=True, kw_only=True)
class MlflowModel:
    """A logged model in MLflow: the final model of a run, or a checkpoint."""

    uri: str  #: of the tracking server
    source: str
    found: str  #: the source as it was at the start: an alias can move
    location: str  #: of its files
    run_id: str  #: of the run that has made it; empty if MLflow has none

    def copy_to(self, folder: Path) -> None:
        """See `WeightSource`. Downloads the model to a temporary folder beside `folder`."""
        from mlflow.artifacts import download_artifacts

        from hpcdist.tracking.mlflow_client import translated

        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.parent) as temporary:
            model = Path(temporary) / "model"
            model.mkdir()
            try:
                with translated(self.uri):
                    download_artifacts(artifact_uri=self.location, dst_path=str(model), tracking_uri=self.uri)
                tokenizer = self._download_tokenizer(Path(temporary))
            except TrackingError as error:
                raise ConfigError(f"{KEY}={self.source}: {error}") from error
            weights = self._weights_in(model)
            replace(weights, files={**weights.files, **tokenizer}).copy_to(folder)

    def _download_tokenizer(self, folder: Path) -> dict[str, Path]:
        """Download the tokenizer of the model's run; return its files by name.

        None if the run has none, is gone, or may not be read by this user, who may read the model.
        """
        from hpcdist.tracking.mlflow_client import open_client, translated

        files: dict[str, Path] = {}
        if not self.run_id:
            return files
        client = open_client(self.uri)
        try:
            with translated(self.uri):
                for entry in client.list_artifacts(self.run_id, TOKENIZER_FOLDER):
                    name = PurePosixPath(entry.path).name
                    if name in (TOKENIZER_FILE, TOKENIZER_CONFIG):
                        files[name] = Path(client.download_artifacts(self.run_id, entry.path, str(folder)))
        except TrackingError as error:
            if error.code not in _UNREADABLE:
                raise
        return files

    def _weights_in(self, folder: Path) -> LocalWeights:
        manifest = next(iter(sorted(folder.rglob(MANIFEST_FILE))), None)
        if manifest is not None:
            return checkpoint_weights(self.source, manifest.parent, found=self.found)
        program = next(iter(sorted(folder.rglob(PROGRAM_FILE))), None)
        if program is not None:
            origin = WeightOrigin(source=self.source, found=self.found)
            return LocalWeights(origin=origin, files={PROGRAM_FILE: program}, sha256={})
        raise ConfigError(
            f"{KEY}: {self.source} has neither the files of a checkpoint nor a program of torch.export (a pickled model"
            " would run its code): name a run, or the folder of a checkpoint"
        )


def _find_model(source: str, uri: str) -> MlflowModel:
    """Return a model in MLflow by the alias or version of a registered model, or by the id of a logged one."""
    if not any(pattern.fullmatch(source) for pattern in (_ALIAS, _VERSION, _LOGGED_MODEL)):
        raise ConfigError(
            f"{KEY}: {source} names no model: expected models:/NAME@ALIAS, models:/NAME/VERSION or models:/m-ID"
        )
    from hpcdist.tracking.mlflow_client import open_client, translated  # its import takes seconds

    try:
        client = open_client(uri)
        with translated(uri):
            return _locate(client, source, uri)
    except TrackingError as error:
        raise ConfigError(f"{KEY}={source}: {error}") from error


def _locate(client: MlflowClient, source: str, uri: str) -> MlflowModel:
    """Return the model that a URI names now."""
    logged = _LOGGED_MODEL.fullmatch(source)
    if logged is not None:
        model = client.get_logged_model(logged[1])
        return MlflowModel(
            uri=uri,
            source=source,
            found=f"model {logged[1]} of MLflow run {model.source_run_id}",
            location=str(model.artifact_location),
            run_id=model.source_run_id or "",
        )
    alias = _ALIAS.fullmatch(source)
    if alias is not None:
        version = client.get_model_version_by_alias(alias[1], alias[2])
    else:
        name, _, number = source.removeprefix(_MODEL_URI).partition("/")
        version = client.get_model_version(name, number)
    location = client.get_model_version_download_uri(version.name, str(version.version))
    return MlflowModel(
        uri=uri,
        source=source,
        found=f"model {version.name}, version {version.version}, of MLflow run {version.run_id}",
        location=str(location),
        run_id=version.run_id or "",
    )
