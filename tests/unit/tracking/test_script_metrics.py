"""The reader of the metrics in files and output of a script, over attempts and restarts of the reader."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from event_records import EVENT_FILE
from tracking_scene import Scene

from hpcdist.config.record_schema import TrackingConfig
from hpcdist.run.folder import RunDir
from hpcdist.supervisor import children
from hpcdist.supervisor.children import MetricsReader
from hpcdist.tracking import output_metrics, script_metrics
from hpcdist.tracking.journal import JournalWriter, Record, journal_files, read_records
from hpcdist.tracking.rank_records import has_metrics
from hpcdist.tracking.script_metrics import ScriptMetrics, prefixes_of

PATTERNS = {"print/loss": r"step (?P<step>\d+): loss ([0-9.]+)", "print/lr": "lr ([0-9.]+)"}


class Script:
    """What rank 0 of a script writes in the attempts of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.run = RunDir.create(folder / "runs" / "exp" / "first")
        self.tracking = TrackingConfig(stdout_metrics=PATTERNS)
        self.begin()

    def begin(self) -> None:
        self.attempt = self.run.new_attempt()

    def write(self, name: str, content: str | bytes, *, again: bool = False) -> Path:
        """Append to a file, or write it `again` from its beginning."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        start = path.stat().st_size if path.exists() and not again else 0
        with open(self.attempt.written, "a") as file:
            file.write(json.dumps({"path": str(path), "start": start}) + "\n")
        with open(path, "wb" if again else "ab") as output:
            output.write(content.encode() if isinstance(content, str) else content)
        return path

    def print(self, text: str) -> None:
        with open(self.attempt.log(0), "a") as file:
            file.write(text)

    def reader(self) -> ScriptMetrics:
        return ScriptMetrics(self.run, self.tracking)

    def records(self, attempt: int = 1) -> list[Record]:
        path = self.run.journal / f"attempt-{attempt:03d}.rank-00000.files.jsonl"
        assert path in [file.path for file in journal_files(self.run.journal)]
        return read_records(path)[0]

    def points(self, attempt: int = 1) -> list[tuple[str, int, float]]:
        """Return metric, step and value of all records, as often as they are there."""
        return [(key, record.step, value) for record in self.records(attempt) for key, value in record.metrics.items()]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_metrics_of_all_sources_are_read_once(script: Script) -> None:
    reader = script.reader()
    script.write("summary.csv", "epoch,loss\n0,2.0\n1,1")
    script.write("logs/events.out.tfevents.1.n1", EVENT_FILE[:200])
    script.print("step 5: loss 0.5\nlr 0.1\rlr 0.2\rlr 0.3")
    for _ in range(3):
        reader.read(over=False)
    script.write("summary.csv", ".5\n")
    script.write("logs/events.out.tfevents.1.n1", EVENT_FILE[200:])
    reader.read(over=False)
    reader.read(over=True)
    reader.read(over=True)
    loss = [point for point in script.points() if point[2] == point[2]]
    assert Counter(loss) == Counter(
        [
            ("loss", 0, 2.0), ("loss", 1, 1.5),
            ("train/loss", 1, 0.5), ("new", 7, 0.25), ("double", -1, 0.1),
            ("print/loss", 5, 0.5), ("print/lr", 0, 0.1), ("print/lr", 1, 0.2), ("print/lr", 2, 0.3),
        ]
    )  # fmt: skip


def test_next_reader_continues_where_the_last_one_was_killed(script: Script) -> None:
    script.write("log.csv", "step,loss\n1,0.5\n")
    script.print("lr 0.1\n")
    script.reader().read(over=False)
    script.write("log.csv", "2,0.25\n")
    script.print("lr 0.2\n")
    script.begin()  # the attempt has ended while no reader was there
    script.write("log.csv", "2,0.125\n")
    script.print("lr 0.3\n")
    script.reader().read(over=True)
    assert script.points(1) == [("loss", 1, 0.5), ("print/lr", 0, 0.1), ("loss", 2, 0.25), ("print/lr", 1, 0.2)]
    assert script.points(2) == [("loss", 2, 0.125), ("print/lr", 0, 0.3)]


def test_file_that_the_next_attempt_begins_anew_is_its_own(script: Script) -> None:
    script.write("metrics.csv", "step,loss\n1,0.5\n2,0.25\n")
    script.reader().read(over=False)
    script.begin()
    script.write("metrics.csv", "step,loss\n1,0.75\n2,0.5\n3,0.25\n", again=True)
    script.reader().read(over=True)
    assert script.points(1) == [("loss", 1, 0.5), ("loss", 2, 0.25)]
    assert script.points(2) == [("loss", 1, 0.75), ("loss", 2, 0.5), ("loss", 3, 0.25)]


def test_later_output_of_another_program_is_not_read(script: Script) -> None:
    path = script.write("metrics.csv", "step,loss\n1,0.5\n")
    script.reader().read(over=False)
    path.write_text("step,loss\n1,8.0\n2,9.0\n")
    later = path.stat().st_mtime + 3600
    os.utime(path, (later, later))
    script.begin()
    script.reader().read(over=True)
    assert script.points() == [("loss", 1, 0.5)]


def test_damaged_state_makes_no_point_twice_in_mlflow(scene: Scene) -> None:
    """The journal then has points twice, of which the shipper sends the first one."""
    scene.write_config({"trainer": {"script": ["train.py"]}})
    attempt = scene.run.new_attempt()
    attempt.log(0).write_text("lr 0.1\nlr 0.2\n")
    for _ in range(2):
        ScriptMetrics(scene.run, TrackingConfig(stdout_metrics=PATTERNS)).read(over=False)
        (scene.run.journal / "read-files.json").write_text("[1")
    scene.state(status="finished")
    ScriptMetrics(scene.run, TrackingConfig(stdout_metrics=PATTERNS)).read(over=True)
    scene.shipper().ship_once(scene.run.read_state())
    history = scene.client.get_metric_history(scene.run_id, "print/lr")
    assert [(point.step, point.value) for point in history] == [(0, 0.1), (1, 0.2)]


def test_files_without_metrics_are_left_out(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    script.write("predictions.csv", "id,probability\n1,0.5\n")
    script.write("events.out.tfevents.1", b"no events, but over twelve bytes")
    script.write("gone.csv", "step,loss\n1,0.5\n").unlink()
    script.write("log.csv", f"step,time/load_s,{'x' * 5000}\n1,0.5,1\n2,0.5,\n")
    reader = script.reader()
    for over in (False, True):
        reader.read(over=over)
    assert script.points() == [("script.time/load_s", 2, 0.5)]
    levels = [(record.levelname, record.message.partition(":")[0].rpartition("/")[2]) for record in caplog.records]
    assert levels == [
        ("INFO", "predictions.csv"),
        ("WARNING", "events.out.tfevents.1 are not read any more"),
        ("WARNING", f"metric name '{'x' * 40}'… has 5000 characters"),
    ]


@pytest.mark.parametrize(
    ("changes", "names"), [({"script_files": False}, {"print/lr"}), ({"stdout_metrics": {}}, {"loss"})]
)
def test_each_source_can_be_left_out(script: Script, changes: dict[str, Any], names: set[str]) -> None:
    script.tracking = TrackingConfig(**({"stdout_metrics": PATTERNS} | changes))
    script.write("log.csv", "step,loss\n1,0.5\n")
    script.print("lr 0.1\n")
    script.reader().read(over=True)
    assert {name for name, _, _ in script.points()} == names


def test_files_of_several_folders_and_names_are_told_apart() -> None:
    paths = [
        "/w/tb/events.out.tfevents.1", "/w/tb/acc_a/events.out.tfevents.2", "/w/other/events.out.tfevents.3",
        "/w/v0/metrics.csv", "/w/v1/metrics.csv", "/w/train.csv", "/w/fold/train.csv",
    ]  # fmt: skip
    prefixes = ["", "acc_a/", "other/", "", "v1/", "train/", "fold/train/"]
    assert list(prefixes_of([Path(path) for path in paths]).values()) == prefixes


def test_last_pass_reads_output_of_many_chunks(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_metrics, "CHUNK_BYTES", 50)
    script.print("".join(f"step {step}: loss 0.5\n" for step in range(100)))
    script.reader().read(over=True)
    assert [step for _, step, _ in script.points()] == list(range(100))


def test_file_that_is_away_for_a_moment_is_read_later(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    script.write("metrics.csv", "step,loss\n1,2.0\n")
    reader = script.reader()
    with monkeypatch.context() as patch:
        patch.setattr(script_metrics, "read_rows", fail)
        reader.read(over=False)
    reader.read(over=True)
    assert script.points() == [("loss", 1, 2.0)]


def test_files_of_a_script_that_logs_itself_are_not_read(script: Script) -> None:
    """Lightning writes a csv log beside MLflow's autologging, at steps of its own."""
    reader = script.reader()
    with JournalWriter(script.run.journal, script.attempt.number) as journal:
        journal.log({"system/cpu_utilization_percentage": 5.0}, 1)
    script.write("metrics.csv", "step,loss\n1,2.0\n")
    reader.read(over=False)
    assert script.points() == [("loss", 1, 2.0)], "hpcdist's own metrics do not count"
    with JournalWriter(script.run.journal, script.attempt.number) as journal:
        journal.log({"loss": 1.0}, 0)
    script.write("metrics.csv", "2,1.0\n")
    script.print("step 5: loss 0.5\n")
    for _ in range(2):
        reader.read(over=True)
    assert script.points() == [("loss", 1, 2.0), ("print/loss", 5, 0.5)]


