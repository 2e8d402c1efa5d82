"""Datasets by name (both splits, the batches of one rank, a digest of the data that was read), and models by name."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

from hpcdist.config.training_schema import DataConfig
from hpcdist.data import DATASETS, RESNET_NAMES, model_name_problems
from hpcdist.data.download import CIFAR10_MD5, IDX_FILES, find_or_raise, idx_file
from hpcdist.data.image_sources import (
    CROP_PADDING,
    FolderImages,
    ImageSource,
    SyntheticImages,
    TensorImages,
    class_names,
    crop_params,
    list_images,
    pad,
    read_cifar10_batch,
    read_digits,
    read_idx_pair,
    sample_hashes,
)
from hpcdist.errors import ConfigError, DataError
from hpcdist.rank.context import Context

# Batches of one rank, from a tensor that holds the whole split or from single images.
#
# All splits have the same `batches`: (images, labels) on the device, images float32 [B, C, H, W] and normalised, labels
# int64 [B]. The result depends on the arguments only, so that an epoch can be continued at any batch. The global
# generator is not used.

FLOAT_TABLE_MAX_BYTES = 256 << 20
"""Up to this size a split is kept normalised as float32, so that a batch is one gather."""

Batch = tuple[Tensor, Tensor]
CPU = torch.device("cpu")


class Normalize:
    """Converts uint8 [B, C, H, W] to float32, (x / 255 - mean) / std per channel, with the same memory format."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.scale = torch.tensor([1 / (255 * s) for s in std], device=device).reshape(-1, 1, 1)
        self.shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)], device=device).reshape(-1, 1, 1)

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(torch.float32).mul_(self.scale).add_(self.shift)


@dataclass(eq=False)
class PreloadedSplit:
    """A whole split in memory, on the device if it fits; a batch is gathered by index.

    It is not a DataLoader with torchvision's transforms, which takes 20 times as long for augmented images of 32 x 32
    pixels, and 7 times for plain ones.
    """

    images: Tensor  #: uint8 [N, C, H, W]
    labels: Tensor  #: int64 [N]
    _: KW_ONLY
    normalize: Normalize
    device: torch.device = CPU  #: of the batches
    channels_last: bool = False  #: memory format of the batches
    #: Of random shifts and, with `flip`, mirroring (see image_sources.py); None disables them.
    augment_seed: int | None = None
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, index_batches: Sequence[Tensor], *, epoch: int = 0) -> Iterator[Batch]:
        """Yield a batch for each element of `index_batches`: the indices of its samples, int64 [n] on the CPU.

        `epoch` changes the augmentation. If the device holds the split, a batch needs neither a copy nor a
        synchronisation.
        """
        sizes = [len(part) for part in index_batches]
        if not any(sizes):  # `split` of an empty tensor returns one empty part
            return
        indices = torch.cat(list(index_batches))
        # One gather for the labels of the whole epoch, so that those of a batch are a view.
        labels = torch.split(self._placed_labels.index_select(0, indices.to(self.device)), sizes)
        if self.augment_seed is None:
            images = self._plain(indices, sizes)
        else:
            images = self._crops(indices, sample_hashes(self.augment_seed, epoch, indices), sizes)
        yield from zip(images, labels, strict=True)

    @cached_property
    def _placed_labels(self) -> Tensor:
        return self.labels.to(self.device)

    @cached_property
    def _table(self) -> Tensor:
        """The images on their device, or on the CPU if it has no room; normalised if they are small enough.

        They are [N, C, H, W], or [N, H, W, C] for channels_last; for augmentation the pixels of all padded images,
        uint8 [N * H * W, C].
        """
        if self.augment_seed is not None:
            padded = pad(self.images).permute(0, 2, 3, 1).flatten(0, 2)
            return padded.to(_place(padded, self.device))
        images = self.images.to(_place(self.images, self.device))
        is_on_device = images.device.type == self.device.type
        float_bytes = images.numel() * torch.float32.itemsize
        if is_on_device and float_bytes <= FLOAT_TABLE_MAX_BYTES:
            images = self.normalize(images)
        if self.channels_last:
            images = images.permute(0, 2, 3, 1).contiguous()
        return images

    def _plain(self, indices: Tensor, sizes: list[int]) -> Iterator[Tensor]:
        """Yield batches of whole images."""
        for part in torch.split(indices.to(self._table.device), sizes):
            images = _to_device(self._table.index_select(0, part), self.device)
            if self.channels_last:
                images = images.permute(0, 3, 1, 2)
            if not images.is_floating_point():  # the table is not normalised
                images = self.normalize(images)
            yield images

    def _crops(self, indices: Tensor, hashes: Tensor, sizes: list[int]) -> Iterator[Tensor]:
        """Yield batches of cropped images; a batch is one gather of pixels from the padded images."""
        channels, height, width = self.images.shape[1:]
        padded_height = height + 2 * CROP_PADDING
        padded_width = width + 2 * CROP_PADDING
        top, left, mirror = crop_params(hashes)
        # Row of the table with the first pixel of each crop, and of the other pixels relative to it.
        corners = (indices * padded_height + top) * padded_width + left
        plain_grid = torch.arange(height)[:, None] * padded_width + torch.arange(width)
        mirrored_grid = plain_grid
        if self.flip:
            mirrored_grid = plain_grid.flip(1)
        place = self._table.device
        grids = torch.stack([plain_grid.flatten(), mirrored_grid.flatten()]).to(place)
        corner_batches = torch.split(corners.to(place), sizes)
        mirror_batches = torch.split(mirror.to(place), sizes)
        for corner, grid_number in zip(corner_batches, mirror_batches, strict=True):
            pixels = (corner[:, None] + grids.index_select(0, grid_number)).flatten()
            images = self._table.index_select(0, pixels).reshape(-1, height, width, channels)
            images = _to_device(images, self.device).permute(0, 3, 1, 2)
            if not self.channels_last:
                images = images.contiguous()
            yield self.normalize(images)


