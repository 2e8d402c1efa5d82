"""Which cells of a sweep run, and how their folders are made ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import RunFolderError, UserMistake
from hpcdist.run.folder import RunDir, State, Status, read_json, write_json
from hpcdist.run.lease import hold
from hpcdist.run.sweep import Sweep, make_sweep, parse_axes
from hpcdist.run.sweep_folder import match
from hpcdist.supervisor import sweep_cells
from hpcdist.supervisor.start import create_run, label_of
from hpcdist.supervisor.sweep_cells import Choice, at_work, choose, make_ready, verdict

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
    """Make ready what is to run."""
    chosen = [choice for choice in choose(sweep) if choice.runs]
    with at_work(sweep) as there:
        make_ready(chosen, there, cwd, launcher=launcher)
    return chosen


def stands(sweep: Sweep) -> list[tuple[bool, str]]:
    return [(choice.runs, choice.why) for choice in choose(sweep)]


def end(run: RunDir, status: Status, **more: Any) -> None:
    run.write_state(replace(run.read_state(), status=status, attempt=1, **more))


# --- which cells run


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
def test_missing_failed_stopped_and_lost_cells_run(
    status: Status, held: bool, in_queue: str | None, runs: bool, why: str
) -> None:
    assert verdict(State(status=status), held=held, in_queue=in_queue) == (runs, why)


def test_a_second_start_runs_what_is_left(make: Make, project: Path) -> None:
    sweep = make(["seed=1,2,3"])
    assert stands(sweep) == [(True, "new")] * 3
    assert not sweep.folder.parent.exists(), "looking makes nothing"
    chosen = start(sweep, project)
    end(chosen[0].run, "finished")
    end(chosen[1].run, "failed")
    assert stands(make(["seed=1,2,3,4"])) == [
        (False, "finished"), (True, "failed"), (True, "not started"), (True, "new")
    ]  # fmt: skip
    with hold(chosen[2].run):
        assert stands(sweep)[2] == (False, "running")


def test_slurm_is_asked_once_for_all_jobs(make: Make, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make()
    for index, choice in enumerate(start(sweep, project)):
        write_json(choice.run.path / "slurm.json", {"job_id": f"7_{index}"})
        choice.run.write_state(replace(choice.run.read_state(), status="queued"))
    asked: list[Sequence[str]] = []

    def queued_jobs(ids: Sequence[str]) -> dict[str, str]:
        asked.append(ids)
        return {"7_1": "PENDING"}

    monkeypatch.setattr(sweep_cells, "queued_jobs", queued_jobs)
    assert stands(sweep) == [(True, "lost"), (False, "queued (pending)")]
    assert asked == [["7_0", "7_1"]]


def test_a_run_in_the_way_of_a_cell(make: Make, project: Path) -> None:
    sweep = make()
    run = create_run(sweep.cells[0].config, project)
    assert stands(sweep)[0] == (True, "new"), "whoever made it was killed before it could be marked"
    end(run, "finished")
    with pytest.raises(RunFolderError, match=r"tune-seed_1 is a run of its own, no cell of sweep tune"):
        choose(sweep)
    for path in ("state.json", "config.yaml"):
        (run.path / path).unlink()
    with pytest.raises(RunFolderError, match=r"tune-seed_1 is there and holds no run: remove it"):
        choose(sweep)


# --- making them ready


def test_new_cells_are_ordinary_runs_that_know_their_sweep(make: Make, project: Path) -> None:
    sweep = make()
    for choice, cell in zip(start(sweep, project), sweep.cells, strict=True):
        assert RunDir.open(choice.run.path).read_state().status == "created"
        assert load_config(choice.run.config) == cell.config
        assert read_json(choice.run.path / "cell.json") == {
            "sweep": "tune", "label": cell.label, "values": cell.values
        }  # fmt: skip


def test_all_new_cells_are_made_or_none(make: Make, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = make()

    def create(config: Any, cwd: Path, *, launcher: str) -> RunDir:
        if config.seed == 2:
            raise UserMistake("no room")
        return create_run(config, cwd, launcher=launcher)

    monkeypatch.setattr(sweep_cells, "create_run", create)
    with pytest.raises(UserMistake, match="no room"):
        start(sweep, project)
    assert [path.name for path in sweep.folder.parent.iterdir()] == ["tune"]


@pytest.mark.parametrize(("status", "code"), [("failed", "second\n"), ("stopped", "first\n")])
def test_a_failed_cell_gets_the_code_as_it_is_now(make: Make, project: Path, status: Status, code: str) -> None:
    sweep = make()
    run = start(sweep, project)[0].run
    end(run, status)
    write_json(run.path / "slurm.json", {"job_id": "7_0"})
    (project / "mine.py").write_text("second\n")
    start(make(["seed=1"], "launch.max_restarts=9", "cluster.time_limit_min=7"), project, "slurm")
    assert (run.code / "mine.py").read_text() == code
    config = load_config(run.effective_config)
    assert (config.launch.max_restarts, config.cluster.time_limit_min) == (9, 7)
    assert (run.path / "slurm.json").exists()
    start(make(["seed=1"]), project)
    assert not (run.path / "slurm.json").exists(), "it runs here now"


def test_two_at_once(make: Make, project: Path) -> None:
    sweep = make()
    with at_work(sweep), pytest.raises(RunFolderError, match=r"^sweep tune is in the hands of process \d+ of "):
        start(sweep, project)


# --- what Slurm says


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, int], Path]:
    """Puts a squeue on PATH that says something; its arguments are in the file that is returned."""

    def squeue(out: str, err: str, code: int) -> Path:
        script = tmp_path / "squeue"
        script.write_text(
            f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\nprintf '{out}'\nprintf '{err}' >&2\nexit {code}\n"
        )
        script.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        return tmp_path / "asked"

    return squeue


STATES = (("7_0", "RUNNING"), ("7_1", "COMPLETED"), ("7_2", "PENDING"), ("8", "PENDING"))


def test_jobs_that_slurm_has_not_done_with(squeue: Callable[[str, str, int], Path]) -> None:
    asked = squeue("".join(f"{task}|{state}|None|N/A|N/A|N/A|n1|1:00:00|e/s\\n" for task, state in STATES), "", 0)
    assert sweep_cells.queued_jobs(["7_0", "7_1", "7_2"]) == {"7_0": "RUNNING", "7_2": "PENDING"}
    assert "--jobs=7_0,7_1,7_2" in asked.read_text()
    assert sweep_cells.queued_jobs([]) == {}


def test_jobs_that_slurm_has_forgotten(squeue: Callable[[str, str, int], Path]) -> None:
    squeue("", "slurm_load_jobs error: Invalid job id specified", 1)
    assert sweep_cells.queued_jobs(["7_0"]) == {}


def test_a_slurm_that_does_not_answer(squeue: Callable[[str, str, int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    squeue("", "Unable to contact slurm controller", 1)
    assert sweep_cells.queued_jobs(["7_0"]) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert sweep_cells.queued_jobs(["7_0"]) is None
