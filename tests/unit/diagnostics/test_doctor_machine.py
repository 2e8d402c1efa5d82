"""Tests of the sections of `hpcdist doctor` about this machine."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.containers.recorded_tests import FAULTS, RECORDED
from hpcdist.containers.runtimes import RUNTIMES
from hpcdist.diagnostics.doctor import container_runtimes, software
from hpcdist.diagnostics.doctor import runs_folder as folder
from hpcdist.diagnostics.doctor.container_checks import container_checks, in_container
from hpcdist.diagnostics.doctor.container_runtimes import Host
from hpcdist.diagnostics.doctor.gpu_checks import gpu_checks
from hpcdist.diagnostics.doctor.host_name import host_name_checks
from hpcdist.diagnostics.doctor.resource_limits import ResourceLimits, resource_checks
from hpcdist.diagnostics.doctor.runs_folder import GIB, folder_checks
from hpcdist.machine.check import Check
from hpcdist.machine.gpus import Gpu


def levels(checks: Sequence[Check]) -> dict[str, str]:
    assert len({check.name for check in checks}) == len(checks), checks
    return {check.name: check.level for check in checks}


# --- cores, memory, limits

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


def test_sufficient_resources_are_ok() -> None:
    assert [check.sentence() for check in resource_checks(SUFFICIENT)] == [
        "cores: 16",
        "memory: 64.0 GiB",
        "shared memory: 32.0 GiB of 32.0 GiB free in /dev/shm",
        "limits: 65536 open files",
    ]


def test_each_resource_limit_is_reported() -> None:
    limited = replace(
        SUFFICIENT,
        quota=1.0,
        memory_limit_bytes=GIB,
        shm_bytes=2**26,
        shm_free_bytes=2**26,
        max_files=256,
        max_processes=100,
        locked_bytes=2**16,
    )
    found = resource_checks(limited)
    assert set(levels(found).values()) == {"warning"}
    sentences = {check.name: check.sentence() for check in found}
    assert "16 visible, but a CPU quota of 1.0 cores" in sentences["cores"]
    assert "1.0 GiB (cgroup limit)" in sentences["memory"]
    assert "--ipc=host or --shm-size" in sentences["shared memory"]
    assert "at most 256 (ulimit)" in sentences["open files"]
    assert "ulimit -u" in sentences["processes"]
    assert "at most 64 KiB may be locked, and InfiniBand" in sentences["locked memory"]
    assert levels(resource_checks(replace(SUFFICIENT, shm_bytes=None)))["shared memory"] == "failure"
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
    first = write_files(
        tmp_path / "v1",
        {
            # In a container the path is the host's, and only its last folder is mounted.
            "proc/self/cgroup": "4:memory:/docker/0a1b\n3:cpu,cpuacct:/docker/0a1b\n1:name=systemd:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
        },
    )
    found = ResourceLimits.inspect(first)
    assert (found.quota, found.memory_limit_bytes) == (0.5, GIB // 2)
    unlimited = write_files(
        tmp_path / "none",
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    found = ResourceLimits.inspect(unlimited)
    assert (found.quota, found.memory_limit_bytes) == (None, None)
    assert ResourceLimits.inspect().cores == len(os.sched_getaffinity(0))


# --- this container


def test_complete_container_shows_its_image(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"run/.containerenv": "", "proc/driver/nvidia/version": "NVRM", "dev/nvidia0": ""})
    assert in_container(root)
    image = {"image": "localhost/hpcdist", "image_build": "abc"}
    assert container_checks(image, {"HOME": str(tmp_path), "USER": "ada"}, root) == [
        Check(name="image", level="ok", text="localhost/hpcdist build abc")
    ]


def test_missing_gpus_home_and_user_name_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_container(tmp_path)
    root = write_files(tmp_path, {".dockerenv": "", "proc/driver/nvidia/version": "NVRM"})
    assert in_container(root)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    found = container_checks({}, {"HOME": "/nowhere"}, root)
    assert levels(found) == {"image": "note", "GPUs": "warning", "home": "note", "user": "note"}
    assert "docker: --gpus all" in found[1].fix
    assert found[2].text.startswith("/nowhere is not writable")


# --- GPUs

H200 = Gpu(index=0, name="NVIDIA H200", used_mb=500, total_mb=143771, uncorrected_errors=0)


def test_healthy_gpus_and_mig_slices_are_ok() -> None:
    assert gpu_checks([H200], 1, 1, "580.65") == [Check(name="GPU 0", level="ok", text="NVIDIA H200, 140 GiB")]
    mig_slice = replace(H200, used_mb=None, total_mb=None, uncorrected_errors=None)
    assert gpu_checks([mig_slice], 1, 1, "580.65")[0].level == "ok"


def test_memory_errors_throttling_and_use_of_gpus_are_reported() -> None:
    unhealthy = [
        replace(H200, uncorrected_errors=2),
        replace(H200, index=1, throttled=("power brake",)),
        replace(H200, index=2, used_mb=100_000, pids=(41, 42)),
    ]
    found = gpu_checks(unhealthy, 1, 3, "580.65")
    assert levels(found) == {"GPU 0": "warning", "GPU 1": "warning", "GPU 2": "warning", "visible": "note"}
    assert "2 uncorrected memory errors (ECC)" in found[0].text
    assert found[1].text.endswith("throttled, power brake")
    assert found[2].text.endswith("97.7 GiB in use by process 41, 42")
    assert found[3].text == "1 of 3 according to CUDA_VISIBLE_DEVICES"


def test_missing_gpus_are_a_note_and_with_a_driver_a_warning() -> None:
    assert [check.sentence() for check in gpu_checks([], 0, 0, "")] == ["GPUs: none: training uses the CPUs"]
    (check,) = gpu_checks([], 0, 2, "550.54")
    assert (check.level, "NVML reports no GPU" in check.text) == ("warning", True)


# --- host name


def test_name_that_resolves_both_ways_is_ok() -> None:
    found = {"address": "10.0.0.7", "forward_s": 0.002, "reverse": "n7.site", "reverse_s": 0.003}
    assert [check.sentence() for check in host_name_checks("n7", found, is_node=True)] == [
        "own name: n7 → 10.0.0.7 (2 ms)",
        "reverse: 10.0.0.7 → n7.site (3 ms)",
    ]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"late": 15.0}, "the resolver gave no answer for n7 within 15 s"),
        ({"error": "Name or service not known", "forward_s": 0.1}, "n7 does not resolve here (Name or service"),
        ({"address": "127.0.1.1", "forward_s": 0.0, "reverse": "n7", "reverse_s": 0.0}, "n7 resolves to 127.0.1.1"),
        (
            {"address": "10.0.0.7", "forward_s": 5.2, "reverse": "n7", "reverse_s": 0.0},
            "n7 → 10.0.0.7 takes 5.2 s, and each rank looks it up",
        ),
    ],
)
def test_name_problems_are_warnings_on_nodes_and_notes_elsewhere(found: dict[str, object], text: str) -> None:
    node, alone = host_name_checks("n7", found, is_node=True)[0], host_name_checks("n7", found, is_node=False)[0]
    assert node.text.startswith(text)
    assert (node.level, alone.level) == ("warning", "note")
    assert alone.text.endswith("runs on this machine alone are not affected")
    assert node.fix


def test_slow_reverse_lookup_is_a_warning() -> None:
    found = {"address": "10.0.0.7", "forward_s": 0.0, "reverse_error": "Unknown host", "reverse_s": 10.0}
    slow = host_name_checks("n7", found, is_node=True)[1]
    assert (slow.level, "takes 10.0 s and fails (Unknown host)" in slow.text) == ("warning", True)
    quick = host_name_checks("n7", found | {"reverse_s": 0.01}, is_node=True)[1]
    assert (quick.level, "harmless" in quick.text) == ("ok", True)


# --- container runtimes

ADA = Host(uid=1000, user="ada", has_gpus=False, subuid="ada:100000:65536\n")


def answer(output: str = "", *, errors: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], code, output, errors)


WORKING = {
    "docker": answer("27.1.1\n"),
    "podman": answer("podman version 4.3.1\n"),
    "apptainer": answer("apptainer version 1.3.4-1.el9\n"),
    "singularity": answer("singularity-ce version 4.1.0\n"),
    "enroot": answer("3.5.0\n"),
    "ch-run": answer(errors="0.31\n"),
    "srun": answer("      --container-image=[USER@][REGISTRY#]IMAGE\n"),
    "scontrol": answer(),
    "unshare": answer(),
}


def checks_of_runtimes(host: Host, *installed: str, **changed: subprocess.CompletedProcess[str]) -> list[Check]:
    """Return the results for the installed commands, which all work except for the changed answers."""
    answers = WORKING | changed
    return container_runtimes.runtime_checks(
        host, which=lambda name: name in installed, query=lambda command: answers[command[0]]
    )


def passed(runtime: str) -> str:
    """Return doctor's text about the recorded tests of a runtime."""
    texts = []
    for one in RECORDED:
        if one.runtime == runtime:
            image = f" with a {one.image} image" if one.image else ""
            where = f" on Slurm {one.slurm} with proctrack/{one.proctrack} as {one.user}"
            texts.append(f"{len(one.passed)} of {len(FAULTS)} tests{image}{where}")
    return f"passed {', '.join(texts)}"


