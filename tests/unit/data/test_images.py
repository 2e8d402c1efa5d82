import gzip
import os
import pickle
import random
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from hpcdist.data import datasets as batches_module
from hpcdist.data import image_sources as data_images
from hpcdist.data.datasets import Normalize, PreloadedSplit, Split, StreamingSplit
from hpcdist.data.download import CIFAR10_MD5
from hpcdist.data.image_sources import (
    CROP_PADDING,
    IMAGE_SUFFIXES,
    FolderImages,
    SyntheticImages,
    TensorImages,
    class_names,
    crop_image,
    list_images,
    random_resized_box,
    read_cifar10_batch,
    read_digits,
    read_idx,
    read_idx_pair,
    sample_hashes,
)
from hpcdist.errors import DataError


def idx_bytes(values: torch.Tensor) -> bytes:
    shape = list(values.shape)
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + bytes(values.flatten().tolist())


WHOLE = idx_bytes(torch.zeros(2, 3, 4, dtype=torch.uint8))
NO_IDX, DAMAGED = "is not an IDX file of unsigned bytes", "is truncated or damaged"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x", WHOLE[:-1], f"{DAMAGED}: 40 bytes expected, 39 found"),
        ("x", WHOLE + bytes(76), f"{DAMAGED}: 40 bytes expected, 116 found"),
        ("x", bytes([0, 0, 8, 4]) + b"\xff" * 16, rf"{DAMAGED}: 3402823\d+ bytes expected, 20 found"),
        ("x", idx_bytes(torch.zeros(0, dtype=torch.uint8)), DAMAGED),
        ("x.gz", gzip.compress(WHOLE, mtime=0)[:-9], "cannot be read"),
        ("x.gz", b"<html>404", "cannot be read"),
        *(
            ("x", content, NO_IDX)
            for content in (b"", b"\x00\x00", b"<html>404", b"\x00\x00\x0d\x01\x00\x00\x00\x01xxxx", WHOLE[:5])
        ),
        ("x", bytes([0, 0, 8, 255]) + b"\xff" * 1020, NO_IDX),
    ],
)
def test_error_of_a_damaged_or_other_file_names_the_file(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path} {message}"):
        read_idx(path)
    with pytest.raises(DataError, match=rf"{tmp_path} cannot be read \(.*Is a directory"):
        read_idx(tmp_path)


def test_unpacked_size_of_a_gz_file_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress(bytes(100_000_000)))
    assert len(data_images.read_bytes(path, max_bytes=1000)) == 1000
    assert len(data_images.read_bytes(path)) == data_images.MAX_BYTES


def write_pair(folder: Path, images: torch.Tensor, labels: list[int]) -> tuple[Path, Path]:
    folder.joinpath("images").write_bytes(idx_bytes(images))
    folder.joinpath("labels").write_bytes(idx_bytes(torch.tensor(labels, dtype=torch.uint8)))
    return folder / "images", folder / "labels"


def test_idx_pair_has_an_image_for_each_label_of_a_class(tmp_path: Path) -> None:
    images = torch.arange(18, dtype=torch.uint8).reshape(2, 3, 3)
    read_images, labels = read_idx_pair(*write_pair(tmp_path, images, [9, 0]), num_classes=10)
    assert torch.equal(read_images, images[:, None])
    assert (labels.dtype, labels.tolist()) == (torch.int64, [9, 0])
    with pytest.raises(DataError, match=r"images of shape \[2, 3, 3\] and .*labels of shape \[3\] do not match"):
        read_idx_pair(*write_pair(tmp_path, images, [0, 0, 0]), num_classes=10)
    with pytest.raises(DataError, match="labels has label 10, but there are 10 classes"):
        read_idx_pair(*write_pair(tmp_path, images, [0, 10]), num_classes=10)


def test_damaged_or_missing_digits_raise_data_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "digits.csv"
    path.write_text("0,1,x\n")
    with monkeypatch.context() as patch:
        patch.setattr(data_images, "digits_path", lambda: path)
        with pytest.raises(DataError, match=rf"{path} is damaged .*: reinstall scikit-learn"):
            read_digits()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="digits is part of scikit-learn, which is not installed"):
        read_digits()