def _place(images: Tensor, device: torch.device) -> torch.device:
    """Return the device for `images`: the given one if half of its free memory is enough, else the CPU."""
    if device.type == "cpu":
        return device
    free_bytes, _ = torch.get_device_module(device).mem_get_info(device)
    if images.numel() <= free_bytes // 2:
        return device
    return CPU


def _to_device(images: Tensor, device: torch.device) -> Tensor:
    if images.device.type == device.type:
        return images
    return images.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class StreamingSplit:
    """A split too large for memory, read by torch's DataLoader in `num_workers` processes."""

    source: ImageSource
    _: KW_ONLY
    normalize: Normalize
    device: torch.device = CPU
    channels_last: bool = False
    num_workers: int = 0
    augment_seed: int | None = None

    @property
    def labels(self) -> Tensor:
        """The label of each image, int64 [N]."""
        return self.source.labels

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, index_batches: Sequence[Tensor], *, epoch: int = 0) -> Iterator[Batch]:
        """See PreloadedSplit.batches. Images are copied to the device as bytes, a quarter of the size of floats."""
        memory_format = torch.contiguous_format
        if self.channels_last:
            memory_format = torch.channels_last
        loader = torch.utils.data.DataLoader(
            _EpochImages(self.source, self.augment_seed, epoch),
            batch_sampler=[part.tolist() for part in index_batches if len(part)],
            num_workers=self.num_workers,
            pin_memory=self.device.type != "cpu",
            generator=torch.Generator(),  # without it the loader draws a seed from the global generator
        )
        try:
            for images, labels in loader:
                on_device = images.to(self.device, non_blocking=True).contiguous(memory_format=memory_format)
                yield self.normalize(on_device), labels.to(self.device, non_blocking=True)
        except DataError as error:
            # The text of an error from a worker process begins with the traceback; only the message is kept.
            message = str(error).strip().rsplit("DataError: ", 1)[-1]
            raise DataError(message) from None


