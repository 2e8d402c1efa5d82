"""Image sources, readers of dataset files, and random crops and flips."""

import gzip
import hashlib
import math
import pickle
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor

from hpcdist.data.download import CIFAR10_MD5, digits_path
from hpcdist.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# Random crops and flips that depend on (seed, epoch, sample index) only.
#
# torchvision's transforms draw from a global generator. Without it, an epoch that resumes in the middle, or on another
# number of ranks, has exactly the same samples as an uninterrupted one.

#: Pixels on each side, and so the largest shift of a random crop.
CROP_PADDING = 4

IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def sample_hashes(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Return a non-negative hash for each sample index (int64 [N] -> int64 [N])."""
    mask = (1 << 63) - 1
    state = _splitmix(torch.tensor(seed & mask))
    return _splitmix(_splitmix(state + epoch) + indices) & mask


def _splitmix(x: Tensor) -> Tensor:
    """Apply SplitMix64 (Steele, Lea, Flood 2014) to int64; products wrap as with uint64."""
    x = x * -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed number; the two below likewise
    x = (x ^ _shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, num_bits: int) -> Tensor:
    return (x >> num_bits) & ((1 << (64 - num_bits)) - 1)  # torch's >> keeps the sign


def crop_params(sample_hash: IntOrTensor) -> tuple[IntOrTensor, IntOrTensor, IntOrTensor]:
    """Return (top, left, flip) of a crop from an image padded by CROP_PADDING, from the bits of a sample's hash."""
    num_offsets = 2 * CROP_PADDING + 1
    top = (sample_hash & 0xFFFF) % num_offsets
    left = ((sample_hash >> 16) & 0xFFFF) % num_offsets
    flip = (sample_hash >> 32) & 1
    return top, left, flip


def pad(images: Tensor) -> Tensor:
    """Return [..., H, W] with CROP_PADDING black pixels on each side."""
    return F.pad(images, (CROP_PADDING,) * 4)


def crop_image(image: Tensor, sample_hash: int, *, flip: bool) -> Tensor:
    """Return `image` [C, H, W] shifted by up to CROP_PADDING pixels and, with `flip`, mirrored at random."""
    top, left, mirror = crop_params(sample_hash)
    height, width = image.shape[-2:]
    crop = pad(image)[:, top : top + height, left : left + width]
    if flip and mirror:
        return crop.flip(-1)
    return crop


def random_resized_box(image: "Image", sample_hash: int) -> tuple[int, int, int, int]:
    """Return a random box (left, top, right, bottom) in an image, determined by the hash.

    It covers 8 to 100 % of the area and has an aspect ratio from 3/4 to 4/3, as in training on ImageNet.
    """
    from torchvision.transforms import RandomResizedCrop  # takes 0.9 s, which other sources do not need

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sample_hash)
        top, left, height, width = RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    return left, top, left + width, top + height


# Image sources: tensors in memory, folders of image files, and synthetic patterns.
#
# A source returns uint8 images of one size: `image(index, crop_hash)` returns one, `all_images()` all. `crop_hash` (see
# `sample_hashes`) selects a random crop, None the plain image. torchvision's ImageFolder is not used: its
# transforms do not receive the index of the sample, it takes hidden folders for classes, and its errors name no file.

#: PIL's decoders for these files. PIL chooses one by the content: for an EPS file of any name it starts Ghostscript.
_IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
#: Images that are resized at once; it limits the memory for their floats.
_RESIZE_BATCH_SIZE = 4096


