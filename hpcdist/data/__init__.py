"""What is known of datasets, models and tokenizers without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from hpcdist.errors import suggestion

# Image datasets and their properties.
#
# `download.prepare` downloads, `loading.load_datasets` loads, and each split yields batches. The package does not use
# process groups: the caller selects the rank that downloads, and passes the indices of each rank.


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """Properties of a dataset. Mean and std are per channel, of pixels scaled to [0, 1]."""

    in_channels: int
    image_size: int
    """Default height and width in pixels."""
    num_classes: int | None
    """None if it depends on the config or the folder."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool
    """Whether a mirrored image has the same class (a mirrored digit does not)."""


DATASETS: Mapping[str, DatasetSpec] = {
    "digits": DatasetSpec(in_channels=1, image_size=28, num_classes=10, mean=(0.3055,), std=(0.3248,), flip=False),
    "mnist": DatasetSpec(in_channels=1, image_size=28, num_classes=10, mean=(0.1307,), std=(0.3081,), flip=False),
    "fashion_mnist": DatasetSpec(
        in_channels=1, image_size=28, num_classes=10, mean=(0.2860,), std=(0.3530,), flip=True
    ),
    "cifar10": DatasetSpec(
        in_channels=3,
        image_size=32,
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        flip=True,
    ),
    # Mean and std of ImageNet, the usual ones for natural images.
    "image_folder": DatasetSpec(
        in_channels=3,
        image_size=224,
        num_classes=None,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        flip=True,
    ),
    "synthetic": DatasetSpec(
        in_channels=3, image_size=32, num_classes=None, mean=(0.5,) * 3, std=(0.15,) * 3, flip=False
    ),
}

#: Tokens of the tokenizer of bytes: their values, and an end token.
NUM_BYTE_TOKENS = 257

# Names of the models. The models of torchvision.models.resnet; listed here because importing torchvision takes 0.9 s.
RESNET_NAMES: tuple[str, ...] = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d"),
    *("resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"),
)

MODEL_NAMES: tuple[str, ...] = ("simple_cnn", *RESNET_NAMES)


def model_name_problems(name: str) -> list[str]:
    """Return the problem of a name that is not one of MODEL_NAMES, with the nearest one; an empty list otherwise."""
    if name in MODEL_NAMES:
        return []
    known = ", ".join(MODEL_NAMES)
    hint = suggestion(name, MODEL_NAMES, f"expected one of {known}")
    return [f"model.name {name!r} is not known: {hint}"]
