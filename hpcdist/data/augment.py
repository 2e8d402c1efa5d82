"""Random crops and flips that depend on (seed, epoch, sample index) only.

torchvision's transforms are not used: they draw from a global generator. Without one, an epoch that resumes in the
middle, or on another number of ranks, has exactly the same samples as an uninterrupted one.
"""

from __future__ import annotations

import math
import random
from typing import TypeVar

import torch
from torch import Tensor

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
    return torch.nn.functional.pad(images, (CROP_PADDING,) * 4)


def crop_image(image: Tensor, sample_hash: int, *, flip: bool) -> Tensor:
    """Return `image` [C, H, W] shifted by up to CROP_PADDING pixels and, with `flip`, mirrored at random."""
    top, left, mirror = crop_params(sample_hash)
    height, width = image.shape[-2:]
    crop = pad(image)[:, top : top + height, left : left + width]
    return crop.flip(-1) if flip and mirror else crop


def random_resized_box(width: int, height: int, sample_hash: int) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of 8 to 100 % of the area, with aspect ratio from 3/4 to 4/3.

    The method of torchvision's RandomResizedCrop (Szegedy et al. 2014, arXiv:1409.4842).
    """
    rng = random.Random(sample_hash)  # noqa: S311 (not for cryptography)
    for _ in range(10):
        area = width * height * rng.uniform(0.08, 1.0)
        ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    # For very long images: the largest allowed box in the centre.
    w, h = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h
