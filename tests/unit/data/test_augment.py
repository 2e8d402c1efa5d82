from __future__ import annotations

import random

import pytest
import torch

from hpcdist.data.images import CROP_PADDING, crop_image, crop_params, random_resized_box, sample_hashes


def splitmix64(x: int) -> int:
    """Return the hash in Python integers: https://prng.di.unimi.it/splitmix64.c with the step as a product."""
    mask = (1 << 64) - 1
    x = (x * 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 1), (2**62, 99)])
def test_sample_hashes_equal_a_reference_in_python_integers(seed: int, epoch: int) -> None:
    expected = [
        splitmix64((splitmix64((splitmix64(seed) + epoch) % 2**64) + index) % 2**64) % 2**63 for index in range(5)
    ]
    assert sample_hashes(seed, epoch, torch.arange(5)).tolist() == expected


def test_sample_hashes_depend_on_seed_epoch_and_index_only() -> None:
    full = sample_hashes(3, 4, torch.arange(1000))
    assert torch.equal(sample_hashes(3, 4, torch.tensor([7, 999])), full[[7, 999]])
    others = torch.cat([full, sample_hashes(3, 5, torch.arange(1000)), sample_hashes(4, 4, torch.arange(1000))])
    assert len(others.unique()) == 3000


def test_crop_params_are_uniform_and_uncorrelated() -> None:
    top, left, flip = crop_params(sample_hashes(0, 0, torch.arange(90_000)))
    for offsets in (top, left):
        counts = torch.bincount(offsets)
        assert len(counts) == 2 * CROP_PADDING + 1
        assert counts.min() > 9_500
        assert counts.max() < 10_500
    assert abs(flip.float().mean().item() - 0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([top.float(), left.float()]))[0, 1].item()) < 0.02


def test_crop_image_shifts_and_mirrors_by_the_hash() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).reshape(1, 4, 4)
    upper_left = 0  # top 0, left 0: the crop has padding only
    assert torch.equal(crop_image(image, upper_left, flip=True), torch.zeros(1, 4, 4, dtype=torch.uint8))
    centred = CROP_PADDING | (CROP_PADDING << 16)
    assert torch.equal(crop_image(image, centred, flip=True), image)
    mirrored = centred | (1 << 32)
    assert torch.equal(crop_image(image, mirrored, flip=True), image.flip(-1))
    assert torch.equal(crop_image(image, mirrored, flip=False), image)


@pytest.mark.parametrize("size", [(500, 375), (10, 10), (1, 1), (1000, 3), (2, 900)])
def test_random_resized_box_lies_within_the_image(size: tuple[int, int]) -> None:
    width, height = size
    for crop_hash in range(200):
        left, top, right, bottom = random_resized_box(width, height, crop_hash)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


def test_random_resized_box_respects_area_and_aspect_ratio() -> None:
    boxes = [random_resized_box(400, 400, crop_hash) for crop_hash in range(500)]
    areas = [(right - left) * (bottom - top) / 160_000 for left, top, right, bottom in boxes]
    ratios = [(right - left) / (bottom - top) for left, top, right, bottom in boxes]
    assert min(areas) > 0.075
    assert 0.4 < sum(areas) / len(areas) < 0.6
    assert min(ratios) > 0.74
    assert max(ratios) < 1.35


def test_augmentation_does_not_use_global_generators() -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    sample_hashes(0, 0, torch.arange(3))
    random_resized_box(40, 40, 5)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before
