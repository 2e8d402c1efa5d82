"""Invalid responses of an MLflow server or a proxy end in a TrackingError of one line and lose no record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from fuzzing import check_message, fuzz
from hypothesis import strategies as st
from mlflow_replies import Fault, Replies, faults, recording, replayed

from hpcdist.checks.storage import store_checks
from hpcdist.config.loading import load_config
from hpcdist.config.written import to_yaml
from hpcdist.errors import TrackingError
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.run.sweeps import make_sweep, mark, parse_axes, write_sweep
from hpcdist.tracking.journal import SentFiles
from hpcdist.tracking.points import SentPoints
from hpcdist.tracking.sync_runs import sync

NUM_STEPS = 20


@dataclass(frozen=True)
class Upload:
    """The finished cell of a sweep with metrics, an artifact, a checkpoint and a model; and the server to upload to."""

    server: Replies
    run: RunDir
    num_requests: int  #: of one upload
    num_points: int

    def reset(self) -> None:
        """Remove the records of earlier uploads."""
        for folder in (self.run.path, self.run.path.parent / "tune"):
            (folder / "mlflow.json").unlink(missing_ok=True)
        for path in self.run.journal.glob("sent-*.json"):
            path.unlink()


def make_cell(folder: Path) -> RunDir:
    """Make the run folder of a finished cell of a sweep."""
    config = folder / "run.yaml"
    config.write_text(
        f"{{experiment: exp, name: tune, runs_dir: {folder}/runs, tracking: {{register_as: digits}},"
        " checkpoint: {monitor: loss, monitor_mode: min}}\n"
    )
    sweep = make_sweep(parse_axes(["seed=1"], []), lambda more: load_config(config, more), lambda _: "ddp")
    sweep_dir = write_sweep(sweep)
    (cell,) = sweep.cells
    run = RunDir.create(sweep_dir.path.parent / cell.name)
    run.config.write_text(to_yaml(cell.config))
    mark(run, sweep_dir, cell)
    records = [json.dumps({"t": step, "s": step, "m": {"loss": 0.5}}) + "\n" for step in range(NUM_STEPS)]
    (run.journal / "attempt-001.rank-00000.jsonl").write_text("".join(records))
    run.artifacts.mkdir(exist_ok=True)
    (run.artifacts / "report.txt").write_text("accuracy 0.9")
    checkpoint = run.checkpoints / f"step-{NUM_STEPS - 1:08d}"
    checkpoint.mkdir()
    file = {"bytes": 3, "sha256": "ab"}
    manifest = {"step": NUM_STEPS - 1, "created": 1e9, "world_size": 1, "metrics": {"loss": 0.5}}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": {"model.pt": file}}))
    run.model.mkdir(exist_ok=True)
    (run.model / "MLmodel").write_text(yaml.safe_dump({"flavors": {}}))
    run.write_state(replace(run.read_state(), status="finished", attempt=1, ended=1e9, world_size=1))
    return run


@pytest.fixture(scope="module")
def upload(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upload]:
    folder = tmp_path_factory.mktemp("mlflow")
    run = make_cell(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)  # an invalid artifact location may be a relative path
        with recording(folder, monkeypatch) as (uri, recorded):
            sync(run, uri, close_dead=False)
        with replayed(recorded, uri) as server:
            ready = Upload(server, run, 0, 0)
            ready.reset()
            num_points = sync(run, server.uri, close_dead=False).num_points
            yield replace(ready, num_requests=server.num_requests, num_points=num_points)
    shutil.rmtree(folder)


def test_replayed_responses_give_a_complete_upload(upload: Upload) -> None:
    assert upload.num_points == NUM_STEPS + 1
    assert upload.num_requests > 20
    assert "registered" in SentFiles.load(upload.run.journal).model


@pytest.mark.slow
@fuzz(share=0.5, fault=faults, position=st.floats(0, 1, exclude_max=True), num_faults=st.sampled_from([1, 2, 1000]))
def test_upload_survives_invalid_responses(upload: Upload, fault: Fault, position: float, num_faults: int) -> None:
    upload.reset()
    upload.server.expect(fault, first_fault=int(position * upload.num_requests), num_faults=num_faults)
    try:
        report = sync(upload.run, upload.server.uri, close_dead=False)
    except TrackingError as error:
        check_message(error)

    else:
        assert report.num_points + report.num_refused == upload.num_points
    # The saved state allows the next upload to continue.
    assert isinstance((read_json(upload.run.mlflow) or {}).get("run_id", ""), str)
    state = SentPoints.load(upload.run.journal)
    (journal,) = upload.run.journal.glob("*.jsonl")
    assert state.offsets.get(journal.name, 0) in (0, journal.stat().st_size)
    upload.server.expect(None)
    try:
        sync(upload.run, upload.server.uri, close_dead=False)
    except TrackingError as error:
        check_message(error)  # such as an id in mlflow.json that the server does not know
    else:
        assert SentPoints.load(upload.run.journal).offsets == {journal.name: journal.stat().st_size}


@fuzz(share=2, fault=faults, first_fault=st.integers(0, 2))
def test_doctor_survives_invalid_responses(upload: Upload, fault: Fault, first_fault: int) -> None:
    upload.server.expect(fault, first_fault=first_fault)
    uri = upload.server.uri
    checks = store_checks(uri, {})
    assert [check.name for check in checks] == ["client", "server"]
    assert all(len(check.text) <= 500 for check in checks)
