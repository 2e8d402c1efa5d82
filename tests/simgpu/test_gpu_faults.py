"""Runs on two simulated GPUs (`conftest.py`) with faults of a device, and what hpcdist says about them."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from hpcdist_runs import Runs, assert_states_equal, finish, wait_for
from slurm_faults import SIMULATED_GPUS, Cell

from hpcdist.checkpoint.state import load_weights
from hpcdist.host.json_files import read_json

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("gpus")]

#: Each run fails or ends after a few steps.
SHORT = ["launch.max_restarts=0", "stop.max_steps=30"]


def explain(runs: Runs, name: str) -> str:
    code, output = runs.command("explain", str(runs.run_dir(name).path))
    assert code == 0, output
    return output


def fill(cell: Cell, runs: Runs, name: str, fault: str) -> None:
    """Fill the row of a run that a fault has ended."""
    state = runs.run_dir(name).read_state()
    cell.fault, cell.devices, cell.attempts, cell.restarts = fault, SIMULATED_GPUS, state.attempt, state.restarts
    cell.weights, cell.points, cell.mlflow = "-", "-", runs.mlflow_status(name)
    assert cell.mlflow == "FAILED"


def start_held(runs: Runs, name: str, *overrides: str) -> subprocess.Popen[str]:
    """Start a run whose ranks wait after step 20."""
    held = ("trainer=gated:train", "params.hold_at=20", *overrides)
    process = runs.start("run", *runs.config(name, *SHORT, *held))
    runs.wait_until_held(name)
    return process


@pytest.mark.quick_fault
def test_lost_gpu_is_named_and_metrics_and_errors_come_from_nvml(runs: Runs, gpus: Path, cell: Cell) -> None:
    process = start_held(runs, "lost")
    journal = runs.run_dir("lost").path / "journal" / "attempt-001.rank-00000.jsonl"
    wait_for(lambda: "system/gpu_1" in journal.read_text(), "metrics of the GPUs")
    (gpus / "1.xid").write_text("79")
    wait_for(lambda: "Xid" in runs.attempt("lost").log(0).read_text(), "the error that the driver reports")
    (gpus / "1.lost").touch()
    runs.release("lost")
    code, output = finish(process)
    assert code == 1, output
    assert "CUDA error: CUDA-capable device(s) is/are busy or unavailable after step 20\n" in output
    text = explain(runs, "lost")
    assert "status:   failed: rank 1 on " in text
    assert "cause:    a GPU of the named rank is lost" in text
    assert f"gpu:      {os.uname().nodename}: GPU 1 reported Xid 79\n" in text
    points = {(key, value) for key, _, value in runs.points("lost")}
    assert ("system/gpu_utilization_percentage", 37) in points
    fill(cell, runs, "lost", "GPU lost")


@pytest.mark.slow
@pytest.mark.quick_fault
@pytest.mark.parametrize(
    ("fault", "files", "reason"),
    [
        ("hung kernel", ["1.hung"], r"; rank 1 has not called nccl \w+ .* which rank 0 waits"),
        # torch's asynchronous error handling, which hpcdist leaves on, ends the rank that waits before a timeout.
        ("NCCL error", ["1.hung", "0.nccl"],
         r"^failed: rank 0 on \S+ was killed by SIGABRT, last heartbeat at step 20\b"),
    ],
    ids=["kernel", "nccl"],
)  # fmt: skip
def test_rank_that_waits_for_a_hung_kernel(
    runs: Runs, gpus: Path, cell: Cell, fault: str, files: list[str], reason: str
) -> None:
    name = fault.replace(" ", "-")
    process = start_held(runs, name, "launch.hang_timeout_s=60")
    for file in files:
        (gpus / file).touch()
    runs.release(name)
    code, output = finish(process)
    assert code == 1, output
    assert re.search(reason, output.splitlines()[-1]), output
    fill(cell, runs, name, fault)


@pytest.mark.quick_fault
def test_full_memory_is_explained(runs: Runs, cell: Cell) -> None:
    code, output = runs.command("run", *runs.config("full", *SHORT), SIMGPU_MEMORY_MB="2")
    assert code == 1, output
    text = explain(runs, "full")
    assert "cause:    the GPU's memory is full" in text
    assert re.search(
        r"^memory: .* reserved by torch, .* of 2 MiB of GPU [01]\nmemory: .*: \w+ \(.*\.py:\d+\)", text, re.M
    )
    fill(cell, runs, "full", "GPU memory full")


KEEPS = """\
import torch


