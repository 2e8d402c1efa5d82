"""The sections of `hpcdist doctor` about this machine."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hpcdist.checks import machine_checks, runtime_checks
from hpcdist.checks.machine_checks import all_gpu_checks, host_name_checks, trial_checks
from hpcdist.checks.node_facts import GIB
from hpcdist.checks.resource_checks import ResourceLimits, resource_checks
from hpcdist.checks.runtime_checks import Host
from hpcdist.host.check_result import Check
from hpcdist.host.gpu_info import Gpu


def levels(checks: Sequence[Check]) -> dict[str, str]:
    assert len({check.name for check in checks}) == len(checks), checks
    return {check.name: check.level for check in checks}


SUFFICIENT = ResourceLimits(
    cores=16,
    quota=None,
    memory_bytes=64 * GIB,
    memory_limit_bytes=None,
    shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
    max_files=65536,
    max_processes=65536,
    locked_bytes=2**60,
    rdma=True,
)


def test_each_resource_limit_is_reported() -> None:
    assert [check.sentence() for check in resource_checks(SUFFICIENT)] == [
        "cores: 16",
        "memory: 64.0 GiB",
        "shm: 32.0 GiB of 32.0 GiB free in /dev/shm",
        "limits: 65536 open files",
    ]
    limited = replace(SUFFICIENT, quota=1.0, memory_limit_bytes=GIB, shm_bytes=2**26, shm_free_bytes=2**26)
    found = resource_checks(replace(limited, max_files=256, max_processes=100, locked_bytes=2**16))
    assert set(levels(found).values()) == {"warning"}
    sentences = {check.name: check.sentence() for check in found}
    assert "16 visible, but a CPU quota of 1.0 cores" in sentences["cores"]
    assert "1.0 GiB (cgroup limit)" in sentences["memory"]
    assert "--shm-size=8g or --ipc=host" in sentences["shm"]
    assert "at most 256 (ulimit)" in sentences["open files"]
    assert "ulimit -u" in sentences["processes"]
    assert "only 0 MB may be locked in memory, and InfiniBand" in sentences["locked memory"]
    assert levels(resource_checks(replace(SUFFICIENT, shm_bytes=None)))["shm"] == "failure"
    assert levels(resource_checks(replace(SUFFICIENT, cores=1)))["cores"] == "note"
    assert "locked memory" not in levels(resource_checks(replace(SUFFICIENT, locked_bytes=2**16, rdma=False)))


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write files of /proc, /sys and /dev below another root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_lowest_limit_of_all_parent_cgroups_applies(tmp_path: Path) -> None:
    second = write_files(
        tmp_path / "v2",
        {
            "proc/self/cgroup": "0::/system.slice/slurm/job_41/step_0\n",
            "sys/fs/cgroup/system.slice/slurm/job_41/step_0/cpu.max": "max 100000\n",
            "sys/fs/cgroup/system.slice/slurm/job_41/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/system.slice/slurm/job_41/memory.max": "1073741824\n",
            "sys/fs/cgroup/system.slice/memory.max": "max\n",
        },
    )
    found = ResourceLimits.inspect(second)
    assert (found.quota, found.memory_limit_bytes, found.shm_bytes) == (1.5, GIB, None)
    cpu, memory = "sys/fs/cgroup/cpu,cpuacct/cpu.cfs", "sys/fs/cgroup/memory/memory.limit_in_bytes"
    # In a container the path is the host's, and only its last folder is mounted.
    names = {"proc/self/cgroup": "4:memory:/docker/0a1b\n3:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/\n"}
    limits = {f"{cpu}_quota_us": "50000\n", f"{cpu}_period_us": "100000\n", memory: "536870912\n"}
    found = ResourceLimits.inspect(write_files(tmp_path / "v1", names | limits))
    assert (found.quota, found.memory_limit_bytes) == (0.5, GIB // 2)
    unlimited = {f"{cpu}_quota_us": "-1\n", memory: "9223372036854771712\n"}
    found = ResourceLimits.inspect(write_files(tmp_path / "v1", unlimited))
    assert (found.quota, found.memory_limit_bytes) == (None, None)
    assert ResourceLimits.inspect().cores == len(os.sched_getaffinity(0))


H200 = Gpu(index=0, name="NVIDIA H200", used_mb=500, total_mb=143771, uncorrected_errors=0)


def test_healthy_missing_and_defective_gpus_are_told_apart() -> None:
    assert all_gpu_checks([H200], 1, 1, "580.65") == [Check(name="GPU 0", level="ok", text="NVIDIA H200, 140 GiB")]
    mig_slice = replace(H200, used_mb=None, total_mb=None, uncorrected_errors=None)
    assert all_gpu_checks([mig_slice], 1, 1, "580.65")[0].level == "ok"
    assert [check.sentence() for check in all_gpu_checks([], 0, 0, "")] == ["GPUs: none: training uses the CPUs"]
    (check,) = all_gpu_checks([], 0, 0, "", has_amd_driver=True)
    assert check.sentence().startswith("GPUs: those of AMD are not checked, and not counted: hpcdist asks NVIDIA's")
    (check,) = all_gpu_checks([], 0, 2, "550.54")
    assert (check.level, "NVML reports no GPU" in check.text) == ("warning", True)
    unhealthy = [
        replace(H200, uncorrected_errors=2),
        replace(H200, index=1, throttled=("power brake",)),
        replace(H200, index=2, used_mb=100_000, pids=(41, 42)),
    ]
    found = all_gpu_checks(unhealthy, 1, 3, "580.65")
    assert levels(found) == {"GPU 0": "failure", "GPU 1": "warning", "GPU 2": "failure", "visible": "note"}
    assert "NVIDIA H200, 140 GiB: has 2 uncorrected memory errors" in found[0].text
    assert found[1].text.endswith("is throttled: power brake")
    assert found[2].text.endswith("has 100,000 of 143,771 MB in use by process 41, 42")
    assert found[3].text == "1 of 3 according to CUDA_VISIBLE_DEVICES"


def test_name_problems_are_notes_unless_the_machine_is_a_node() -> None:
    quick: dict[str, object] = {"address": "10.0.0.7", "forward_s": 0.002, "reverse": "n7.site", "reverse_s": 0.003}
    assert [check.sentence() for check in host_name_checks("n7", quick, is_node=True)] == [
        "names: n7 → 10.0.0.7 → n7.site (2 ms, reverse 3 ms)"
    ]
    (check,) = host_name_checks("n7", quick | {"reverse": "", "reverse_error": "Unknown host"}, is_node=True)
    assert (check.level, "harmless" in check.text) == ("ok", True)
    for found, level, text in (
        ({"late": 15.0}, "warning", "looking up n7, or its address, took more than 15 s"),
        ({"error": "Name or service not known", "forward_s": 0.1}, "failure", "n7 cannot be looked up (Name or"),
        (quick | {"address": "127.0.1.1"}, "failure", "n7 resolves to 127.0.1.1"),
        (quick | {"forward_s": 5.2}, "warning", "looking up n7 took 5.2 s; torch repeats the lookup"),
    ):
        node, alone = (host_name_checks("n7", found, is_node=is_node)[0] for is_node in (True, False))
        assert node.text.startswith(text)
        assert (node.level, alone.level) == (level, "note")
        assert alone.text.endswith("runs on this machine alone are not affected")
        assert node.fix


def software(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, str], vision: str = "", requires: str = "", required: bool = True
) -> dict[str, Check]:
    """Return the results for versions of this Python's packages, by name."""
    monkeypatch.setattr(machine_checks, "version_of", lambda name: vision)
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy", requires, "pillow!=8.3.*,>=5.3.0"])
    return {
        check.name: check
        for check in machine_checks.software_checks({"python": "3.11.2", **found}, torch_required=required)
    }


