"""When the shipper writes the report of a run, and that a failure of the report does not stop the upload."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_scene import ReportScene

from hpcdist.review import report
from hpcdist.run.folder import RunDir
from hpcdist.tracking.delivery import ReportWriter
from hpcdist.tracking.points import ShippingState


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the runs whose report was written, which grows."""
    found: list[str] = []
    monkeypatch.setattr(report, "write_report", lambda run, series: found.append(run.name))
    return found


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    scene = ReportScene(tmp_path)
    scene.state(status="running", ended=None)
    return scene.run


def test_report_is_written_after_each_change_of_state(run: RunDir, written: list[str]) -> None:
    writer, progress = ReportWriter(run), ShippingState()
    running = run.read_state()
    for _ in range(3):
        writer.write_if_due(running, progress)
    assert len(written) == 1
    ReportScene.state_of(run, status="running", attempt=2, ended=None)
    writer.write_if_due(run.read_state(), progress)
    assert len(written) == 2
    ReportScene.state_of(run, status="finished", attempt=2)
    for _ in range(3):
        writer.write_if_due(run.read_state(), progress)
    assert len(written) == 3
    # Another process, such as `hpcdist sync`, does not write it again, unless records arrive after the end.
    again = ReportWriter(run)
    again.write_if_due(run.read_state(), progress)
    assert len(written) == 3
    progress.num_points += 1
    again.write_if_due(run.read_state(), progress)
    assert len(written) == 4


def test_a_running_run_gets_a_new_report_now_and_then(
    run: RunDir, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("hpcdist.tracking.delivery.time.monotonic", lambda: now[0])
    writer, progress = ReportWriter(run), ShippingState()
    for seconds, expected in ((0, 1), (299, 1), (2, 2), (299, 2), (2, 3)):
        now[0] += seconds
        writer.write_if_due(run.read_state(), progress)
        assert len(written) == expected


def test_failure_of_a_report_is_logged_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(run: RunDir, series: object) -> None:
        raise ZeroDivisionError("in a chart")

    monkeypatch.setattr(report, "write_report", fail)
    writer, progress = ReportWriter(run), ShippingState()
    ReportScene.state_of(run, status="failed")
    for _ in range(3):
        writer.write_if_due(run.read_state(), progress)
    assert caplog.text.count("the report of first cannot be written") == 1
    assert "ZeroDivisionError: in a chart" in caplog.text
    assert progress.report == ""
