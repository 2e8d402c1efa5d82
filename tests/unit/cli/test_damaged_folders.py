"""Damaged files in a run folder: commands on all runs skip it, and commands on the run report the problem.

The damages are those that a crash, a full disk, another user or a newer hpcdist can cause.
"""

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hpcdist.checks.doctor_report import run_sections
from hpcdist.cli import doctor as cli_doctor
from hpcdist.cli import runs
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.errors import HpcdistError
from hpcdist.host.json_files import read_json, write_json
from hpcdist.job.submit_checks import longest_save
from hpcdist.review.ledger import read_ledger
from hpcdist.run.checkpoint_files import newest_step
from hpcdist.run.create import create_run
from hpcdist.run.folder import RunDir, State
from hpcdist.run.lookup import find_runs, find_unfinished
from hpcdist.run.snapshot import code_state
from hpcdist.run.status import update_job_starts
from hpcdist.run.sweeps import Cell, Sweep, SweepDir, mark, sweep_of, write_sweep
from hpcdist.slurm import client
from hpcdist.slurm.output import SlurmError
from hpcdist.tracking import artifacts, run_tags
from hpcdist.tracking.journal import JournalWriter
from hpcdist.tracking.journal_tail import JournalTail
from hpcdist.tracking.sent_points import SentPoints
from hpcdist.tracking.upload_state import SentFacts, SentFiles
from hpcdist.tracking.uri import link_to_newest, link_to_run

pytestmark = pytest.mark.processes  # the undamaged run is made with git

EXTRA: dict[str, dict[str, Any]] = {
    "mlflow.json": {"uri": "sqlite:////x.db", "run_id": "a", "experiment_id": "1"},
    "cell.json": {"sweep": "grid", "label": "l", "values": {}},
    "attempts/001/rank-00000.beat.json": {"time": 1.0, "step": 285, "total_steps": 300, "metrics": {"loss": 0.1}},
    "attempts/001/rank-00000.outcome.json": {"outcome": "stopped", "rank": 0, "host": "h", "step": 285, "time": 1.0},
    "attempts/001/request.json": {"action": "stop", "cause": "user", "by": "u", "time": 1.0},
    "checkpoints/step-00000285/manifest.json": {"step": 285, "created": 1.0, "write_s": 0.1, "files": {}},
    "slurm.json": {"job_id": "41_0", "job_name": "x", "cluster": "c"},
    "job.json": {"job_id": "41_0", "starts": {"0": {"nodes": "n1", "queue_s": 1.0}}},
    "container.json": {"runtime": "apptainer", "image": "i"},
    "lease": {"host": "h", "pid": 1, "started": 1.0, "user": "u", "job_id": None, "acquired": 1.0, "renewed": 1.0},
    "attempts/001/failure.json": {"kind": "error", "rank": 0, "host": "h", "step": 1, "error": "e"},
    "attempts/001/preflight.json": {"nodes": ["n1"], "checks": []},
    "attempts/001/times.json": {
        "supervised": 1.0,
        "began": 2.0,
        "ended": 3.0,
        "nodes": {"n1": {"allocated": 2, "share": 1, "ranks": [0, 1]}},
    },
    "attempts/001/network.json": {"text": "t", "warnings": []},
    "journal/sent-points.json": {
        "run_id": "1",
        "offsets": {"attempt-001.rank-00000.jsonl": 14},
        "marks": {"1": [1795311489741, 1]},
        "steps": {"train/loss": {"1": [1, 285]}},
    },
    "journal/sent-files.json": {"run_id": "1", "artifacts": {"config.yaml": "1"}},
    "journal/sent-facts.json": {"run_id": "1", "tags": {"hpcdist.state": "stopped"}, "complete": "stopped 1"},
}
FILES = [
    "state.json",
    "config.yaml",
    "environment.json",
    "journal/attempt-001.rank-00000.jsonl",
    "attempts/001/stragglers.jsonl",
    "attempts/001/phases.jsonl",
    "attempts/001/rank-00000.log",
    "attempts/001/stacks.txt",
    "attempts/001",
    "attempts",
    *EXTRA,
]