def test_cifar10_checksums_equal_those_of_torchvision() -> None:
    from torchvision.datasets import CIFAR10

    assert dict(CIFAR10_MD5) == dict(CIFAR10.train_list + CIFAR10.test_list)


def test_crafted_cifar10_file_is_not_unpickled(tmp_path: Path) -> None:
    class Crafted:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "executed"),)

    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(Crafted()))
    with pytest.raises(DataError, match=rf"{path} is truncated or damaged \(its MD5 sum is not CIFAR-10's\)"):
        read_cifar10_batch(path)
    assert not (tmp_path / "executed").exists()


CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NORMALIZE = Normalize(MEAN, STD, CPU)
NUM_SAMPLES = 23


@pytest.fixture
def source() -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (NUM_SAMPLES, 3, 6, 6), dtype=torch.uint8, generator=generator)
    return TensorImages(images, torch.arange(NUM_SAMPLES) % 5, image_size=6, flip=True)


def make_split(kind: str, source: TensorImages, **options: Any) -> Split:
    options |= {"augment_seed": 7 if "augmented" in kind else None}
    options["normalize"] = Normalize(MEAN, STD, options.get("device", CPU))
    if kind.startswith("streaming"):
        return StreamingSplit(source, **options)
    return PreloadedSplit(source.images, source.labels, flip=source.flip, **options)


KINDS = ["preloaded", "augmented", "streaming", "streaming augmented"]


def run(
    split: Split, indices: Tensor, *, batch_size: int | list[int] = 4, start: int = 0, epoch: int = 0
) -> list[tuple[Tensor, Tensor]]:
    return list(split.batches(indices.split(batch_size)[start:], epoch=epoch))


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
    result = run(make_split(kind, source, channels_last=channels_last), indices, epoch=2)
    assert [len(labels) for _, labels in result] == [4, 4, 2]
    images, labels = (torch.cat(parts) for parts in zip(*result, strict=True))
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, normalized(expected), rtol=1e-5, atol=1e-5)
    assert labels.dtype == torch.int64
    assert torch.equal(labels, source.labels[indices])
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    assert all(images.is_contiguous(memory_format=memory_format) for images, _ in result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch_size", "start"), [(4, 0), (4, 1), (4, 2), (4, 9), ([4, 2, 5], 0), ([4, 2, 5], 2)])
def test_batches_of_any_size_continue_an_epoch_exactly(
    kind: str, batch_size: int | list[int], start: int, source: TensorImages
) -> None:
    indices = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1))[:11]
    split = make_split(kind, source)
    [(expected, _)] = run(split, indices, epoch=5, batch_size=11)
    [(other, _)] = run(split, indices, epoch=6, batch_size=11)
    assert torch.equal(other, expected) is ("augmented" not in kind)
    torch.manual_seed(99)  # the global generator of a resumed process has another state
    parts = run(make_split(kind, source), indices, epoch=5, batch_size=batch_size, start=start)
    sizes = [len(part) for part in indices.split(batch_size)]
    assert [len(labels) for _, labels in parts] == sizes[start:]
    first = sum(sizes[:start])
    assert torch.equal(torch.cat([expected[:0], *(images for images, _ in parts)]), expected[first:])
    assert [int(label) for _, labels in parts for label in labels] == source.labels[indices[first:]].tolist()


@pytest.mark.processes
def test_worker_processes_yield_the_same_batches(source: TensorImages) -> None:
    in_process, in_workers = (
        run(StreamingSplit(source, normalize=NORMALIZE, augment_seed=3, num_workers=num), torch.arange(NUM_SAMPLES))
        for num in (0, 2)
    )
    for found, expected in zip(in_workers, in_process, strict=True):
        assert all(map(torch.equal, found, expected))


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
    on_cpu, on_gpu = (
        run(make_split(kind, source, channels_last=channels_last, device=device), torch.arange(NUM_SAMPLES), epoch=1)
        for device in (CPU, cuda)
    )
    for (images, labels), (expected_images, expected_labels) in zip(on_gpu, on_cpu, strict=True):
        assert images.is_cuda
        assert labels.is_cuda
        assert images.stride() == expected_images.stride()
        torch.testing.assert_close(images.cpu(), expected_images)
        assert torch.equal(labels.cpu(), expected_labels)


