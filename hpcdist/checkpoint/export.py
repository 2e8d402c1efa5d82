"""The final model in MLflow's own format, written where torch and the model's code are: in the rank."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)


def export_model(module: nn.Module, example: torch.Tensor, run: RunDir) -> None:
    """Write `model/` into the run folder for `mlflow.pytorch.load_model`; the shipper uploads it.

    The format is torch.export's: it loads without the model's code and runs none of it. A model that cannot be
    exported (branches that depend on data) is pickled, with its code from the run's snapshot beside it.

    A container without MLflow trains all the same: then the checkpoint alone is there, and the log says so.

    Args:
        module: the bare model; it ends up on the CPU, in evaluation mode.
        example: one input batch of at least two samples, so that the batch dimension is seen to vary.
    """
    try:
        import mlflow.pytorch
        from mlflow.models import infer_signature
    except ModuleNotFoundError:
        log.warning("no MLflow in this environment: the final model is in checkpoints/, not as an MLflow model")
        return
    module = module.cpu().eval()
    example = example.cpu().contiguous()
    with torch.no_grad():
        output = module(example)
    options: dict[str, Any] = {
        "signature": infer_signature(example.numpy(), output.float().numpy()),
        # Named here, because MLflow would start a process that imports everything to find out.
        "pip_requirements": [f"torch=={torch.__version__.partition('+')[0]}"],
    }
    shutil.rmtree(run.model, ignore_errors=True)
    try:
        mlflow.pytorch.save_model(
            module, run.model, input_example=example.numpy(), serialization_format="pt2", **options
        )
    except Exception as error:  # torch.export promises no particular exception
        log.warning("the model cannot be exported as a graph (%s): it is pickled with its code instead", error)
        shutil.rmtree(run.model, ignore_errors=True)
        mlflow.pytorch.save_model(
            module, run.model, code_paths=_users_code(module, run), serialization_format="pickle", **options
        )


def _users_code(module: nn.Module, run: RunDir) -> list[str] | None:
    """The package or file of the run's code snapshot that defines the model, which `load_model` must import."""
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    if file is None or not Path(file).is_relative_to(run.code):
        return None
    package = Path(file)
    while (package.parent / "__init__.py").exists():
        package = package.parent
    return [str(package)]
