"""Export of the final model to MLflow's format. It runs in the rank, because it needs torch and the model's code."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcdist.checkpoint.state_dict import MaybeSharded
from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)


def export_model(module: nn.Module, example: torch.Tensor, run: RunDir) -> None:
    """Write `model/` into the run folder for `mlflow.pytorch.load_model`; the shipper uploads it.

    The model is saved with `torch.export`, so that loading it neither needs nor runs the model's code. A model that
    cannot be exported (data-dependent branches) is pickled together with its code from the run's snapshot. Without
    MLflow, for example in a container, the call only logs a warning.

    Args:
        module: the bare model. It is moved to the CPU and set to evaluation mode.
        example: one input batch of at least two samples, so that the batch dimension is exported as dynamic.
        run: the run folder.
    """
    if MaybeSharded(list(module.parameters())).is_sharded:  # this rank alone cannot compute
        log.warning("the model is sharded over ranks (DTensor): `hpcdist export` converts its checkpoint instead")
        return
    try:
        import mlflow.pytorch
        from mlflow.models import infer_signature
    except ModuleNotFoundError:
        log.warning("MLflow is not installed: the final model is only in checkpoints/, not in MLflow's format")
        return
    module = module.cpu().eval()
    example = example.cpu().contiguous()
    with torch.no_grad():
        output = module(example)
    options: dict[str, Any] = {
        "signature": infer_signature(example.numpy(), output.float().numpy()),
        # Without this list MLflow starts a process that imports everything, to find the requirements.
        "pip_requirements": [f"torch=={torch.__version__.partition('+')[0]}"],
    }
    shutil.rmtree(run.model, ignore_errors=True)
    try:
        mlflow.pytorch.save_model(
            module, run.model, input_example=example.numpy(), serialization_format="pt2", **options
        )
    except Exception as error:  # torch.export does not document its exceptions
        log.warning("torch.export cannot export the model (%s): it is pickled with its code instead", error)
        shutil.rmtree(run.model, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            code = _users_code(module, run, Path(folder))
            mlflow.pytorch.save_model(module, run.model, code_paths=code, serialization_format="pickle", **options)


def _users_code(module: nn.Module, run: RunDir, folder: Path) -> list[str] | None:
    """Return the package or file in the run's code snapshot that defines the model; `load_model` must import it.

    A package is copied to `folder` without links that leave the snapshot: they may lead to data.
    """
    file = getattr(sys.modules.get(type(module).__module__), "__file__", None)
    if file is None or not Path(file).is_relative_to(run.code):
        return None
    package = Path(file)
    while (package.parent / "__init__.py").exists():
        package = package.parent
    if package.is_file():
        return [str(package)]

    def leaving(place: str, names: list[str]) -> list[str]:
        return [name for name in names if not Path(place, name).resolve().is_relative_to(run.code.resolve())]

    return [str(shutil.copytree(package, folder / package.name, ignore=leaving))]
