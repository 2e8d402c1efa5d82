"""Energy counters: NVML and RAPL, here a replacement of NVML and files as the kernel writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest
from fake_nvml import gpu, install_fake_nvml

from hpcdist.rank.system_metrics import EnergyMeter


def write_domain(powercap: Path, folder: str, name: str, joules: float, limit: float = 1000.0) -> Path:
    domain = powercap / folder
    domain.mkdir(parents=True, exist_ok=True)
    (domain / "name").write_text(f"{name}\n")
    (domain / "max_energy_range_uj").write_text(f"{int(limit * 1e6)}\n")
    (domain / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return domain


def test_packages_and_memory_are_counted_from_the_start_of_the_meter(tmp_path: Path) -> None:
    write_domain(tmp_path, "intel-rapl:0", "package-0", 100)
    write_domain(tmp_path, "intel-rapl:0:0", "core", 40)  # a part of the package
    write_domain(tmp_path, "intel-rapl:0:1", "dram", 7)
    meter = EnergyMeter(None, {}, powercap=tmp_path)
    assert meter.joules() == {"intel-rapl:0 package-0": 0.0, "intel-rapl:0:1 dram": 0.0}
    write_domain(tmp_path, "intel-rapl:0", "package-0", 150)
    write_domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    assert meter.joules() == {"intel-rapl:0 package-0": 50.0, "intel-rapl:0:1 dram": 3.0}


def test_counter_that_starts_again_at_its_limit_keeps_the_sum(tmp_path: Path) -> None:
    write_domain(tmp_path, "intel-rapl:0", "package-0", 990)
    meter = EnergyMeter(None, {}, powercap=tmp_path)
    write_domain(tmp_path, "intel-rapl:0", "package-0", 5)
    assert meter.joules() == {"intel-rapl:0 package-0": 15.0}


def test_failed_read_keeps_the_sum_and_the_next_one_includes_its_time(tmp_path: Path) -> None:
    domain = write_domain(tmp_path, "intel-rapl:0", "package-0", 10)
    meter = EnergyMeter(None, {}, powercap=tmp_path)
    (domain / "energy_uj").unlink()
    assert meter.joules() == {"intel-rapl:0 package-0": 0.0}
    write_domain(tmp_path, "intel-rapl:0", "package-0", 30)
    assert meter.joules() == {"intel-rapl:0 package-0": 20.0}


def test_counter_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (write_domain(tmp_path, "intel-rapl:0", "package-0", 10) / "energy_uj").unlink()
    assert EnergyMeter(None, {}, powercap=tmp_path).joules() == {}
    assert EnergyMeter(None, {}, powercap=tmp_path / "missing").joules() == {}


def test_shared_node_has_no_energy_of_packages(tmp_path: Path) -> None:
    write_domain(tmp_path, "intel-rapl:0", "package-0", 10)
    cpus = psutil.cpu_count() or 1
    assert EnergyMeter(None, {"SLURM_CPUS_ON_NODE": str(cpus)}, powercap=tmp_path).joules()
    assert EnergyMeter(None, {"SLURM_CPUS_ON_NODE": str(cpus + 1)}, powercap=tmp_path).joules() == {}
    assert EnergyMeter(None, None, powercap=tmp_path).joules() == {}, "another process of the node reads them"


def test_gpu_is_counted_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = gpu("H100", UUID="GPU-1", TotalEnergyConsumption=5_000)
    install_fake_nvml(monkeypatch, counted, gpu("H100", UUID="GPU-2"))
    meter = EnergyMeter("GPU-1", None)
    counted["nvmlDeviceGetTotalEnergyConsumption"] = 12_500
    assert meter.joules() == {"GPU-1": 7.5}
    assert EnergyMeter("GPU-2", None).joules() == {}, "a MIG slice has no counter"
    assert EnergyMeter("GPU-3", None).joules() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyMeter("GPU-1", None).joules() == {}, "the package nvidia-ml-py is not installed"