def test_each_installed_runtime_has_a_line() -> None:
    found = checks_of_runtimes(ADA, "docker", "podman", "apptainer", "singularity", "enroot", "ch-run", "srun")
    assert [check.sentence() for check in found] == [
        "docker: 27.1.1; no test with this release is recorded (tested: 20.10.24)",
        f"podman: 4.3.1; {passed('podman')}",
        "apptainer: 1.3.4-1.el9; no test with this release is recorded (tested: 1.4.5)",
        "enroot: 3.5.0; no test with this release is recorded (tested: 4.1.2)",
        f"charliecloud: 0.31; {passed('charliecloud')}",
        "pyxis: srun has --container-image",
    ]
    assert {check.level for check in found} == {"ok"}


def test_missing_runtimes_are_a_note_and_missing_pyxis_is_not_reported() -> None:
    (none,) = checks_of_runtimes(ADA, "srun", srun=answer("--help"))
    assert (none.name, none.level) == ("runtimes", "note")
    assert container_runtimes.runtime_checks(ADA, expected=False, which=lambda name: None) == []


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        ("permission denied while trying to connect to the Docker daemon socket", "`sudo usermod -aG docker ada`"),
        ("Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", "start its daemon"),
    ],
)
def test_unusable_docker_has_a_fix(error: str, fix: str) -> None:
    broken = answer(errors=f"{error}\n", code=1)
    (check,) = checks_of_runtimes(ADA, "docker", docker=broken)
    assert (check.level, error in check.text, check.fix.startswith(fix)) == ("warning", True, True)
    docker, podman = checks_of_runtimes(ADA, "docker", "podman", docker=broken)
    assert (docker.level, podman.level) == ("note", "ok"), "one working runtime suffices"


