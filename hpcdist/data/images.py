"""Image sources: tensors in memory, folders of image files, and synthetic patterns.

A source returns uint8 images of one size: `image(index, crop_hash)` one, `all_images()` all. `crop_hash` (see
augment.sample_hashes) selects a random crop, None the plain image. torchvision's ImageFolder is not used: its
transforms do not receive the index of the sample, it takes hidden folders for classes, and its errors name no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor

from hpcdist.data.augment import crop_image, crop_params, random_resized_box, sample_hashes
from hpcdist.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


def resize(images: Tensor, size: int) -> Tensor:
    """Return uint8 [N, C, H, W] as uint8 [N, C, size, size], bilinear with antialiasing."""
    if images.shape[-2:] == (size, size):
        return images
    resized = torch.empty(*images.shape[:2], size, size, dtype=torch.uint8)
    # Parts limit the memory for floats.
    for part, out in zip(torch.split(images, 4096), torch.split(resized, 4096), strict=True):
        floats = F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
        out.copy_(floats.round_())
    return resized


class TensorImages:
    """Images in memory, resized on access."""

    def __init__(self, images: Tensor, labels: Tensor, *, image_size: int, flip: bool) -> None:
        self.images = images
        self.labels = labels
        self.shape = (images.shape[1], image_size, image_size)
        self.flip = flip

    def image(self, index: int, crop_hash: int | None) -> Tensor:
        image = resize(self.images[index : index + 1], self.shape[1])[0]
        return image if crop_hash is None else crop_image(image, crop_hash, flip=self.flip)

    def all_images(self) -> Tensor:
        return resize(self.images, self.shape[1])


class SyntheticImages:
    """A pattern per class with noise: learnable, of any size, determined by the seed.

    Image i is the pattern of class i mod num_classes plus two of 64 noise images, selected by i and `split`. A sum of
    three lookups is fast enough for every GPU, also with large images.
    """

    NUM_NOISES = 64

    def __init__(
        self, *, num_samples: int, num_classes: int, image_size: int, in_channels: int, seed: int, split: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = (in_channels, image_size, image_size)
        coarse = torch.rand(num_classes, in_channels, 4, 4, generator=generator)
        # 127 + 63 + 63 <= 255: the sum does not overflow.
        self.patterns = F.interpolate(coarse * 127, self.shape[1:], mode="nearest").to(torch.uint8)
        self.noises = torch.randint(0, 64, (self.NUM_NOISES, *self.shape), dtype=torch.uint8, generator=generator)
        self.labels = torch.arange(num_samples) % num_classes
        hashes = sample_hashes(seed, split, torch.arange(num_samples))
        self.first, self.second = hashes % self.NUM_NOISES, (hashes >> 8) % self.NUM_NOISES

    def image(self, index: int, crop_hash: int | None) -> Tensor:
        noise = self.noises[self.first[index]] + self.noises[self.second[index]]
        image = self.patterns[self.labels[index]] + noise
        return image if crop_hash is None else crop_image(image, crop_hash, flip=False)

    def all_images(self) -> Tensor:
        images = torch.empty(len(self.labels), *self.shape, dtype=torch.uint8)
        # A loop over images stays in the processor's cache: four times faster than one operation on all.
        picks = zip(self.labels.tolist(), self.first.tolist(), self.second.tolist(), strict=True)
        for out, (label, first, second) in zip(images, picks, strict=True):
            torch.add(self.noises[first], self.noises[second], out=out).add_(self.patterns[label])
        return images


class FolderImages:
    """Image files in one folder per class, read with PIL as RGB; torchvision.io reads no BMP, PPM and TIFF files.

    Training crops are RandomResizedCrop and flip. Otherwise the centre square of 224/256 of the shorter side is scaled
    to `image_size`: resize and centre crop in one step.
    """

    CENTER_FRACTION = 224 / 256

    def __init__(self, files: Sequence[Path], labels: Tensor, *, image_size: int, num_threads: int) -> None:
        self.files = files
        self.labels = labels
        self.shape = (3, image_size, image_size)
        self.num_threads = num_threads

    def image(self, index: int, crop_hash: int | None) -> Tensor:
        from PIL import Image  # imported here because other sources do not need it

        path = self.files[index]
        size = self.shape[1]
        try:
            with Image.open(path) as opened:
                rgb = opened.convert("RGB")
        except Exception as error:  # PIL's decoders document no exceptions for damaged content
            raise DataError(f"{path} cannot be read as an image ({error}): repair or remove it") from error
        if crop_hash is None:
            side = min(rgb.size) * self.CENTER_FRACTION
            left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
            box: tuple[float, float, float, float] = (left, top, left + side, top + side)
        else:
            box = random_resized_box(rgb.width, rgb.height, crop_hash)
        rgb = rgb.resize((size, size), Image.Resampling.BILINEAR, box=box)
        if crop_hash is not None and crop_params(crop_hash)[2]:
            rgb = rgb.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
        return pixels.reshape(size, size, 3).permute(2, 0, 1).contiguous()

    def all_images(self) -> Tensor:
        images = torch.empty(len(self.files), *self.shape, dtype=torch.uint8)
        with ThreadPoolExecutor(max(1, self.num_threads)) as pool:  # PIL decodes without holding the GIL
            decoded = pool.map(lambda index: self.image(index, None), range(len(self.files)))
            for out, image in zip(images, decoded, strict=True):
                out.copy_(image)
        return images


ImageSource: TypeAlias = TensorImages | SyntheticImages | FolderImages
"""Labelled images of shape (C, H, W), available one by one (`image`, uint8 [C, H, W]) or all at once."""


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder`, one per class."""
    names = [path.name for path in _scan(folder) if path.is_dir()]
    if not names:
        raise DataError(f"{folder} has no class folders: image_folder expects {folder}/CLASS/IMAGE.jpg")
    return names


def list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Tensor]:
    """Return the image files in `folder`/CLASS, sorted, and the label of each, int64 [N].

    Raises DataError for a class folder that is not in `classes` or has no images.
    """
    files: list[Path] = []
    labels: list[int] = []
    for name in class_names(folder):
        if name not in classes:
            raise DataError(f"{folder / name} is not a class of the training images")
        found = [path for path in _scan(folder / name) if path.suffix.lower() in IMAGE_SUFFIXES]
        if not found:
            raise DataError(f"{folder / name} has no images ({', '.join(IMAGE_SUFFIXES)})")
        files += found
        labels += [classes.index(name)] * len(found)
    return files, torch.tensor(labels)


def _scan(folder: Path) -> list[Path]:
    """Return the entries of a folder, sorted, without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}): check data.root") from error
