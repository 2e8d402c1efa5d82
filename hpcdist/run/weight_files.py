"""The folder `init_from/` of a run: a copy of the weights that `model.init_from` names, and where they come from.

The copy is made once, before the run starts. The source may change or disappear while the run waits in a queue, and
containers and nodes do not see every folder; all of them see the run folder. Ranks read the copy only until the run has
a checkpoint.

    source.json                    the record `WeightOrigin`, written last
    weights.pt  weights.safetensors        a state dict; or
    model.pt  shard-00002.pt               the files of a checkpoint with weights; or
    model.pt2                              a final model of `hpcdist`, a program of torch.export
"""

import hashlib
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from hpcdist.config.training_schema import WEIGHT_SUFFIXES
from hpcdist.errors import ConfigError
from hpcdist.host import retry
from hpcdist.host.files import open_regular
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.run.folder import RunDir

KEY = "model.init_from"
ORIGIN_FILE = "source.json"
#: Name of the copy of a state dict, without its ending.
WEIGHTS_NAME = "weights"
#: Files of a checkpoint that have weights.
WEIGHT_FILES_OF_CHECKPOINT = re.compile(r"model\.pt|shard-\d{5,}\.pt")
_CHUNK_BYTES = 1 << 22
#: First bytes of files that torch.save wrote before version 1.6.
_PICKLE_MAGIC = b"\x80\x02"
#: A safetensors file begins with the length of its header, 8 bytes, and the header, which is a JSON object.
_SAFETENSORS_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class WeightOrigin:
    """The content of `init_from/source.json`."""

    source: str = ""  #: the value of `model.init_from`
    found: str = ""  #: what this was at the start: `run digits/first, checkpoint of step 1200`
    sha256: str = ""  #: of the file; of a checkpoint, the digest that the page of its run shows
    step: int | None = None  #: of a checkpoint


class WeightSource(Protocol):
    """Weights that `model.init_from` names, found before the start."""

    def copy_to(self, folder: Path) -> None:
        """Create the folder with a copy of the weights and their origin. Raises ConfigError if that fails."""


def read_origin_of_weights(run: RunDir) -> WeightOrigin | None:
    """Return where the first weights of a run come from; None if it did not start from weights."""
    path = run.init_from / ORIGIN_FILE
    raw = read_json(path)
    if raw is None:
        return None
    return fill(WeightOrigin, raw, path)


@dataclass(frozen=True, kw_only=True)
class LocalWeights:
    """Weights in files of this machine."""

    origin: WeightOrigin
    files: Mapping[str, Path]  #: by the names of their copies
    sha256: Mapping[str, str]  #: expected hashes of the copies, by name, if they are known

    def copy_to(self, folder: Path) -> None:
        """See `WeightSource`."""
        hashes = {}
        try:
            retry.make_folder(folder)
            for name, path in self.files.items():
                hashes[name] = _copy(path, folder / name)
        except OSError as error:
            raise ConfigError(
                f"{KEY}: {self.origin.source} cannot be copied to {folder}: {error.strerror or error}"
            ) from error
        for name, expected in self.sha256.items():
            if hashes[name] != expected:
                raise ConfigError(
                    f"{KEY}: {self.files[name]} has changed since it was written (its SHA-256 differs): choose another"
                    " checkpoint"
                )
        sha256 = self.origin.sha256 or "".join(hashes.values())  # else there is one file
        write_json(folder / ORIGIN_FILE, {**asdict(self.origin), "sha256": sha256}, durable=True)


class SharedWeights:
    """The weights from which several runs start: found and downloaded once, so that all start from the same ones."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._first_copy: Path | None = None

    def copy_to(self, folder: Path) -> None:
        """See `WeightSource`."""
        if self._first_copy is None:
            self._source.copy_to(folder)
            self._first_copy = folder
            return
        try:
            shutil.copytree(self._first_copy, folder, dirs_exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{KEY}: {self._first_copy} cannot be copied to {folder}: {error}") from error


def _copy(source: Path, target: Path) -> str:
    """Copy a file, and return its SHA-256."""
    digest = hashlib.sha256()
    with open_regular(source) as file, open(target, "xb") as copy:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()


def weight_file(source: str) -> LocalWeights:
    """Return the weights in a `.pt`, `.pth` or `.safetensors` file.

    Raises ConfigError if the file cannot be read, or does not have the format of its ending.
    """
    path = Path(source)
    if path.suffix not in WEIGHT_SUFFIXES:
        known = ", ".join(WEIGHT_SUFFIXES)
        raise ConfigError(f"{KEY}: {path} ends with {path.suffix or 'no ending'!r}: expected a file with {known}")
    try:
        with open_regular(path) as file:
            reason = _format_problem(file, path)
    except OSError as error:
        raise ConfigError(f"{KEY}: {path} cannot be read: {error.strerror or error}") from error
    if reason:
        raise ConfigError(f"{KEY}: {path} {reason}: was it downloaded completely?")
    ending = ".safetensors" if path.suffix == ".safetensors" else ".pt"
    origin = WeightOrigin(source=source, found=f"file {path}")
    return LocalWeights(origin=origin, files={f"{WEIGHTS_NAME}{ending}": path}, sha256={})


def _format_problem(file: IO[bytes], path: Path) -> str:
    """Return why a file cannot have the format of its ending; empty if it can. No tensor is read."""
    if path.suffix != ".safetensors":
        if zipfile.is_zipfile(file):
            return ""
        file.seek(0)
        if file.read(len(_PICKLE_MAGIC)) == _PICKLE_MAGIC:
            return ""
        return "is not a file of torch.save"
    length = int.from_bytes(file.read(_SAFETENSORS_LENGTH_BYTES), "little")
    if file.read(1) == b"{" and _SAFETENSORS_LENGTH_BYTES + length <= path.stat().st_size:
        return ""
    return "is not a safetensors file"