def resize(images: Tensor, size: int) -> Tensor:
    """Return uint8 [N, C, H, W] as uint8 [N, C, size, size], bilinear with antialiasing."""
    if images.shape[-2:] == (size, size):
        return images
    resized = torch.empty(*images.shape[:2], size, size, dtype=torch.uint8)
    parts = torch.split(images, _RESIZE_BATCH_SIZE)
    outputs = torch.split(resized, _RESIZE_BATCH_SIZE)
    for part, out in zip(parts, outputs, strict=True):
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
        """Return one image, uint8 [C, H, W], as a random crop or, with `crop_hash` None, whole."""
        image = resize(self.images[index : index + 1], self.shape[1])[0]
        if crop_hash is None:
            return image
        return crop_image(image, crop_hash, flip=self.flip)

    def all_images(self, alive: Callable[[], None] = lambda: None) -> Tensor:
        """Return all images without crops, uint8 [N, C, H, W]."""
        alive()
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
        self.first = hashes % self.NUM_NOISES
        self.second = (hashes >> 8) % self.NUM_NOISES

    def image(self, index: int, crop_hash: int | None) -> Tensor:
        """Return one image, uint8 [C, H, W], as a random crop or, with `crop_hash` None, whole."""
        noise = self.noises[self.first[index]] + self.noises[self.second[index]]
        image = self.patterns[self.labels[index]] + noise
        if crop_hash is None:
            return image
        return crop_image(image, crop_hash, flip=False)

    def all_images(self, alive: Callable[[], None] = lambda: None) -> Tensor:
        """Return all images without crops, uint8 [N, C, H, W]."""
        alive()
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
        """Return one image, uint8 [C, H, W], as a random crop or, with `crop_hash` None, its centre.

        Raises DataError if the file cannot be decoded.
        """
        from PIL import Image  # imported here because other sources do not need it

        path = self.files[index]
        size = self.shape[1]
        try:
            with Image.open(path, formats=_IMAGE_FORMATS) as file:
                rgb = file.convert("RGB")
        except Exception as error:  # PIL's decoders document no exceptions for damaged content
            raise DataError(f"{path} cannot be read as an image ({error}): repair or remove it") from error
        mirror = 0
        if crop_hash is None:
            box = self._center_box(rgb)
        else:
            box = random_resized_box(rgb, crop_hash)
            _, _, mirror = crop_params(crop_hash)
        rgb = rgb.resize((size, size), Image.Resampling.BILINEAR, box=box)
        if mirror:
            rgb = rgb.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
        return pixels.reshape(size, size, 3).permute(2, 0, 1).contiguous()

    def _center_box(self, image: "Image") -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) of the centre square."""
        side = min(image.size) * self.CENTER_FRACTION
        left = (image.width - side) / 2
        top = (image.height - side) / 2
        return left, top, left + side, top + side

    def all_images(self, alive: Callable[[], None] = lambda: None) -> Tensor:
        """Return the centres of all images, uint8 [N, C, H, W], decoded in several threads.

        `alive` is called for each image: a slow file system needs minutes for many files.
        """
        images = torch.empty(len(self.files), *self.shape, dtype=torch.uint8)
        with ThreadPoolExecutor(max(1, self.num_threads)) as pool:  # PIL decodes without holding the GIL
            decoded = pool.map(lambda index: self.image(index, None), range(len(self.files)))
            for out, image in zip(images, decoded, strict=True):
                out.copy_(image)
                alive()
        return images


ImageSource: TypeAlias = TensorImages | SyntheticImages | FolderImages
"""Labelled images of shape (C, H, W), available one by one (`image`, uint8 [C, H, W]) or all at once."""


def class_names(folder: Path) -> list[str]:
    """Return the sorted names of the folders in `folder`, one per class."""
    names = [path.name for path in _scan(folder) if path.is_dir()]
    if not names:
        raise DataError(f"{folder} has no class folders: image_folder expects {folder}/CLASS/IMAGE.jpg")
    return names


def list_images(
    folder: Path, classes: Sequence[str], alive: Callable[[], None] = lambda: None
) -> tuple[list[Path], Tensor]:
    """Return the image files in `folder`/CLASS, sorted, and the label of each, int64 [N].

    `alive` is called before each folder is listed.
    Raises DataError for a class folder that is not in `classes` or has no images.
    """
    files: list[Path] = []
    labels: list[int] = []
    for name in class_names(folder):
        alive()
        if name not in classes:
            raise DataError(f"{folder / name} is not a class of the training images")
        class_files = [path for path in _scan(folder / name) if path.suffix.lower() in IMAGE_SUFFIXES]
        if not class_files:
            raise DataError(f"{folder / name} has no images ({', '.join(IMAGE_SUFFIXES)})")
        files += class_files
        labels += [classes.index(name)] * len(class_files)
    return files, torch.tensor(labels)


def _scan(folder: Path) -> list[Path]:
    """Return the sorted paths of the files and folders in a folder, without hidden ones."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise DataError(f"{folder} cannot be listed ({error.strerror}): check data.root") from error


# Readers of dataset files. Each raises DataError with the path of a file that it cannot read.
#
# torchvision's and scikit-learn's readers are not used: their imports take 1.7 s and 1.9 s of CPU time in every rank,
# reading MNIST takes 0.1 s, and torchvision reads no .gz files, as which MNIST is published.

