"""Tests of the section of `hpcdist doctor` about container runtimes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcdist.checks import containers
from hpcdist.checks.containers import Host, program_checks, run_checks
from hpcdist.host.files import write_json
from hpcdist.host.machine import Check
from hpcdist.run.folder import RunDir

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
    "unshare": answer(),
}


def checks_of_runtimes(host: Host, *installed: str, **changed: subprocess.CompletedProcess[str]) -> list[Check]:
    """Return the results for the installed commands, which all work except for the changed answers."""
    answers = WORKING | changed
    return containers.runtime_checks(
        host, which=lambda name: name in installed, query=lambda command: answers[command[0]]
    )


def test_each_installed_runtime_has_a_line_with_findings_of_this_machine_only() -> None:
    """Results of hpcdist's own tests are in the documentation."""
    found = checks_of_runtimes(ADA, "docker", "podman", "apptainer", "singularity", "enroot", "ch-run", "srun")
    assert [check.sentence() for check in found] == [
        "docker: 27.1.1",
        "podman: 4.3.1",
        "apptainer: 1.3.4-1.el9",
        "enroot: 3.5.0",
        "charliecloud: 0.31",
        "pyxis: srun has --container-image",
    ]
    assert {check.level for check in found} == {"ok"}


def test_missing_and_old_runtimes_are_reported() -> None:
    (none,) = checks_of_runtimes(ADA, "srun", srun=answer("--help"))
    assert (none.name, none.level) == ("runtimes", "note")
    assert containers.runtime_checks(ADA, expected=False, which=lambda name: None) == []
    (check,) = checks_of_runtimes(ADA, "podman", podman=answer("podman version 3.4.4\n"))
    assert (check.level, check.text) == ("warning", "3.4.4; hpcdist requires podman 4 or newer")
    (check,) = checks_of_runtimes(ADA, "singularity")
    assert (check.level, "container.runtime=apptainer calls `apptainer`" in check.text) == ("note", True)


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
    assert checks_of_runtimes(host, "apptainer")[0].text.endswith(", GPUs by --nv")


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


def test_apptainer_of_a_root_without_all_capabilities_has_a_fix() -> None:
    root = replace(ADA, uid=0, opens_fuse=False, squashfuse=False)
    assert checks_of_runtimes(root, "apptainer")[0].level == "ok", "the kernel mounts the image"
    (check,) = checks_of_runtimes(replace(root, lacks_capability=True), "apptainer")
    assert (check.level, check.fix) == ("warning", "`export APPTAINER_DROP_CAPS=CAP_SYS_RESOURCE`")


@pytest.mark.processes
def test_failing_and_hanging_runtimes_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enroot").write_text("#!/bin/sh\nread -r line\n")
    (tmp_path / "enroot").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(containers, "TIMEOUT_S", 0.01)
    hanging = containers.run_command(["/bin/sleep", "60"])
    assert (hanging.returncode, hanging.stderr.strip()) == (-1, "no answer within 0.01 s")
    assert containers.run_command(["podman"]).returncode == -1
    (check,) = checks_of_runtimes(ADA, "apptainer", apptainer=answer(errors="libsubid.so.4: cannot open\n", code=127))
    assert (check.level, check.text) == ("warning", "installed, but fails: libsubid.so.4: cannot open")


# --- Doctor's checks of Python environments of ranks without containers.


MODULES = "module() { echo 'Modules Release 5.2.0 (2022-11-08)' >&2; }"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "exp" / "first")


@pytest.mark.processes
def test_programs_of_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    env = {"PATH": str(tmp_path), "MODULESHOME": str(tmp_path)}
    bash = tmp_path / "bash"
    bash.symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "init").mkdir()
    (tmp_path / "init" / "bash").write_text(MODULES)
    levels = {check.name: check.level for check in program_checks(env)}
    assert levels == {"uv": "note", "zstd": "note", "unsquashfs": "note", "modules": "ok"}
    for name, text in {"uv": "echo 'uv 0.13.9 (x86_64)'", "zstd": "", "unsquashfs": ""}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    found = program_checks(env)
    assert {check.level for check in found} == {"ok"}
    assert found[0].text == "0.13.9: locked projects are built (kind=uv)"
    assert found[-1].text == "Environment Modules 5.2.0 (kind=module, cluster.environment.modules)"
    (tmp_path / "uv").write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    assert program_checks(env)[0].text == "installed, but fails: broken"


def test_environment_of_a_run(run: RunDir, tmp_path: Path) -> None:
    assert run_checks(run) == []
    archive = tmp_path / "venv-1.tar.zst"
    archive.touch()
    record = {"kind": "venv", "path": str(archive), "key": "venv-1", "modules": ["cuda/13.0"]}
    write_json(run.rank_environment, record)
    (check,) = run_checks(run)
    assert check.sentence() == f"environment: kind=venv, {archive}, modules cuda/13.0, no node has prepared it yet"
    write_json(run.rank_environment, {**record, "python": "3.12.3", "torch": "2.15.0"})
    assert run_checks(run)[0].text.endswith("modules cuda/13.0, Python 3.12.3, torch 2.15.0")
    archive.unlink()
    for kind, path, effect in (
        ("venv", archive, "packs the present content"),
        ("squashfs", tmp_path / "image.sqsh", "fails"),
    ):
        write_json(run.rank_environment, {"kind": kind, "path": str(path)})
        _, check = run_checks(run)
        assert check.level == "warning"
        assert check.text.startswith(f"{path} does not exist any more: the next start of the job {effect}")