def test_torch_is_required_and_must_fit_torchvision_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    for required, level in ((True, "failure"), (False, "note")):
        check = software(monkeypatch, {}, required=required)["torch"]
        assert (check.level, check.fix) == (level, "`pip install '.[train]'` in a checkout of hpcdist")
    assert check.text.startswith("not installed: ranks need container.image or cluster.environment"), "on a login node"
    cpu, cuda = {"torch": "2.15.0+cpu"}, {"torch": "2.15.0+cu132", "cuda": "13.2"}
    check = software(monkeypatch, cpu, "0.28.0", "torch==2.14.1")["torch"]
    assert (check.level, check.fix) == ("failure", machine_checks.TOGETHER)
    assert check.text == "2.15.0+cpu beside a torchvision 0.28.0 built for 2.14.1, which cannot be imported"
    assert software(monkeypatch, cpu)["torchvision"].level == "warning"
    check = software(monkeypatch, cpu | {"driver": "580.82.07"})["torch"]
    assert (check.level, "built without CUDA" in check.text) == ("warning", True)

    found = software(monkeypatch, cuda | {"driver": "580.82.07"}, "0.30.0", "torch (==2.15.0)")
    assert found["torch"].sentence() == "torch: 2.15.0+cu132, built for CUDA 13.2"
    assert found["driver"].sentence() == "driver: 580.82.07, supports CUDA 13.2"
    old = software(monkeypatch, cuda | {"driver": "550.54.15"})["driver"]
    assert old.level == "failure"
    assert "needs driver 580.65 or newer for its CUDA 13.2, found 550.54.15" in old.text