def test_rootless_runtimes_need_subordinate_ids_and_user_namespaces() -> None:
    (check,) = checks_of_runtimes(replace(ADA, subuid="bob:100000:65536\n"), "podman")
    assert (check.level, check.fix.startswith("`sudo usermod --add-subuids")) == ("warning", True)
    assert checks_of_runtimes(replace(ADA, uid=0, subuid=""), "podman")[0].level == "ok"
    forbidden = answer(errors="unshare: unshare failed: Operation not permitted\n", code=1)
    for tool in ("podman", "enroot", "ch-run"):
        (check,) = checks_of_runtimes(ADA, tool, unshare=forbidden)
        assert (check.level, "user namespaces (unshare: unshare failed" in check.text) == ("warning", True), tool
    missing = answer(errors="[Errno 2] No such file or directory: 'unshare'", code=-1)
    assert checks_of_runtimes(ADA, "podman", unshare=missing)[0].level == "ok", "without unshare the test is skipped"


def test_gpus_in_containers_need_the_nvidia_toolkit() -> None:
    host = replace(ADA, has_gpus=True)
    (docker,) = checks_of_runtimes(host, "docker")
    assert (docker.level, "nvidia-ctk runtime configure" in docker.fix) == ("warning", True)
    (podman,) = checks_of_runtimes(host, "podman")
    assert (podman.level, "nvidia-ctk cdi generate" in podman.fix) == ("warning", True)
    assert [check.level for check in checks_of_runtimes(replace(host, cdi=True), "docker", "podman")] == ["ok", "ok"]
    with_runtime = answer('{"nvidia":{"path":"nvidia-container-runtime"}}')
    assert checks_of_runtimes(host, "docker", docker=with_runtime)[0].level == "ok"
    assert ", GPUs by --nv; " in checks_of_runtimes(host, "apptainer")[0].text


