"""Tests of the Slurm steps that check images and remove containers."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from container_facts import IMAGE, PYXIS_CORRUPT_LOG, PYXIS_LOG, PYXIS_OTHER_TASK_LOG, SPEC, probe_output
from supervisor_scene import Scene

import hpcdist
from hpcdist.containers.steps import ContainerSteps
from hpcdist.errors import HpcdistError, UserMistake
from hpcdist.host.files import read_json
from hpcdist.run.folder import Attempt, RunDir


def test_container_of_pyxis_that_slurm_interrupts_is_no_failure_of_the_rank(tmp_path: Path) -> None:
    (tmp_path / "001").mkdir()
    attempt = Attempt(tmp_path / "001")
    steps = ContainerSteps(replace(SPEC, runtime="pyxis"), RunDir(tmp_path), {})
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


def test_rank_whose_container_another_task_should_have_started_is_a_consequence(tmp_path: Path) -> None:
    (tmp_path / "001").mkdir()
    attempt = Attempt(tmp_path / "001")
    steps = ContainerSteps(replace(SPEC, runtime="pyxis"), RunDir(tmp_path), {})
    for rank, log in enumerate((PYXIS_OTHER_TASK_LOG, PYXIS_CORRUPT_LOG)):
        attempt.log(rank).write_text(log)
        steps.exit_code(attempt, rank, "n2", 1)
    assert [attempt.outcomes()[rank]["peer_lost"] for rank in (0, 1)] == [True, False]


def test_start_failure_is_written_as_the_outcome_of_the_rank(tmp_path: Path) -> None:
    (tmp_path / "001").mkdir()
    attempt = Attempt(tmp_path / "001")
    steps = ContainerSteps(SPEC, RunDir(tmp_path), {})
    attempt.log(2).write_text("Error: no space\n")
    assert steps.exit_code(attempt, 2, "n1", 125) == 125
    assert {key: attempt.outcomes()[2][key] for key in ("outcome", "host", "error", "peer_lost")} == {
        "outcome": "failed",
        "host": "n1",
        "error": "podman could not start the container (exit code 125): Error: no space",
        "peer_lost": False,
    }
    assert steps.exit_code(attempt, 3, "n1", 127) == 127
    assert attempt.outcomes()[3]["outcome"] == "rejected"
    assert [steps.exit_code(attempt, 1, "n1", code) for code in (137, 143, 1, 0, -15, 255)] == [-9, -15, 1, 0, -15, 255]
    assert sorted(attempt.outcomes()) == [2, 3]


def test_files_of_killed_wrappers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "001").mkdir()
    attempt = Attempt(tmp_path / "001")
    os.mkfifo(attempt.path / "rank-00000.line")
    (attempt.path / "rank-00001.exit").write_text("137\n")
    attempt.log(1).write_text("stays")
    ContainerSteps(SPEC, RunDir(tmp_path), {}).remove_files(attempt)
    assert [path.name for path in attempt.path.iterdir()] == ["rank-00001.log"]


class FakeJob:
    """A job whose srun and podman are scripts that record their calls."""

    def __init__(self, folder: Path, srun: str) -> None:
        self.log = folder / "calls"
        for name, script in (("srun", srun), ("podman", f"echo {'ab' * 32}")):
            tool = folder / name
            tool.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.log}\n{script}\n')
            tool.chmod(0o755)
        self.env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[1-2]", "PYTHONPATH": "/host"}

    def calls(self) -> list[str]:
        return [text for text in self.log.read_text().splitlines() if text.startswith(("srun", "podman"))]


@pytest.mark.processes
def test_each_attempt_removes_containers_and_the_first_checks_the_image(tmp_path: Path) -> None:
    job = FakeJob(tmp_path, f"case $* in *label*-c*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    run = RunDir(tmp_path)
    steps = ContainerSteps(SPEC, run, job.env)
    env_before = os.environ.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", job.env["PATH"])
        steps.prepare(lambda: None)
        steps.prepare(lambda: None)
    assert os.environ == env_before
    started = [call.split()[:8] for call in job.calls() if call.startswith("srun")]
    assert len(started) == 3, "two remove containers, one checks the image"
    common = "srun --job-name=hpcdist-containers --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1"
    common += " --cpus-per-task=1 --input=none"
    assert started == [common.split()] * 3
    assert "remove podman hpcdist.run=/runs/e/r" in job.calls()[0]
    assert read_json(run.container) == {
        "runtime": "podman",
        "image": IMAGE,
        "image_digest": f"sha256:{'ab' * 32}",
        "hpcdist": hpcdist.__version__,
        "python": "3.12.3",
        "torch": "2.15.0",
        "cuda": "13.2",
    }


@pytest.mark.processes
def test_containers_of_pyxis_are_removed_after_a_killed_supervisor_or_a_failed_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, f"case $* in *label*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    monkeypatch.setenv("PATH", job.env["PATH"])
    spec = replace(SPEC, runtime="pyxis")
    steps = ContainerSteps(spec, RunDir(tmp_path), {**job.env, "SLURM_JOB_ID": "7"})

    def num_removals() -> int:
        return sum(" remove pyxis 7" in call for call in job.calls())

    steps.prepare(lambda: None)
    assert num_removals() == 1, "an earlier supervisor may have been killed"
    steps.remove_containers()
    steps.prepare(lambda: None)
    assert num_removals() == 1, "pyxis removes the containers of a step that ends by itself"
    steps.remove_containers(failed=True)
    assert num_removals() == 2
    steps.prepare(lambda: None)
    assert num_removals() == 3, "SIGKILL to a step that has not ended also ends pyxis' removal"


@pytest.mark.processes
def test_each_component_of_a_heterogeneous_job_has_separate_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob(tmp_path, f"case $* in *label*-c*) echo '0: {probe_output()}'; echo '1: {probe_output()}';; esac")
    monkeypatch.setenv("PATH", job.env["PATH"])
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    spec = replace(SPEC, gpus="all")
    ContainerSteps(spec, RunDir(tmp_path), job.env | groups | {"SLURM_HET_SIZE": "2"}, het=True).prepare(lambda: None)
    calls = [call for call in job.calls() if call.startswith("srun")]
    expected = [{"--het-group=0", "--nodes=1", "--ntasks=1"}, {"--het-group=1", "--nodes=2", "--ntasks=2"}]
    assert all(words <= {*call.split()} for call, words in zip(calls, [*expected, *expected], strict=True))
    assert "gpu" not in "".join(calls), "some components have no GPUs"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        ("srun: error: Slurm job 12 has expired", False),
        ("srun: error: Unable to confirm allocation for job 4: Job is pending execution", False),
        ("Error: no space", True),
    ],
)
def test_remaining_containers_are_logged_unless_the_job_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: str, is_logged: bool
) -> None:
    job = FakeJob(tmp_path, f"echo '{error}' >&2; exit 1")
    monkeypatch.setenv("PATH", job.env["PATH"])
    ContainerSteps(SPEC, RunDir(tmp_path), job.env).remove_containers()
    assert (f"containers may remain on a node: {error}" in caplog.text) == is_logged


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    run = RunDir.create(tmp_path / "runs" / "digits" / "first")
    run.config.write_text("{}\n")
    return Scene(run)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("error", "rejected", "attempts"),
    [(UserMistake("podman is not installed on n2"), True, 1), (HpcdistError("n2 printed nothing"), False, 2)],
)
def test_error_at_the_start_of_ranks_ends_the_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: HpcdistError, rejected: bool, attempts: int
) -> None:
    supervisor = scene.supervisor()

    def fail(attempt: Attempt) -> Any:
        raise error

    monkeypatch.setattr(scene.launcher, "start", fail)
    state = scene.supervise(supervisor)
    suffix = "" if rejected else ", twice in a row: another restart would not help"
    assert (state.status, state.rejected, state.attempt) == ("failed", rejected, attempts)
    assert state.reason == f"{error}{suffix}"


def test_node_script_is_part_of_the_package() -> None:
    assert shutil.which("sh")
    assert (Path(hpcdist.__file__).parent / "containers" / "node_wrapper.sh").is_file()