@pytest.mark.parametrize(
    ("free_bytes", "expected"), [(2 * NUM_SAMPLES * 108, "cuda"), (2 * NUM_SAMPLES * 108 - 1, "cpu")]
)
def test_split_too_large_for_the_gpu_stays_on_the_host(
    free_bytes: int, expected: str, source: TensorImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_bytes, free_bytes))
    assert batches_module._place(source.images, torch.device("cuda")).type == expected
    assert batches_module._place(source.images, CPU) == CPU


def save(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def synthetic(**changes: int) -> SyntheticImages:
    arguments = {"num_samples": 50, "num_classes": 4, "image_size": 9, "in_channels": 3, "seed": 1, "split": 0}
    return SyntheticImages(**(arguments | changes))


def test_synthetic_images_depend_on_seed_and_split_only() -> None:
    source = synthetic()
    whole = source.all_images()
    assert whole.dtype == torch.uint8
    assert all(torch.equal(source.image(index, None), whole[index]) for index in range(50))
    assert torch.equal(synthetic().all_images(), whole)
    assert not torch.equal(synthetic(seed=2).all_images(), whole)
    assert not torch.equal(synthetic(split=1).all_images(), whole)


def test_folder_images_ignore_hidden_entries_and_other_files(tmp_path: Path) -> None:
    save(tmp_path / "b" / "1.png", (10, 20, 30))
    save(tmp_path / "a" / "2.PNG", (200, 100, 50), size=(5, 90))
    save(tmp_path / "a" / "1.png", (1, 2, 3))
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / "._1.png").write_text("metadata of macOS")
    (tmp_path / ".cache").mkdir()
    assert class_names(tmp_path) == ["a", "b"]
    files, labels = list_images(tmp_path, ["a", "b"])
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a/1.png", "a/2.PNG", "b/1.png"]
    assert labels.tolist() == [0, 0, 1]
    source = FolderImages(files, labels, image_size=7, num_threads=2)
    whole = source.all_images()
    for index, colour in enumerate([(1, 2, 3), (200, 100, 50), (10, 20, 30)]):
        expected = torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, 7, 7)
        assert torch.equal(whole[index], expected)
        assert torch.equal(source.image(index, 12345), expected)


def test_folder_image_is_the_centre_or_a_crop_by_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.png"
    picture = Image.new("L", (512, 256))
    picture.paste(255, (256, 0, 512, 256))  # the right half is white
    picture.save(path)
    source = FolderImages([path], torch.tensor([0]), image_size=8, num_threads=1)
    centre = source.image(0, None)
    assert centre.shape == (3, 8, 8)
    assert (centre[:, :, :3] == 0).all()
    assert (centre[:, :, 5:] == 255).all()
    crops = [source.image(0, crop_hash) for crop_hash in range(20)]
    assert torch.equal(crops[3], source.image(0, 3))
    assert len({bytes(crop.flatten().tolist()) for crop in crops}) > 5
    monkeypatch.setattr("hpcdist.data.image_sources.random_resized_box", lambda image, crop_hash: (0, 0, *image.size))
    assert torch.equal(source.image(0, 1 << 32), source.image(0, 0).flip(-1))


