"""Export of a model: in the rank for MLflow's format, and to a file that other programs load without hpcdist."""

import importlib.util
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.fx.experimental import _config

from hpcdist.checkpoint.sharded import is_sharded
from hpcdist.checkpoint.store import CheckpointStore, Manifest
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.errors import ExportError
from hpcdist.host.image_identity import install_command
from hpcdist.run.checkpoint_files import EXAMPLE_FILE, PROGRAM_FILE
from hpcdist.run.folder import RunDir

log = logging.getLogger(__name__)

#: Dimensions of a batch of images: samples, channels, height, width.
IMAGE_DIMENSIONS = 4


def export_model(module: nn.Module, example: torch.Tensor, run: RunDir) -> None:
    """Write the final model to `exported/`, from which the shipper creates `model/`; see `Context.export_model`.

    The model is saved with `torch.export`, so that loading it neither needs nor runs the model's code. A model that
    cannot be exported (data-dependent branches) is pickled to `model/` together with its code from the run's snapshot.

    The shipper converts it, because the import of MLflow's code for models takes ten times as long as the export, and
    all ranks would keep their devices meanwhile. Without MLflow, for example in a container, the call only logs a
    warning.
    """
    if is_sharded(list(module.parameters())):  # this rank alone cannot compute the output of the model
        log.warning("the model is sharded over ranks (DTensor): `hpcdist export` converts its checkpoint instead")
        return
    mlflow = importlib.util.find_spec("mlflow")
    # A module without submodules is a file of the user that happens to be called `mlflow`.
    if mlflow is None or mlflow.submodule_search_locations is None:
        log.warning("MLflow is not installed: the final model is only in checkpoints/, not in MLflow's format")
        return
    module = module.cpu().eval()
    example = example.cpu().contiguous()
    try:
        with torch.no_grad():
            output = _only_tensor(module(example)).float()
        _write_exported(module, example, output, run)
    except Exception:  # of the user's code, torch.export and pickle; the training is complete without the export
        log.warning("the final model is only in checkpoints/, not in MLflow's format:", exc_info=True)


def _only_tensor(output: object) -> torch.Tensor:
    """Return the output of a model. Raises TypeError if it is anything but one tensor."""
    if not isinstance(output, torch.Tensor):
        raise TypeError(f"the model returns a {type(output).__name__}, but MLflow's format needs one tensor")
    return output


def _write_exported(module: nn.Module, example: torch.Tensor, output: torch.Tensor, run: RunDir) -> None:
    """Write `exported/`, or `model/` if torch.export cannot export the model."""
    unfinished = run.path / ".exported"
    for folder in (unfinished, run.exported, run.model):  # of an earlier end of the run
        shutil.rmtree(folder, ignore_errors=True)
    unfinished.mkdir()
    try:
        free = free_dimensions(module, example)
        sizes = dict.fromkeys(free, torch.export.Dim.AUTO)
        # Otherwise the program of a small image is limited to sizes with which a later layer has one pixel, too.
        with _config.patch(backed_size_oblivious=free != [0]):  # type: ignore[attr-defined]  # torch adds it at run time
            program = torch.export.export(module, (example,), dynamic_shapes=(sizes,))
        torch.export.save(program, unfinished / PROGRAM_FILE)
        arrays: dict[str, Any] = {
            "inputs": example.numpy(),
            "outputs": output.numpy(),
            "torch": np.array(torch.__version__),
            "free": np.array(free),
        }
        np.savez(unfinished / EXAMPLE_FILE, **arrays)
        unfinished.rename(run.exported)
    except Exception as error:  # torch.export does not document its exceptions
        log.warning("torch.export cannot export the model (%s): it is pickled with its code instead", error)
        _pickle_model(module, example, output, run)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def free_dimensions(module: nn.Module, example: torch.Tensor) -> list[int]:
    """Return the dimensions of the input that may differ from those of the example in the exported model.

    The number of samples may; height and width of images [N, C, H, W] may if the network takes an image of twice the
    size. A network with a linear layer for all pixels does not.
    """
    if example.dim() != IMAGE_DIMENSIONS:
        return [0]
    try:
        with torch.no_grad():
            module(example.repeat(1, 1, 2, 2))
    except RuntimeError:
        return [0]
    return [0, 2, 3]


def _pickle_model(module: nn.Module, example: torch.Tensor, output: torch.Tensor, run: RunDir) -> None:
    import mlflow.pytorch
    from mlflow.models import infer_signature

    with tempfile.TemporaryDirectory() as folder:
        mlflow.pytorch.save_model(
            module,
            run.model,
            code_paths=_users_code(module, run, Path(folder)),
            serialization_format="pickle",
            signature=infer_signature(example.numpy(), output.numpy()),
            # Without this list MLflow starts a process that imports everything, to find the requirements.
            pip_requirements=[f"torch=={torch.__version__.partition('+')[0]}"],
        )


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

    snapshot = run.code.resolve()

    def links_that_leave(place: str, names: list[str]) -> list[str]:
        return [name for name in names if not Path(place, name).resolve().is_relative_to(snapshot)]

    copy = shutil.copytree(package, folder / package.name, ignore=links_that_leave)
    return [str(copy)]