def test_recorded_tests_of_the_release_are_named() -> None:
    (docker,) = checks_of_runtimes(ADA, "docker", docker=answer("20.10.5+dfsg1\n"))
    assert docker.text == f"20.10.5+dfsg1; {passed('docker')}"
    (apptainer,) = checks_of_runtimes(ADA, "apptainer", apptainer=answer("apptainer version 1.4.0\n"))
    assert "tests with a folder image on Slurm " in apptainer.text
    assert "tests with a .sif image on Slurm " in apptainer.text


def test_old_runtime_is_a_warning() -> None:
    (check,) = checks_of_runtimes(ADA, "podman", podman=answer("podman version 3.4.4\n"))
    assert (check.level, check.text) == ("warning", "3.4.4; hpcdist requires podman 4 or newer")


def test_properties_that_matter_on_slurm_are_named() -> None:
    on_slurm = replace(ADA, proctrack="cgroup")
    assert "outside of Slurm's cgroups" in checks_of_runtimes(on_slurm, "docker")[0].text
    assert "`:ro` is rejected" in checks_of_runtimes(on_slurm, "ch-run")[0].text
    assert checks_of_runtimes(ADA, "ch-run")[0].text == f"0.31; {passed('charliecloud')}"


def test_recorded_tests_name_runtimes_and_faults_of_the_matrix() -> None:
    for one in RECORDED:
        assert set(one.passed) <= set(FAULTS)
    assert {one.runtime for one in RECORDED} == {*RUNTIMES, "pyxis"}


def test_apptainer_of_a_user_needs_namespaces_and_squashfuse(tmp_path: Path) -> None:
    forbidden = answer(errors="unshare: unshare failed: Operation not permitted\n", code=1)
    (check,) = checks_of_runtimes(ADA, "apptainer", unshare=forbidden)
    assert (check.level, "user namespaces (unshare: unshare failed" in check.text) == ("warning", True)
    suid = answer("apptainer version 1.4.5\nAPPTAINER_SUID_INSTALL=1\n")
    assert checks_of_runtimes(ADA, "apptainer", unshare=forbidden, apptainer=suid)[0].level == "ok"

    (check,) = checks_of_runtimes(replace(ADA, opens_fuse=False), "apptainer")
    assert (check.level, "cannot start a .sif" in check.text) == ("warning", True)
    (check,) = checks_of_runtimes(replace(ADA, squashfuse=False), "apptainer")
    assert (check.level, "every rank unpacks the .sif" in check.text) == ("warning", True)
    own = tmp_path / "apptainer/bin/squashfuse_ll"
    own.parent.mkdir(parents=True)
    own.touch()
    bundled = answer(f"apptainer version 1.4.5\nLIBEXECDIR={tmp_path}\n")
    assert checks_of_runtimes(replace(ADA, squashfuse=False), "apptainer", apptainer=bundled)[0].level == "ok"
    (check,) = checks_of_runtimes(replace(ADA, proctrack="linuxproc"), "apptainer", apptainer=bundled)
    assert (check.level, f"proctrack/linuxproc signals {own}" in check.text) == ("warning", True)
    assert checks_of_runtimes(replace(ADA, proctrack="cgroup"), "apptainer", apptainer=bundled)[0].level == "ok"


