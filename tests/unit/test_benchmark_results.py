"""Results of benchmarks/: one per script and kind of machine, with date and commit. Each script has a test."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import BENCHMARKS, BY_HAND, FOLDER, MODULES, NEED_GPU, NOT_RUN, SMALLEST, SMALLEST_JOBS, run_all
from generators import answers

FAKE = run_all.Benchmark("fake", ("--rounds", "2"), (run_all.Figure("time of a call", ("rows", "s"), "s", 2.0),))


def result(seconds: float, date: str, commit: str = "1234abcd") -> dict[str, Any]:
    return {
        "report": f"{seconds} s",
        "values": {"rows": {"s": seconds}},
        "date": date,
        "commit": commit,
        "minutes": 1.0,
        "load_before": 0.5,
        "machine": "a processor, 24 GiB",
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let `run_all` use an empty folder, and one benchmark."""
    found = tmp_path / "benchmarks"
    found.mkdir()
    monkeypatch.setattr(run_all, "HERE", found)
    monkeypatch.setattr(run_all, "RAW", found / "results.json")
    monkeypatch.setattr(run_all, "RESULTS", found / "RESULTS.md")
    monkeypatch.setattr(run_all, "BENCHMARKS", (FAKE,))
    monkeypatch.setattr(sys, "argv", ["run_all.py"])
    return found


def test_each_script_is_run_by_a_test_or_has_a_reason() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")}
    listed = [*SMALLEST, *SMALLEST_JOBS, *BY_HAND, *NEED_GPU, *NOT_RUN, *MODULES]
    assert sorted(files) == sorted(listed), "add a new script to SMALLEST of tests/support/benchmark_scripts.py"
    assert set(BENCHMARKS) == {*SMALLEST, *SMALLEST_JOBS}


def test_page_shows_the_results_of_the_file() -> None:
    page = (FOLDER / "RESULTS.md").read_text()
    results = json.loads((FOLDER / "results.json").read_text())
    notes = page.partition("\n" + run_all.NOTES)[2]
    assert notes
    assert page == run_all.render(results, run_all.NOTES + notes), "edit the notes only, or run benchmarks/run_all.py"


def test_each_result_has_a_date_a_commit_and_a_known_benchmark() -> None:
    names = {benchmark.name for benchmark in run_all.BENCHMARKS}
    results = json.loads((FOLDER / "results.json").read_text())
    for kind in (*results, run_all.machine_kind()):
        assert re.fullmatch(r".+, \d+ logical CPUs, (no GPU|\d+ × .+|GPUs of an unknown kind)", kind)
    for of_machine in results.values():
        for name, one in of_machine.items():
            assert name in names
            assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", one["date"]), name
            assert re.fullmatch(r"([0-9a-f]{8}(-dirty)?)?", one["commit"]), name


def test_run_keeps_the_results_of_other_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = result(3.0, "2026-02-03 04:05", "fedcba98-dirty")
    monkeypatch.setattr(run_all, "run", lambda benchmark: new)
    monkeypatch.setattr(run_all, "machine_kind", lambda: "this one")
    others = {
        "older": {"fake": result(1.0, "2025-12-31 23:59", "")},
        "newer": {"fake": result(2.0, "2026-03-01 00:00")},
    }
    run_all.RAW.write_text(json.dumps(others))
    run_all.RESULTS.write_text("old\n\n## Notes\n\nkept\n")
    run_all.main()
    assert json.loads(run_all.RAW.read_text()) == {**others, "this one": {"fake": new}}
    page = run_all.RESULTS.read_text()
    assert page.endswith("\n## Notes\n\nkept\n")
    assert "1. older\n2. newer\n3. this one\n" in page
    assert [line for line in page.splitlines() if line.startswith("| time")] == [
        "| time of a call | 2 s | ≤ 2 s | met | 2026-03-01 1234abcd (2) |",
        "| time of a call | 3 s | ≤ 2 s | **missed** | 2026-02-03 fedcba98-dirty (3) |",
        "| time of a call | 1 s | ≤ 2 s | met | 2025-12-31 unknown commit (1) |",
    ], "newest first"
    assert [line[:69] for line in page.splitlines() if line.startswith("`python")] == [
        "`python benchmarks/fake.py --rounds 2`, 2026-03-01 00:00, commit 1234",
        "`python benchmarks/fake.py --rounds 2`, 2026-02-03 04:05, commit fedc",
        "`python benchmarks/fake.py --rounds 2`, 2025-12-31 23:59, commit unkn",
    ]


def test_rows_of_one_case_on_several_machines_follow_each_other() -> None:
    case = {"unit": "steps/s", "baseline": 2.0, "ours": 4.0, "ratio": 2.0, "bound": None, "goal": 1.5}
    measured = [
        run_all.Measured(
            run_all.Benchmark("fake", (), ()),
            number,
            {
                "values": {"table": [{"case": name, **case} for name in ("first", "second")]},
                "date": f"2026-02-0{number} 03:04",
                "commit": "1234abcd",
            },
        )
        for number in (2, 1)
    ]
    assert list(run_all.trainer_rows(measured)) == [
        f"| fake | {name} | 2 steps/s | 4 steps/s | 2× |  | ≥ 1.5× | met | 2026-02-0{number} 1234abcd ({number}) |"
        for name in ("first", "second")
        for number in (2, 1)
    ]


def test_answers_have_the_newest_of_several_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = run_all.Benchmark("startup", (), (run_all.Figure("the figure", ("rows", "s"), "s"),))
    monkeypatch.setattr(run_all, "BENCHMARKS", (benchmark,))
    results = {"one": {"startup": result(1.0, "2026-01-01 00:00")}, "two": {"startup": result(2.0, "2026-01-02 00:00")}}
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "RESULTS.md").write_text(run_all.render(results, run_all.NOTES))
    monkeypatch.setattr(answers, "ROOT", tmp_path)
    monkeypatch.setattr(answers, "QUESTIONS", (("How long?", "{}", (r"the figure",), "startup"),))
    assert answers.answers().splitlines()[-1] == "| How long? | 2 s | `python benchmarks/startup.py` | 2026-01-02 |"


@pytest.mark.processes
def test_run_records_report_figures_and_commit(folder: Path) -> None:
    script = 'import sys\nprint(sys.argv[1:])\nprint(\'{"rows": {"s": 1.5}}\')\n'
    (folder / "fake.py").write_text(script)
    git = ("git", "-c", "user.name=ada", "-c", "user.email=ada@localhost", "-C", str(folder.parent))
    for words in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message=first")):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "--short=8", "HEAD"], text=True).strip()
    found = run_all.run(FAKE)
    assert (found["report"], found["values"]) == ("['--rounds', '2', '--json']", {"rows": {"s": 1.5}})
    assert found["commit"] == commit
    run_all.RAW.write_text("{}")
    run_all.RESULTS.write_text("")
    assert run_all.commit_of(folder.parent) == commit, "results are no change of what is measured"
    (folder / "harness.py").touch()
    assert run_all.commit_of(folder.parent) == f"{commit}-dirty"
