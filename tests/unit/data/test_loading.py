import gzip
import hashlib
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hpcdist.config.training_schema import DataConfig
from hpcdist.data import DATASETS, MODEL_NAMES, RESNET_NAMES, datasets, model_name_problems
from hpcdist.data import image_sources as data_images
from hpcdist.data.datasets import PreloadedSplit, StreamingSplit, build_model, digest_of, load_datasets, log_image_data
from hpcdist.data.download import CIFAR10_MD5, IDX_FILES
from hpcdist.data.image_sources import FolderImages, ImageSource, TensorImages
from hpcdist.errors import ConfigError, DataError


def params(name: str, **changes: Any) -> DataConfig:
    values = {"root": "/nowhere", "num_workers": 0, "num_samples": 40, "num_classes": 4}
    return DataConfig(**{"name": name, **values, **changes})


def write_idx(root: Path, folder: str, *, num_train: int, num_test: int) -> None:
    """Write a small MNIST: all pixels of image i are i, its label is i mod 10; the test split is packed."""
    target = root / folder / "raw"
    target.mkdir(parents=True)
    for (images, labels), count in zip(IDX_FILES.values(), (num_train, num_test), strict=True):
        pixels = b"".join(bytes([i]) * 784 for i in range(count))
        contents = {
            images: b"\x00\x00\x08\x03" + struct.pack(">III", count, 28, 28) + pixels,
            labels: b"\x00\x00\x08\x01" + struct.pack(">I", count) + bytes(i % 10 for i in range(count)),
        }
        for name, content in contents.items():
            if count == num_test:
                (target / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (target / name).write_bytes(content)


def write_folder(root: Path, *, test_name: str = "val") -> None:
    for split, count in (("train", 3), (test_name, 1)):
        for label, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (20, 10), (label * 100, i, 0)).save(root / split / name / f"{i}.png")


def test_digits_are_split_by_class_and_normalised() -> None:
    data = load_datasets(params("digits"), seed=0)
    assert isinstance(data.train, PreloadedSplit)
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 28)
    assert data.train.images.shape == (1433, 1, 28, 28)
    assert len(data.train) + len(data.test) == 1797
    assert torch.bincount(data.train.labels).tolist() == [142, 145, 141, 146, 144, 145, 144, 143, 139, 144]
    assert torch.bincount(data.test.labels).tolist() == [36, 37, 36, 37, 37, 37, 37, 36, 35, 36]
    [(images, labels)] = data.train.batches([torch.arange(1433)])
    assert images.mean().abs() < 1e-3
    assert abs(images.std().item() - 1) < 1e-3
    assert torch.equal(labels, data.train.labels)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_like_datasets_are_loaded_from_idx_files(name: str, folder: str, tmp_path: Path) -> None:
    write_idx(tmp_path, folder, num_train=12, num_test=5)
    data = load_datasets(params(name, root=str(tmp_path)), seed=0)
    assert (len(data.train), len(data.test)) == (12, 5)
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 28)
    [(images, labels)] = data.test.batches([torch.arange(5)])
    expected = (torch.arange(5) / 255 - DATASETS[name].mean[0]) / DATASETS[name].std[0]
    torch.testing.assert_close(images[:, 0, 3, 4], expected)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    data = load_datasets(params(name, root=str(tmp_path), image_size=32), seed=0)
    assert data.image_size == 32
    [(images, _)] = data.test.batches([torch.arange(5)])
    assert images.shape == (5, 1, 32, 32)


def pickled(rows: torch.Tensor, labels: list[int]) -> bytes:
    """Return a file of CIFAR-10 as Python 2 and NumPy of 2009 pickled it: byte strings, protocol 2."""
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntU\x01btR(I1\n"
        + b"(I%d\nI%d\nt" % tuple(rows.shape)
        + b"cnumpy\ndtype\n(U\x02u1I0\nI1\ntR(I3\nU\x01|NNNI-1\nI-1\nI0\ntb\x89T"
        + struct.pack("<I", rows.numel())
        + bytes(rows.flatten().tolist())
        + b"tbU\x06labels]("
        + b"".join(b"K" + bytes([label]) for label in labels)
        + b"eu."
    )