@pytest.mark.processes
@pytest.mark.parametrize("damage", ["text", "truncated", "missing"])
def test_error_of_an_unreadable_image_names_the_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a" / "broken.jpg"
    save(path, (1, 2, 3), size=(200, 200))
    if damage == "text":
        path.write_text("<html>404")
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-200])
    else:
        path.unlink()
    source = FolderImages([path], torch.tensor([0]), image_size=7, num_threads=1)
    message = rf"^{path} cannot be read as an image \([^\n]*\): repair or remove it$"
    with pytest.raises(DataError, match=message):
        source.all_images()
    for num_workers in (0, 1):
        with pytest.raises(DataError, match=message):
            run(StreamingSplit(source, normalize=NORMALIZE, num_workers=num_workers), torch.tensor([0]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PIL warns about damaged metadata
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp"])
def test_damaged_image_is_read_or_raises_data_error(tmp_path: Path, suffix: str) -> None:
    generator, path = random.Random(3), tmp_path / f"x.{suffix}"
    Image.effect_noise((40, 30), 50).convert("RGB").save(path)
    raw = path.read_bytes()
    source = FolderImages([path], torch.tensor([0]), image_size=7, num_threads=1)
    for _ in range(60):
        data = bytearray(raw[: generator.choice((len(raw), generator.randrange(1, len(raw))))])
        for _ in range(3):
            data[generator.randrange(min(len(data), 200))] = generator.randrange(256)
        path.write_bytes(data)
        with suppress(DataError):
            assert source.image(0, None).shape == (3, 7, 7)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(x) run\n", "EPS"),
        (
            b"GIF87a\x01\x00\x01\x00\x80\x01\x00\x00\x00\x00\xff\xff\xff,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02D\x01\x00;",
            "GIF",
        ),
    ],
)
def test_file_of_another_format_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, kind: str
) -> None:
    """PIL starts Ghostscript for an EPS file, whatever its name is."""
    path = tmp_path / "image.jpg"
    path.write_bytes(content)
    with Image.open(path) as opened:
        assert opened.format == kind
    started: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **_: started.append(args))
    source = FolderImages([path], torch.tensor([0]), image_size=8, num_threads=1)
    with pytest.raises(DataError, match=r"image\.jpg cannot be read as an image"):
        source.image(0, None)
    assert not started


@pytest.mark.parametrize("suffix", IMAGE_SUFFIXES)
def test_each_listed_suffix_has_its_decoder(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"image{suffix}"
    Image.new("RGB" if suffix != ".pgm" else "L", (9, 9), 128).save(path)
    source = FolderImages([path], torch.tensor([0]), image_size=8, num_threads=1)
    assert source.image(0, None).shape == (3, 8, 8)


def test_folders_without_images_of_the_classes_raise_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere cannot be listed \(No such file or directory\): check data\.root"):
        class_names(tmp_path / "nowhere")
    with pytest.raises(DataError, match=rf"{tmp_path} has no class folders: image_folder expects"):
        class_names(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=rf"{tmp_path}/a has no images \(\.jpg, "):
        list_images(tmp_path, ["a"])
    with pytest.raises(DataError, match=rf"{tmp_path}/a is not a class of the training images"):
        list_images(tmp_path, ["b"])


def test_crop_image_shifts_and_mirrors_by_the_hash() -> None:
    image = torch.arange(1, 17, dtype=torch.uint8).reshape(1, 4, 4)
    upper_left = 0  # top 0, left 0: the crop has padding only
    assert torch.equal(crop_image(image, upper_left, flip=True), torch.zeros(1, 4, 4, dtype=torch.uint8))
    centred = CROP_PADDING | (CROP_PADDING << 16)
    assert torch.equal(crop_image(image, centred, flip=True), image)
    assert sample_hashes(1, 2, torch.arange(2)).tolist() == [7249523183808856999, 7459148402836318581]
    mirrored = centred | (1 << 32)
    assert torch.equal(crop_image(image, mirrored, flip=True), image.flip(-1))
    assert torch.equal(crop_image(image, mirrored, flip=False), image)


def test_random_crop_respects_image_area_and_aspect_ratio() -> None:
    for width, height in ((500, 375), (10, 10), (1, 1), (1000, 3), (2, 900)):
        image = Image.new("RGB", (width, height))
        for crop_hash in range(200):
            left, top, right, bottom = random_resized_box(image, crop_hash)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            if width == 500:
                assert 0.07 < (right - left) * (bottom - top) / (width * height) <= 1
                assert 0.73 < (right - left) / (bottom - top) < 1.36
