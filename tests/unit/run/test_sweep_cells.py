"""Selection of the cells that must run, and preparation of their folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.cli import sweep as cli_sweep
from hpcdist.cli.sweep import Choice, choose, hold_sweep, prepare, verdict
from hpcdist.config.loading import load_config
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.host.files import read_json, write_json
from hpcdist.run.create import create_run, label_of
from hpcdist.run.folder import RunDir, State, Status
from hpcdist.run.lease import hold
from hpcdist.run.sweeps import Sweep, make_sweep, match, parse_axes
from hpcdist.slurm import client
from hpcdist.slurm.client import JobSnapshot
from hpcdist.slurm.output import JobInfo

#: All tests of this file may start processes.
pytestmark = pytest.mark.processes

Make = Callable[..., Sweep]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    path = tmp_path / "project"
    path.mkdir()
    (path / "mine.py").write_text("first\n")
    return path


@pytest.fixture
def make(tmp_path: Path) -> Make:
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, name: tune, runs_dir: {tmp_path}/runs, trainer: 'mine:train'}}\n")

    def make(axes: Sequence[str] = ("seed=1,2",), *overrides: str) -> Sweep:
        return match(
            make_sweep(parse_axes(axes, overrides), lambda more: load_config(path, [*overrides, *more]), label_of)
        )

    return make


def start(sweep: Sweep, cwd: Path, launcher: str = "local") -> list[Choice]:
    """Prepare the cells that must run."""
    chosen = [choice for choice in choose(sweep) if choice.runs]
    with hold_sweep(sweep) as folder:
        prepare(chosen, folder, cwd, launcher=launcher)
    return chosen


def verdicts(sweep: Sweep) -> list[tuple[bool, str]]:
    return [(choice.runs, choice.why) for choice in choose(sweep)]


def end(run: RunDir, status: Status, **more: Any) -> None:
    run.write_state(replace(run.read_state(), status=status, attempt=1, **more))


# --- selection


@pytest.mark.parametrize(
    ("status", "held", "in_queue", "runs", "why"),
    [
        ("finished", False, None, False, "finished"),
        ("finished", True, "RUNNING", False, "finished"),
        ("failed", False, None, True, "failed"),
        ("stopped", False, None, True, "stopped"),
        ("cancelled", False, None, True, "cancelled"),
        ("failed", False, "COMPLETING", True, "failed"),
        ("failed", False, "UNKNOWN", True, "failed"),
        ("stopped", False, "PENDING", False, "queued (pending)"),
        ("running", True, None, False, "running"),
        ("failed", True, None, False, "running"),
        ("running", False, None, True, "lost"),
        ("running", False, "PENDING", False, "queued (pending)"),
        ("running", False, "COMPLETING", False, "queued (completing)"),
        ("queued", False, "PENDING", False, "queued (pending)"),
        ("queued", False, "UNKNOWN", False, "queued (unknown)"),
        ("queued", False, None, True, "lost"),
        ("created", False, None, True, "not started"),
    ],
)
def test_new_failed_stopped_and_lost_cells_run(
    status: Status, held: bool, in_queue: str | None, runs: bool, why: str
) -> None:
    facts = None if in_queue in (None, "UNKNOWN") else JobInfo(id="7", state=str(in_queue))
    job = None if in_queue is None else JobSnapshot(info=facts, error="no answer" * (in_queue == "UNKNOWN"))
    assert verdict(State(status=status), held=held, job=job) == (runs, why)
    if in_queue is None:
        assert verdict(State(status=status), held=held, job=JobSnapshot()) == (runs, why)


def test_second_start_runs_the_remaining_cells(make: Make, project: Path) -> None:
    sweep = make(["seed=1,2,3"])
    assert verdicts(sweep) == [(True, "new")] * 3
    assert not sweep.folder.parent.exists(), "`choose` creates no folder"
    chosen = start(sweep, project)
    end(chosen[0].run, "finished")
    end(chosen[1].run, "failed")
    assert verdicts(make(["seed=1,2,3,4"])) == [
        (False, "finished"), (True, "failed"), (True, "not started"), (True, "new")
    ]  # fmt: skip
    with hold(chosen[2].run):
        assert verdicts(sweep)[2] == (False, "running")


def test_slurm_is_queried_once_for_all_jobs(make: Make, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make()
    for index, choice in enumerate(start(sweep, project)):
        write_json(choice.run.path / "slurm.json", {"job_id": f"7_{index}"})
        choice.run.write_state(replace(choice.run.read_state(), status="queued"))
    queries: list[Sequence[str]] = []

    def query_jobs(ids: Sequence[str]) -> dict[str, JobInfo]:
        queries.append(ids)
        return {"7_1": JobInfo(id="7_1", state="PENDING")}

    monkeypatch.setattr(client, "query_jobs", query_jobs)
    monkeypatch.setattr(client, "take_snapshot", lambda job: JobSnapshot())
    assert verdicts(sweep) == [(True, "lost"), (False, "queued (pending)")]
    assert queries == [["7_0", "7_1"]]


def test_folder_of_another_run_is_an_error(make: Make, project: Path) -> None:
    sweep = make()
    run = create_run(sweep.cells[0].config, project)
    assert verdicts(sweep)[0] == (True, "new"), "the command was killed before it marked the cell"
    end(run, "finished")
    with pytest.raises(RunFolderError, match=r"tune-seed_1 is a run outside of sweep tune"):
        choose(sweep)
    for path in ("state.json", "config.yaml"):
        (run.path / path).unlink()
    with pytest.raises(RunFolderError, match=r"tune-seed_1 exists and holds no run: remove it"):
        choose(sweep)


# --- preparation


def test_new_cells_are_ordinary_runs_with_a_cell_file(make: Make, project: Path) -> None:
    sweep = make()
    for choice, cell in zip(start(sweep, project), sweep.cells, strict=True):
        assert RunDir.open(choice.run.path).read_state().status == "created"
        assert load_config(choice.run.config) == cell.config
        assert read_json(choice.run.path / "cell.json") == {
            "sweep": "tune", "label": cell.label, "values": cell.values
        }  # fmt: skip


def test_no_new_folder_remains_on_errors(make: Make, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make()

    def create(config: Any, cwd: Path, **options: Any) -> RunDir:
        if config.seed == 2:
            raise UserMistake("disk full")
        return create_run(config, cwd, **options)

    monkeypatch.setattr(cli_sweep, "create_run", create)
    with pytest.raises(UserMistake, match="disk full"):
        start(sweep, project)
    assert [path.name for path in sweep.folder.parent.iterdir()] == ["tune"]


@pytest.mark.parametrize(("status", "code"), [("failed", "second\n"), ("stopped", "first\n")])
def test_failed_cell_gets_the_current_code(make: Make, project: Path, status: Status, code: str) -> None:
    sweep = make()
    run = start(sweep, project)[0].run
    end(run, status)
    write_json(run.path / "slurm.json", {"job_id": "7_0"})
    (project / "mine.py").write_text("second\n")
    start(make(["seed=1"], "launch.max_restarts=9", "cluster.time_limit_min=7"), project, "slurm")
    assert (run.code / "mine.py").read_text() == code
    config = load_config(run.config)
    assert (config.launch.max_restarts, config.cluster.time_limit_min) == (9, 7)
    assert (run.path / "slurm.json").exists()
    start(make(["seed=1"]), project)
    assert not (run.path / "slurm.json").exists(), "it now runs locally"


def test_sweep_is_held_by_one_process(make: Make, project: Path) -> None:
    sweep = make()
    with hold_sweep(sweep), pytest.raises(RunFolderError, match=r"^sweep tune is held by process \d+ of "):
        start(sweep, project)