def text(value: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(value)


def wrongly_typed(path: Path) -> None:
    """Replace each value by one of another type."""
    found = read_json(path) or {"time": 1}
    path.write_text(json.dumps({key: [None] if not isinstance(value, list) else 7 for key, value in found.items()}))


def newer(path: Path) -> None:
    if path.suffix == ".yaml":
        path.write_text("format: 2\n" + path.read_text())
    elif path.suffix == ".jsonl":
        path.write_text('{"format": 2}\n' + path.read_text())
    else:
        path.write_text(json.dumps({**(read_json(path) or {}), "format": 2}))


def numbers(value: object) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        found = (read_json(path) or {}).items()
        path.write_text(json.dumps({key: value if isinstance(old, (int, float)) else old for key, old in found}))

    return damage


def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> object:
        path.unlink()
        return make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": text(""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a list": text("[1, 2]"),
    "null": text("null"),
    "wrong types": wrongly_typed,
    "NaN": numbers(math.nan),
    "huge": numbers(10**400),
    "infinite": numbers(math.inf),
    "negative": numbers(-(10**15)),
    "deep": text("[" * 1_200),
    "deep object": text('{"a":' * 1_200),
    "long number": text('{"attempt": ' + "9" * 6000 + "}"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "surrogate": text('{"status": "\\ud800", "reason": "\\ud800", "text": "\\ud800"}\n'),
    "folder": replaced(Path.mkdir),
    "dangling": replaced(lambda path: path.symlink_to("/nowhere/at/all")),
    "loop": replaced(lambda path: path.symlink_to(path)),
    "pipe": replaced(os.mkfifo),
    "endless": replaced(lambda path: path.symlink_to("/dev/zero")),
    "newer": newer,
    "format": text('{"format": "new"}'),
}


#: The most important files are tested with all kinds of damage, the others with a selection.
READ_BY_DOCTOR = ("environment.json", "attempts/001/failure.json", "lease")
ALL_DAMAGES = ("state.json", "lease")
SOME_DAMAGES = ("truncated", "wrong types", "huge", "folder", "pipe", "newer")


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run folder with all its files, and an undamaged run beside it."""
    runs_dir = tmp_path_factory.mktemp("undamaged") / "runs"
    words = [f"runs_dir={runs_dir}", "experiment=counting"]
    cells = [Cell(name="grid-seed_1", label="seed=1", values={"seed": 1}, config=load_config("ddp_digits", words))]
    sweep = write_sweep(Sweep(name="grid", keys=("seed",), cells=tuple(cells), base={}))
    for name in ("half", "grid-seed_1"):
        made = create_run(load_config("ddp_digits", [*words, f"name={name}"]), runs_dir)
        attempt = made.new_attempt()
        made.write_state(State(status="stopped", attempt=attempt.number, world_size=1))
        with JournalWriter(made.journal, attempt.number) as journal:
            journal.log({"train/loss": 1.0}, 1)
    mark(made, sweep, cells[0])
    run = runs_dir / "counting" / "half"
    (run / "checkpoints/step-00000285").mkdir()
    for name, content in EXTRA.items():
        write_json(run / name, content)
    (run / "attempts/001/stragglers.jsonl").write_text(
        '{"role": "", "name": "n", "event": "slow", "text": "rank 1 is slow"}\n'
    )
    (run / "attempts/001/phases.jsonl").write_text('{"cause": "start", "began": 1.0, "ended": 2.0}\n')
    (run / "attempts/001/rank-00000.log").write_text("hello\n")
    (run / "attempts/001/stacks.txt").write_text("rank 1 hangs\n")
    return runs_dir


def sync_without_mlflow(run: RunDir) -> None:
    """Read the files that the shipper reads."""
    state, config = run.read_state(), run_tags.read_config(run)
    run_tags.params(run, config)
    run_tags.fixed_tags(run, config)
    run_tags.state_tags(run, state)
    sweep_of(run)
    SentFacts.load(run.journal)
    SentFiles.load(run.journal)
    sent = SentPoints.load(run.journal)
    sent.offsets = {}
    tail = JournalTail(run.journal, sent)
    tail.new_points(tail.next_chunks(1, over=True))
    list(artifacts.documents(run, patch=True))
    list(artifacts.trainer_artifacts(run))
    list(artifacts.reports(run, ended=True))
    list(artifacts.checkpoints(run, config.config.checkpoint))


def doctor(run: RunDir) -> None:
    """Run the checks of `doctor RUN` on the folder, without checks of machines."""
    config = load_run_config(run.config, [], {}, require_secrets=False)
    for section in run_sections(run, config)[:3]:
        section.run()


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object, **__: object) -> str:
        raise SlurmError("no Slurm here", installed=False)

    monkeypatch.setattr(client, "run", unavailable)


def damaged_run(undamaged: Path, runs_dir: Path, name: str, damage: Callable[[Path], object]) -> RunDir:
    """Copy the undamaged runs to `runs_dir` and damage a file of one of them, which is returned."""
    shutil.rmtree(runs_dir, ignore_errors=True)
    shutil.copytree(undamaged, runs_dir, ignore=shutil.ignore_patterns("code", "*.pt"))
    run = RunDir(runs_dir / "counting" / "half")
    path = run.path / name
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    damage(path)
    return run


@pytest.mark.parametrize("name", FILES)
def test_commands_report_a_damaged_file_in_one_line(
    name: str,
    undamaged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs_dir = tmp_path / "runs"
    monkeypatch.setenv("HPCDIST_RUNS_DIR", str(runs_dir))
    monkeypatch.setenv("COLUMNS", "150")  # wide enough for the names of runs with their experiment
    config = load_config("ddp_digits", [f"runs_dir={runs_dir}", "experiment=counting"])
    for kind in DAMAGES if name in ALL_DAMAGES else SOME_DAMAGES:
        run = damaged_run(undamaged, runs_dir, name, DAMAGES[kind])
        label = f"{name}, {kind}"

        def command(function: Callable[[], object], kind: str = kind) -> tuple[int, str]:
            """Return exit code and output, with exceptions handled as in `main`."""
            try:
                function()
            except HpcdistError as raised:
                return raised.exit_code, str(raised)
            except OSError as raised:
                if kind != "loop":
                    raise
                return 0, str(raised)
            return 0, capsys.readouterr().out

        code, output = command(runs.runs)
        assert code == 0, label
        assert "counting/grid-seed_1" in output, f"{label}: the other run is listed"
        assert "counting/half" in output or name in ("state.json", "config.yaml"), label
        found = find_runs(runs_dir)
        assert found, label
        find_unfinished(config)
        link_to_newest(found, "sqlite:////x.db", "http://127.0.0.1:5000/")
        link_to_run(run)
        longest_save(runs_dir / "counting")
        if name in ("state.json", "cell.json"):
            command(lambda: runs.status("grid"))
        for act in (
            lambda: runs.status("half"),
            lambda: runs.logs("half", 0, None, False),
            lambda: cli_doctor.explain("half"),
        ):
            code, output = command(act)
            assert code in (0, 2), label
            if code == 2:
                assert len(output.splitlines()) == 1, f"{label}: {output}"
                assert str(run.path) in output, f"{label}: {output}"
        command(lambda: runs.stop("half"))
        readers = [sync_without_mlflow, read_ledger, update_job_starts, code_state, newest_step]
        for read in [*readers, *([doctor] if name in READ_BY_DOCTOR else [])]:
            with suppress(HpcdistError, OSError):
                read(run)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_sweep_file_raises_an_error_with_its_path(undamaged: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(undamaged, tmp_path / "runs")
    sweep = SweepDir(tmp_path / "runs" / "counting" / "grid")
    DAMAGES[kind](sweep.file)
    with pytest.raises((HpcdistError, OSError), match=r"sweep\.json"):
        sweep.read()


def test_messages_about_damaged_and_newer_state_files(undamaged: Path, tmp_path: Path) -> None:
    run = RunDir(shutil.copytree(undamaged, tmp_path / "runs") / "counting" / "half")
    path = run.path / "state.json"
    for content, message in {
        '{"format": 1, "status": "dormant"}': "is damaged: status cannot be 'dormant'",
        '{"format": 1}': "is damaged: it has no status",
    }.items():
        path.write_text(content)
        with pytest.raises(HpcdistError) as raised:
            run.read_state()
        assert str(raised.value) == f"{path} {message}"
    path.write_text('{"format": 1, "status": "stopped", "mood": "fine"}')
    assert run.read_state().status == "stopped", "a key of a later version"