def test_run_has_metrics_only_if_its_code_has_logged_some(scene: Scene) -> None:
    scene.log([1], key="system/cpu_utilization_percentage")
    scene.log([1], key="time/step_s")
    assert not has_metrics(scene.run)
    scene.log([1], attempt=2)
    assert has_metrics(scene.run)


# --- the process


@pytest.fixture
def process_run(script: Script) -> RunDir:
    config = {"trainer": {"script": ["train.py"]}, "tracking": {"stdout_metrics": {"loss": "loss ([0-9.]+)"}}}
    script.run.config.write_text(yaml.safe_dump(config))
    return script.run


@pytest.mark.processes
def test_last_pass_reads_what_ranks_wrote_before_they_ended(script: Script, process_run: RunDir) -> None:
    reader = MetricsReader(process_run, os.environ)
    script.print("loss 0.5\nloss 0.25")
    script.write("events.out.tfevents.1", b"no events, but over twelve bytes")
    assert reader.finish() == [
        f"metrics in {script.folder}/events.out.tfevents.1 are not read any more: no record begins at byte 0"
    ]
    assert script.points() == [("loss", 0, 0.5), ("loss", 1, 0.25)]


@pytest.mark.processes
def test_failure_of_the_reader_is_reported(process_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    log = process_run.path / "script-metrics.log"
    assert MetricsReader(process_run, os.environ).finish() == [
        f"the process that reads the metrics of the script has failed (see {log})"
    ]


@pytest.mark.processes
def test_another_process_reads_the_rest_if_one_was_killed(script: Script, process_run: RunDir) -> None:
    reader = MetricsReader(process_run, os.environ)
    os.kill(reader._process.pid, signal.SIGKILL)
    script.print("loss 0.5\n")
    assert reader.finish() == []
    assert script.points() == [("loss", 0, 0.5)]
    reader.kill()


@pytest.mark.processes
def test_reader_that_does_not_end_is_killed(process_run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "READ_WITHIN_S", 0.0)
    reader = MetricsReader(process_run, os.environ)
    assert reader.finish() == [
        f"not all metrics of the script were read within 0 s (see {process_run.path}/script-metrics.log)"
    ]


@pytest.mark.processes
def test_reader_of_a_replaced_folder_ends_with_an_error(process_run: RunDir) -> None:
    command = [sys.executable, "-m", "hpcdist.tracking.script_metrics", str(process_run.path)]
    env = {**os.environ, "HPCDIST_FOLDER_IDENTITY": "another"}
    done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has been replaced by another one" in done.stderr
