"""Digests of datasets, by which reviewers see whether two runs read the same data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpcdist.config.schema import DataConfig
from hpcdist.data.batches import PreloadedSplit, Split
from hpcdist.data.images import FolderImages, SyntheticImages, TensorImages
from hpcdist.data.loading import ImageData
from hpcdist.rank.context import Context

#: Limits of the content of a split that a digest covers, besides all labels: images, or sizes of files.
_MAX_IMAGES = 10_000
_MAX_BYTES = 64 << 20
_MAX_FILES = 1000
#: As long as MLflow's own digests, so that its column shows them.
_DIGEST_CHARS = 8


def log_image_data(ctx: Context, cfg: DataConfig, data: ImageData, seed: int) -> None:
    """Declare both splits of an image dataset on rank 0; on other ranks the call has no effect."""
    if not ctx.is_main:
        return
    source = "scikit-learn" if cfg.name == "digits" else "generated" if cfg.name == "synthetic" else cfg.root
    for split, images in (("train", data.train), ("test", data.test)):
        digest = _digest_of_split(images, seed, split)
        ctx.log_dataset(cfg.name, split=split, num_samples=len(images), digest=digest, source=source)


def digest_of(*parts: Any) -> str:
    """Return a digest of tensors, texts and JSON values, 8 hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype} {list(part.shape)} ".encode())
            found.update(part.contiguous().cpu().numpy().data)
        else:
            found.update(json.dumps(part, sort_keys=True, default=str).encode())
    return found.hexdigest()[:_DIGEST_CHARS]


def _digest_of_split(images: Split, seed: int, split: str) -> str:
    """Return a digest of all labels and of evenly spaced images, or of what determines the images."""
    return digest_of(images.labels, *_content(images, seed, split))


def _content(images: Split, seed: int, split: str) -> Iterator[Any]:
    source = images if isinstance(images, PreloadedSplit) else images.source
    if isinstance(source, FolderImages):
        yield [f"{path.parent.name}/{path.name}" for path in source.files]
        yield [source.files[index].stat().st_size for index in _spread(len(source.files), _MAX_FILES)]
    elif isinstance(source, SyntheticImages):
        yield [seed, split, list(source.shape)]
    elif isinstance(source, TensorImages | PreloadedSplit):
        image_bytes = max(1, source.images[:1].numel())
        chosen = _spread(len(source.images), min(_MAX_IMAGES, max(1, _MAX_BYTES // image_bytes)))
        yield source.images[torch.tensor(chosen, dtype=torch.int64)]


def _spread(length: int, limit: int) -> range:
    """Return at most `limit` evenly spaced indices."""
    return range(0, length, max(1, -(-length // limit)))
