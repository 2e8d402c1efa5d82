"""Batches of one rank, from a tensor that holds the whole split or from single images.

All splits have the same `batches`: (images, labels) on the device, images float32 [B, C, H, W] and normalised, labels
int64 [B], in the order of `indices`; the last batch may be smaller. The result depends on the arguments only, so that
`start_batch` continues an epoch exactly. The global generator is not used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hpcdist.data.augment import CROP_PADDING, crop_params, pad, sample_hashes
from hpcdist.data.images import ImageSource
from hpcdist.errors import DataError

FLOAT_TABLE_MAX_BYTES = 256 << 20
"""Up to this size a split is kept normalised as float32, so that a batch is one gather."""

Batch = tuple[Tensor, Tensor]


def eval_indices(num_samples: int, rank: int, world_size: int) -> Tensor:
    """Return this rank's share of 0 … num_samples - 1, int64: each sample once over all ranks, without padding.

    Sizes of shares differ by at most one, and a share may be empty: reduce sums and counts over ranks, not means.
    """
    assert 0 <= rank < world_size
    return torch.arange(num_samples)[rank::world_size]


class Normalize:
    """Converts uint8 [B, C, H, W] to float32, (x / 255 - mean) / std per channel, with the same memory format."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        def per_channel(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device).reshape(-1, 1, 1)

        self.scale = per_channel([1 / (255 * s) for s in std])
        self.shift = per_channel([-m / s for m, s in zip(mean, std, strict=True)])

    def __call__(self, images: Tensor) -> Tensor:
        return images.to(torch.float32).mul_(self.scale).add_(self.shift)


@dataclass(frozen=True)
class _Table:
    """A split on its device in one memory format, built once."""

    images: Tensor  #: on the CPU if the device has no room
    labels: Tensor
    normalize: Normalize
    channels_last: bool

    def gathered(self, indices: Tensor, batch_size: int | list[int]) -> Iterator[Tensor]:
        """Yield batches of the images of these samples."""
        for part in torch.split(indices.to(self.images.device), batch_size):
            images = _to_device(self.images.index_select(0, part), self.labels.device)
            if self.channels_last:
                images = images.permute(0, 3, 1, 2)
            yield images if self.images.is_floating_point() else self.normalize(images)


