"""Tests of the concurrent sections of `hpcdist doctor` and of the rendered report."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hpcdist.checks.doctor import Section, document, execute, section_lines, summary_lines, would_fail
from hpcdist.host.machine import Check

OK = Check(name="cores", level="ok", text="16")
FAILURE = Check(name="space", level="failure", text="0.0 GiB free of 100.0: a run would fail", fix="remove old runs")
WARNING = Check(name="names", level="warning", text="the lookup of its own name took 5.0 s", node="n3")


def test_sections_run_concurrently_and_results_keep_their_order() -> None:
    second_done = threading.Event()

    def first() -> list[Check]:
        assert second_done.wait(30), "the second section waits for the first"
        return [OK]

    def second() -> list[Check]:
        second_done.set()
        return [FAILURE]

    sections = [Section(title="One", run=first, timeout_s=30), Section(title="Two", run=second, timeout_s=30)]
    assert list(execute(sections)) == [("One", [OK]), ("Two", [FAILURE])]


def test_hanging_or_failing_section_is_a_warning() -> None:
    released = threading.Event()

    def hang() -> list[Check]:
        released.wait()
        return []

    def fail() -> list[Check]:
        raise OSError(5, "Input/output error")

    pending: list[Sequence[str]] = []
    sections = [
        Section(title="Folder", run=hang, timeout_s=0.05, timeout_fix="check the server"),
        Section(title="MLflow", run=fail),
        Section(title="Cores", run=lambda: [OK]),
    ]
    hung, failed, passed = execute(sections, pending.append)
    released.set()
    text = "no answer within 0.05 s"
    assert hung == ("Folder", [Check(name="Folder", level="warning", text=text, fix="check the server")])
    text = "this section failed: OSError: [Errno 5] Input/output error"
    assert failed == ("MLflow", [Check(name="MLflow", level="warning", text=text)])
    assert passed == ("Cores", [OK])
    assert pending[0][0] == "Folder"


def lines(title: str, *checks: Check, width: int = 80) -> str:
    return "\n".join(line for _, line in section_lines(title, checks, width))


def test_each_result_has_a_line_and_its_fix_below() -> None:
    assert lines("Folder of runs", OK, FAILURE, WARNING) == (
        "Folder of runs\n"
        "  ok       cores          16\n"
        "  FAILURE  space          0.0 GiB free of 100.0: a run would fail\n"
        "                          → remove old runs\n"
        "  warning  n3 names       the lookup of its own name took 5.0 s"
    )
    assert lines("Empty") == ""
    assert [kind for kind, _ in section_lines("x", [OK, FAILURE], 80)] == ["title", "ok", "failure", ""]


def test_lines_wrap_at_the_width_without_breaking_words() -> None:
    path = "/very/long/" + "folder/" * 12
    long = Check(name="a name that is long", level="note", text=f"{path} " + "word " * 40, fix=f"`ls -ld {path}` " * 2)
    text = lines("Folder", long)
    assert f" {path}\n" in text
    assert all(len(line) <= 80 or path in line for line in text.splitlines()), text


def test_summary_counts_problems_and_warnings() -> None:
    def summary(*checks: Check) -> str:
        return "\n".join(line for _, line in summary_lines([("Section", checks)], 80))

    assert summary(OK) == "No problem found that would make a run fail; no warnings."
    assert summary(OK, WARNING) == "No problem found that would make a run fail; 1 warning above."
    assert summary(FAILURE, WARNING, WARNING) == (
        "1 problem would make a run fail (2 warnings above):\n"
        "  - Section, space: 0.0 GiB free of 100.0: a run would fail"
    )
    assert summary(FAILURE, FAILURE).startswith("2 problems would make a run fail (no warnings):\n")


def test_json_document_has_facts_verdict_and_all_checks() -> None:
    page = [("One", [OK]), ("Two", [FAILURE])]
    found = document(page, {"host": "n1"})
    assert found["host"] == "n1"
    assert found["would_fail"] is True is would_fail(page)
    assert found["checks"][1] == {
        "section": "Two",
        "name": "space",
        "level": "failure",
        "text": FAILURE.text,
        "fix": FAILURE.fix,
        "node": "",
    }
    assert would_fail(page[:1]) is False
