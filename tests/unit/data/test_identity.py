"""Digests of datasets: equal for equal data, different for any change that matters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpcdist.config.schema import DataConfig
from hpcdist.data import loading
from hpcdist.data.images import FolderImages, ImageSource, TensorImages
from hpcdist.data.loading import PreloadedSplit, StreamingSplit, digest_of, load_datasets, log_image_data

NORMAL: dict[str, Any] = {"mean": (0.5,), "std": (0.5,)}


class Recorder:
    """Stands in for the context of one rank."""

    def __init__(self, *, is_main: bool = True) -> None:
        self.is_main = is_main
        self.found: dict[str, dict[str, Any]] = {}

    def log_dataset(self, name: str, *, split: str, **facts: Any) -> None:
        self.found[f"{name} {split}"] = facts


def logged(data: DataConfig, seed: int = 0) -> dict[str, dict[str, Any]]:
    recorder = Recorder()
    log_image_data(recorder, data, load_datasets(data, seed), seed)  # type: ignore[arg-type]
    return recorder.found


def digest(source: ImageSource) -> str:
    return loading._digest_of_split(StreamingSplit(source, **NORMAL), 0, "train")


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
    digests = [logged(data, seed)["synthetic train"]["digest"] for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    streamed = DataConfig(name="synthetic", num_samples=50, image_size=8, preload="never")
    assert logged(streamed, 0)["synthetic train"]["digest"] != logged(streamed, 1)["synthetic train"]["digest"]


@pytest.mark.parametrize("part", ["image", "label"])
def test_changed_image_or_label_changes_the_digest(part: str) -> None:
    images, labels = torch.zeros(5, 1, 4, 4, dtype=torch.uint8), torch.arange(5)
    before = loading._digest_of_split(PreloadedSplit(images, labels, **NORMAL), 0, "train")
    assert before == digest(TensorImages(images, labels, image_size=4, flip=False)), "preloaded or not"
    (images[3, 0, 1] if part == "image" else labels[3:4]).fill_(9)
    assert loading._digest_of_split(PreloadedSplit(images, labels, **NORMAL), 0, "train") != before


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


def test_large_splits_are_sampled_evenly() -> None:
    assert list(loading._spread(10, 3)) == [0, 4, 8]
    assert list(loading._spread(3, 10)) == [0, 1, 2]
    assert list(loading._spread(0, 10)) == []