def keep(held):
    while True:
        held.append(torch.empty(2**20, device="cuda"))


keep([])
"""


def test_script_that_fills_a_gpu_learns_which_line_did(runs: Runs) -> None:
    (runs.project / "keeps.py").write_text(KEEPS)
    words = ("run", "experiment=digits", "name=keeps", "launch.num_ranks=1", "launch.max_restarts=0", "keeps.py")
    code, output = runs.command(*words, SIMGPU_MEMORY_MB="64", **runs.unshipped)
    assert code == 1, output
    text = explain(runs, "keeps")
    assert re.search(
        r"^memory: .* of 64 MiB of GPU 0\nmemory: .* blocks of at most 4 MiB: keep \(keeps\.py:6\)$", text, re.M
    )


#: One table of 12 MiB, of which a batch has nearly all rows: the gradients of an update, unlike its rows, do not fit.
LARGE_UPDATE = [
    *("roles={trainer: 1, parameter_server: 1}", "hybrid.tables={user: 12000}", "hybrid.embedding_dim=256"),
    *("hybrid.num_samples=50000", "hybrid.batch_size=40000", "hybrid.hidden_sizes=[]"),
    *("launch.device=cpu", "launch.devices.parameter_server=cuda"),
]


def test_full_memory_of_a_parameter_server_is_its_own_failure(runs: Runs, cell: Cell) -> None:
    config = runs.config("server", *SHORT, f"experiment={runs.experiment}", *LARGE_UPDATE)[1:]
    code, output = runs.command("run", "hybrid_clicks", *config, SIMGPU_MEMORY_MB="48")
    assert code == 1, output
    text = explain(runs, "server")
    assert re.search(
        r"^status:   failed: rank 1 \(parameter_server:0\) on \S+ failed with OutOfMemoryError: ", text, re.M
    )
    assert "cause:    the GPU's memory is full" in text
    held = r"^memory: .* reserved by torch, .* of 48 MiB of GPU 0\nmemory: .*: \w+ \(tables\.py:\d+\)"
    assert re.search(held, text, re.M)
    traceback = (read_json(runs.attempt("server").outcome(1)) or {})["traceback"][0]
    assert "in push" in traceback
    assert "in update" in traceback
    trainer = read_json(runs.attempt("server").outcome(0)) or {}
    assert trainer["peer_lost"], trainer
    assert re.search(r"the GPU's memory is full", runs.tags("server")["mlflow.note.content"])
    cell.trainer = "hybrid"
    fill(cell, runs, "server", "GPU memory of a server full")


def test_late_copies_leave_checkpoints_as_they_are(runs: Runs) -> None:
    """A checkpoint after each step is copied to pinned memory while the next step changes the weights."""
    every_step = ("checkpoint.every_steps=1", "checkpoint.keep_last=20", "stop.max_steps=12")
    for name, delay in (("quick", "0"), ("late", "3000")):
        code, output = runs.command(
            "run", *runs.config(name, *SHORT, *every_step), SIMGPU_COPY_US=delay, **runs.unshipped
        )
        assert code == 0, output
    assert runs.checkpoint_steps("late") == runs.checkpoint_steps("quick") == list(range(1, 13))
    for quick in sorted(runs.run_dir("quick").checkpoints.glob("step-*")):
        late = runs.run_dir("late").checkpoints / quick.name
        assert_states_equal(load_weights(late), load_weights(quick))


@pytest.mark.slow
def test_settings_of_the_gpu_are_those_of_the_config(runs: Runs) -> None:
    settings = ["precision.dtype=fp16", "model.channels_last=true", "launch.hang_timeout_s=700"]
    config = runs.config("settings", "trainer=on_gpus:train", "stop.max_steps=2", *settings)
    code, output = runs.command("run", *config)
    assert code == 0, output
    facts = read_json(runs.attempt("settings").path / "gpu.json") or {}
    assert (facts["device_id"], facts["timeout_s"]) == ("cuda:1", 760)
    assert (facts["autocast"], facts["scaled"], facts["channels_last"]) == ("torch.float16", True, True)
    assert (facts["fused"], facts["tf32"]) == ([True], [True, True])
