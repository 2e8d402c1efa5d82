"""Tests of the training test of `hpcdist doctor`, with ranks on CPUs and recorded output of failing ranks."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys

import pytest

from hpcdist.checks import machine
from hpcdist.checks.machine import TOGETHER, Trial, rank_checks, torch_checks, try_ranks
from hpcdist.rank import startup_check

PASSED = (
    {"stage": "torch", "seconds": 1.0, "version": "2.15.0+cu132", "cuda": "13.2"},
    {"stage": "torchvision", "seconds": 1.0, "version": "0.29.2"},
    {"stage": "compute", "seconds": 0.1},
    {"stage": "meet", "seconds": 0.2},
    {"stage": "all-reduce", "seconds": 0.1},
)


@pytest.mark.processes
def test_two_ranks_pass_on_this_machine() -> None:
    trials = try_ranks("cpu", "gloo", 2)
    (ranks,) = rank_checks(trials, "2 ranks, gloo")
    assert (ranks.level, ranks.text.endswith("all-reduce correct")) == ("ok", True), trials
    torch, torchvision = torch_checks(trials)
    assert (torch.name, torch.level, torchvision.level) == ("torch", "ok", "ok")


def stages(*names: str, **last: str) -> tuple[dict[str, object], ...]:
    """Return passed stages; the keywords are added to the last one."""
    found: list[dict[str, object]] = [dict(stage) for stage in PASSED if stage["stage"] in names]
    found[-1] |= last
    return tuple(found)


@pytest.mark.parametrize(
    ("second", "text", "fix"),
    [
        (
            Trial(stages=({"stage": "torch", "seconds": 0.1, "error": "ImportError: libcudart.so.13"},), code=1),
            "rank 1: importing torch fails: ImportError: libcudart.so.13",
            "pip install '.[train]'",
        ),
        (
            Trial(
                stages=stages("torch", "torchvision", "compute", error="RuntimeError: the CUDA driver is old"), code=1
            ),
            "a small matrix product fails: RuntimeError: the CUDA driver is old",
            "see `nvidia-smi`",
        ),
        (Trial(stages=stages("torch", "torchvision", "compute")), "loopback did not finish within 90 s", "NCCL_DEBUG"),
        (
            Trial(stages=stages("torch", "torchvision", "compute", "meet"), code=-11, errors="a\nFatal: bus error\n"),
            "an all-reduce ended the rank with signal 11: Fatal: bus error",
            "/dev/shm",
        ),
        (
            Trial(stages=(), code=127),
            "importing torch ended the rank with exit code 127: no error message",
            "pip install",
        ),
    ],
    ids=["import", "compute", "hang", "signal", "exit"],
)
def test_failing_rank_has_stage_error_and_fix(second: Trial, text: str, fix: str) -> None:
    (check,) = rank_checks([Trial(stages=PASSED, code=0), second], "2 ranks, nccl")
    assert (check.name, check.level) == ("2 ranks, nccl", "failure")
    assert text in check.text
    assert fix in check.fix


def test_ranks_on_gpus_show_the_nccl_version() -> None:
    gpu = tuple(stage | ({"nccl": "2.29.3"} if stage["stage"] == "compute" else {}) for stage in PASSED)
    (check,) = rank_checks([Trial(stages=gpu, code=0)], "1 rank, nccl")
    assert (check.level, check.text.endswith("all-reduce correct, NCCL 2.29.3")) == ("ok", True)


def test_slow_import_is_a_warning() -> None:
    (check,) = rank_checks([Trial(stages=(PASSED[0],)), Trial(stages=PASSED, code=0)], "2 ranks, gloo")
    assert (check.level, check.text) == ("warning", "rank 0: importing torchvision did not finish within 90 s")


def test_broken_torchvision_does_not_fail_the_ranks() -> None:
    broken = {"stage": "torchvision", "seconds": 1.0, "error": "RuntimeError: operator torchvision::nms does not exist"}
    trials = [Trial(stages=(PASSED[0], broken, *PASSED[2:]), code=0)]
    assert rank_checks(trials, "1 rank")[0].level == "ok"
    check = torch_checks(trials)[1]
    assert (check.level, check.fix) == ("failure", TOGETHER)
    assert check.text.endswith("RuntimeError: operator torchvision::nms does not exist")
    missing = {"stage": "torchvision", "seconds": 0.0, "error": "ModuleNotFoundError: No module named 'torchvision'"}
    assert torch_checks([Trial(stages=(PASSED[0], missing), code=0)])[1].level == "warning"


@pytest.mark.processes
def test_hanging_rank_is_killed_and_its_output_kept() -> None:
    script = f"import time; print({json.dumps(PASSED[0])!r}, flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    select.select([process.stdout], [], [])
    assert machine._finish(process, deadline=0.0) == Trial(stages=(PASSED[0],))
    assert process.returncode == -signal.SIGKILL


def test_startup_check_reports_the_failed_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> dict[str, object]:
        raise ArithmeticError("3 of 65536 numbers of a matrix product are wrong")

    for stage in ("_import_torch", "_import_torchvision", "_meet", "_all_reduce"):
        monkeypatch.setattr(startup_check, stage, lambda *_: {})
    assert startup_check.main(["cpu", "gloo", "0", "1", "0"]) == 0
    monkeypatch.setattr(startup_check, "_compute", fail)
    assert startup_check.main(["cpu", "gloo", "0", "1", "0"]) == 1
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["stage"] for one in reports[:5]] == [one["stage"] for one in PASSED]
    wrong_product = "ArithmeticError: 3 of 65536 numbers of a matrix product are wrong"
    assert (reports[-1]["stage"], reports[-1]["error"]) == ("compute", wrong_product)
