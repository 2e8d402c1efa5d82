"""Training on all of MNIST while a rank, the supervisor and the tracking server are killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hpcdist_runs import TRAINING_METRICS, Descendants, Runs, assert_states_equal, finish, rank_of, wait_for
from http_servers import Server
from slurm_faults import Cell

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "ddp_mnist.yaml"
DATA = os.environ.get("HPCDIST_DATA_DIR", "")
LAST_STEP = 2 * 469  # 60,000 images, two ranks, batches of 64

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(
        not (Path(DATA) / "MNIST" / "raw").is_dir(),
        reason="needs MNIST: HPCDIST_DATA_DIR=<folder with MNIST/raw> make faults",
    ),
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def wait_step(runs: Runs, name: str, attempt: int, step: int) -> None:
    runs.wait_step(name, attempt, step)
    assert runs.step(name, attempt) < LAST_STEP, "the run has ended already"


def test_kills_of_rank_supervisor_and_server_change_no_result(tmp_path: Path, server: Server, cell: Cell) -> None:
    cell.fault = "rank, supervisor, server killed (MNIST, no Slurm)"
    runs = Runs(tmp_path, experiment="mnist")

    def arguments(name: str) -> list[str]:
        return [str(CONFIG), f"name={name}", f"data.root={DATA}", f"tracking.uri={server.uri}", "launch.device=cpu"]

    code, output = finish(runs.start("run", *arguments("control")), timeout_s=600)
    assert code == 0, output
    expected = runs.series("control")
    assert {key for key, _ in expected} == set(TRAINING_METRICS)
    assert expected["eval/accuracy", LAST_STEP] >= 0.985

    name = "faulted"
    folder = runs.run_dir(name).path
    first = runs.start("run", *arguments(name))
    wait_step(runs, name, 1, 120)
    server.kill()
    wait_step(runs, name, 1, 240)
    rank_1 = next(child for child in psutil.Process(first.pid).children(recursive=True) if rank_of(child) == 1)
    rank_1.kill()
    wait_step(runs, name, 2, 520)
    descendants = Descendants(first.pid)
    first.kill()
    descendants.wait_until_ended(60)  # the shipper may be waiting for the server
    code, output = finish(first)
    assert code == -signal.SIGKILL
    assert "rank 1 on " in output
    assert "was killed by SIGKILL" in output
    assert "restart 1 of 3\n" in output
    assert "records stay in the journal until" in (folder / "shipper.log").read_text()

    second = runs.start("resume", name)
    wait_step(runs, name, 3, 600)
    warning = "records stay in the journal until"  # once by the shipper of each supervisor
    wait_for(
        lambda: (folder / "shipper.log").read_text().count(warning) == 2, "second shipper's warning", timeout_s=300
    )
    server.start()
    code, output = finish(second, timeout_s=600)
    assert code == 0, output
    assert "no records were lost" in (folder / "shipper.log").read_text()
    assert "hpcdist sync" not in output, "all records are in MLflow"

    for attempt in (2, 3):
        assert "resumed at step " in runs.attempt(name, attempt).log(0).read_text()
    state = runs.run_dir(name).read_state()
    cell.attempts, cell.restarts = state.attempt, state.restarts
    assert_states_equal(runs.final_state(name), runs.final_state("control"))
    cell.weights = "equal"
    assert runs.series(name) == expected
    cell.points = "once"
    cell.mlflow = runs.mlflow_status(name)
    assert cell.mlflow == "FINISHED"
