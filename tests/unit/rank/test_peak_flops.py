import pytest
import torch

from hpcdist.rank import peak_flops
from hpcdist.rank.peak_flops import measured_flops, specified_flops


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA B200", 2250),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("Simulated GPU", None),
    ],
)
def test_the_name_of_a_gpu_has_the_rate_of_its_data_sheet(name: str, tflops: float | None) -> None:
    flops = specified_flops(name)
    if tflops is None:
        assert flops is None
    else:
        assert flops == tflops * 1e12


def test_larger_products_are_measured_until_one_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        sizes.append(len(left))
        return {8: 1e-4, 16: 2e-3}[len(left)]

    monkeypatch.setattr(peak_flops, "SIZES", (8, 16, 32))
    monkeypatch.setattr(peak_flops, "_seconds", seconds)

    assert measured_flops(torch.device("cpu"), torch.float32) == pytest.approx(2 * 16**3 / 2e-3)
    assert 32 not in sizes


@pytest.mark.parametrize(("product_s", "num_products"), [(2e-3, 15), (0.02, 5), (1.0, 3)])
def test_slow_products_are_timed_less_often(
    monkeypatch: pytest.MonkeyPatch, product_s: float, num_products: int
) -> None:
    calls = []

    def seconds(left: torch.Tensor, right: torch.Tensor) -> float:
        calls.append(product_s)
        return product_s

    monkeypatch.setattr(peak_flops, "SIZES", (8,))
    monkeypatch.setattr(peak_flops, "_seconds", seconds)
    measured_flops(torch.device("cpu"), torch.float32)

    assert len(calls) == 2 + num_products  # one warms up, one chooses the size
