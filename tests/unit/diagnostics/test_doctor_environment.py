"""Tests of doctor's checks of Python environments of ranks without containers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcdist.checks.containers import program_checks, run_checks
from hpcdist.host.files import write_json
from hpcdist.run.folder import RunDir

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


@pytest.mark.parametrize(
    ("kind", "name", "effect"),
    [("venv", "venv-1.tar.zst", "packs the present content"), ("squashfs", "image.sqsh", "fails")],
)
def test_removed_environment_of_a_run_is_a_warning(
    run: RunDir, tmp_path: Path, kind: str, name: str, effect: str
) -> None:
    write_json(run.rank_environment, {"kind": kind, "path": str(tmp_path / name)})
    _, check = run_checks(run)
    assert check.level == "warning"
    assert check.text.startswith(f"{tmp_path / name} does not exist any more: the next start of the job {effect}")
