"""Facts about this machine: versions, container, GPUs, compiler and energy."""

import os
import runpy
import sys
import sysconfig
import tempfile
import threading
import time
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from fake_nvml import FakeNvml, gpu, install_fake_nvml
from hpcdist_runs import wait_for

import hpcdist
from hpcdist.errors import ConfigError
from hpcdist.host import gpu_info, versions
from hpcdist.host.compiler import cache_environment, require_compiler
from hpcdist.host.gpu_info import Gpu, count_gpus, driver_version, selected_gpus, visible_devices, visible_gpus
from hpcdist.host.image_identity import container_runtime, image_facts
from hpcdist.host.network import amount, bandwidths, rate, seconds
from hpcdist.host.time_limits import run_within
from hpcdist.rank.system_metrics import EnergyMeter

# --- The facts of this machine: versions, ports, name lookups, network interfaces


def test_versions_equal_those_of_the_installed_packages() -> None:
    found = versions.versions()
    assert found["hpcdist"] == hpcdist.__version__
    assert found["source"] == versions.source_digest(str(Path(hpcdist.__file__).parent))
    # The version file is executed, because importing torch takes a second.
    torch = runpy.run_path(str(distribution("torch").locate_file("torch/version.py")))
    assert found["torch"] == torch["__version__"]
    assert found.get("cuda") == torch["cuda"], "the file also contains the name cuda in its list of exports"
    if torch["cuda"]:
        assert found["nccl"] == distribution(f"nvidia-nccl-cu{torch['cuda'].partition('.')[0]}").version


def test_digest_of_a_wheel_equals_that_of_the_checkout(tmp_path: Path) -> None:
    package = tmp_path / "hpcdist"
    package.mkdir()
    (package / "module.py").write_text("x = 1")
    checkout = versions.source_digest(str(package))
    programs = package / "examples" / "tutorials"  # a wheel has them inside of the package
    programs.mkdir(parents=True)
    (programs / "ddp.py").write_text("y = 2")
    assert versions.source_digest(str(package)) == checkout
    (package / "module.py").write_text("x = 2")
    assert versions.source_digest(str(package)) != checkout


# --- The GPU facts against a replacement for NVML, since test machines have no GPU


def memory(used_mb: int, total_mb: int) -> SimpleNamespace:
    return SimpleNamespace(used=used_mb << 20, total=total_mb << 20)


IDLE = gpu("NVIDIA H200", MemoryInfo=memory(4, 143771), TotalEccErrors=0, CurrentClocksEventReasons=0x01)
BROKEN = gpu(
    "NVIDIA H200",
    MemoryInfo=memory(90210, 143771),
    TotalEccErrors=2,
    CurrentClocksEventReasons=0xC4,
    ComputeRunningProcesses=[SimpleNamespace(pid=4711), SimpleNamespace(pid=4712)],
    UtilizationRates=SimpleNamespace(gpu=3),
)
WITHOUT_ECC = gpu(
    "NVIDIA GeForce RTX 4090",
    MemoryInfo=memory(12, 24564),
    CurrentClocksEventReasons=0,
    UtilizationRates=SimpleNamespace(gpu=0),
)
#: NVML reports the memory and processes of the slices instead.
IN_MIG_MODE_NAME = "NVIDIA A100-SXM4-40GB"
IN_MIG_MODE = gpu(IN_MIG_MODE_NAME)


def test_gpus_have_memory_errors_throttling_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_nvml(monkeypatch, IDLE, BROKEN, WITHOUT_ECC, IN_MIG_MODE)
    idle, broken, without_ecc, in_mig_mode = gpu_info.gpus()
    assert idle == Gpu(index=0, name="NVIDIA H200", used_mb=4, total_mb=143771, uncorrected_errors=0)
    assert (broken.used_mb, broken.uncorrected_errors, broken.pids) == (90210, 2, (4711, 4712))
    assert broken.throttled == ("too hot (hardware slowdown)", "power brake"), "the power cap 0x04 is normal"
    assert [one.busy for one in (idle, broken, without_ecc)] == [False, True, False]
    assert (without_ecc.total_mb, without_ecc.uncorrected_errors) == (24564, None)
    assert in_mig_mode == Gpu(index=3, name=IN_MIG_MODE_NAME, used_mb=None, total_mb=None, uncorrected_errors=None)


def test_lost_gpus_are_not_listed_and_others_keep_their_index(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_nvml(monkeypatch, IDLE, None, {}, BROKEN)
    assert [one.index for one in gpu_info.gpus()] == [0, 3]
    assert count_gpus() == 3, "the third GPU fails later than the second"


def test_machine_without_a_driver_that_answers_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeNvml) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    install_fake_nvml(monkeypatch, IDLE)
    monkeypatch.setattr(FakeNvml, "nvmlInit", fail)
    monkeypatch.setattr(gpu_info, "versions", dict)  # a real driver of this machine has its version in /proc
    assert (gpu_info.gpus(), count_gpus(), driver_version()) == ([], 0, "")
    answered = threading.Event()
    monkeypatch.setattr(FakeNvml, "nvmlInit", lambda self: answered.wait())
    monkeypatch.setattr(gpu_info, "DRIVER_S", 0.01)
    assert (gpu_info.gpus(), count_gpus()) == ([], 0)
    answered.set()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an environment of ranks with torch, NumPy and psutil only
    assert gpu_info.open_gpus() == {}


