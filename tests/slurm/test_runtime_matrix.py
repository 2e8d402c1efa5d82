"""The matrix runtime x fault: every container runtime for real, on two nodes with two ranks each.

Each cell compares the run with an undisturbed one without a container, bit by bit, and checks that nothing outlives the
job. `make faults` prints the matrix. `make test` runs podman's requeue, and ranks that only count with other runtimes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import runtime_cases
from containers import Containers, mismatch
from hpcdist_runs import HOLD_STEP, LAST_STEP
from runtime_cases import CASES, RuntimeCase, assert_nothing_left
from slurm_faults import Cell, FaultScene
from slurm_runs import SlurmRuns

from hpcdist.devcluster import cluster
from hpcdist.host.files import read_json

#: One form of image of each runtime, for `make test`.
COUNTING = ("podman", "docker", "apptainer-sif", "charliecloud", "enroot-sqsh", "pyxis")
every_runtime = pytest.mark.parametrize("runtime", CASES, indirect=True, scope="module")


def cells(*, slow: tuple[str, ...]) -> pytest.MarkDecorator:
    """Return the parameters of a test that some runtimes run in `make slow`, and all in `make faults`."""

    def marks(case: str) -> list[pytest.MarkDecorator]:
        return [pytest.mark.quick_fault, pytest.mark.slow] if case in slow else [pytest.mark.faults]

    marked = [pytest.param(case, marks=marks(case)) for case in CASES]
    return pytest.mark.parametrize("runtime", marked, indirect=True, scope="module")


@pytest.fixture(scope="module")
def runtime(
    request: pytest.FixtureRequest,
    containers: Containers,
    slurm_runs: SlurmRuns,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RuntimeCase]:
    """A runtime that is ready on all nodes; its variables are set."""
    if (reason := mismatch()) is not None:
        pytest.skip(reason)
    if (reason := runtime_cases.missing_program(request.param)) is not None:
        assert os.environ.get("HPCDIST_REQUIRE_CONTAINERS") != "1", reason
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    prepared = runtime_cases.prepared(request.param, containers, slurm_runs, folder)
    with prepared as case, pytest.MonkeyPatch.context() as patch:
        for name, value in case.env.items():
            patch.setenv(name, value)
        yield case


@pytest.fixture
def boxed(
    request: pytest.FixtureRequest, runtime: RuntimeCase, slurm_runs: SlurmRuns, slurm_control: str
) -> Iterator[FaultScene]:
    """Fault injection for a run whose ranks are in containers; teardown restores the cluster."""
    yield FaultScene(slurm_runs, runtime_cases.subject_of(runtime), slurm_control, Cell(fault="", trainer=runtime.name))
    if "grace_s" in request.fixturenames:
        cluster.set_grace_time(slurm_runs.cluster.layout, 0)
    slurm_runs.cluster.restore_nodes()
    runtime.restore()


@pytest.mark.parametrize("runtime", COUNTING, indirect=True, scope="module")
def test_counting(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """Ranks that only count start in a third of the time."""
    boxed.submit("counting", *runtime.overrides, "trainer=counting:train", "params.until=20")
    state = boxed.runs.wait_end(boxed.name, boxed.job)
    assert (state.status, state.reason, state.attempt) == ("finished", "counted to 20", 1), state
    assert boxed.runs.checkpoint_steps(boxed.name) == [20]
    assert (read_json(boxed.runs.run_dir(boxed.name).container) or {})["runtime"] == runtime.runtime
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@cells(slow=("charliecloud", "enroot-sqsh", "pyxis"))
def test_plain(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.plain(boxed, runtime)


@cells(slow=("podman", "docker", "apptainer-sif"))
def test_requeue(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.requeue(boxed, runtime)


@pytest.mark.faults
@pytest.mark.parametrize("grace_s", [0, 20])
@every_runtime
def test_preemption(boxed: FaultScene, runtime: RuntimeCase, grace_s: int) -> None:
    cluster.set_grace_time(boxed.cluster.layout, grace_s)
    with boxed.cluster.kill_wait(30):
        boxed.submit_held(f"preemption, grace {grace_s}")
        high = boxed.cluster.start_high_priority_job("--nodes=4")
        boxed.runs.wait_stop_request(boxed.name)
        boxed.release()
        boxed.wait_queued()
    assert boxed.runs.checkpoint_steps(boxed.name)[-1] >= HOLD_STEP
    boxed.cluster.wait_job_state(high, "COMPLETED")
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.num_starts() == 2


@pytest.mark.faults
@every_runtime
def test_time_limit(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """The ranks are held until they are asked to stop; only the time limit causes that."""
    boxed.submit("time limit", *boxed.subject.overrides, "cluster.time_limit_min=3", "cluster.signal_lead_s=60")
    assert boxed.wait_queued().partition("(")[2] in ("time limit)", "the ranks received a stop signal)")
    assert 0 < boxed.runs.checkpoint_steps(boxed.name)[-1] < LAST_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    boxed.start_now()
    boxed.assert_recovered(max_lost_steps=0)
    assert boxed.num_starts() == 2


@pytest.mark.faults
@every_runtime
def test_stop_command(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("hpcdist stop")
    code, output = boxed.runs.command("stop", boxed.name)
    assert code == 0, output
    assert boxed.runs.wait_end(boxed.name, boxed.job).status == "stopped"
    assert boxed.runs.checkpoint_steps(boxed.name)[-1] >= HOLD_STEP
    assert_nothing_left(runtime, boxed.runs, boxed.name)
    code, output = boxed.runs.command("resume", boxed.name, "--detach")
    assert code == 0, output
    boxed.job, boxed.earlier_jobs = boxed.runs.job_id(boxed.name), (boxed.job,)
    boxed.assert_recovered(max_lost_steps=0)


@pytest.mark.faults
@every_runtime
def test_killed_rank(boxed: FaultScene, runtime: RuntimeCase) -> None:
    runtime_cases.killed_rank(boxed, runtime)


@pytest.mark.faults
@every_runtime
def test_killed_supervisor(boxed: FaultScene, runtime: RuntimeCase) -> None:
    """The new supervisor first kills the old ranks, which were never released."""
    boxed.submit_held("killed supervisor")
    old = boxed.runs.rank_processes(boxed.name).values()
    os.kill(boxed.runs.holder_pid(boxed.name), signal.SIGKILL)
    boxed.assert_recovered_from_checkpoint()
    assert (boxed.num_starts(), boxed.cell.attempts) == (1, 2)
    assert not any(process.is_running() for process in old)
    assert_nothing_left(runtime, boxed.runs, boxed.name)


@pytest.mark.faults
@every_runtime
def test_dead_node(boxed: FaultScene, runtime: RuntimeCase) -> None:
    boxed.submit_held("dead node", "launch.hang_timeout_s=60")
    boxed.kill_node("n2")
    boxed.wait_restarted()
    boxed.assert_recovered_from_checkpoint()
    assert "n2" not in boxed.runs.hosts(boxed.name, 2)
    assert_nothing_left(runtime, boxed.runs, boxed.name, dead="n2")
