"""The steps of a job that check images and remove containers, and the exit codes of ranks in containers."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from container_logs import FACTS, PYXIS_CORRUPT_LOG, PYXIS_LOG, PYXIS_OTHER_TASK_LOG, SPEC, probe_output
from slurm_recordings import FakeCommands

from hpcdist.containers.container_steps import ContainerSteps
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import Attempt, RunDir

PYXIS = replace(SPEC, runtime="pyxis", image="/i/hpcdist.sqsh")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    (tmp_path / "001").mkdir()
    return Attempt(tmp_path / "001")


def test_interrupted_pyxis_container_is_no_failure_of_the_rank(attempt: Attempt, tmp_path: Path) -> None:
    steps = ContainerSteps(PYXIS, RunDir(tmp_path), {})
    ended = "child 77 failed with error code: 1"
    attempt.log(0).write_text(PYXIS_LOG.replace(ended, f"child 77 terminated with signal {int(signal.SIGUSR2)}"))
    attempt.log(1).write_text(PYXIS_LOG)
    for rank in (0, 1):
        steps.exit_code(attempt, rank, "n1", 1)
    assert [attempt.outcomes()[rank]["interrupted"] for rank in (0, 1)] == [True, False]
    # With proctrack/cgroup the signal ends the task itself, and no message is printed.
    assert steps.exit_code(attempt, 2, "n1", -signal.SIGUSR2) == -signal.SIGUSR2
    assert attempt.outcomes()[2]["interrupted"]
    assert attempt.outcomes()[2]["error"] == "pyxis was interrupted by SIGUSR2 while it created the container"
    # Nor is a container that another task has not started.
    for rank, log in ((3, PYXIS_OTHER_TASK_LOG), (4, PYXIS_CORRUPT_LOG)):
        attempt.log(rank).write_text(log)
        steps.exit_code(attempt, rank, "n2", 1)
    assert [attempt.outcomes()[rank]["peer_lost"] for rank in (3, 4)] == [True, False]


def test_start_failure_is_written_as_the_outcome_of_the_rank(attempt: Attempt, tmp_path: Path) -> None:
    steps = ContainerSteps(SPEC, RunDir(tmp_path), {})
    attempt.log(2).write_text("FATAL:   no space\n")
    attempt.log(3).write_text("FATAL:   fuse: failed to open /dev/fuse: Permission denied\n")
    assert [steps.exit_code(attempt, rank, "n1", 255) for rank in (2, 3)] == [255, 255]
    assert {key: attempt.outcomes()[2][key] for key in ("outcome", "host", "error", "peer_lost")} == {
        "outcome": "failed",
        "host": "n1",
        "error": "apptainer could not start the container (exit code 255): FATAL: no space",
        "peer_lost": False,
    }
    assert attempt.outcomes()[3]["outcome"] == "rejected"
    assert [steps.exit_code(attempt, 1, "n1", code) for code in (137, 143, 1, 0, -15, 255)] == [-9, -15, 1, 0, -15, 255]
    assert sorted(attempt.outcomes()) == [2, 3]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCommands:
    """An srun with a complete image on its two nodes; nothing else is on PATH."""
    (tmp_path / "bin").mkdir()
    found = FakeCommands(tmp_path / "bin")
    found.add_script("srun", f"case $* in *label*-c*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    monkeypatch.setenv("PATH", f"{found.folder}:/usr/bin:/bin")
    return found


def job_env(tools: FakeCommands, **more: str) -> dict[str, str]:
    return {"PATH": f"{tools.folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHONPATH": "/host", **more}


@pytest.mark.processes
def test_image_is_checked_once_on_each_node(tools: FakeCommands, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    steps = ContainerSteps(SPEC, run, job_env(tools))
    steps.prepare(lambda: None)
    steps.prepare(lambda: None)
    (call,) = (call for call in tools.calls() if call.startswith("srun"))
    common = "srun --job-name=hpcdist-containers --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1"
    assert call.startswith(f"{common} --cpus-per-task=1 --input=none")
    assert read_json(run.container) == {
        "runtime": "apptainer",
        "image": SPEC.image,
        "image_digest": None,
        **{key: FACTS[key] for key in ("hpcdist", "python", "torch", "cuda")},
    }


@pytest.mark.processes
def test_pyxis_containers_are_removed_after_failures(tools: FakeCommands, tmp_path: Path) -> None:
    steps = ContainerSteps(PYXIS, RunDir(tmp_path), job_env(tools, SLURM_JOB_ID="7"))

    def num_removals() -> int:
        return sum(" remove 7" in call for call in tools.calls())

    steps.prepare(lambda: None)
    assert num_removals() == 1, "an earlier supervisor may have been killed"
    steps.clean_up(failed=False)
    steps.prepare(lambda: None)
    assert num_removals() == 1, "pyxis removes the containers of a step that ends by itself"
    steps.clean_up(failed=True)
    assert num_removals() == 2
    steps.prepare(lambda: None)
    assert num_removals() == 3, "SIGKILL to a step that has not ended also ends pyxis' removal"


@pytest.mark.processes
def test_remaining_containers_are_logged_unless_the_job_is_over(
    tools: FakeCommands, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for error in ("srun: error: Slurm job 12 has expired", "Error: no space"):
        tools.add_script("srun", f"echo '{error}' >&2; exit 1")
        ContainerSteps(PYXIS, RunDir(tmp_path), job_env(tools)).clean_up(failed=True)
    assert caplog.messages == ["containers may remain on a node: Error: no space"]
