"""MLflow's artifact repository for the code of a rank: files are copied to the run folder, which the shipper uploads.

MLflow loads it by the entry point `mlflow.artifact_repository` for the scheme `hpcdist`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

from hpcdist.tracking.artifacts.run_files import SCRIPT_FOLDER, is_own_name
from hpcdist.tracking.mlflow_plugin import rank_records


class RankArtifacts(LocalArtifactRepository):
    """Files in a folder of the run folder; those of ranks other than 0 are dropped.

    A file under a name that hpcdist uses itself, such as `config.yaml`, is stored in the folder `script`. Paths and
    symbolic links that leave the folder are refused.
    """

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        folder = Path(urlsplit(artifact_uri).path)
        super().__init__(folder.as_uri(), tracking_uri, registry_uri)
        self._folder = folder
        self._records = rank_records.current()
        # The folders of models hold no files of hpcdist.
        self._is_root = self._records is not None and folder == self._records.run.artifacts

    def _placed(self, path: str | None, name: str = "") -> str | None:
        """Return the folder for a file `name` in the folder `path`, both as the script names them.

        Raises MlflowException if it is outside of the artifact folder.
        """
        folder = os.path.normpath(path) if path and os.path.normpath(path) != "." else ""
        if self._is_root and is_own_name(os.path.join(folder, name)):
            folder = os.path.join(SCRIPT_FOLDER, folder).rstrip("/")
        target = self._folder / folder / name
        if not target.resolve().is_relative_to(self._folder.resolve()):
            raise MlflowException(
                f"Artifact path {str(path or name)!r} leaves the artifact folder {self._folder}",
                INVALID_PARAMETER_VALUE,
            )
        return folder or None

    @property
    def _is_dropped(self) -> bool:
        return self._records is None or not self._records.is_main

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        folder = self._placed(artifact_path, os.path.basename(local_file))
        if not self._is_dropped:
            super().log_artifact(local_file, folder)  # type: ignore[no-untyped-call]

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        # File by file, because each one is replaced atomically and the shipper reads at the same time.
        for above, _, names in os.walk(local_dir):
            inner = os.path.relpath(above, local_dir)
            for name in names:
                self.log_artifact(os.path.join(above, name), os.path.normpath(os.path.join(artifact_path or "", inner)))

    def _log_artifact_async(self, filename: str, artifact_path: str | None = None, artifact: Any = None) -> None:
        """Write an image of `mlflow.log_image` at once: a rank ends without waiting for MLflow's threads."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, os.path.basename(filename))
            artifact.save(path)
            self.log_artifact(path, artifact_path)

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Delete files of the run folder; what is in MLflow already stays there."""
        folder, name = os.path.split(artifact_path or "")
        placed = self._placed(folder, name)
        if not self._is_dropped:
            super().delete_artifacts(os.path.join(placed or "", name))  # type: ignore[no-untyped-call]
