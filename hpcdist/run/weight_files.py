"""The folder `init_from/` of a run: a copy of the weights that `model.init_from` names, and where they come from.

The copy is made once, before the run starts. The source may change or disappear while the run waits in a queue, and
containers and nodes do not see every folder; all of them see the run folder. Ranks read the copy only until the run has
a checkpoint.

    source.json                    the record `WeightOrigin`, written last
    weights.pt  weights.safetensors        a state dict; or
    model.pt  shard-00002.pt               the files of a checkpoint with weights; or
    model.pt2                              a final model of `hpcdist`, a program of torch.export; or
    config.json  model.safetensors  …      a model in Hugging Face's format
    tokenizer.json  tokenizer_config.json  beside the last three kinds: the tokenizer of a language model

The files in Hugging Face's format are often many GB, so they are hard links if the source is on the same file system.
"""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from hpcdist.config.training_schema import HUGGING_FACE_CONFIG, WEIGHT_SUFFIXES
from hpcdist.errors import ConfigError, few
from hpcdist.host import retry
from hpcdist.host.files import open_regular, read_regular
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.run.folder import RunDir

KEY = "model.init_from"
ORIGIN_FILE = "source.json"
#: Name of the copy of a state dict, without its ending.
WEIGHTS_NAME = "weights"
#: Files of a checkpoint that have weights.
WEIGHT_FILES_OF_CHECKPOINT = re.compile(r"model\.pt|shard-\d{5,}\.pt")
#: The tensors of a model in Hugging Face's format: in one file, or in those that the index names.
HUGGING_FACE_WEIGHTS = "model.safetensors"
HUGGING_FACE_INDEX = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
#: Among the artifacts of a run: the files of the tokenizer with which it was trained.
TOKENIZER_FOLDER = "tokenizer"
#: Other files that such a folder may have, and an export passes on.
HUGGING_FACE_EXTRAS = (TOKENIZER_FILE, TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json")
#: The index of a model of 405 B parameters has 0.1 MB.
_MAX_INDEX_BYTES = 64 << 20
#: Key in `source.json`, beside those of the record: of each hard link, the time of the last change in nanoseconds.
_LINKED = "linked"
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
    may_link: bool = False  #: whether a hard link replaces a copy where the file system allows it

    def copy_to(self, folder: Path) -> None:
        """See `WeightSource`."""
        hashes = {}
        linked = {}
        try:
            retry.make_folder(folder)
            for name, path in self.files.items():
                if self.may_link and _link(path, folder / name):
                    linked[name] = os.stat(path).st_mtime_ns
                    hashes[name] = _sha256(path)
                else:
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
        record = {**asdict(self.origin), "sha256": self.origin.sha256 or _sha256_of_all(hashes)}
        if linked:
            record[_LINKED] = linked
        write_json(folder / ORIGIN_FILE, record, durable=True)


def require_unchanged_links(folder: Path) -> None:
    """Raise ConfigError if the source of a hard link in the folder `init_from` of a run was overwritten in place."""
    record = read_json(folder / ORIGIN_FILE) or {}
    for name, changed_ns in record.get(_LINKED, {}).items():
        if (folder / name).stat().st_mtime_ns != changed_ns:
            raise ConfigError(
                f"{KEY}: {name} in {record.get('source')} was overwritten after the run had been created: start a new"
                " run"
            )


def _sha256_of_all(hashes: Mapping[str, str]) -> str:
    """Return the hash of one file; of several files, the hash of their names and hashes."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = [f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items())]  # as sha256sum prints them
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _link(source: Path, target: Path) -> bool:
    """Return whether a hard link to a file could be made: not on another file system, nor to a file of somebody else.

    A file behind a symbolic link, such as those in the cache of Hugging Face's hub, is linked itself.
    """
    with open_regular(source):
        pass
    try:
        os.link(source.resolve(), target)
    except OSError:
        return False
    return True


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def hugging_face_weights(source: str) -> LocalWeights:
    """Return the model in a folder in Hugging Face's format, with its tokenizer if the folder has one.

    Raises ConfigError if the folder is incomplete, or a file cannot be read or is damaged.
    """
    folder = Path(source)
    names = [HUGGING_FACE_CONFIG]
    if (folder / HUGGING_FACE_INDEX).is_file():
        names += [HUGGING_FACE_INDEX, *_names_in_index(folder / HUGGING_FACE_INDEX)]
    elif (folder / HUGGING_FACE_WEIGHTS).is_file():
        names.append(HUGGING_FACE_WEIGHTS)
    else:
        others = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pth", ".gguf")]
        has = ""
        if others:
            has = f", only {few(others)}"
        raise ConfigError(
            f"{KEY}: {folder} has no {HUGGING_FACE_WEIGHTS}{has}: write one with transformers,"
            " model.save_pretrained(folder)"
        )
    for name in names:
        try:
            with open_regular(folder / name) as file:
                reason = ""
                if name.endswith(".safetensors"):
                    reason = _format_problem(file, folder / name)
        except OSError as error:
            raise ConfigError(f"{KEY}: {folder / name} cannot be read: {error.strerror or error}") from error
        if reason:
            raise ConfigError(f"{KEY}: {folder / name} {reason}: was it downloaded completely?")
    names += [name for name in HUGGING_FACE_EXTRAS if (folder / name).is_file()]
    origin = WeightOrigin(source=source, found=f"folder {folder}")
    return LocalWeights(origin=origin, files={name: folder / name for name in names}, sha256={}, may_link=True)


def _names_in_index(path: Path) -> list[str]:
    """Return the names of the files with tensors. Raises ConfigError if the index is damaged or leaves its folder."""
    try:
        names = sorted(set(json.loads(read_regular(path, _MAX_INDEX_BYTES))["weight_map"].values()))
        if not all(Path(name).name == name and name.endswith(".safetensors") for name in names):
            raise ValueError("a name in weight_map is not one of a .safetensors file beside it")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{KEY}: {path} cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
    return names


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
