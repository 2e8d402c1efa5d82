"""Names of the models. This file imports without torch, so that names can be checked without it."""

from __future__ import annotations

from hpcdist.errors import suggestion

# The models of torchvision.models.resnet; listed here because importing torchvision takes 0.9 s.
RESNET_NAMES: tuple[str, ...] = (
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
)

MODEL_NAMES: tuple[str, ...] = ("simple_cnn", *RESNET_NAMES)


def model_name_problems(name: str) -> list[str]:
    """Return a sentence with the nearest known name unless `name` is one of MODEL_NAMES."""
    if name in MODEL_NAMES:
        return []
    hint = suggestion(name, MODEL_NAMES, f"expected one of {', '.join(MODEL_NAMES)}")
    return [f"model.name {name!r} is not known: {hint}"]
