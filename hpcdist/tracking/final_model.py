"""The final model of a run in MLflow's format, which the shipper writes from the program that rank 0 has exported."""

import shutil
import tempfile
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from hpcdist.errors import TrackingError
from hpcdist.run.checkpoint_files import EXAMPLE_FILE
from hpcdist.run.folder import RunDir
from hpcdist.tracking.artifacts import leaves_folder
from hpcdist.tracking.mlflow_client import translated

#: Beginning of the name of a folder that is not complete.
_UNFINISHED = ".model-"


def complete_model(run: RunDir, uri: str) -> None:
    """Write the final model to `model/` from `exported/`, and remove that; do nothing if there is no `exported/`.

    `model/` appears when it is complete. Raises TrackingError if it cannot be written, and may then be called again.
    """
    if not run.exported.is_dir():
        return
    reason = leaves_folder(run.exported, run)
    if reason:
        raise TrackingError(f"{reason}: the model is not uploaded")
    try:
        for leftover in run.path.glob(f"{_UNFINISHED}*"):  # of a shipper that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=run.path) as folder:
            _write(run.exported, Path(folder) / "model", uri)
            shutil.rmtree(run.model, ignore_errors=True)
            Path(folder, "model").rename(run.model)
        shutil.rmtree(run.exported)
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise TrackingError(f"the final model of {run.name} cannot be written in MLflow's format: {error}") from error


def _write(exported: Path, target: Path, uri: str) -> None:
    """Write a model that `mlflow.pytorch.load_model` and `mlflow.pyfunc.load_model` load.

    `mlflow.pytorch.save_model` writes the same, but it needs torch and the model's code, and its import takes seconds.
    """
    import mlflow.pyfunc
    from mlflow.models import Model, infer_signature
    from mlflow.types import Schema, TensorSpec

    with np.load(exported / EXAMPLE_FILE) as example:
        inputs, outputs, torch_version = example["inputs"], example["outputs"], str(example["torch"])
        free = [0]
        if "free" in example:  # older versions of hpcdist did not write it
            free = example["free"].tolist()
    shape = [-1 if dimension in free else size for dimension, size in enumerate(inputs.shape)]
    signature = infer_signature(inputs, outputs)
    signature.inputs = Schema([TensorSpec(inputs.dtype, shape)])
    model = Model()
    model.add_flavor("pytorch", model_data=f"data/{exported.name}", pytorch_version=torch_version, code=None)
    with translated(uri):
        mlflow.pyfunc.save_model(
            target,
            loader_module="mlflow.pytorch",
            data_path=exported,
            mlflow_model=model,
            signature=signature,
            input_example=inputs,
            # Without this list MLflow starts a process that loads the model, to find the requirements.
            pip_requirements=[f"torch=={torch_version.partition('+')[0]}"],
            model_config={"device": None},
        )
