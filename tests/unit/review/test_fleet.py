"""The page on all runs of the last weeks."""

import json
import re
from pathlib import Path

import pytest
from report_scene import BEGAN, ReportScene, account, add_attempt, failure

from hpcdist.host.json_files import write_json
from hpcdist.review.fleet import render_fleet
from hpcdist.run.attempt_times import NodeShare, Resources
from hpcdist.run.folder import RunDir

DAY_S = 24 * 3600.0
GPUS = Resources(nodes={"g1": NodeShare(allocated=4, share=4, ranks=[0])}, unit="GPU")


def make_run(root: Path, name: str, user: str, *, began: float, hours: float, resources: Resources) -> RunDir:
    """Create a run of one attempt that has computed from its first to its last second."""
    run = ReportScene(root, name).run
    write_json(run.environment, {"host": "login", "user": user})
    end = began + 3600 * hours
    add_attempt(run, began, end, [account(began, end)], resources)
    ReportScene.state_of(run, ended=BEGAN + end)
    return run


def fail(run: RunDir, kind: str, host: str) -> None:
    run.attempt(1).failure.write_text(json.dumps(failure("it ended", kind=kind, host=host)))


@pytest.fixture
def cores() -> Resources:
    return Resources(nodes={"n1": NodeShare(allocated=2, share=2, ranks=[0])})


def test_hours_by_user_and_cause_and_nodes_that_failed(tmp_path: Path, cores: Resources) -> None:
    runs = [
        make_run(tmp_path, "a", "ada", began=0.0, hours=1.0, resources=GPUS),
        make_run(tmp_path, "b", "<bob>", began=0.0, hours=2.0, resources=GPUS),
        make_run(tmp_path, "c", "<bob>", began=0.0, hours=1.0, resources=GPUS),
        make_run(tmp_path, "d", "ada", began=0.0, hours=1.0, resources=cores),
        make_run(tmp_path, "old", "user-of-an-old-run", began=-40 * DAY_S, hours=5.0, resources=cores),
    ]
    (runs[-1].path / "attempts").rename(runs[-1].path / "moved")
    (runs[-1].path / "attempts").touch()
    fail(runs[0], "killed", "g1")
    fail(runs[1], "error", "g2")
    fail(runs[2], "hung", "g1")
    page = render_fleet(runs, BEGAN + DAY_S)
    assert "<p>4 runs had resources in the 4 weeks before 2026-11-1" in page
    assert page.index("<h2>GPU-hours</h2>") < page.index("<h2>core-hours</h2>")
    row = '<tr><td>{}</td><td class="n">{}</td><td>{}</td><td class="n">{}</td><td>100 %</td></tr>'
    assert row.format("&lt;bob&gt;", 2, "12 GPU-hours", "75 %") in page
    assert row.format("ada", 1, "4 GPU-hours", "25 %") in page
    assert row.format("ada", 1, "2 core-hours", "100 %") in page
    assert page.index("&lt;bob&gt;") < page.index("ada"), "most hours first"
    assert "compute: 12 GPU-hours" in page
    assert '<tr><td class="w">g1</td><td class="n">2</td>' in page
    assert "g2" not in page, "an exception of the code"
    assert "user-of-an-old-run" not in page
    assert "unreadable" not in page, "the ledger of an old run is not read"


def test_page_without_runs(tmp_path: Path) -> None:
    page = render_fleet([RunDir(tmp_path / "missing")], BEGAN)
    assert "<p>0 runs had resources" in page
    assert "1 run with unreadable files is left out." in page
    assert "No rank was killed or hung, and no GPU or node was lost." in page


def test_killed_supervisor_counts_for_its_node(tmp_path: Path, cores: Resources) -> None:
    run = ReportScene(tmp_path).run
    add_attempt(run, 0.0, None, [account(0.0, 60.0)], cores)
    add_attempt(run, 100.0, 200.0, [account(100.0, 200.0)], cores)
    ReportScene.state_of(run, attempt=2, ended=BEGAN + 200)
    page = render_fleet([run], BEGAN + DAY_S)
    assert '<tr><td class="w">n1</td><td class="n">1</td>' in page
    assert "the supervisor was killed, or its node failed" in page


def test_nodes_that_slurm_reports_count_and_its_decisions_do_not(tmp_path: Path, cores: Resources) -> None:
    """Of a lost node the supervisor often records nothing; a preemption kills ranks on healthy nodes."""
    run = ReportScene(tmp_path).run
    states = ("NODE_FAIL", "PREEMPTED", "CANCELLED", "TIMEOUT")
    starts = {}
    for number, state in enumerate(states):
        began = 1000.0 * number
        add_attempt(run, began, None, [account(began, began + 60)], cores)
        starts[str(number)] = {"began": BEGAN + began - 1, "ended": BEGAN + began + 100, "nodes": "n1", "state": state}
    starts["0"]["failed_nodes"] = "lost1,lost2"
    write_json(run.path / "job.json", {"job_id": "7", "starts": starts})
    write_json(run.attempt(2).failure, failure("was killed by SIGTERM"))
    ReportScene.state_of(run, status="failed", attempt=4, ended=BEGAN + 3100)
    page = render_fleet([run], BEGAN + DAY_S)
    nodes = page.partition("<h2>Nodes</h2>")[2]
    assert re.findall(r'<td class="w">(\w+)</td><td class="n">(.*?)</td>', nodes) == [("lost1", "1"), ("lost2", "1")]
    assert "nodes lost1, lost2 failed (Slurm: NODE_FAIL)" in page


@pytest.mark.parametrize(
    ("error", "nodes"),
    [("RuntimeError: CUDA error: uncorrectable ECC error encountered", ["n2"]), ("Connection reset by peer", [])],
)
def test_lost_gpu_counts_for_its_node_and_a_lost_peer_for_none(
    tmp_path: Path, cores: Resources, error: str, nodes: list[str]
) -> None:
    run = make_run(tmp_path, "a", "ada", began=0.0, hours=1.0, resources=cores)
    write_json(run.attempt(1).failure, failure(error, kind="error", is_fault=True))
    page = render_fleet([run], BEGAN + DAY_S)
    assert re.findall('<td class="w">(n[0-9])</td>', page) == nodes