@pytest.mark.parametrize(
    ("value", "selected", "visible"),
    [
        (None, None, 2),
        ("", [], 0),
        ("2,", ["2"], 1),
        ("MIG-GPU-8932f937/1/2,MIG-5c4b,MIG-77e2", ["MIG-GPU-8932f937/1/2", "MIG-5c4b", "MIG-77e2"], 3),
    ],
)
def test_cuda_visible_devices_selects_gpus(
    value: str | None, selected: list[str] | None, visible: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert selected_gpus(env) == selected
    assert visible_gpus(2, env) == visible
    monkeypatch.setattr(gpu_info, "gpus", lambda: [SimpleNamespace(name="A100")] * 2)
    is_mig = any(item.startswith("MIG") for item in selected or ())
    assert visible_devices(env) == ("" if is_mig else f"{visible} × A100" if visible else "CPU")


# --- The identity of the image that a process runs in.
def test_facts_come_from_the_environment_and_files_of_the_image(tmp_path: Path) -> None:
    (tmp_path / "build-id").write_text("abc\n")
    env = {"HPCDIST_IMAGE": "hpcdist", "HPCDIST_IMAGE_DIGEST": "sha256:0"}
    assert image_facts({}, tmp_path / "absent", tmp_path / "absent", tmp_path) == {}
    (tmp_path / "base-image").write_text("sha256:1\n")
    (tmp_path / ".dockerenv").touch()
    assert image_facts(env, tmp_path / "build-id", tmp_path / "base-image", tmp_path) == {
        "image": "hpcdist",
        "image_digest": "sha256:0",
        "image_build": "abc",
        "image_base": "sha256:1",
        "container_runtime": "docker",
    }


@pytest.mark.parametrize(
    ("mark", "root_mount", "runtime"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("etc/hosts", "", ""),
        # A virtual machine whose disk was made of an image of docker.
        (".dockerenv", "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw", ""),
        (".dockerenv", "540 430 0:30 / / rw - overlay overlay rw,lowerdir=/a", "docker"),
        (".dockerenv", "540 430 254:0 /var/lib/docker/vfs/dir/0a / rw - ext4 /dev/vda rw", "docker"),
    ],
)
def test_runtime_is_known_by_its_files_and_mounts(tmp_path: Path, mark: str, root_mount: str, runtime: str) -> None:
    (tmp_path / mark).parent.mkdir(exist_ok=True)
    (tmp_path / mark).touch()
    if root_mount:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/mountinfo").write_text(f"22 27 0:21 / /proc rw - proc proc rw\n{root_mount}\n")
    assert container_runtime(tmp_path) == runtime


# --- The check for a compiler and headers, which torch.compile needs


@pytest.fixture
def host_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that is both PATH and the folder of headers."""
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("device", "installed", "missing"),
    [
        ("cpu", (), "a C++ compiler (g++) and Python's headers (Python.h)"),
        ("cuda", ("g++", "Python.h"), "a C compiler (gcc)"),
        ("cpu", ("g++", "Python.h"), ""),
        ("cuda", ("clang", "Python.h"), ""),
    ],
)
def test_missing_parts_are_named(host_machine: Path, device: str, installed: tuple[str, ...], missing: str) -> None:
    for name in installed:
        (host_machine / name).touch(mode=0o755)
    env = {"PATH": str(host_machine)}
    if missing:
        with pytest.raises(ConfigError) as raised:
            require_compiler(device, env)
        fix = "use an image of the target `default` instead of `slim`, or set model.compile=false"
        problem = f"model.compile=true needs {missing}, not found here"
        assert str(raised.value) == f"{problem}: install g++ and libpython3-dev, {fix}"
    else:
        require_compiler(device, env)
        (host_machine / "mine").touch(mode=0o755)
        require_compiler(device, {**env, "CXX": "mine -O1", "CC": "mine"})
        with pytest.raises(ConfigError, match="needs a C"):
            require_compiler(device, {**env, "CXX": "absent", "CC": "absent"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can plant a folder of another user")
def test_cache_that_another_user_may_have_filled_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)
    run, ours, planted = tmp_path / "run", tmp_path / "torchinductor_0", tmp_path / "torchinductor_root"
    default = {"TORCHINDUCTOR_CACHE_DIR": str(planted)}
    elsewhere = {"TORCHINDUCTOR_CACHE_DIR": "/var/tmp/torchinductor_root"}
    assert cache_environment({"TORCHINDUCTOR_CACHE_DIR": "/data/cache"}, run) == {}
    for _ in range(2):  # the second run finds the cache of the first
        for env in ({}, default, elsewhere):
            assert cache_environment(env, run) == {"TORCHINDUCTOR_CACHE_DIR": str(ours)}
        assert ours.stat().st_mode & 0o777 == 0o700
    in_run = {"TORCHINDUCTOR_CACHE_DIR": str(run / "torchinductor")}
    ours.chmod(0o777)
    assert cache_environment({}, run) == in_run
    ours.chmod(0o700)
    os.chown(ours, 65534, 65534)
    assert cache_environment({}, run) == in_run
    ours.rmdir()
    ours.symlink_to(tmp_path)
    os.lchown(ours, 65534, 65534)
    assert cache_environment({}, run) == in_run


# --- Bandwidths and units that ranks and benchmark share.


def test_bandwidths_of_four_ranks_equal_those_of_nccl_tests() -> None:
    """https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    factors = {"all_reduce": 2 * 3 / 4}
    factors |= dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all", "scatter", "gather"), 3 / 4)
    factors |= dict.fromkeys(("broadcast", "reduce", "send_recv", "isend_irecv"), 1)
    for operation, factor in factors.items():
        assert bandwidths(operation, 1000, 0.5, 4) == (2000, 2000 * factor), operation


def test_units() -> None:
    assert [amount(value) for value in (1, 1000, 1024, 1536, 2**28, 2**40)] == [
        "1 B", "1000 B", "1 KiB", "1.5 KiB", "256 MiB", "1024 GiB",
    ]  # fmt: skip
    assert [seconds(value) for value in (8.31e-6, 1.2e-4, 9.999e-4, 0.5, 75.0, 1234.0)] == [
        "8.31 µs", "120 µs", "1.00 ms", "500 ms", "75.0 s", "1234 s",
    ]  # fmt: skip
    assert [rate(value) for value in (0.0, 512, 2.51e7, 9.999e8, 1.2e11)] == [
        "0.00 B/s", "512 B/s", "25.1 MB/s", "1.00 GB/s", "120 GB/s",
    ]  # fmt: skip
    assert rate(9.8e8, 1.31e9) == "0.980 / 1.31 GB/s"


# --- Commands with a time limit.


@pytest.mark.processes
@pytest.mark.parametrize("is_cut", [False, True])
def test_hanging_command_is_ended_with_its_children(tmp_path: Path, is_cut: bool) -> None:
    """The output is available although a leftover child process holds it open."""
    script = f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/pid; echo early; wait; sleep 1000"
    began = time.monotonic()
    done = run_within(["sh", "-c", script], 1000 if is_cut else 3, is_enough="early\n".__eq__ if is_cut else None)
    assert time.monotonic() - began < 500
    assert (done.returncode, done.stdout) == (-1, "early\n")
    assert done.stderr == ("" if is_cut else "\nno answer within 3 s\n")
    child = int((tmp_path / "pid").read_text())
    wait_for(lambda: has_ended(child), "the killed child to end")


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- Energy counters: NVML and RAPL, here a replacement of NVML and files as the kernel writes them


def write_domain(powercap: Path, folder: str, name: str, joules: float, limit: float = 1000.0) -> Path:
    domain = powercap / folder
    domain.mkdir(parents=True, exist_ok=True)
    (domain / "name").write_text(f"{name}\n")
    (domain / "max_energy_range_uj").write_text(f"{int(limit * 1e6)}\n")
    (domain / "energy_uj").write_text(f"{int(joules * 1e6)}\n")
    return domain


def test_cpu_energy_counts_from_the_start_of_the_meter(tmp_path: Path) -> None:
    domain = write_domain(tmp_path, "intel-rapl:0", "package-0", 100)
    write_domain(tmp_path, "intel-rapl:0:0", "core", 40)  # a part of the package
    write_domain(tmp_path, "intel-rapl:0:1", "dram", 7)
    unreadable = write_domain(tmp_path, "intel-rapl:1", "package-1", 1)
    (unreadable / "energy_uj").unlink()
    meter = EnergyMeter(None, {}, powercap=tmp_path)
    assert meter.joules() == {"intel-rapl:0 package-0": 0.0, "intel-rapl:0:1 dram": 0.0}
    write_domain(tmp_path, "intel-rapl:0", "package-0", 150)
    write_domain(tmp_path, "intel-rapl:0:1", "dram", 10)
    assert meter.joules() == {"intel-rapl:0 package-0": 50.0, "intel-rapl:0:1 dram": 3.0}
    (domain / "energy_uj").unlink()  # a failed read keeps the sum
    assert meter.joules()["intel-rapl:0 package-0"] == 50.0
    write_domain(tmp_path, "intel-rapl:0", "package-0", 20)  # the counter has started again at its limit of 1000 J
    assert meter.joules()["intel-rapl:0 package-0"] == 920.0
    cpus = psutil.cpu_count() or 1
    assert EnergyMeter(None, {"SLURM_CPUS_ON_NODE": str(cpus)}, powercap=tmp_path).joules()
    shared = EnergyMeter(None, {"SLURM_CPUS_ON_NODE": str(cpus + 1)}, powercap=tmp_path)
    assert shared.joules() == {}, "other jobs on the node use energy as well"
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