def test_cifar10_joins_the_training_files_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rows = torch.randint(0, 256, (6, 2, 3072), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sums = {}
    for number, name in enumerate(CIFAR10_MD5):
        content = pickled(rows[number], [number, 9])
        (folder / name).write_bytes(content)
        sums[name] = hashlib.md5(content).hexdigest()
    monkeypatch.setattr(data_images, "CIFAR10_MD5", sums)
    data = load_datasets(params("cifar10", root=str(tmp_path)), seed=0)
    assert isinstance(data.train, PreloadedSplit)
    assert torch.equal(data.train.images, rows[:5].reshape(10, 3, 32, 32))
    assert data.train.labels.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert data.test.labels.tolist() == [5, 9]


@pytest.mark.parametrize("test_name", ["val", "test"])
def test_image_folder_is_loaded_with_val_or_test_images(tmp_path: Path, test_name: str) -> None:
    with pytest.raises(DataError, match=rf"image_folder was not found in {tmp_path} \("):
        load_datasets(params("image_folder", root=str(tmp_path)), seed=0)
    write_folder(tmp_path, test_name=test_name)
    beats: list[str] = []
    options = params("image_folder", root=str(tmp_path), image_size=8)
    data = load_datasets(options, seed=0, alive=lambda: beats.append(""))
    assert len(beats) == len(data.train) + len(data.test) + 4, "one for each image and each folder of a class"
    assert (data.num_classes, data.in_channels, data.image_size) == (2, 3, 8)
    assert data.train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    [(images, labels)] = data.test.batches([torch.arange(2)])
    assert labels.tolist() == [0, 1]
    expected = (torch.tensor([0, 100]) / 255 - 0.485) / 0.229  # of the red channel
    torch.testing.assert_close(images[:, 0, 0, 0], expected)
    (tmp_path / test_name).rename(tmp_path / "holdout")
    with pytest.raises(DataError, match=rf"image_folder needs {tmp_path}/val or {tmp_path}/test beside"):
        load_datasets(params("image_folder", root=str(tmp_path)), seed=0)


def test_augmented_image_folder_is_streamed(tmp_path: Path) -> None:
    write_folder(tmp_path)
    data = load_datasets(params("image_folder", root=str(tmp_path), image_size=8, augment=True), seed=0)
    assert isinstance(data.train, StreamingSplit)
    assert data.train.augment_seed == 0
    assert isinstance(data.test, PreloadedSplit)


@pytest.mark.parametrize(
    ("preload", "limit_bytes", "expected"),
    [
        (True, 40 * 3072, PreloadedSplit),
        (True, 40 * 3072 - 1, StreamingSplit),
        (False, 1 << 30, StreamingSplit),
    ],
)
def test_large_split_is_streamed(
    preload: bool, limit_bytes: int, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "PRELOAD_MAX_BYTES", limit_bytes)
    data = load_datasets(params("synthetic", num_workers=2), seed=3, preload=preload)
    assert type(data.train) is expected
    if isinstance(data.train, StreamingSplit):
        assert data.train.num_workers == 2


@pytest.mark.parametrize(("name", "flip"), [("digits", False), ("fashion_mnist", True)])
def test_only_training_images_are_augmented(name: str, flip: bool, tmp_path: Path) -> None:
    write_idx(tmp_path, "FashionMNIST", num_train=12, num_test=5)
    data = load_datasets(params(name, root=str(tmp_path), augment=True), seed=9)
    assert isinstance(data.train, PreloadedSplit)
    assert (data.train.augment_seed, data.train.flip) == (9, flip)
    assert data.test.augment_seed is None


@pytest.mark.processes
def test_datasets_are_found_and_loaded_without_slow_imports(tmp_path: Path) -> None:
    write_idx(tmp_path, "MNIST", num_train=12, num_test=5)
    code = (
        "import sys\n"
        "from hpcdist.config.training_schema import DataConfig\n"
        "from hpcdist.data.download import missing, prepare\n"
        "datasets = [DataConfig(name=name, root=sys.argv[1], augment=True) for name in ('digits', 'mnist')]\n"
        "for data in datasets:\n"
        "    prepare(data)\n"
        "    assert not missing(data)\n"
        "assert 'torch' not in sys.modules\n"
        "from hpcdist.data.datasets import build_model, load_datasets\n"
        "for data in datasets:\n"
        "    load_datasets(data, 0)\n"
        "build_model('simple_cnn', num_classes=2, in_channels=1, image_size=28)\n"
        "slow = {'torchvision', 'PIL', 'sklearn', 'scipy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)


# --- Digests of datasets: equal for equal data, different for any change that matters.


NORMAL = datasets.Normalize((0.5,), (0.5,), torch.device("cpu"))


class Recorder:
    """Stands in for the context of one rank."""

    def __init__(self, *, is_main: bool = True) -> None:
        self.is_main = is_main
        self.report = self
        self.found: dict[str, dict[str, Any]] = {}

    def log_dataset(self, name: str, *, split: str, **facts: Any) -> None:
        self.found[f"{name} {split}"] = facts


def logged(data: DataConfig, seed: int = 0) -> dict[str, dict[str, Any]]:
    recorder = Recorder()
    log_image_data(recorder, data, load_datasets(data, seed), seed)  # type: ignore[arg-type]
    return recorder.found


def digest(source: ImageSource) -> str:
    return datasets._digest_of_split(StreamingSplit(source, normalize=NORMAL), 0, "train")


def test_both_splits_are_declared_by_rank_0_alone() -> None:
    found = logged(DataConfig(name="digits"))
    assert {name: (facts["num_samples"], facts["source"]) for name, facts in found.items()} == {
        "digits train": (1433, "scikit-learn"),
        "digits test": (364, "scikit-learn"),
    }
    assert found == logged(DataConfig(name="digits"), seed=5), "the seed does not change these images"
    data = DataConfig(name="digits")
    other = Recorder(is_main=False)
    log_image_data(other, data, load_datasets(data, 0), 0)  # type: ignore[arg-type]
    assert other.found == {}


def test_synthetic_images_depend_on_the_seed() -> None:
    data = DataConfig(name="synthetic", num_samples=50, image_size=8)
    found = [logged(data, seed)["synthetic train"]["digest"] for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    assert logged(data)["synthetic test"]["num_samples"] == 10, "a fifth"


@pytest.mark.parametrize("part", ["image", "label"])
def test_changed_image_or_label_changes_the_digest(part: str) -> None:
    images, labels = torch.zeros(5, 1, 4, 4, dtype=torch.uint8), torch.arange(5)
    before = datasets._digest_of_split(PreloadedSplit(images, labels, normalize=NORMAL), 0, "train")
    assert before == digest(TensorImages(images, labels, image_size=4, flip=False)), "preloaded or not"
    (images[3, 0, 1] if part == "image" else labels[3:4]).fill_(9)
    assert datasets._digest_of_split(PreloadedSplit(images, labels, normalize=NORMAL), 0, "train") != before


def test_digest_of_image_files_covers_names_and_sizes(tmp_path: Path) -> None:
    files = [tmp_path / "cat" / "a.png", tmp_path / "cat" / "b.png"]
    files[0].parent.mkdir()
    for file in files:
        file.write_bytes(b"1234")

    def of(files: list[Path]) -> str:
        return digest(FolderImages(files, torch.zeros(len(files), dtype=torch.int64), image_size=8, num_threads=1))

    before = of(files)
    assert of(files) == before
    files[1].write_bytes(b"12345")
    assert of(files) != before
    assert of(files[:1]) != before


def test_digest_depends_on_type_shape_and_values() -> None:
    tensors = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.ones(4)]
    assert len({digest_of(tensor) for tensor in tensors}) == 4
    assert digest_of({"b": 1, "a": 2}, "x") == digest_of({"a": 2, "b": 1}, "x")
    assert len(digest_of(1)) == 8


# --- Models by name.


def test_resnets_are_those_of_torchvision() -> None:
    from torchvision.models import resnet

    assert set(RESNET_NAMES) == {name for name in resnet.__all__ if name[0].islower()}
    torch.manual_seed(0)
    found = build_model("resnet18", num_classes=5, in_channels=3, image_size=32)
    torch.manual_seed(0)
    expected = resnet.resnet18(weights=None, num_classes=5)
    pairs = zip(found.state_dict().items(), expected.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)
    grey = build_model("resnet18", num_classes=5, in_channels=1, image_size=28).eval()
    assert grey(torch.zeros(2, 1, 28, 28)).shape == (2, 5)
    assert list(grey.state_dict()) == list(found.state_dict())


def test_unknown_model_and_too_small_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model\.name 'resnet51' is not known: did you mean 'resnet5?[0-9]+'\?$"):
        build_model("resnet51", num_classes=2, in_channels=3, image_size=32)

    with pytest.raises(ConfigError, match=r"data\.image_size must be >= 4 for model\.name=simple_cnn, got 3"):
        build_model("simple_cnn", num_classes=2, in_channels=1, image_size=3)
    (problem,) = model_name_problems("transformer")
    assert "expected one of simple_cnn, resnet18" in problem
    assert [problem for name in MODEL_NAMES for problem in model_name_problems(name)] == []
