"""Commands in the process of the test, run folders, and replacements of the supervisor and Slurm."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Ends, Make, Result, Seen, SetJob

from hpcdist.cli import app
from hpcdist.config.loading import load_config
from hpcdist.run import create
from hpcdist.run.folder import RunDir, State
from hpcdist.slurm.client import JobSnapshot
from hpcdist.supervisor import local_launcher


@pytest.fixture
def hpcdist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    """Run a command in this process, in an empty folder, as the console script does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HPCDIST_TRACKING_URI", raising=False)

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["hpcdist", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(ended.value.code, out, err)

    return call


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Create a run folder in `runs/exp` as `hpcdist run` does."""

    def make(name: str = "first", *overrides: str, **state: Any) -> RunDir:
        path = tmp_path / "made.yaml"
        path.write_text("experiment: exp\n")
        config = load_config(path, [f"name={name}", f"runs_dir={tmp_path}/runs", *overrides])
        run = create.create_run(config, tmp_path)
        for _ in range(state.get("attempt", 0)):
            run.new_attempt()
        run.write_state(replace(run.read_state(), **state))
        return run

    return make


@pytest.fixture
def make_bare(runs_dir: Path) -> Make:
    """Create a run folder with a state and an empty config."""

    def make(name: str = "first", **state: Any) -> RunDir:
        run = RunDir.create(runs_dir / "exp" / name)
        run.config.touch()
        for _ in range(state.get("attempt", 0)):
            run.new_attempt()
        run.write_state(replace(run.read_state(), **state))
        return run

    return make


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Replace `supervise_locally`, which starts no ranks: it records its arguments and returns the state in `ends`."""
    seen: dict[str, Any] = {"ends": State(status="finished", reason="all epochs are done")}

    def supervise_locally(run: RunDir, config: Any, plan: Any, view: Any, env: Any, *, tracking_uri: str) -> State:
        seen.update(run=run, config=config, plan=plan, env=env)
        state: State = seen["ends"]
        with view():
            pass
        return state

    monkeypatch.setattr(local_launcher, "supervise_locally", supervise_locally)
    monkeypatch.setattr("hpcdist.host.log_files.configure", lambda: None)
    return seen  # type: ignore[return-value]


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Start no ranks for the cells of a sweep; set their ends by the last part of their names. All others finish."""
    ends: Ends = {}

    def supervise_locally(run: RunDir, *_: Any, **__: Any) -> State:
        run.new_attempt()
        how = ends.get(run.name.rpartition("-")[2])
        end = how(run) if how else State(status="finished", reason="done")
        state = replace(end, attempt=1)
        run.write_state(state)
        return state

    monkeypatch.setattr("hpcdist.cli.local_sweep.supervise_locally", supervise_locally)
    monkeypatch.setattr("hpcdist.host.log_files.configure", lambda: None)
    monkeypatch.setattr("hpcdist.cli.local_sweep._close_parent_run", lambda run, uri: print("closed the parent run"))
    return ends


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> SetJob:
    """Set the snapshot that Slurm returns for every job."""
    snapshots: list[JobSnapshot] = []
    monkeypatch.setattr("hpcdist.slurm.client.take_snapshot", lambda job, history=False: snapshots[-1])
    return snapshots.append