# A checkpoint's weights by name, as a file that other programs load without hpcdist: `safetensors` for any framework,
# `torch` for `torch.load(path, weights_only=True)`. `dcp` is a folder for `torch.distributed.checkpoint.load`.

Format = Literal["safetensors", "torch", "dcp"]
SUFFIXES: Mapping[Format, str] = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ".dcp"}
_FORMATS: Mapping[str, Format] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch"}
#: Longest number that counts as a step: 19 digits are the longest 64-bit integer.
_MAX_STEP_DIGITS = 19
#: Number of steps that a message lists; of more, it lists only the first and the last ones.
_MAX_LISTED_STEPS = 10


def format_of(requested: Format | None, output: Path | None) -> Format:
    """Return the format that is requested by name, or by the ending of the file to write; both must agree."""
    by_ending = None
    if output is not None:
        by_ending = _FORMATS.get(output.suffix)
    if requested is not None and by_ending is not None and requested != by_ending:
        raise ExportError(f"--format {requested} contradicts the ending of --output {output}: leave out --format")
    chosen = requested or by_ending
    if chosen is None:
        raise ExportError(f"no format: add --format {', '.join(SUFFIXES)}, or an --output that ends with .pt")
    return chosen


def find_checkpoint(run: RunDir, which: str | None, monitored: CheckpointConfig) -> Manifest:
    """Return a checkpoint of a run.

    Args:
        which: `best` (by the monitored metric), `final` (the newest one), or a step; None for the best, or the final
            one if no checkpoint has the metric.
    """
    store = CheckpointStore(run.checkpoints, monitored)
    checkpoints = {checkpoint.step: checkpoint for checkpoint in store.all()}
    if not checkpoints:
        raise ExportError(f"run {run.name} has no valid checkpoint in {run.checkpoints}")
    newest = checkpoints[max(checkpoints)]
    if which == "final":
        return newest
    if which in ("best", None):
        best = store.best()
        if best is None and which == "best":
            raise ExportError(
                f"no checkpoint of {run.name} has the metric of checkpoint.monitor ({monitored.monitor or 'empty'}):"
                f" choose --checkpoint final or a step ({_listed_steps(checkpoints)})"
            )
        return best or newest
    is_step = which.isascii() and which.isdigit() and len(which) <= _MAX_STEP_DIGITS
    if not is_step:
        raise ExportError(f"--checkpoint {which}: expected best, final or a step ({_listed_steps(checkpoints)})")
    step = int(which)
    if step not in checkpoints:
        raise ExportError(f"run {run.name} has no checkpoint of step {step}: it has {_listed_steps(checkpoints)}")
    return checkpoints[step]


def _listed_steps(checkpoints: Mapping[int, Manifest]) -> str:
    steps = [str(step) for step in sorted(checkpoints)]
    if len(steps) > _MAX_LISTED_STEPS:
        steps = [*steps[:3], "...", *steps[-6:]]
    return ", ".join(steps)


def require_package(kind: Format) -> None:
    """Raise ExportError if the package that reads a format is not installed; torch's formats need none."""
    if kind == "safetensors" and importlib.util.find_spec("safetensors") is None:
        raise ExportError(f"format safetensors needs a package: run {install_command('export')}")


def write_model(run: RunDir, checkpoint: Manifest, kind: Format, output: Path) -> None:
    """Write the weights of a checkpoint to a file or folder, under their names in the bare model.

    The formats `safetensors` and `dcp` need memory for the largest tensor only, `torch` for all of them. A safetensors
    output without an ending is a folder in Hugging Face's layout.

    The output appears when it is complete. Raises ExportError if it exists, if its folder cannot be written, or if the
    checkpoint contains no weights.
    """
    from hpcdist.checkpoint import weight_writers

    if output.exists():
        raise ExportError(f"{output} exists: remove it, or choose another --output")
    weights = StoredWeights.of(checkpoint.path)
    if not weights:
        raise ExportError(f"the checkpoint of step {checkpoint.step} of {run.name} contains no weights")
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent)
    except OSError as error:
        raise ExportError(f"--output {output}: {output.parent} cannot be written ({error.strerror})") from error
    with scratch as folder:
        file = Path(folder) / output.name
        metadata = {"format": "pt", "run": run.name, "step": str(checkpoint.step)}
        if kind == "dcp":
            weight_writers.write_dcp(weights, file)
        elif kind == "torch":
            torch.save(dict(weights), file)
        elif output.suffix:
            weight_writers.write_safetensors(weights, list(weights), file, metadata)
        else:
            file.mkdir()
            weight_writers.write_safetensors_folder(weights, file, metadata)
        file.replace(output)