@pytest.mark.processes
def test_trial_of_two_ranks_passes_or_names_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (check,) = trial_checks("cpu", 2, os.environ)
    assert (check.name, check.level) == ("2 ranks, gloo", "ok"), check
    assert "checks passed" in check.text
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (check,) = trial_checks("cpu", 2, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (check.level, "libcudart.so.13: cannot open" in check.text) == ("failure", True), check
    (check,) = trial_checks("cuda", 1, {**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (check.name, check.level, "launch.device" in check.text) == ("1 rank, nccl", "failure", True), check
    monkeypatch.setattr(machine_checks, "TRIAL_S", 0.01)
    (check,) = trial_checks("cpu", 2, os.environ)
    assert (check.level, check.text) == ("warning", "the ranks did not end within 0.01 s")


ADA = Host(uid=1000, user="ada", has_gpus=False, subuid="ada:100000:65536\n")


def answer(output: str = "", *, errors: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, output, errors)


WORKING = {
    "docker": answer("27.1.1\n"),
    "podman": answer("podman version 4.3.1\n"),
    "apptainer": answer("apptainer version 1.3.4-1.el9\n"),
    "enroot": answer("3.5.0\n"),
    "srun": answer("      --container-image=[USER@][REGISTRY#]IMAGE\n"),
    "unshare": answer(),
}


def checks_of_runtimes(host: Host, *installed: str, **changed: subprocess.CompletedProcess[str]) -> list[Check]:
    """Return the results for the installed commands, which all work except for the changed answers."""
    answers = WORKING | changed
    return runtime_checks.runtime_checks(
        host, which=lambda name: name in installed, query=lambda command: answers[command[0]]
    )


def test_runtime_that_fails_is_a_note_beside_a_working_one() -> None:
    """Results of hpcdist's own tests are in the documentation."""
    found = checks_of_runtimes(ADA, "docker", "podman", "apptainer", "enroot", "srun")
    assert [check.sentence() for check in found] == [
        "docker: 27.1.1",
        "podman: 4.3.1",
        "apptainer: 1.3.4-1.el9",
        "enroot: 3.5.0",
        "pyxis: srun has --container-image",
    ]
    assert {check.level for check in found} == {"ok"}
    (none,) = checks_of_runtimes(ADA, "srun", srun=answer("--help"))
    assert (none.name, none.level) == ("runtimes", "note")
    assert runtime_checks.runtime_checks(ADA, expected=False, which=lambda name: None) == []
    docker, podman = checks_of_runtimes(ADA, "docker", "podman", docker=answer(code=1))
    assert (docker.level, podman.level) == ("note", "ok"), "one working runtime suffices"


DENIED = "permission denied while trying to connect to the Docker daemon socket"
NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."
OLD = {"podman": answer("podman version 3.4.4\n")}
BROKEN = {"apptainer": answer(errors="libsubid.so.4: cannot open\n", code=127)}
NO_UNSHARE = {"unshare": answer(errors="[Errno 2] No such file or directory: 'unshare'", code=-1)}
FORBIDDEN = {"unshare": answer(errors="unshare: unshare failed: Operation not permitted\n", code=1)}
NAMESPACES = "cannot create user namespaces (unshare: unshare failed"
SUID = {"apptainer": answer("apptainer version 1.4.5\nAPPTAINER_SUID_INSTALL=1\n")}
TOOLKIT = {"docker": answer('{"nvidia":{"path":"nvidia-container-runtime"}}')}


@pytest.mark.parametrize(
    ("command", "host", "changed", "level", "part"),
    [
        ("podman", {}, OLD, "warning", "3.4.4; hpcdist requires podman 4 or newer"),
        ("apptainer", {}, BROKEN, "warning", "installed, but fails: libsubid.so.4: cannot open"),
        ("docker", {}, {"docker": answer(errors=DENIED, code=1)}, "warning", "; `sudo usermod -aG docker ada`"),
        ("docker", {}, {"docker": answer(errors=NO_DAEMON, code=1)}, "warning", f"{NO_DAEMON}; start its daemon"),
        ("podman", {"subuid": "bob:100000:65536\n"}, {}, "warning", "; `sudo usermod --add-subuids"),
        ("podman", {"uid": 0, "subuid": ""}, {}, "ok", ""),
        ("podman", {}, FORBIDDEN, "warning", NAMESPACES),
        ("enroot", {}, FORBIDDEN, "warning", NAMESPACES),
        ("apptainer", {}, FORBIDDEN, "warning", NAMESPACES),
        ("apptainer", {}, FORBIDDEN | SUID, "ok", ""),
        ("podman", {}, NO_UNSHARE, "ok", ""),
        ("docker", {"has_gpus": True}, {}, "warning", "nvidia-ctk runtime configure"),
        ("docker", {"has_gpus": True}, TOOLKIT, "ok", ""),
        ("podman", {"has_gpus": True}, {}, "warning", "nvidia-ctk cdi generate"),
        ("podman", {"has_gpus": True, "cdi": True}, {}, "ok", ""),
        ("apptainer", {"has_gpus": True}, {}, "ok", ", GPUs by --nv"),
        ("apptainer", {"opens_fuse": False}, {}, "warning", "cannot start a .sif; `sudo chmod 0666 /dev/fuse`"),
        ("apptainer", {"squashfuse": False}, {}, "warning", "every rank unpacks the .sif"),
        ("apptainer", {"uid": 0, "opens_fuse": False, "squashfuse": False}, {}, "ok", ""),  # the kernel mounts it
        ("enroot", {"squashfuse": False}, {}, "warning", "cannot start a .sqsh (pyxis needs none); install squashfuse"),
    ],
)
def test_unusable_runtime_has_its_problem_and_fix(
    command: str, host: dict[str, Any], changed: dict[str, Any], level: str, part: str
) -> None:
    (check,) = checks_of_runtimes(replace(ADA, **host), command, **changed)
    assert (check.level, part in check.sentence()) == (level, True), check


def test_own_squashfuse_of_apptainer_must_not_get_slurms_signals(tmp_path: Path) -> None:
    own = tmp_path / "apptainer/bin/squashfuse_ll"
    own.parent.mkdir(parents=True)
    own.touch()
    bundled = answer(f"apptainer version 1.4.5\nLIBEXECDIR={tmp_path}\n")
    for proctrack, level in (("", "ok"), ("cgroup", "ok"), ("linuxproc", "warning")):
        host = replace(ADA, squashfuse=False, proctrack=proctrack)
        (check,) = checks_of_runtimes(host, "apptainer", apptainer=bundled)
        assert check.level == level
    assert f"proctrack/linuxproc signals {own}" in check.text


@pytest.mark.processes
def test_hanging_and_missing_commands_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runtime_checks, "COMMAND_TIMEOUT_S", 0.01)
    hanging = runtime_checks.run_command(["/bin/sleep", "60"])
    assert (hanging.returncode, hanging.stderr.strip()) == (-1, "no answer within 0.01 s")
    assert runtime_checks.run_command(["podman"]).returncode == -1
