"""Parts of the session of a GPU machine (`benchmarks/gpu_checks.py`) on two simulated GPUs (`conftest.py`)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from containers import CHECKOUT

pytestmark = pytest.mark.processes


def check(part: str, folder: Path) -> dict[str, Any]:
    """Run a part of the session, and return its figures."""
    command = [sys.executable, str(CHECKOUT / "benchmarks" / "gpu_checks.py"), part, "cuda", str(folder)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_unit_tests_that_are_skipped_without_a_gpu_pass(gpus: Path, tmp_path: Path) -> None:
    figures = check("tests", tmp_path)
    assert set(figures) == {"passed"}, "none is skipped"
    assert figures["passed"] >= 18
    assert "context on device 0" in (gpus / "log").read_text()


def test_doctor_and_preflight_read_the_gpus(gpus: Path, tmp_path: Path) -> None:
    figures = check("doctor", tmp_path)
    assert {figures["GPU 0"], figures["GPU 1"]} == {"Simulated GPU, 16 GiB"}
    (gpus / "0.slow").write_text("1")
    (gpus / "1.ecc").write_text("3")
    figures = check("preflight", tmp_path)
    assert figures["visible_gpus"] == 2
    states = [(gpu["total_mb"], gpu["uncorrected_errors"], bool(gpu["throttled"])) for gpu in figures["gpus"]]
    assert states == [(16384, 0, True), (16384, 3, False)]