@dataclass(frozen=True)
class _EpochImages(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """One epoch of a source as a torch Dataset: item i is (uint8 [C, H, W], label)."""

    source: ImageSource
    augment_seed: int | None
    epoch: int

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        crop_hash = None
        if self.augment_seed is not None:
            crop_hash = int(sample_hashes(self.augment_seed, self.epoch, torch.tensor([index])))
        return self.source.image(index, crop_hash), self.source.labels[index]


Split: TypeAlias = PreloadedSplit | StreamingSplit
"""Images for training or testing, with `labels` int64 [N] on the CPU."""


log = logging.getLogger(__name__)

#: Up to this size as uint8 a split is kept in memory: each rank of a node holds its own copy.
PRELOAD_MAX_BYTES = 1 << 30
#: Test samples per rank and batch. Without gradients, they need less memory than a training batch of usual size.
EVAL_BATCH_SIZE = 256
#: Synthetic data have one test image for so many training images.
_SYNTHETIC_TRAIN_PER_TEST = 5
#: One in this number of digits of each class is for testing.
_DIGITS_TEST_EVERY = 5
#: Largest value of scikit-learn's digits.
_DIGITS_MAX_VALUE = 16


@dataclass(frozen=True, kw_only=True)
class ImageData:
    """Both splits of a dataset."""

    train: Split
    test: Split
    num_classes: int
    in_channels: int
    image_size: int
    class_names: tuple[str, ...] = ()  #: empty if classes have numbers only


def load_datasets(
    data: DataConfig,
    seed: int,
    device: torch.device = CPU,
    *,
    channels_last: bool = False,
    preload: bool = True,
    alive: Callable[[], None] = lambda: None,
) -> ImageData:
    """Read the dataset `data.name` (a key of DATASETS) from disk; call download.prepare before.

    `seed` determines the augmentation and synthetic images. Batches are on `device`. Without `preload`, for a rank that
    needs the labels only, no split is kept in memory. `alive` is called now and then. Raises DataError for missing,
    unreadable or truncated files.
    """
    spec = DATASETS[data.name]
    size = data.image_size or spec.image_size
    names: tuple[str, ...] = ()
    train: ImageSource
    test: ImageSource
    if data.name == "synthetic":
        train, test = _synthetic_sources(data, seed, size)
    elif data.name == "image_folder":
        folder = find_or_raise(data.name, Path(data.root).expanduser())
        test_folder = _test_folder_of(folder)
        names = tuple(class_names(folder))
        train = _folder_source(folder, names, size, data.num_workers, alive)
        test = _folder_source(test_folder, names, size, data.num_workers, alive)
    else:
        train_arrays, test_arrays = _arrays(data)
        train = TensorImages(*train_arrays, image_size=size, flip=spec.flip)
        test = TensorImages(*test_arrays, image_size=size, flip=spec.flip)
    normalize = Normalize(spec.mean, spec.std, device)
    options = {"normalize": normalize, "device": device, "channels_last": channels_last}
    train_options: dict[str, Any] = {**options, "augment_seed": None}
    if data.augment:
        train_options["augment_seed"] = seed
    return ImageData(
        train=_split(train, data, train_options, flip=spec.flip, preload=preload, alive=alive),
        test=_split(test, data, options, flip=spec.flip, preload=preload, alive=alive),
        num_classes=len(names) or spec.num_classes or data.num_classes,
        in_channels=spec.in_channels,
        image_size=size,
        class_names=names,
    )


def _synthetic_sources(data: DataConfig, seed: int, size: int) -> tuple[SyntheticImages, SyntheticImages]:
    """Return training and test images; each class has at least one test image."""
    common = {
        "num_classes": data.num_classes,
        "image_size": size,
        "in_channels": DATASETS[data.name].in_channels,
        "seed": seed,
    }
    num_test = max(data.num_classes, data.num_samples // _SYNTHETIC_TRAIN_PER_TEST)
    train = SyntheticImages(num_samples=data.num_samples, split=0, **common)
    test = SyntheticImages(num_samples=num_test, split=1, **common)
    return train, test


def _test_folder_of(train_folder: Path) -> Path:
    """Return the folder `val` or, without one, `test` beside the folder of the training images."""
    root = train_folder.parent
    for name in ("val", "test"):
        if (root / name).is_dir():
            return root / name
    raise DataError(f"image_folder needs {root}/val or {root}/test beside {train_folder}, found neither")


def _folder_source(
    folder: Path, names: Sequence[str], size: int, num_threads: int, alive: Callable[[], None]
) -> FolderImages:
    files, labels = list_images(folder, names, alive)
    return FolderImages(files, labels, image_size=size, num_threads=num_threads)


def _split(
    source: ImageSource,
    data: DataConfig,
    options: dict[str, Any],
    *,
    flip: bool,
    preload: bool,
    alive: Callable[[], None],
) -> Split:
    """Return the source as a split: in memory if it is small enough, else read while training."""
    # Random crops of image files need the original sizes.
    needs_files = isinstance(source, FolderImages) and options.get("augment_seed") is not None
    num_bytes = len(source.labels) * torch.Size(source.shape).numel()
    if preload and num_bytes <= PRELOAD_MAX_BYTES and not needs_files:
        log.info("preloading %d images, %.0f MB", len(source.labels), num_bytes / 1e6)
        return PreloadedSplit(source.all_images(alive), source.labels, flip=flip, **options)
    return StreamingSplit(source, num_workers=data.num_workers, **options)


_Arrays = tuple[Tensor, Tensor]  # images uint8 [N, C, H, W], labels int64 [N]


def _arrays(data: DataConfig) -> tuple[_Arrays, _Arrays]:
    """Return training and test images of a dataset that is read as a whole."""
    if data.name == "digits":
        return _digits_arrays()
    folder = find_or_raise(data.name, Path(data.root).expanduser())
    if data.name == "cifar10":
        *train, test = [read_cifar10_batch(folder / name) for name in CIFAR10_MD5]
        images = torch.cat([images for images, _ in train])
        labels = torch.cat([labels for _, labels in train])
        return (images, labels), test
    return _idx_arrays(folder, "train"), _idx_arrays(folder, "test")


def _digits_arrays() -> tuple[_Arrays, _Arrays]:
    """Return training and test digits. The test digits are the first of every five of a class: nothing is drawn."""
    images, labels = read_digits()
    pixels = (images.float() * (255 / _DIGITS_MAX_VALUE)).round().to(torch.uint8)
    is_test = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        indices = (labels == label).nonzero().flatten()
        is_test[indices[::_DIGITS_TEST_EVERY]] = True
    return (pixels[~is_test], labels[~is_test]), (pixels[is_test], labels[is_test])


def _idx_arrays(folder: Path, split: str) -> _Arrays:
    """Return the images of a split of an MNIST-like dataset. Its files may be packed."""
    images_name, labels_name = IDX_FILES[split]
    images_path = idx_file(folder, images_name) or folder / images_name
    labels_path = idx_file(folder, labels_name) or folder / labels_name
    return read_idx_pair(images_path, labels_path, num_classes=10)


# Digests of datasets, by which reviewers see whether two runs read the same data.

#: Limits of the content of a split that a digest covers, besides all labels: images, or sizes of files.
_MAX_IMAGES = 10_000
_MAX_BYTES = 64 << 20
_MAX_FILES = 1000


def log_image_data(ctx: Context, cfg: DataConfig, data: ImageData, seed: int) -> None:
    """Declare both splits of an image dataset on rank 0; on other ranks the call has no effect."""
    if not ctx.is_main:
        return
    sources = {"digits": "scikit-learn", "synthetic": "generated"}
    source = sources.get(cfg.name, cfg.root)
    for split, images in (("train", data.train), ("test", data.test)):
        digest = _digest_of_split(images, seed, split)
        ctx.report.log_dataset(cfg.name, split=split, num_samples=len(images), digest=digest, source=source)


def digest_of(*parts: Any) -> str:
    """Return a digest of tensors, texts and JSON values: 8 hexadecimal digits, as MLflow's own digests have."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {list(part.shape)} ".encode())
            digest.update(part.contiguous().cpu().numpy().data)
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:8]


def _spacing(count: int, most: int) -> int:
    """Return the step of a slice that takes at most `most` of `count` elements."""
    return max(1, math.ceil(count / most))


def _digest_of_split(images: Split, seed: int, split: str) -> str:
    """Return a digest of all labels and of evenly spaced images.

    For image files, the images are represented by all names and the sizes of evenly spaced files; for synthetic images
    by the values that determine them.
    """
    source = images if isinstance(images, PreloadedSplit) else images.source
    content: list[Any]
    if isinstance(source, FolderImages):
        names = [f"{path.parent.name}/{path.name}" for path in source.files]
        spaced = source.files[:: _spacing(len(source.files), _MAX_FILES)]
        sizes = [path.stat().st_size for path in spaced]
        content = [names, sizes]
    elif isinstance(source, SyntheticImages):
        content = [[seed, split, list(source.shape)]]
    else:
        image_bytes = max(1, source.images[:1].numel())
        num_images = max(1, min(_MAX_IMAGES, _MAX_BYTES // image_bytes))
        content = [source.images[:: _spacing(len(source.images), num_images)]]
    return digest_of(images.labels, *content)


# Image classifiers: a small CNN for digit-like images, and torchvision's ResNets.

SIMPLE_CNN_MIN_SIZE = 4  # at least one pixel remains after two 2x2 poolings
#: Channels of the images that torchvision's ResNets take.
_RESNET_IN_CHANNELS = 3


class SimpleCNN(nn.Module):
    """Two 3x3 convolutions (32, 64 channels), each with ReLU and 2x2 max-pooling, then two linear layers.

    Takes float images [B, in_channels, image_size, image_size], returns logits [B, num_classes].
    """

    def __init__(self, *, num_classes: int, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        side = image_size // 4
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(64 * side * side, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images."""
        # ReLU and max-pooling commute; pooling first reduces the elements for ReLU to a quarter.
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


def build_model(name: str, *, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a classifier on the CPU with logits [B, num_classes], initialised from torch's global generator.

    `name` is one of hpcdist.data.MODEL_NAMES. A ResNet is torchvision's own; only its first convolution
    is replaced when `in_channels` is not 3. Raises ConfigError on an unknown name or too small an image.
    """
    problems = model_name_problems(name)
    if problems:
        raise ConfigError(*problems)
    if name in RESNET_NAMES:
        from torchvision.models import resnet  # imported here because it takes 0.9 s, which simple_cnn does not need

        model: nn.Module = getattr(resnet, name)(weights=None, num_classes=num_classes)
        if in_channels != _RESNET_IN_CHANNELS:
            stem = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision
            model.conv1 = stem
        return model
    if image_size < SIMPLE_CNN_MIN_SIZE:
        raise ConfigError(
            f"data.image_size must be >= {SIMPLE_CNN_MIN_SIZE} for model.name=simple_cnn, got {image_size}"
        )
    return SimpleCNN(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