#: Limit of the unpacked size; the largest file, the training images of MNIST, has 47 MB.
MAX_BYTES = 64 << 20
#: Start of an IDX file: two zero bytes and the type of the values, 8 for unsigned bytes.
_IDX_MAGIC = b"\x00\x00\x08"
#: Bytes of the start with the number of dimensions after it, and of each dimension.
_IDX_HEADER_BYTES = 4
_IDX_DIM_BYTES = 4
#: Limit of the dimensions of an IDX file; images have two to four.
_IDX_MAX_DIMS = 8
#: Height and width of scikit-learn's digits.
_DIGIT_SIZE = 8


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytearray:
    """Return the content of `path`, unpacked if its name ends in .gz, at most `max_bytes`."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as packed:
                return bytearray(packed.read(max_bytes))
        with open(path, "rb") as file:
            return bytearray(file.read(max_bytes))
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise DataError(f"{path} cannot be read ({error}): download it again or check its permissions") from error


def read_idx(path: Path) -> Tensor:
    """Return the array of an IDX file of unsigned bytes, plain or .gz, as a uint8 tensor.

    Format: two zero bytes, type (8 = unsigned byte), number of dimensions, each dimension as a big-endian
    uint32, then the values (http://yann.lecun.com/exdb/mnist/).
    """
    raw = read_bytes(path)
    num_dims = 0
    if len(raw) >= _IDX_HEADER_BYTES:
        num_dims = raw[_IDX_HEADER_BYTES - 1]
    values_begin = _IDX_HEADER_BYTES + _IDX_DIM_BYTES * num_dims
    is_idx = raw.startswith(_IDX_MAGIC) and 0 < num_dims <= _IDX_MAX_DIMS and len(raw) >= values_begin
    if not is_idx:
        raise DataError(f"{path} is not an IDX file of unsigned bytes: download it again")
    shape = []
    for begin in range(_IDX_HEADER_BYTES, values_begin, _IDX_DIM_BYTES):
        shape.append(int.from_bytes(raw[begin : begin + _IDX_DIM_BYTES], "big"))
    num_values = math.prod(shape)
    expected = values_begin + num_values
    if len(raw) != expected or num_values == 0:
        raise DataError(f"{path} is truncated or damaged: {expected} bytes expected, {len(raw)} found")
    return torch.frombuffer(raw, dtype=torch.uint8, offset=values_begin).reshape(shape)


def read_idx_pair(images_path: Path, labels_path: Path, *, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 [N, 1, H, W] and labels int64 [N] of an MNIST-like pair of IDX files."""
    images = read_idx(images_path)
    labels = read_idx(labels_path)
    num_axes = (images.dim(), labels.dim())
    if num_axes != (3, 1) or len(images) != len(labels):
        raise DataError(
            f"{images_path} of shape {list(images.shape)} and {labels_path} of shape {list(labels.shape)} "
            "do not match: expected [N, H, W] and [N]"
        )
    largest_label = int(labels.max())
    if largest_label >= num_classes:
        raise DataError(f"{labels_path} has label {largest_label}, but there are {num_classes} classes")
    return images.unsqueeze(1), labels.long()


def read_cifar10_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Return images uint8 [N, 3, 32, 32] and labels int64 [N] of one file of CIFAR-10's Python version, a pickle."""
    raw = read_bytes(path)
    if hashlib.md5(raw, usedforsecurity=False).hexdigest() != CIFAR10_MD5[path.name]:
        raise DataError(f"{path} is truncated or damaged (its MD5 sum is not CIFAR-10's): download it again")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about dtypes that Python 2 has pickled
        # The checksum, taken of the same bytes, admits no other pickle.
        content = pickle.loads(raw, encoding="bytes")  # noqa: S301
    images = torch.from_numpy(np.ascontiguousarray(content[b"data"]))
    return images.reshape(-1, 3, 32, 32), torch.tensor(content[b"labels"])


def read_digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits: uint8 [1797, 1, 8, 8] with values 0 … 16, labels int64 [1797]."""
    path = digits_path()
    num_pixels = _DIGIT_SIZE * _DIGIT_SIZE
    try:
        rows = []
        for line in read_bytes(path).split():
            rows.append([int(value) for value in line.split(b",")])
        table = torch.tensor(rows)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({error}): reinstall scikit-learn") from error
    images = table[:, :num_pixels].to(torch.uint8).reshape(-1, 1, _DIGIT_SIZE, _DIGIT_SIZE)
    labels = table[:, num_pixels].contiguous()  # each line ends with the label
    return images, labels
