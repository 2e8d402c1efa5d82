from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpcdist.data import loading as batches_module
from hpcdist.data.images import FolderImages, TensorImages, crop_image, sample_hashes
from hpcdist.data.loading import PreloadedSplit, Split, StreamingSplit, eval_indices
from hpcdist.errors import DataError

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NUM_SAMPLES = 23


@pytest.fixture
def source() -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (NUM_SAMPLES, 3, 6, 6), dtype=torch.uint8, generator=generator)
    return TensorImages(images, torch.arange(NUM_SAMPLES) % 5, image_size=6, flip=True)


def make_split(kind: str, source: TensorImages) -> Split:
    if kind == "streaming":
        return StreamingSplit(source, mean=MEAN, std=STD)
    if kind == "streaming augmented":
        return StreamingSplit(source, mean=MEAN, std=STD, augment_seed=7)
    augment_seed = 7 if kind == "augmented" else None
    return PreloadedSplit(source.images, source.labels, mean=MEAN, std=STD, augment_seed=augment_seed, flip=source.flip)


KINDS = ["preloaded", "augmented", "streaming", "streaming augmented"]


def run(split: Split, indices: Tensor, **options: object) -> list[tuple[Tensor, Tensor]]:
    arguments: dict[str, object] = {"batch_size": 4, "device": CPU} | options
    return list(split.batches(indices, **arguments))  # type: ignore[arg-type]


def normalized(images: Tensor) -> Tensor:
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    return (images.float() / 255 - mean) / std


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("float_limit_bytes", [0, 1 << 20])
def test_batches_contain_the_normalised_images_of_the_indices(
    kind: str, channels_last: bool, float_limit_bytes: int, source: TensorImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "FLOAT_TABLE_MAX_BYTES", float_limit_bytes)
    indices = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1))[:10]
    expected = source.images[indices]
    if "augmented" in kind:
        hashes = sample_hashes(7, 2, indices).tolist()
        expected = torch.stack([crop_image(x, h, flip=True) for x, h in zip(expected, hashes, strict=True)])
    result = run(make_split(kind, source), indices, epoch=2, channels_last=channels_last)
    assert [len(labels) for _, labels in result] == [4, 4, 2]
    images, labels = (torch.cat(parts) for parts in zip(*result, strict=True))
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, normalized(expected), rtol=1e-5, atol=1e-5)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, source.labels[indices])
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert all(images.is_contiguous(memory_format=memory_format) for images, _ in result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start_batch", [0, 1, 2, 3, 9])
def test_start_batch_continues_an_epoch_exactly(kind: str, start_batch: int, source: TensorImages) -> None:
    indices = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1))[:11]
    full = run(make_split(kind, source), indices, epoch=5)
    torch.manual_seed(99)  # the global generator of a resumed process has another state
    tail = run(make_split(kind, source), indices, epoch=5, start_batch=start_batch)
    assert len(tail) == max(0, 3 - start_batch)
    for (images, labels), (expected_images, expected_labels) in zip(tail, full[start_batch:], strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_different_sizes(kind: str, source: TensorImages) -> None:
    indices = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1))[:11]
    split = make_split(kind, source)
    full = torch.cat([images for images, _ in run(split, indices, epoch=5)])
    parts = run(split, indices, epoch=5, batch_size=[4, 2, 5])
    assert [len(labels) for _, labels in parts] == [4, 2, 5]
    assert torch.equal(torch.cat([images for images, _ in parts]), full)
    ((images, labels),) = run(split, indices, epoch=5, batch_size=[4, 2, 5], start_batch=2)
    assert torch.equal(images, full[6:])
    assert torch.equal(labels, source.labels[indices[6:]])


@pytest.mark.parametrize("kind", ["augmented", "streaming augmented"])
def test_augmentation_depends_on_the_epoch_and_not_on_the_batches(kind: str, source: TensorImages) -> None:
    split = make_split(kind, source)
    indices = torch.arange(NUM_SAMPLES)
    [(first, _)] = run(split, indices, batch_size=NUM_SAMPLES, epoch=0)
    [(second, _)] = run(split, indices, batch_size=NUM_SAMPLES, epoch=1)
    assert not torch.equal(first, second)
    reversed_order = torch.cat([images for images, _ in run(split, indices.flip(0), batch_size=3, epoch=0)])
    assert torch.equal(reversed_order.flip(0), first)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_do_not_use_global_generators(kind: str, source: TensorImages) -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    run(make_split(kind, source), torch.arange(NUM_SAMPLES))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


