"""The workflow of GitHub Actions is valid and runs targets of the Makefile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doc_blocks import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def validate(path: Path) -> subprocess.CompletedProcess[str]:
    """Check a workflow as `make check` does."""
    command = [Path(sys.executable).with_name("check-jsonschema"), "--builtin-schema", "vendor.github-workflows", path]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_workflow_is_valid_and_broken_ones_are_not(tmp_path: Path) -> None:
    assert validate(WORKFLOW).returncode == 0
    broken = tmp_path / "ci.yml"
    for old, new in (("runs-on:", "run-on:"), ("timeout-minutes: 20", "timeout-minutes: soon")):
        broken.write_text(WORKFLOW.read_text().replace(old, new, 1))
        assert validate(broken).returncode != 0


def test_jobs_run_make_targets_that_exist() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    called = {match for step in steps for match in re.findall(r"^make (\w+)", step.get("run", ""))}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert called == {"check", "unit", "smoke", "docs", "test", "slow"}
    assert called <= targets
    assert workflow["jobs"]["unit"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]


def test_jobs_need_existing_jobs_and_have_timeouts() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert {name for job in jobs.values() for name in job.get("needs", [])} <= set(jobs)
    assert [name for name, job in jobs.items() if "timeout-minutes" not in job] == []


def test_actions_are_pinned_to_commits_and_images_to_digests() -> None:
    text = WORKFLOW.read_text()
    uses = re.findall(r"uses: (.+)", text)
    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []
    compose, mlflow = ((ROOT / "docker" / name).read_text() for name in ("compose.yaml", "mlflow.Dockerfile"))
    for found in (text, compose, mlflow):
        assert len(re.findall(r"(?:image: |BASE_IMAGE=).*@sha256:[0-9a-f]{64}}?$", found, re.MULTILINE)) == 1


@pytest.mark.processes
def test_images_are_pinned_to_the_digests_of_a_registry(tmp_path: Path) -> None:
    files = ("docker/Dockerfile", "docker/mlflow.Dockerfile", "docker/compose.yaml", ".github/workflows/ci.yml")
    for name in (*files, "scripts/pin_images.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    skopeo = tmp_path / "bin" / "skopeo"
    skopeo.parent.mkdir()
    skopeo.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\necho sha256:{"5" * 64}\n')
    skopeo.chmod(0o755)
    env = os.environ | {"PATH": f"{skopeo.parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", tmp_path / "scripts" / "pin_images.sh"], env=env, check=True)
    assert [line.rpartition("docker://")[2] for line in (tmp_path / "calls").read_text().splitlines()] == [
        "docker.io/nvidia/cuda:13.2.0-base-ubuntu24.04",
        "docker.io/library/ubuntu:24.04",
        "docker.io/library/postgres:17",
        "debian:12",
    ]
    for name in files:
        old, new = ((root / name).read_text() for root in (ROOT, tmp_path))
        assert new.count(f"@sha256:{'5' * 64}") == 1
        assert re.sub(r"@sha256:[0-9a-f]+", "", new) == re.sub(r"@sha256:[0-9a-f]+", "", old)
    skopeo.write_text("#!/bin/sh\necho unauthorized\n")
    assert subprocess.run(["bash", tmp_path / "scripts" / "pin_images.sh"], env=env, check=False).returncode == 1
