"""The doctor's page: parts that are looked at side by side, and how people and programs read it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hpcdist.diagnostics.doctor.page import document, section_lines, summary_lines, would_fail
from hpcdist.diagnostics.doctor.section import Section, execute
from hpcdist.machine.check import Check

WELL = Check(name="cores", level="ok", text="16")
FULL = Check(name="space", level="failure", text="0.0 GiB free of 100.0: a run would fail", fix="remove old runs")
SLOW = Check(name="names", level="warning", text="looking up its own name took 5.0 s", node="n3")


def test_parts_are_looked_at_at_once_and_told_in_their_order() -> None:
    second_done = threading.Event()

    def first() -> list[Check]:
        assert second_done.wait(30), "the second part waits for the first"
        return [WELL]

    def second() -> list[Check]:
        second_done.set()
        return [FULL]

    waited: list[Sequence[str]] = []
    sections = [Section(title="One", run=first, timeout_s=30), Section(title="Two", run=second, timeout_s=30)]
    assert list(execute(sections, waited.append)) == [("One", [WELL]), ("Two", [FULL])]


def test_a_part_that_hangs_or_breaks_is_a_finding() -> None:
    never = threading.Event()

    def hang() -> list[Check]:
        never.wait()
        return []

    def broken() -> list[Check]:
        raise OSError(5, "Input/output error")

    waited: list[Sequence[str]] = []
    sections = [
        Section(title="Folder", run=hang, timeout_s=0.05, timeout_fix="is its server up?"),
        Section(title="MLflow", run=broken),
        Section(title="Cores", run=lambda: [WELL]),
    ]
    hung, failed, well = execute(sections, waited.append)
    never.set()
    text = "no answer within 0.05 s"
    assert hung == ("Folder", [Check(name="Folder", level="warning", text=text, fix="is its server up?")])
    text = "this section failed: OSError: [Errno 5] Input/output error"
    assert failed == ("MLflow", [Check(name="MLflow", level="warning", text=text)])
    assert well == ("Cores", [WELL])
    assert waited[0][0] == "Folder"


def lines(title: str, *checks: Check, width: int = 80) -> str:
    return "\n".join(line for _, line in section_lines(title, checks, width))


def test_a_line_a_check_and_its_fix_beneath() -> None:
    assert lines("Folder of runs", WELL, FULL, SLOW) == (
        "Folder of runs\n"
        "  ok       cores          16\n"
        "  FAILURE  space          0.0 GiB free of 100.0: a run would fail\n"
        "                          → remove old runs\n"
        "  warning  n3 names       looking up its own name took 5.0 s"
    )
    assert lines("Nothing to say") == ""
    assert [kind for kind, _ in section_lines("x", [WELL, FULL], 80)] == ["title", "ok", "failure", ""]


def test_long_words_are_never_cut_and_lines_stay_within_the_width() -> None:
    path = "/very/long/" + "folder/" * 12
    long = Check(name="a name that is long", level="note", text=f"{path} " + "word " * 40, fix=f"`ls -ld {path}` " * 2)
    found = lines("Folder", long)
    assert f" {path}\n" in found
    assert all(len(line) <= 80 or path in line for line in found.splitlines()), found


def test_the_end_says_what_counts() -> None:
    def end(*checks: Check) -> str:
        return "\n".join(line for _, line in summary_lines([("Part", checks)], 80))

    assert end(WELL) == "No problem found that would make a run fail; no warnings."
    assert end(WELL, SLOW) == "No problem found that would make a run fail; 1 warning above."
    assert end(FULL, SLOW, SLOW) == (
        "1 problem would make a run fail (2 warnings above):\n  - Part, space: 0.0 GiB free of 100.0: a run would fail"
    )
    assert end(FULL, FULL).startswith("2 problems would make a run fail (no warnings):\n")


def test_one_document_for_programs() -> None:
    page = [("One", [WELL]), ("Two", [FULL])]
    found = document(page, {"host": "n1"})
    assert found["host"] == "n1"
    assert found["would_fail"] is True is would_fail(page)
    assert found["checks"][1] == {
        "section": "Two",
        "name": "space",
        "level": "failure",
        "text": FULL.text,
        "fix": FULL.fix,
        "node": "",
    }
    assert would_fail(page[:1]) is False
