"""Each script of benchmarks/ in its smallest size: it ends, and prints what `run_all.py` reads."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark_scripts import BY_HAND, FOLDER, SMALLEST, TIMEOUT_S, assert_has_figures, json_of
from containers import CHECKOUT
from hpcdist_runs import finish

#: Stages of `gpu.sh` that rehearse the scripts of GPU machines, and a name in the summary of each.
REHEARSED = {"facts": "gpu none", "step": "images/s over bare loop", "lm": "mfu", "timer": "known_compute_ms"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_script_prints_every_figure(name: str) -> None:
    if name == "start_calls" and shutil.which("strace") is None:
        pytest.skip("strace is not installed: run scripts/test_packages.sh")
    assert_has_figures(name, json_of(name, *SMALLEST[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_HAND)
def test_script_run_by_hand_prints_its_figures(name: str) -> None:
    arguments, (first, *rest) = BY_HAND[name]
    value = json_of(name, *arguments)[first]
    for key in rest:
        value = value[key]
    assert value > 0


@pytest.mark.slow
def test_gpu_session_has_a_rehearsal_on_the_cpu(tmp_path: Path) -> None:
    command = ["bash", str(FOLDER / "gpu.sh"), "--device", "cpu", "--results", str(tmp_path), "--only"]
    process = subprocess.Popen(
        [*command, ",".join(REHEARSED)],
        cwd=CHECKOUT,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code, output = finish(process, TIMEOUT_S)
    statuses = {stage: json.loads((tmp_path / f"{stage}.json").read_text())["status"] for stage in REHEARSED}
    assert (code, statuses) == (0, dict.fromkeys(REHEARSED, "ok")), output[-4000:]
    summary = (tmp_path / "summary.md").read_text()
    assert [stage for stage, figure in REHEARSED.items() if figure not in summary] == []
