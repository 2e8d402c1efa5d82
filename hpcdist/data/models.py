"""Image classifiers: a small CNN for digit-like images, and torchvision's ResNets."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 (the name everyone uses)
from torch import Tensor, nn

from hpcdist.data import RESNET_NAMES, model_name_problems
from hpcdist.errors import ConfigError

SIMPLE_CNN_MIN_SIZE = 4  # at least one pixel remains after two 2x2 poolings


class SimpleCNN(nn.Module):
    """Two 3x3 convolutions (32, 64 channels), each with ReLU and 2x2 max-pooling, then two linear layers.

    Takes float images [B, in_channels, image_size, image_size], returns logits [B, num_classes].
    """

    def __init__(self, *, num_classes: int, in_channels: int = 1, image_size: int = 28) -> None:
        super().__init__()
        side = image_size // 4
        self.conv1 = nn.Conv2d(in_channels, 32, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(64 * side * side, 128)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        # ReLU and max-pooling commute; pooling first reduces the elements for ReLU to a quarter.
        x = F.relu(F.max_pool2d(self.conv1(images), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        logits: Tensor = self.fc2(x)
        return logits


def build_model(name: str, *, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Return a freshly initialised (from torch's global generator) classifier on the CPU, logits [B, num_classes].

    `name` is one of hpcdist.data.MODEL_NAMES. A ResNet is torchvision's own; only its first convolution
    is replaced when `in_channels` is not 3. Raises ConfigError on an unknown name or too small an image.
    """
    if problems := model_name_problems(name):
        raise ConfigError(problems)
    if name in RESNET_NAMES:
        from torchvision.models import resnet  # imported here because it takes 0.9 s, which simple_cnn does not need

        model: nn.Module = getattr(resnet, name)(weights=None, num_classes=num_classes)
        if in_channels != 3:
            stem = nn.Conv2d(in_channels, 64, kernel_size=7, stride=2, padding=3, bias=False)
            nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")  # as in torchvision
            model.conv1 = stem
        return model
    if image_size < SIMPLE_CNN_MIN_SIZE:
        raise ConfigError(
            [f"data.image_size must be >= {SIMPLE_CNN_MIN_SIZE} for model.name=simple_cnn, got {image_size}"]
        )
    return SimpleCNN(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
