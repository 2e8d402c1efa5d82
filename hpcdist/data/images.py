"""Image sources: tensors in memory, folders of image files, and synthetic patterns.

A source returns uint8 images of one size: `image(index, crop_hash)` one, `all_images()` all. `crop_hash` (see
augment.sample_hashes) selects a random crop, None the plain image. torchvision's ImageFolder is not used, because its
transforms do not get the index of the sample, and because an unreadable image raises an error without its path.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor

from hpcdist.data.augment import crop_image, random_flip, random_resized_box, sample_hashes
from hpcdist.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")


class ImageSource(Protocol):
    """Labelled images, available one by one or all at once."""

    labels: Tensor
    """int64 [N]"""
    shape: tuple[int, int, int]
    """C, H, W of every returned image."""

    def image(self, index: int, crop_hash: int | None) -> Tensor:
        """Return one image, uint8 [C, H, W]."""
        ...

    def all_images(self) -> Tensor:
        """Return all images, not augmented, uint8 [N, C, H, W]."""
        ...


def resize(images: Tensor, size: int) -> Tensor:
    """Return uint8 [N, C, H, W] as uint8 [N, C, size, size], bilinear with antialiasing."""
    if images.shape[-2:] == (size, size):
        return images
    resized = torch.empty(*images.shape[:2], size, size, dtype=torch.uint8)
    for part, out in zip(
        torch.split(images, 4096), torch.split(resized, 4096), strict=True
    ):  # limits the memory for floats
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
    """Image files in one folder per class, read with PIL as RGB.

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
        # PIL's decoders document no exceptions for damaged content.
        except (
            *(OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, zlib.error),
            *(EOFError, MemoryError, NotImplementedError, RuntimeError, Image.DecompressionBombError),
        ) as error:
            raise DataError(f"{path} cannot be read as an image ({error}): repair or remove it") from error
        if crop_hash is None:
            side = min(rgb.size) * self.CENTER_FRACTION
            left, top = (rgb.width - side) / 2, (rgb.height - side) / 2
            box: tuple[float, float, float, float] = (left, top, left + side, top + side)
        else:
            box = random_resized_box(rgb.width, rgb.height, crop_hash)
        rgb = rgb.resize((size, size), Image.Resampling.BILINEAR, box=box)
        if crop_hash is not None and random_flip(crop_hash):
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


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder`, one per class."""
    names = sorted(entry.name for entry in _scan(folder) if entry.is_dir())
    if not names:
        raise DataError(f"{folder} has no class folders: image_folder expects {folder}/CLASS/IMAGE.jpg")
    return names


def list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Tensor]:
    """Return the image files in `folder`/CLASS, sorted, and the label of each, int64 [N].

    Raises DataError for a class folder that is not in `classes` or has no images.
    """
    files: list[Path] = []
    labels: list[int] = []
    known = {name: label for label, name in enumerate(classes)}
    for name in class_names(folder):
        if name not in known:
            raise DataError(f"{folder / name} is not a class of the training images")
        found = sorted(
            Path(entry.path) for entry in _scan(folder / name) if entry.name.lower().endswith(IMAGE_SUFFIXES)
        )
        if not found:
            raise DataError(f"{folder / name} has no images ({', '.join(IMAGE_SUFFIXES)})")
        files += found
        labels += [known[name]] * len(found)
    return files, torch.tensor(labels)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}): check data.root") from error
