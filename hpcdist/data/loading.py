"""Load a dataset by its name: both splits, preloaded if they are small, and the properties that a model needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hpcdist.config.schema import DataConfig
from hpcdist.data import DATASETS, DatasetSpec
from hpcdist.data.batches import PreloadedSplit, Split, StreamingSplit
from hpcdist.data.download import CIFAR10_MD5, IDX_FILES, find_or_raise, idx_file
from hpcdist.data.images import FolderImages, ImageSource, SyntheticImages, TensorImages, class_names, list_images
from hpcdist.data.readers import read_cifar10_batch, read_digits, read_idx_pair
from hpcdist.errors import ConfigError, DataError

log = logging.getLogger(__name__)

PRELOAD_MAX_BYTES = 1 << 30
"""With preload=auto, a split up to this size as uint8 is kept in memory."""


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Both splits of a dataset."""

    train: Split
    test: Split
    num_classes: int
    in_channels: int
    image_size: int
    class_names: tuple[str, ...] = ()  #: empty if classes have numbers only


_Sources = tuple[ImageSource, ImageSource, int]  # training and test images, and the number of classes


def load_datasets(data: DataConfig, seed: int) -> ImageData:
    """Read the dataset `data.name` (a key of DATASETS) from disk; call download.prepare before.

    `seed` determines the augmentation and synthetic images. Raises DataError for missing, unreadable or truncated
    files, ConfigError for settings that exclude each other.
    """
    spec = DATASETS[data.name]
    size = data.image_size or spec.image_size
    train, test, num_classes = _sources(data, spec, size, seed)
    is_folder = isinstance(train, FolderImages)
    return ImageData(
        train=_split(train, data, spec, seed if data.augment else None),
        test=_split(test, data, spec, None),
        num_classes=num_classes,
        in_channels=spec.in_channels,
        image_size=size,
        class_names=tuple(class_names(find_or_raise(data.name, Path(data.root).expanduser()))) if is_folder else (),
    )


def _split(source: ImageSource, data: DataConfig, spec: DatasetSpec, augment_seed: int | None) -> Split:
    # Random crops of image files need the original sizes.
    needs_files = isinstance(source, FolderImages) and augment_seed is not None
    if needs_files and data.preload == "always":
        raise ConfigError(["data.preload=always and data.augment=true exclude each other for image_folder: remove one"])
    num_bytes = len(source.labels) * torch.Size(source.shape).numel()
    small = num_bytes <= PRELOAD_MAX_BYTES
    if data.preload == "always" or (data.preload == "auto" and small and not needs_files):
        log.info("preloading %d images, %.0f MB", len(source.labels), num_bytes / 1e6)
        return PreloadedSplit(
            source.all_images(),
            source.labels,
            mean=spec.mean,
            std=spec.std,
            augment_seed=augment_seed,
            flip=spec.flip,
        )
    return StreamingSplit(source, mean=spec.mean, std=spec.std, num_workers=data.num_workers, augment_seed=augment_seed)


def _sources(data: DataConfig, spec: DatasetSpec, size: int, seed: int) -> _Sources:
    if data.name == "synthetic":
        return _synthetic_sources(data, spec, size, seed)
    if data.name == "digits":
        arrays = _digits_arrays()
    else:
        folder = find_or_raise(data.name, Path(data.root).expanduser())
        if data.name == "image_folder":
            return _folder_sources(folder, size, data.num_workers)
        arrays = _cifar10_arrays(folder) if data.name == "cifar10" else _idx_arrays(folder)
    train, test = (TensorImages(images, labels, image_size=size, flip=spec.flip) for images, labels in arrays)
    assert spec.num_classes is not None
    return train, test, spec.num_classes


_Arrays = tuple[Tensor, Tensor]  # images uint8 [N, C, H, W], labels int64 [N]


def _digits_arrays() -> tuple[_Arrays, _Arrays]:
    """Return both splits; every fifth image of each class is for testing, independent of random numbers."""
    images, labels = read_digits()
    pixels = (images.float() * (255 / 16)).round().to(torch.uint8)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        is_test[(labels == label).nonzero().flatten()[::5]] = True
    return (pixels[~is_test], labels[~is_test]), (pixels[is_test], labels[is_test])


def _idx_arrays(folder: Path) -> tuple[_Arrays, _Arrays]:
    def read(split: str) -> _Arrays:
        images, labels = (idx_file(folder, name) for name in IDX_FILES[split])
        assert images is not None
        assert labels is not None  # find_or_raise has checked them
        return read_idx_pair(images, labels, num_classes=10)

    return read("train"), read("test")


def _cifar10_arrays(folder: Path) -> tuple[_Arrays, _Arrays]:
    *train, test = [read_cifar10_batch(folder / name) for name in CIFAR10_MD5]
    return (torch.cat([images for images, _ in train]), torch.cat([labels for _, labels in train])), test


def _folder_sources(train_folder: Path, size: int, num_threads: int) -> _Sources:
    root = train_folder.parent
    test_folder = next((root / name for name in ("val", "test") if (root / name).is_dir()), None)
    if test_folder is None:
        raise DataError(f"image_folder needs {root}/val or {root}/test beside {train_folder}, found neither")
    classes = class_names(train_folder)
    train, test = (
        FolderImages(*list_images(folder, classes), image_size=size, num_threads=num_threads)
        for folder in (train_folder, test_folder)
    )
    return train, test, len(classes)


def _synthetic_sources(data: DataConfig, spec: DatasetSpec, size: int, seed: int) -> _Sources:
    """Return both splits; the test split has a fifth of the size and the same patterns."""

    def make(num_samples: int, split: int) -> SyntheticImages:
        return SyntheticImages(
            num_samples=num_samples,
            num_classes=data.num_classes,
            image_size=size,
            in_channels=spec.in_channels,
            seed=seed,
            split=split,
        )

    test = make(max(data.num_classes, data.num_samples // 5), 1)
    return make(data.num_samples, 0), test, data.num_classes
