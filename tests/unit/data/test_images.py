from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from PIL import Image

from hpcdist.data.images import FolderImages, SyntheticImages, TensorImages, class_names, list_images, resize
from hpcdist.errors import DataError


def save(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def synthetic(**changes: int) -> SyntheticImages:
    arguments = {
        "num_samples": 50,
        "num_classes": 4,
        "image_size": 9,
        "in_channels": 3,
        "seed": 1,
        "split": 0,
    }
    return SyntheticImages(**(arguments | changes))


def test_resize_differs_from_pillow_by_rounding_only() -> None:
    image = torch.randint(0, 256, (1, 1, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for size in (8, 20, 33):
        pil = Image.frombytes("L", (20, 20), bytes(image.flatten().tolist()))
        expected = torch.tensor(list(pil.resize((size, size), Image.Resampling.BILINEAR).tobytes()))
        difference = resize(image, size).flatten().long() - expected
        assert difference.abs().max() <= 1


def test_tensor_images_are_equal_one_by_one_and_at_once() -> None:
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    source = TensorImages(images, torch.arange(5), image_size=12, flip=False)
    assert source.shape == (3, 12, 12)
    whole = source.all_images()
    assert whole.shape == (5, 3, 12, 12)
    assert all(torch.equal(source.image(index, None), whole[index]) for index in range(5))


def test_synthetic_images_depend_on_seed_and_split_only() -> None:
    source = synthetic()
    whole = source.all_images()
    assert whole.dtype == torch.uint8
    assert all(torch.equal(source.image(index, None), whole[index]) for index in range(50))
    assert torch.equal(synthetic().all_images(), whole)
    assert not torch.equal(synthetic(seed=2).all_images(), whole)
    assert not torch.equal(synthetic(split=1).all_images(), whole)


def test_nearest_class_mean_classifies_all_synthetic_images() -> None:
    train, test = synthetic(num_samples=400), synthetic(split=1)
    images = train.all_images().float().flatten(1)
    means = torch.stack([images[train.labels == label].mean(0) for label in range(4)])
    nearest = torch.cdist(test.all_images().float().flatten(1), means).argmin(1)
    assert torch.equal(nearest, test.labels)
    assert torch.bincount(test.labels).tolist() == [13, 13, 12, 12]


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


def test_folder_image_is_the_centre_or_a_crop_by_the_hash(tmp_path: Path) -> None:
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
    mirrored = source.image(0, 3 | 1 << 32)
    assert mirrored.shape == (3, 8, 8)


def test_folder_image_is_mirrored_by_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.png"
    Image.linear_gradient("L").rotate(90).save(path)
    source = FolderImages([path], torch.tensor([0]), image_size=8, num_threads=1)
    monkeypatch.setattr("hpcdist.data.images.random_resized_box", lambda w, h, crop_hash: (0, 0, w, h))
    assert torch.equal(source.image(0, 1 << 32), source.image(0, 0).flip(-1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PIL warns about damaged metadata
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("suffix", ["png", "jpg", "tif", "webp", "bmp", "ppm"])
def test_damaged_image_is_read_or_raises_data_error(tmp_path: Path, suffix: str) -> None:
    generator = random.Random(3)
    path = tmp_path / f"x.{suffix}"
    Image.effect_noise((40, 30), 50).convert("RGB").save(path)
    raw = path.read_bytes()
    source = FolderImages([path], torch.tensor([0]), image_size=7, num_threads=1)
    for _ in range(40):
        data = bytearray(raw[: generator.randrange(len(raw))] if generator.random() < 0.3 else raw)
        for _ in range(generator.randrange(1, 6)):
            place = generator.randrange(min(len(data), 200)) if data and generator.random() < 0.7 else len(data) - 1
            data[place:] = bytes([generator.randrange(256)]) + data[place + 1 :]
        path.write_bytes(data)
        with suppress(DataError):
            assert source.image(0, None).shape == (3, 7, 7)


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
    with pytest.raises(DataError, match=rf"^{path} cannot be read as an image \(.*\): repair or remove it$"):
        source.image(0, None)
    with pytest.raises(DataError, match=r"broken\.jpg"):
        source.all_images()


def test_folder_without_class_folders_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{tmp_path} has no class folders: image_folder expects"):
        class_names(tmp_path)


def test_missing_folder_raises_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere cannot be listed \(No such file or directory\): check data\.root"):
        class_names(tmp_path / "nowhere")


def test_class_folder_without_images_raises_data_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match=rf"{tmp_path}/a has no images \(\.jpg, "):
        list_images(tmp_path, ["a"])


def test_class_that_training_lacks_raises_data_error(tmp_path: Path) -> None:
    save(tmp_path / "b" / "1.png", (1, 2, 3))
    with pytest.raises(DataError, match=rf"{tmp_path}/b is not a class of the training images"):
        list_images(tmp_path, ["a"])