@pytest.mark.parametrize("kind", KINDS)
def test_empty_indices_yield_no_batches(kind: str, source: TensorImages) -> None:
    split = make_split(kind, source)
    assert len(split) == NUM_SAMPLES
    assert run(split, torch.empty(0, dtype=torch.int64)) == []


@pytest.mark.parametrize("kind", ["preloaded", "augmented"])
def test_changing_a_batch_in_place_does_not_change_the_split(kind: str, source: TensorImages) -> None:
    split = make_split(kind, source)
    for images, _ in split.batches(torch.arange(NUM_SAMPLES), batch_size=4, device=CPU):
        images.zero_()
    for (images, _), (expected, _) in zip(
        run(split, torch.arange(4)), run(make_split(kind, source), torch.arange(4)), strict=True
    ):
        assert torch.equal(images, expected)


@pytest.mark.processes
def test_worker_processes_yield_the_same_batches(source: TensorImages) -> None:
    indices = torch.arange(NUM_SAMPLES)
    in_process = run(StreamingSplit(source, mean=MEAN, std=STD, augment_seed=3), indices)
    in_workers = run(StreamingSplit(source, mean=MEAN, std=STD, augment_seed=3, num_workers=2), indices)
    for (images, labels), (expected_images, expected_labels) in zip(in_workers, in_process, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


@pytest.mark.processes
@pytest.mark.parametrize("num_workers", [0, 1])
def test_unreadable_image_in_a_worker_raises_an_error_of_one_line(tmp_path: Path, num_workers: int) -> None:
    path = tmp_path / "broken.png"
    path.write_text("<html>404")
    broken = FolderImages([path], torch.tensor([0]), image_size=4, num_threads=1)
    split = StreamingSplit(broken, mean=MEAN, std=STD, num_workers=num_workers)
    with pytest.raises(DataError, match=rf"^{path} cannot be read as an image \([^\n]*\): repair or remove it$"):
        run(split, torch.tensor([0]))


@pytest.mark.parametrize(("num_samples", "world_size"), [(10, 1), (10, 3), (2, 4), (0, 2), (12, 4)])
def test_eval_shares_cover_each_sample_once(num_samples: int, world_size: int) -> None:
    shares = [eval_indices(num_samples, rank, world_size) for rank in range(world_size)]
    assert sorted(torch.cat(shares).tolist()) == list(range(num_samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert all(share.dtype == torch.int64 for share in shares)


@pytest.fixture(params=["on the device", "on the host"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    if request.param == "on the host":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1))
    return torch.device("cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_batches_on_a_gpu_equal_those_on_the_cpu(
    kind: str, channels_last: bool, source: TensorImages, cuda: torch.device
) -> None:
    split = make_split(kind, source)
    indices = torch.arange(NUM_SAMPLES)
    on_cpu = run(split, indices, epoch=1, channels_last=channels_last)
    on_gpu = run(split, indices, epoch=1, channels_last=channels_last, device=cuda)
    for (images, labels), (expected_images, expected_labels) in zip(on_gpu, on_cpu, strict=True):
        assert images.is_cuda
        assert labels.is_cuda
        assert images.stride() == expected_images.stride()
        torch.testing.assert_close(images.cpu(), expected_images)
        assert torch.equal(labels.cpu(), expected_labels)


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(2 * NUM_SAMPLES * 108, "cuda"), (2 * NUM_SAMPLES * 108 - 1, "cpu")]
)
def test_split_larger_than_half_of_the_free_gpu_memory_stays_on_the_host(
    free_bytes: int, expected: str, source: TensorImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, free_bytes))
    assert batches_module._place(source.images, torch.device("cuda")).type == expected
    assert batches_module._place(source.images, CPU) == CPU
