"""Export of a model: in the rank for MLflow's format, and to a file that other programs load without hpcdist."""

import importlib.util
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.fx.experimental import _config

from hpcdist.checkpoint.sharded import is_sharded
from hpcdist.checkpoint.store import CheckpointStore, Manifest, free_space, save_file
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.trainer_declaration import Trainer
from hpcdist.config.training_schema import HUGGING_FACE_CONFIG
from hpcdist.config.written import StoredConfig
from hpcdist.errors import ExportError
from hpcdist.host import retry
from hpcdist.host.image_identity import install_command
from hpcdist.host.json_files import read_json, write_json
from hpcdist.run.checkpoint_files import EXAMPLE_FILE, PROGRAM_FILE
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import HUGGING_FACE_EXTRAS, TOKENIZER_CONFIG, TOKENIZER_FILE, TOKENIZER_FOLDER

log = logging.getLogger(__name__)

#: The weight that Hugging Face's format stores as the embedding only, if the config says that they are tied.
TIED_OUTPUT = "lm_head.weight"
#: Dimensions of a batch of images: samples, channels, height, width.
IMAGE_DIMENSIONS = 4
#: Dimensions of a batch of sequences of tokens: samples, length.
SEQUENCE_DIMENSIONS = 2


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
        has_any_image_size = example.dim() == IMAGE_DIMENSIONS and free != [0]
        with _config.patch(backed_size_oblivious=has_any_image_size):  # type: ignore[attr-defined]  # torch adds it at run time
            program = torch.export.export(module, (example,), dynamic_shapes=(sizes,))
        torch.export.save(program, unfinished / PROGRAM_FILE)
        arrays: dict[str, Any] = {
            "inputs": example.numpy(),
            "outputs": output.numpy(),
            "torch": np.array(torch.__version__),
            "free": np.array(_free_in(program, free)),
        }
        np.savez(unfinished / EXAMPLE_FILE, **arrays)
        unfinished.rename(run.exported)
    except Exception as error:  # torch.export does not document its exceptions
        log.warning("torch.export cannot export the model (%s): it is pickled with its code instead", error)
        _pickle_model(module, example, output, run)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _free_in(program: torch.export.ExportedProgram, expected: Sequence[int]) -> list[int]:
    """Return which dimensions of the input are free in a program: an LSTM, for example, has the length of its input."""
    (name,) = program.graph_signature.user_inputs
    placeholder = next(node for node in program.graph.nodes if node.name == name)
    shape = placeholder.meta["val"].shape
    return [dimension for dimension in expected if not isinstance(shape[dimension], int)]


def free_dimensions(module: nn.Module, example: torch.Tensor) -> list[int]:
    """Return the dimensions of the input that may differ from those of the example in the exported model.

    The number of samples may; height and width of images [N, C, H, W], or the length of sequences of tokens [N, T], may
    if the network takes an input of twice the size. A network with a linear layer for all pixels does not.
    """
    if example.dim() == IMAGE_DIMENSIONS:
        growing = [2, 3]
    elif example.dim() == SEQUENCE_DIMENSIONS and not example.is_floating_point():
        growing = [1]
    else:
        return [0]
    repeats = [1] * example.dim()
    for dimension in growing:
        repeats[dimension] = 2
    try:
        with torch.no_grad():
            module(example.repeat(repeats))
    except RuntimeError:
        return [0]
    return [0, *growing]


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
# `torch` for `torch.load(path, weights_only=True)`. `dcp` is a folder for `torch.distributed.checkpoint.load`,
# `huggingface` one for `from_pretrained` of transformers.

Format = Literal["safetensors", "torch", "dcp", "huggingface"]
SUFFIXES: Mapping[Format, str] = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ".dcp", "huggingface": ""}
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


def write_model(
    run: RunDir, checkpoint: Manifest, kind: Format, output: Path, stored: StoredConfig | None = None
) -> None:
    """Write the weights of a checkpoint to a file or folder, under their names in the bare model.

    The formats `safetensors`, `dcp` and `huggingface` need memory for the largest tensor only, `torch` for all of them.
    A safetensors output is a folder in Hugging Face's layout, unless it ends with .safetensors. The output appears when
    it is complete.

    Args:
        stored: the config of the run: its trainer may change the weights, and must know the format `huggingface`.

    Raises ExportError if the output exists, if its folder cannot be written, if the disk is full, if the checkpoint
    contains no weights, or if the model has no form in the format.
    """
    from hpcdist.checkpoint import weight_writers

    stored = stored or StoredConfig()
    trainer = stored.trainer or Trainer()
    if kind == "huggingface" and trainer.hugging_face_config is None:
        raise ExportError(
            f"format huggingface is for language models of trainer lm, and {run.name} has another trainer: choose"
            " --format safetensors"
        )
    if output.exists():
        raise ExportError(f"{output} exists: remove it, or choose another --output")
    weights = StoredWeights.of(checkpoint.path)
    if not weights:
        raise ExportError(f"the checkpoint of step {checkpoint.step} of {run.name} contains no weights")
    if trainer.exported_weights is not None:
        weights = trainer.exported_weights(stored.config, weights)
    try:
        scratch = tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent)
    except OSError as error:
        raise ExportError(f"--output {output}: {output.parent} cannot be written ({error.strerror})") from error
    with scratch as folder, _full_disk_explained(output):
        file = Path(folder) / output.name
        metadata = {"format": "pt", "run": run.name, "step": str(checkpoint.step)}
        if kind == "dcp":
            weight_writers.write_dcp(weights, file)
        elif kind == "torch":
            save_file(dict(weights), file)
        elif trainer.hugging_face_config is not None and kind == "huggingface":
            document = trainer.hugging_face_config(stored.config, run, weights)
            if document.get("tie_word_embeddings"):
                weights = weights.without(TIED_OUTPUT)
            file.mkdir()
            weight_writers.write_safetensors_folder(weights, file, metadata)
            write_json(file / HUGGING_FACE_CONFIG, document)
            _copy_tokenizer(run, file)
        elif output.suffix == SUFFIXES["safetensors"]:
            weight_writers.write_safetensors(weights, list(weights), file, metadata)
        else:
            file.mkdir()
            weight_writers.write_safetensors_folder(weights, file, metadata)
        file.replace(output)


@contextmanager
def _full_disk_explained(output: Path) -> Iterator[None]:
    """Raise ExportError if the block fails because the disk is full: the error of the system does not name a file."""
    try:
        yield
    except OSError as error:
        if error.errno not in retry.FULL:
            raise
        raise ExportError(
            f"--output {output} cannot be written: {error.strerror} ({free_space(output.parent)}): free space there, or"
            " choose another --output"
        ) from error


def _copy_tokenizer(run: RunDir, folder: Path) -> None:
    """Copy the tokenizer of a run, if it has a file, to a folder in Hugging Face's format."""
    for source in _tokenizer_folders(run):
        for name in HUGGING_FACE_EXTRAS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    if (folder / TOKENIZER_FILE).is_file():
        config = read_json(folder / TOKENIZER_CONFIG) or {}
        # Otherwise transformers takes the class of the architecture, which changes how text is divided.
        write_json(folder / TOKENIZER_CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **config})


def _tokenizer_folders(run: RunDir) -> list[Path]:
    """Return the folders with the files of a run's tokenizer; those of the last one count."""
    trained_with = run.artifacts / TOKENIZER_FOLDER
    started_from = run.init_from
    files = [folder / TOKENIZER_FILE for folder in (trained_with, started_from)]
    if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
        return [trained_with]  # the run has another tokenizer than the model from which it started
    return [trained_with, started_from]  # the files of the latter have more settings