class PreloadedSplit:
    """A whole split in memory, on the device if it fits; a batch is gathered by index.

    It is not a DataLoader with torchvision's transforms, which takes 20 times as long for augmented images of 32 x 32
    pixels, and 7 times for plain ones.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        augment_seed: seed of random shifts and, with `flip`, mirroring (see augment.py); None disables them.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment_seed: int | None = None,
        flip: bool = False,
    ) -> None:
        self.images = images
        self.labels = labels
        self.mean = mean
        self.std = std
        self.augment_seed = augment_seed
        self.flip = flip
        self._tables: dict[tuple[torch.device, bool], _Table] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self,
        indices: Tensor,
        *,
        batch_size: int | list[int],
        device: torch.device,
        start_batch: int = 0,
        epoch: int = 0,
        channels_last: bool = False,
    ) -> Iterator[Batch]:
        """Yield the batches of `indices` (int64 [n], on the CPU) from number `start_batch` on.

        `batch_size` may be a list with the size of each batch. `epoch` changes the augmentation. If the device holds
        the split, a batch needs neither a copy nor a synchronisation.
        """
        rest, batch_size = _from_batch(start_batch, indices, batch_size)
        if len(rest) == 0:  # torch.split returns one empty batch for it
            return
        table = self._table(device, channels_last)
        # One gather for the labels of the whole epoch, so that those of a batch are a view.
        labels = torch.split(table.labels.index_select(0, rest.to(device)), batch_size)
        if self.augment_seed is None:
            images = table.gathered(rest, batch_size)
        else:
            images = self._crops(table, rest, sample_hashes(self.augment_seed, epoch, rest), batch_size)
        yield from zip(images, labels, strict=True)

    def _table(self, device: torch.device, channels_last: bool) -> _Table:
        """Return the images on their device, normalised if they are small enough.

        They are [N, C, H, W], or [N, H, W, C] for channels_last; for augmentation the pixels of all padded images,
        uint8 [N * H * W, C].
        """
        key = (device, channels_last)
        if key not in self._tables:
            normalize = Normalize(self.mean, self.std, device)
            if self.augment_seed is not None:
                padded = pad(self.images).permute(0, 2, 3, 1).flatten(0, 2)
                images = padded.to(_place(padded, device))
            else:
                images = self.images.to(_place(self.images, device))
                if images.device.type == device.type and 4 * images.numel() <= FLOAT_TABLE_MAX_BYTES:
                    images = normalize(images)
                if channels_last:
                    images = images.permute(0, 2, 3, 1).contiguous()
            self._tables[key] = _Table(images, self.labels.to(device), normalize, channels_last)
        return self._tables[key]

    def _crops(self, table: _Table, indices: Tensor, hashes: Tensor, batch_size: int | list[int]) -> Iterator[Tensor]:
        """Yield batches of cropped images; a batch is one gather of pixels from the padded images."""
        channels, height, width = self.images.shape[1:]
        padded_height, padded_width = height + 2 * CROP_PADDING, width + 2 * CROP_PADDING
        top, left, mirror = crop_params(hashes)
        corners = (indices * padded_height + top) * padded_width + left
        plain_grid = torch.arange(height)[:, None] * padded_width + torch.arange(width)
        mirrored_grid = plain_grid.flip(1) if self.flip else plain_grid
        place = table.images.device
        grids = torch.stack([plain_grid.flatten(), mirrored_grid.flatten()]).to(place)
        for corner, grid_number in zip(
            torch.split(corners.to(place), batch_size), torch.split(mirror.to(place), batch_size), strict=True
        ):
            pixels = (corner[:, None] + grids.index_select(0, grid_number)).flatten()
            images = table.images.index_select(0, pixels).reshape(-1, height, width, channels)
            images = _to_device(images, table.labels.device).permute(0, 3, 1, 2)
            yield table.normalize(images if table.channels_last else images.contiguous())


def _from_batch(number: int, indices: Tensor, batch_size: int | list[int]) -> tuple[Tensor, int | list[int]]:
    """Return the indices from a batch on, and the size of the batches or the sizes of those that are left."""
    if isinstance(batch_size, int):
        return indices[number * batch_size :], batch_size
    return indices[sum(batch_size[:number]) :], batch_size[number:]


def _place(images: Tensor, device: torch.device) -> torch.device:
    """Return the device for `images`: the given one if half of its free memory is enough, else the CPU."""
    if device.type != "cuda":
        return device
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return device if images.numel() <= free_bytes // 2 else torch.device("cpu")


def _to_device(images: Tensor, device: torch.device) -> Tensor:
    """Copy a batch to the device unless it is there."""
    if images.device.type == device.type:
        return images
    return images.pin_memory().to(device, non_blocking=True)


class StreamingSplit:
    """A split too large for memory, read by torch's DataLoader in `num_workers` processes."""

    def __init__(
        self,
        source: ImageSource,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        num_workers: int = 0,
        augment_seed: int | None = None,
    ) -> None:
        self.source = source
        self.labels = source.labels
        self.mean = mean
        self.std = std
        self.num_workers = num_workers
        self.augment_seed = augment_seed

    def __len__(self) -> int:
        return len(self.labels)

    def batches(
        self,
        indices: Tensor,
        *,
        batch_size: int | list[int],
        device: torch.device,
        start_batch: int = 0,
        epoch: int = 0,
        channels_last: bool = False,
    ) -> Iterator[Batch]:
        """See PreloadedSplit.batches. Images are copied to the device as bytes, a quarter of the size of floats."""
        normalize = Normalize(self.mean, self.std, device)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        rest, batch_size = _from_batch(start_batch, indices, batch_size)
        loader = torch.utils.data.DataLoader(
            _EpochImages(self.source, self.augment_seed, epoch),
            batch_sampler=[part.tolist() for part in torch.split(rest, batch_size)] if len(rest) else [],
            num_workers=self.num_workers,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # without it the loader draws a seed from the global generator
        )
        try:
            for images, labels in loader:
                on_device = images.to(device, non_blocking=True).contiguous(memory_format=memory_format)
                yield normalize(on_device), labels.to(device, non_blocking=True)
        except DataError as error:
            # An error from a worker process has the traceback in its text; only the message is kept.
            raise DataError(str(error).strip().rsplit("DataError: ", 1)[-1]) from None


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
