from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from hpcdist.data import MODEL_NAMES, RESNET_NAMES, model_name_problems
from hpcdist.data.models import build_model
from hpcdist.errors import ConfigError


@pytest.mark.parametrize(("in_channels", "image_size"), [(1, 28), (3, 32), (1, 8), (3, 31), (2, 4)])
def test_simple_cnn_accepts_any_size_and_number_of_channels(in_channels: int, image_size: int) -> None:
    model = build_model("simple_cnn", num_classes=7, in_channels=in_channels, image_size=image_size)
    logits = model(torch.zeros(5, in_channels, image_size, image_size))
    assert logits.shape == (5, 7)


def test_simple_cnn_equals_relu_before_pooling() -> None:
    torch.manual_seed(0)
    model = build_model("simple_cnn", num_classes=10, in_channels=1, image_size=28)
    pool = nn.MaxPool2d(2)
    convolutions = (model.conv1, nn.ReLU(), pool, model.conv2, nn.ReLU(), pool)
    expected = nn.Sequential(*convolutions, nn.Flatten(), model.fc1, nn.ReLU(), model.fc2)
    images = torch.randn(4, 1, 28, 28)
    assert torch.equal(model(images), expected(images))


def test_resnet_equals_the_one_of_torchvision() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    found = build_model("resnet18", num_classes=5, in_channels=3, image_size=32)
    torch.manual_seed(0)
    expected = resnet18(weights=None, num_classes=5)
    pairs = zip(found.state_dict().items(), expected.state_dict().items(), strict=True)
    assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


def test_resnet_accepts_grey_images() -> None:
    model = build_model("resnet18", num_classes=5, in_channels=1, image_size=28).eval()
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 5)
    coloured = build_model("resnet18", num_classes=5, in_channels=3, image_size=28)
    assert list(model.state_dict()) == list(coloured.state_dict())


def test_resnet_names_are_those_of_torchvision() -> None:
    from torchvision.models import resnet

    functions = {name for name in resnet.__all__ if name[0].islower()}
    assert set(RESNET_NAMES) == functions


def test_unknown_model_and_too_small_images_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^model\.name 'resnet51' is not known: did you mean 'resnet5?[0-9]+'\?$"):
        build_model("resnet51", num_classes=2, in_channels=3, image_size=32)

    with pytest.raises(ConfigError, match=r"data\.image_size must be >= 4 for model\.name=simple_cnn, got 3"):
        build_model("simple_cnn", num_classes=2, in_channels=1, image_size=3)
    (problem,) = model_name_problems("transformer")
    assert "expected one of simple_cnn, resnet18" in problem
    assert [problem for name in MODEL_NAMES for problem in model_name_problems(name)] == []


@pytest.mark.processes
def test_names_do_not_import_torch_and_simple_cnn_does_not_import_torchvision() -> None:
    code = (
        "import sys, hpcdist.data, hpcdist.data\n"
        "assert 'torch' not in sys.modules\n"
        "from hpcdist.data.models import build_model\n"
        "build_model('simple_cnn', num_classes=2, in_channels=1, image_size=28)\n"
        "assert 'torchvision' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
