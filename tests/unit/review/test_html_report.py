"""The report of a run as one HTML page."""

from __future__ import annotations

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_scene import ReportScene, failure, some_ledger

from hpcdist.host.files import write_json
from hpcdist.review import report
from hpcdist.review.facts import Series
from hpcdist.review.figures import Curves, Histogram, Matrix, Text, histogram, read_figures, write_figure
from hpcdist.review.report import render_report, write_report
from hpcdist.tracking.points import read_series

HOSTILE = "</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


class Elements(HTMLParser):
    """The start tags of a page with their attributes, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(scene: ReportScene) -> str:
    return render_report(scene.run, read_series(scene.run))


@pytest.fixture
def scene(tmp_path: Path) -> ReportScene:
    return ReportScene(tmp_path)


@pytest.fixture
def full(scene: ReportScene, monkeypatch: pytest.MonkeyPatch) -> ReportScene:
    """A run of two attempts with each part of a report."""
    scene.state(attempt=2, restarts=1)
    scene.log({"train/loss": [1 / step for step in range(1, 51)], "train/samples_per_s": [100.0] * 50})
    scene.log({"train/loss": [1 / step for step in range(41, 91)]}, attempt=2, first=41)
    scene.log({"eval/loss": [0.5, 0.3], "eval/accuracy": [0.8, 0.9]}, attempt=2, first=60)
    scene.attempt_file("failure.json", failure("was killed by SIGKILL"))
    write_json(scene.run.mlflow, {"run_id": "0a1b"})
    scene.attempt_file("stragglers.jsonl", {"role": "", "name": "n2", "event": "slow", "text": "n2 is 100 % slower"})
    scene.figure("confusion_matrix", Matrix(title="confusion", row_label="true", column_label="predicted",
                                            names=["a", "b"], values=[[9, 1], [2, 8]], step=90))  # fmt: skip
    scene.figure("curve", Curves(title="calibration", x_label="p", y_label="q", lines={"model": [[0, 0], [1, 0.9]]}))
    scene.figure("spread", Histogram(title="returns", x_label="r", y_label="episodes", edges=[0, 1, 2], counts=[3, 4]))
    scene.figure("text", Text(title="sample", text="once upon a time"))
    monkeypatch.setattr(report, "read_ledger", lambda run: some_ledger())
    return scene


def test_report_has_every_part_of_a_run(full: ReportScene) -> None:
    page = page_of(full)
    found = Elements(page)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Run", "Timeline", "Ledger", "Faults", "Trainer ddp", "Metrics", "Stragglers", "Environment", "Config",
    ]  # fmt: skip
    assert "trained 90 steps" in found.text
    assert "Repeat and compare" + "hpcdist rerun 0a1b --runs-dir " in found.text
    assert "rank 1 on n2 after step 40 (last heartbeat): was killed by SIGKILL" in found.text
    assert "the rank was killed from outside" in found.text, "cause of the failure"
    assert "run dmesg -T | grep -i oom on that host" in found.text, "its fix, without backticks"
    assert "code" in {tag for tag, _ in found.found}
    assert "n2 is 100 % slower" in found.text
    assert re.search(r"core-hours\s*0.078", found.text)
    assert "7.1 %" in found.text, "the goodput"
    assert "once upon a time" in found.text
    assert '<td class="n h8">9</td><td class="n h0">1</td>' in page, "shaded by the share of the row"
    assert "attempt 2" in found.text, "the mark in the charts"
    assert not {tag for tag, _ in found.found} & {"script", "link", "img", "iframe", "object"}
    assert re.findall(r"https?://|url\(|@import", page) == [], "the page needs no network"
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 100_000


def test_texts_of_the_user_do_not_become_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = ReportScene(tmp_path, name="<script>alert(1)<")
    scene.state(reason=HOSTILE)
    scene.write_config({"trainer": {"target": HOSTILE}, HOSTILE: HOSTILE})
    scene.run.environment.write_text(json.dumps({"host": HOSTILE, HOSTILE: HOSTILE}))
    scene.log({f"train/{HOSTILE}": [1.0, 2.0], f"eval/{HOSTILE}": [1.0, math.nan], f"a{HOSTILE}": [1.0]})
    scene.attempt_file("failure.json", failure(HOSTILE, host=HOSTILE))
    scene.attempt_file("stragglers.jsonl", {"role": "", "name": "n2", "event": HOSTILE, "text": HOSTILE})
    scene.figure("a", Matrix(title=HOSTILE, row_label=HOSTILE, column_label=HOSTILE, names=[HOSTILE], values=[[1]]))
    scene.figure("c", Curves(title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, lines={HOSTILE: [[0, 1], [1, 1]]}))
    scene.figure("d", Histogram(title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, edges=[0, 1], counts=[1]))
    scene.figure("e", Text(title=HOSTILE, text=HOSTILE))
    (scene.run.artifacts / "figures" / f"{HOSTILE.replace('/', '')}.json").write_text("{}")
    monkeypatch.setattr(report, "read_ledger", lambda run: some_ledger())
    page = page_of(scene)
    found = Elements(page)
    assert not {tag for tag, _ in found.found} & {"script", "img"}
    assert not [attributes for _, attributes in found.found if "onerror" in attributes]
    assert found.text.count(HOSTILE) >= 15


def test_damaged_files_are_named_and_the_rest_is_shown(full: ReportScene) -> None:
    full.run.path.joinpath("state.json").write_text("[]")
    full.run.config.write_text("- a list")
    (full.run.artifacts / "figures" / "text.json").write_text('{"kind": "matrix", "title": 1}')
    (full.run.artifacts / "figures" / "curve.json").write_text("[1]")
    series = {"train/loss": Series()}
    series["train/loss"].add(1, 0.5)
    text = Elements(render_report(full.run, series)).text
    assert "state.json is damaged" in text
    assert "config.yaml: must hold keys and values" in text
    assert "figures/text.json is not a figure" in text
    assert "figures/curve.json is not a figure: its kind must be one of matrix, curves, histogram, text" in text
    assert "train/loss" in text
    full.run.config.write_text("trainer: [ddp]")
    assert "train/loss" in Elements(render_report(full.run, series)).text


def test_report_is_rewritten_only_if_it_changes(full: ReportScene) -> None:
    series = read_series(full.run)
    assert [write_report(full.run, series), write_report(full.run, series)] == [True, False]
    full.state(reason="another one")
    assert write_report(full.run, series)
    assert "another one" in full.run.report.read_text()
    full.run.report.unlink()
    os.mkfifo(full.run.report)
    assert write_report(full.run, series), "a pipe is replaced; reading it would never end"


def test_report_of_a_large_run_has_a_bounded_size(scene: ReportScene) -> None:
    """A run with many metrics, classes, failures and stragglers."""
    wave = [math.sin(step / 7) for step in range(1000)]
    scene.log({f"train/metric_{number}": wave for number in range(60)})
    names = [f"class {number}" for number in range(100)]
    scene.figure("confusion", Matrix(title="c", row_label="t", column_label="p", names=names, values=[[1] * 100] * 100))
    for attempt in range(1, 300):
        scene.attempt_file("failure.json", failure("x" * 9000, traceback=["y" * 9000]), attempt=attempt)
        scene.attempt_file(
            "stragglers.jsonl", {"role": "", "name": "n", "event": "slow", "text": "s" * 400}, attempt=attempt
        )
    scene.state(attempt=299, status="failed")
    page = page_of(scene)
    assert len(page.encode()) < 2_000_000
    assert [tag for tag, _ in Elements(page).found].count("polyline") == 24


def test_figures_are_read_as_written_and_histograms_count_each_value_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    figures = [
        Matrix(title="m", row_label="r", column_label="c", names=["a", "b"], values=[[1, 2], [3, 4]], step=7),
        Curves(title="k", x_label="x", y_label="y", lines={"one": [[0, 1], [1, 2]]}, step=7),
        Histogram(title="h", x_label="x", y_label="y", edges=[0, 1, 2], counts=[1, 2], step=7),
        Text(title="t", text="words", step=7),
    ]
    for number, figure in enumerate(figures):
        write_figure(tmp_path, f"f{number}", figure)
    assert read_figures(tmp_path) == (figures, [])
    assert read_figures(tmp_path / "nowhere") == ([], [])
    write_figure(tmp_path / "figures" / "f0.json", "f", figures[3])
    assert "f.json cannot be written" in caplog.text
    found = histogram("h", [1.0, 2.0, 3.0, 3.0], x_label="x", y_label="y")
    assert (sum(found.counts), found.edges[0], found.edges[-1]) == (4, 1.0, 3.0)
    equal = histogram("h", [5.0, 5.0], x_label="x", y_label="y")
    assert equal.counts == [2.0]
    assert equal.edges[0] < equal.edges[1]


def test_other_content_is_no_figure(tmp_path: Path) -> None:
    matrix = {"kind": "matrix", "title": "m", "row_label": "r", "column_label": "c", "names": ["a"], "values": [[1]]}
    curves = {"kind": "curves", "title": "k", "x_label": "x", "y_label": "y"}
    histogram = {"kind": "histogram", "title": "h", "x_label": "x", "y_label": "y", "edges": [0, 1], "counts": [1]}
    (tmp_path / "figures").mkdir()
    for content in (
        {"kind": "photo"},
        {"kind": "text", "title": "t"},
        {"kind": "text", "title": "t", "text": 3},
        matrix | {"values": [[1, 2]]},
        matrix | {"names": [1]},
        matrix | {"values": ["1"]},
        curves | {"lines": {"one": [[0, 1, 2]]}},
        curves | {"lines": {"one": [[0, math.nan]]}},
        curves | {"lines": {"one": 3}},
        histogram | {"edges": [1, 0]},
        histogram | {"counts": []},
    ):
        (tmp_path / "figures" / "one.json").write_text(json.dumps(content))
        found, (problem,) = read_figures(tmp_path)
        assert found == [], content
        assert problem.startswith("figures/one.json is not a figure: ")
