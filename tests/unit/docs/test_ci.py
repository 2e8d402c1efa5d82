"""The workflow of GitHub Actions is valid and runs targets of the Makefile."""

from __future__ import annotations

import re
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
