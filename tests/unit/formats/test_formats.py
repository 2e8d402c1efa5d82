"""The format number of a run folder's files, and resuming run folders of each released format."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from hpcdist.config.loading import load_config
from hpcdist.config.written import run_yaml
from hpcdist.errors import RunFolderError
from hpcdist.host import files
from hpcdist.host.files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.run.lookup import find_runs
from hpcdist.run.sweeps import SweepDir, sweep_of
from hpcdist.tracking.journal import JournalWriter, read_records

HERE = Path(__file__).parent
#: The folder in which the runs of v0 and v1 were created; their files contain this path.
MADE_IN = "/var/tmp/hpcdist-fixture"


@dataclass
class Sample:
    whole: int
    ratio: float = 1.0


def unpack(version: str, to: Path) -> Path:
    """Copy the runs of a format, and replace the paths in their files. Returns the `runs_dir`."""
    shutil.copytree(HERE / version / "runs", to / "runs")
    for path in (to / "runs").rglob("*"):
        if path.suffix in (".json", ".yaml") and path.is_file():
            path.write_text(path.read_text().replace(MADE_IN, str(to)))
        path.chmod(0o700 if path.is_dir() else 0o600)
    return to / "runs"


@pytest.mark.processes
@pytest.mark.parametrize("version", ["v0", "v1"])
def test_run_folder_of_a_released_format_is_resumed(version: str, tmp_path: Path) -> None:
    """The ranks restore the checkpoint, execute the code in the folder, and finish the run."""
    runs_dir = unpack(version, tmp_path)
    assert "half" in [run.name for run in find_runs(runs_dir)]
    run = RunDir(runs_dir / "counting" / "half")
    before = run.read_state()
    assert (before.status, before.attempt) == ("stopped", 1)
    last = int(sorted(run.checkpoints.glob("step-*"))[-1].name.removeprefix("step-")) + 15
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("hpcdist")),
            "resume",
            str(run.path),
            f"params.until={last}",
            "tracking.drain_timeout_s=0.01",
        ],
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    state = run.read_state()
    assert (state.status, state.attempt, state.reason) == ("finished", 2, f"counted to {last}")
    records, _ = read_records(run.journal / "attempt-002.rank-00000.jsonl")
    assert records[0].step == last - 14, "resumed from the checkpoint"
    assert records[-1].step == last
    assert json.loads((run.path / "state.json").read_text())["format"] == files.FORMAT
    config = yaml.safe_load(run.config.read_text())
    assert (config["format"], config["tracking"]["drain_timeout_s"]) == (files.FORMAT, 0.01), (
        "the changed config is adopted"
    )


def test_sweep_of_format_0_is_read(tmp_path: Path) -> None:
    runs_dir = unpack("v0", tmp_path)
    sweep = SweepDir(runs_dir / "counting" / "grid")
    assert sweep.read_state().reason == "2 cells: 2 finished"
    assert [found.name for run in sweep.cells() if (found := sweep_of(run)) is not None] == ["grid", "grid"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (2, r"^a\.json was written by a newer hpcdist \(format 2; this version reads up to 1\): upgrade hpcdist$"),
        ("1", r"^a\.json is damaged: its format is '1', not an integer$"),
        (-1, r"^a\.json is damaged: its format is '-1', not an integer$"),
        (True, r"^a\.json is damaged: its format is 'True', not an integer$"),
    ],
)
def test_unknown_format_is_an_error(number: object, message: str) -> None:
    with pytest.raises(RunFolderError, match=message):
        files.unstamped({"format": number}, Path("a.json"))


def test_content_without_a_format_number_has_format_0() -> None:
    assert files.unstamped({"a": 1}, Path("a.json")) == {"a": 1}
    assert files.unstamped(files.stamped({"a": 1}), Path("a.json")) == {"a": 1}


def test_fill_ignores_new_keys_and_names_invalid_values() -> None:
    assert files.fill(Sample, {"whole": 3, "later": "x"}, Path("a.json")) == Sample(whole=3)
    with pytest.raises(RunFolderError, match=r"^a\.json is damaged: it has no whole$"):
        files.fill(Sample, {}, Path("a.json"))
    for value in (True, "3", None, -1, 10**400, 1.0):
        with pytest.raises(RunFolderError, match=r"^a\.json is damaged: whole cannot be '"):
            files.fill(Sample, {"whole": value}, Path("a.json"))
    for value in (float("nan"), float("inf"), 10**400, "1"):
        with pytest.raises(RunFolderError, match=r"^a\.json is damaged: ratio cannot be '"):
            files.fill(Sample, {"whole": 1, "ratio": value}, Path("a.json"))


def test_journal_of_a_newer_format_is_an_error_and_without_format_is_read(tmp_path: Path) -> None:
    with JournalWriter(tmp_path) as writer:
        writer.log({"loss": 1.0}, 1)
    text = writer.path.read_text()
    assert text.startswith('{"format": 1}\n')
    assert [record.step for record in read_records(writer.path)[0]] == [1]
    writer.path.write_text(text.partition("\n")[2])
    assert [record.step for record in read_records(writer.path)[0]] == [1]
    writer.path.write_text('{"format": 2}\n' + text)
    with pytest.raises(RunFolderError, match=r"jsonl was written by a newer hpcdist \(format 2; "):
        read_records(writer.path)


def test_config_of_a_run_can_start_another_run(tmp_path: Path) -> None:
    """The format number is not a config key."""
    path = tmp_path / "config.yaml"
    path.write_text(run_yaml(load_config("ddp_digits")))
    assert path.read_text().startswith("format: 1\n")
    assert load_config(path).experiment == "digits"
    path.write_text(path.read_text().replace("format: 1", "format: 7"))
    with pytest.raises(RunFolderError, match=r"config\.yaml was written by a newer hpcdist"):
        load_config(path)


def test_json_files_of_a_run_folder_have_a_format_number(tmp_path: Path) -> None:
    """Except heartbeats, which only the same version reads."""
    folder = HERE / "v1" / "runs"
    for path in folder.rglob("*.json"):
        if "beat" not in path.name:
            assert json.loads(path.read_text()).get("format") == 1, path
    assert read_json(folder / "counting" / "half" / "state.json") is not None