def test_enroot_needs_squashfuse_for_a_sqsh() -> None:
    for host in (replace(ADA, opens_fuse=False), replace(ADA, squashfuse=False), replace(ADA, uid=0, squashfuse=False)):
        (check,) = checks_of_runtimes(host, "enroot")
        assert (check.level, "start a .sqsh" in check.text) == ("warning", True)
        assert check.fix.endswith("or use a folder: `hpcdist image convert --to dir`")


def test_version_of_pyxis_is_read_from_the_plugin(tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    plugin = tmp_path / "plugins/spank_pyxis.so"
    plugin.write_bytes(b"\x7fELF\0pyxis: failed\0pyxis: version v0.24.0\0")
    (tmp_path / "plugstack.conf").write_text("# pyxis\nrequired other.so\ninclude plugstack.conf.d/*\n")
    (tmp_path / "plugstack.conf.d").mkdir()
    (tmp_path / "plugstack.conf.d/pyxis.conf").write_text("required spank_pyxis.so runtime_path=/run/pyxis\n")
    settings = answer(f"PluginDir = {plugin.parent}\nSLURM_CONF = {tmp_path}/slurm.conf\n")
    (check,) = checks_of_runtimes(ADA, "srun", scontrol=settings)
    assert check.sentence() == f"pyxis: 0.24.0; {passed('pyxis')}"
    plugin.write_bytes(b"pyxis: version v0.15.0\0")
    assert checks_of_runtimes(ADA, "srun", scontrol=settings)[0].text.startswith("0.15.0; no test with this release")
    plugin.unlink()
    assert checks_of_runtimes(ADA, "srun", scontrol=settings)[0].text == "srun has --container-image"


def test_apptainer_of_a_root_without_all_capabilities_has_a_fix() -> None:
    root = replace(ADA, uid=0, opens_fuse=False, squashfuse=False)
    assert checks_of_runtimes(root, "apptainer")[0].level == "ok", "the kernel mounts the image"
    (check,) = checks_of_runtimes(replace(root, lacks_capability=True), "apptainer")
    assert (check.level, check.fix) == ("warning", "`export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE`")


def test_singularity_without_apptainer_command_is_a_note() -> None:
    (check,) = checks_of_runtimes(ADA, "singularity")
    assert (check.level, "container.runtime=apptainer calls `apptainer`" in check.text) == ("note", True)


@pytest.mark.processes
def test_failing_and_hanging_runtimes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enroot").write_text("#!/bin/sh\nread -r line\n")
    (tmp_path / "enroot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(container_runtimes, "TIMEOUT_S", 0.01)
    hanging = container_runtimes.run_command(["/bin/sleep", "60"])
    assert (hanging.returncode, hanging.stderr.strip()) == (-1, "no answer within 0.01 s")
    assert container_runtimes.run_command(["podman"]).returncode == -1
    (check,) = checks_of_runtimes(ADA, "apptainer", apptainer=answer(errors="libsubid.so.4: cannot open\n", code=127))
    assert (check.level, check.text) == ("warning", "installed, but fails: libsubid.so.4: cannot open")


# --- the folder of runs


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the speed, which writes for two seconds."""
    monkeypatch.setattr(folder.storage, "write_speed", lambda *_: 2.0**30)


@pytest.mark.processes
def test_local_folder_is_ok(tmp_path: Path) -> None:
    found = folder_checks(tmp_path / "runs")
    assert levels(found) == dict.fromkeys(("runs", "file system", "space", "files", "writing"), "ok") | {
        "writing": found[3].level
    }
    assert found[0].text == f"{tmp_path}/runs (the first run creates it)"
    assert list(tmp_path.iterdir()) == [], "the check creates nothing"


def test_folder_without_write_permission_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.os, "access", lambda path, mode: False)  # root may write everywhere
    (check,) = folder_checks(tmp_path)
    me = os.getuid()
    assert check.level == "failure"
    assert check.text == (
        f"{tmp_path} belongs to {tmp_path.owner()} ({me}) and cannot be written by user {me}: a run would fail"
    )
    assert check.fix == "set another folder by --runs-dir or HPCDIST_RUNS_DIR"
    (check,) = folder_checks(tmp_path, in_container=True)
    assert check.fix.startswith("start the container with --user $(id -u):$(id -g); or set another")


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
def test_folder_or_database_of_others_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow.db").touch(mode=0o600)
    tmp_path.chmod(0o775)
    (tmp_path / "mlflow.db").chmod(0o640)
    folder_check, database_check = folder_checks(tmp_path)[1:3]
    assert (folder_check.name, folder_check.level) == ("owner", "warning")
    assert f"group or others may write to {tmp_path} (mode 0775)" in folder_check.text
    assert folder_check.fix == f"chmod go-w {tmp_path}"
    assert (database_check.name, database_check.level) == ("database", "warning")
    assert database_check.fix == f"chmod 600 {tmp_path}/mlflow.db"
    monkeypatch.setattr(folder, "foreign_owner", lambda path: "user bob" if path.name == "mlflow.db" else None)
    (check,) = (check for check in folder_checks(tmp_path) if check.name == "owner")
    assert (check.level, check.text) == (
        "failure",
        f"the database {tmp_path}/mlflow.db belongs to user bob: runs are refused,"
        " because a folder of runs has a single owner",
    )
    assert "share results by an MLflow server" in check.fix


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
def test_folder_in_the_container_layer_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.storage, "mount_of", lambda path: ("overlay", "overlay"))
    monkeypatch.setattr(folder, "is_in_container_layer", lambda place: True)
    check = folder_checks(tmp_path, in_container=True)[1]
    assert (check.level, check.fix) == ("warning", f"mount a folder: -v $PWD/runs:{tmp_path}")
    assert folder_checks(tmp_path)[1].level == "ok"
    monkeypatch.setattr(folder, "is_in_container_layer", lambda place: False)
    assert folder_checks(tmp_path, in_container=True)[1].level == "ok"


def test_read_only_file_system_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, num_bytes: int, limit_s: float) -> float:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(folder.storage, "write_speed", fail)
    found = folder_checks(tmp_path)
    assert levels(found)["writing"] == "failure"
    assert "could not be written (Read-only file system)" in found[-1].text


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("space", "level", "text"),
    [
        ({"free": 0, "total": 100 * GIB}, "failure", "0.0 GiB free of 100.0: a run would fail"),
        ({"free": GIB, "total": 100 * GIB}, "warning", "checkpoints may not fit"),
        ({"free": 50 * GIB, "total": 100 * GIB, "free_files": 12}, "warning", "only 12 more files (inodes)"),
        ({"free": 50 * GIB, "total": 100 * GIB, "free_files": 10**6}, "ok", "50.0 GiB free of 100.0"),
    ],
)
def test_little_space_is_reported(
    space: dict[str, int], level: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.storage, "space", lambda path: space)
    check = next(check for check in folder_checks(tmp_path) if check.name == "space")
    assert (check.level, text in check.text) == (level, True)


@pytest.mark.processes
@pytest.mark.usefixtures("fast_disk")
def test_file_system_without_posix_guarantees_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(folder.storage, "rename_problem", lambda path: "a reader saw no file")
        patch.setattr(folder.storage, "exclusive_problem", lambda path: "the same file was created twice")
        found = levels(folder_checks(tmp_path))
    assert found["replacing"] == found["making once"] == "failure"
    monkeypatch.setattr(folder.storage, "lock_problem", lambda path: "No locks available")
    assert levels(folder_checks(tmp_path))["locks"] == "warning"


@pytest.mark.processes
@pytest.mark.usefixtures("fast_disk")
@pytest.mark.parametrize(("offset_s", "text"), [(40.0, "40 s ahead of this"), (-40.0, "40 s behind this")])
def test_clock_of_the_file_server_is_compared(
    offset_s: float, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "clock_offset", lambda path: offset_s)
    clock = folder_checks(tmp_path)[-1]
    assert (clock.name, clock.level, text in clock.text) == ("clock", "warning", True)


@pytest.mark.processes
def test_slow_file_system_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.storage, "write_speed", lambda *_: 2.0**20)
    speed = folder_checks(tmp_path)[3]
    assert (speed.level, "1 MiB/s" in speed.text) == ("note", True)


@pytest.mark.usefixtures("fast_disk")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "on_cluster", "level", "text"),
    [
        ("nfs4", True, "ok", "nfs4 (server:/home): other machines may see it"),
        ("", True, "ok", "of unknown type (server:/home): unknown whether other machines see it"),
        ("ext4", False, "ok", "of this machine"),
        ("ext4", True, "warning", "Slurm's nodes must see it"),
        ("tmpfs", True, "warning", "each machine has its own: Slurm's nodes must see it"),
    ],
)
def test_local_file_system_on_a_cluster_is_a_warning(
    kind: str, on_cluster: bool, level: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder.storage, "mount_of", lambda path: (kind, "server:/home"))
    check = folder_checks(tmp_path, on_cluster=on_cluster)[1]
    assert (check.level, text in check.text) == (level, True), check


# --- installed software


@pytest.mark.processes
def test_installed_python_and_checkout_are_ok() -> None:
    found = software.software_checks(torch_required=True, cuda="", driver="")
    assert levels(found) == {"Python": "ok", "hpcdist": "ok"}


@pytest.mark.processes
def test_old_python_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "OLDEST_PYTHON", (3, 99))
    assert software.software_checks(torch_required=True, cuda="", driver="")[0].level == "failure"


def set_installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], requires: dict[str, list[str]]) -> None:
    monkeypatch.setattr(software, "version_of", lambda name: versions.get(name, ""))
    monkeypatch.setattr(software.metadata, "requires", lambda name: requires.get(name))


@pytest.mark.processes
def test_missing_torch_fails_except_on_login_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    set_installed(monkeypatch, {}, {})
    check = software.software_checks(torch_required=True, cuda="", driver="")[-1]
    assert (check.name, check.level, check.fix) == ("torch", "failure", "`pip install 'hpcdist[train]'`")
    assert software.software_checks(torch_required=False, cuda="", driver="")[-1].level == "note"


@pytest.mark.processes
def test_torchvision_for_another_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.15.0+cpu", "torchvision": "0.28.0"}
    set_installed(monkeypatch, versions, {"torchvision": ["numpy", "torch==2.14.1", "pillow!=8.3.*,>=5.3.0"]})
    check = software.software_checks(torch_required=True, cuda="", driver="")[-1]
    assert (check.level, check.fix) == ("failure", software.TOGETHER)
    assert check.text == "2.15.0+cpu beside a torchvision 0.28.0 built for 2.14.1, which cannot be imported"
    set_installed(monkeypatch, versions, {"torchvision": ["torch (==2.15.0)"]})
    assert "torch" not in levels(software.software_checks(torch_required=True, cuda="", driver=""))


@pytest.mark.processes
def test_driver_is_compared_with_the_cuda_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    set_installed(monkeypatch, {"torch": "2.15.0+cu132"}, {})
    old = software.software_checks(torch_required=True, cuda="13.2", driver="550.54.15")[-1]
    assert (old.name, old.level) == ("driver", "failure")
    assert "needs driver 580.65 or newer for its CUDA 13.2, found 550.54.15" in old.text
    new = software.software_checks(torch_required=True, cuda="13.2", driver="580.82.07")[-1]
    assert new.sentence() == "driver: 580.82.07, supports CUDA 13.2"
    cpu = software.software_checks(torch_required=True, cuda="", driver="580.82.07")[-1]
    assert (cpu.name, cpu.level, "built without CUDA" in cpu.text) == ("torch", "warning", True)
