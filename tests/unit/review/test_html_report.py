"""The report of a run as one HTML page."""

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_scene import ReportScene, failure, some_ledger

from hpcdist.host.json_files import write_json
from hpcdist.review import ledger, report
from hpcdist.review.charts import line_chart, metric_charts
from hpcdist.review.explain import explain
from hpcdist.review.ledger import ledgers_of
from hpcdist.review.metric_series import Series
from hpcdist.review.report import render_report, render_sweep, write_report
from hpcdist.review.svg import LEFT, RIGHT, TOP
from hpcdist.review.sweep_facts import read_sweep_facts
from hpcdist.run.attempt_times import CAUSES
from hpcdist.run.figures import Curves, Histogram, Matrix, Text
from hpcdist.run.sweeps import SweepDir
from hpcdist.tracking.series import read_last_values, read_series

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
    return render_report(scene.run, read_series, read_last_values)


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
    scene.failed("rank 1 on n2 was killed by SIGKILL, last heartbeat at step 40")
    write_json(scene.run.mlflow, {"run_id": "0a1b"})
    scene.attempt_file("stragglers.jsonl", {"role": "", "name": "n2", "event": "slow", "text": "n2 is 100 % slower"})
    scene.figure("confusion_matrix", Matrix(title="confusion", row_label="true", column_label="predicted",
                                            names=["a", "b"], values=[[9, 1], [2, 8]], step=90))  # fmt: skip
    scene.figure("curve", Curves(title="calibration", x_label="p", y_label="q", lines={"model": [[0, 0], [1, 0.9]]}))
    scene.figure("spread", Histogram(title="returns", x_label="r", y_label="episodes", edges=[0, 1, 2], counts=[3, 4]))
    scene.figure("sample", Text(title="text of the model", text="def main():▶\n    pass", step=90))
    monkeypatch.setattr(report, "read_ledger", lambda run: some_ledger())
    return scene


def test_report_has_every_part_of_a_run(full: ReportScene) -> None:
    page = page_of(full)
    found = Elements(page)
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == [
        "Run", "Timeline", "Ledger", "Trainer ddp", "Metrics", "Stragglers", "Environment", "Config",
    ]  # fmt: skip
    assert "trained 90 steps" in found.text
    assert "Repeat and compare" + "hpcdist rerun /" in found.text
    assert found.text.count("rank 1 on n2 was killed by SIGKILL, last heartbeat at step 40") == 1
    assert "the rank was killed from outside" in found.text, "cause of the failure"
    assert "run dmesg -T | grep -i oom on that host" in found.text, "its fix, without backticks"
    assert "code" in {tag for tag, _ in found.found}
    assert ">fix:<" not in page[: page.index("</header>")], "it has finished"
    assert "State at 2025-10-09 08:55 UTC, when it ended." in page
    full.state(status="running")
    assert re.search(r"State at 20\d\d-\d\d-\d\d \d\d:\d\d UTC\.<", page_of(full)), "the time of the page"
    full.state(status="failed", reason="rank 1 on n2 was killed by SIGKILL")
    top = page_of(full).partition("</header>")[0]
    assert [line for line in explain(full.run).lines if line.startswith("fix:")] == [
        "fix:      " + re.sub(r"</?code>", "`", re.findall(r"<b>fix:</b> (.*?)</p>", top)[0])
    ]
    assert '<td class="interrupted">interrupted</td>' in page, "an attempt that was killed"
    assert "n2 is 100 % slower" in found.text
    assert "0.078 core-hours" in found.text
    assert "7.1 %" in found.text, "the goodput"
    assert '<td class="n h8">9</td><td class="n h0">1</td>' in page, "shaded by the share of the row"
    assert "<pre>def main():▶\n    pass</pre>" in page
    assert "attempt 2" in found.text, "the mark in the charts"
    assert not {tag for tag, _ in found.found} & {"script", "link", "img", "iframe", "object"}
    assert re.findall(r"https?://|url\(|@import", page) == [], "the page needs no network"
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page
    assert len(page) < 100_000


@pytest.mark.parametrize(("is_fault", "end"), [(True, "interrupted"), (False, "failed")])
def test_error_of_a_device_is_an_interruption(scene: ReportScene, is_fault: bool, end: str) -> None:
    error = failure("failed with RuntimeError: CUDA error: ECC", kind="error", traceback=["x"], is_fault=is_fault)
    scene.attempt_file("failure.json", error, attempt=1)
    scene.failed("rank 1 on n2 failed with RuntimeError: CUDA error: ECC", attempt=1)
    assert f'<td class="{end}">{end}</td>' in page_of(scene)


@pytest.mark.parametrize(
    ("kind", "end"), [("vanished", "failed"), ("unfit", "interrupted"), ("not_started", "interrupted")]
)
def test_exit_of_the_code_is_no_interruption(scene: ReportScene, kind: str, end: str) -> None:
    scene.attempt_file("failure.json", failure("exited with code 3 without a report", kind=kind))
    scene.failed("rank 1 on n2 exited with code 3 without a report")
    assert f'<td class="{end}">{end}</td>' in page_of(scene)


def test_error_of_a_run_is_named_once(scene: ReportScene) -> None:
    calls = ['  File "/home/ada/train.py", line 20, in <module>\n', "    name = labels[step]\n"]
    error = failure("failed with KeyError: 40", kind="error", traceback=[*calls, "KeyError: 40\n"])
    sentence = "rank 1 on n2 failed with KeyError: 40 after step 40"
    for attempt in (1, 2):
        scene.attempt_file("failure.json", error, attempt=attempt)
        outcome = error | {"outcome": "failed", "time": 1.0, "error": "KeyError: 40", "peer_lost": False}
        scene.attempt_file("rank-00001.outcome.json", outcome, attempt=attempt)
        scene.failed(f"{sentence}, attempt {attempt}", attempt=attempt)
    scene.state(status="failed", attempt=2, reason=f"{sentence}, attempt 2")
    log = scene.run.attempt(2).log(1)
    log.write_text("".join(f"line {number} at https://ada:pw@host\n" for number in range(50)))
    page = page_of(scene)
    found = Elements(page).text
    assert found.count(f"{sentence}, attempt 2") == 1
    assert found.count(f"{sentence}, attempt 1") == 1
    assert page.count('<td class="failed">failed</td>') == 2, "an error of the code"
    head = page.partition("</header>")[0]
    assert re.findall("<b>([a-z]+):</b>", head) == ["evidence", "fix", "log"], "the traceback has the cause"
    assert f"log: hpcdist logs {scene.run.path} --attempt 2 --rank 1 prints {log}\n" in found
    assert "line 20, in &lt;module&gt;" in head
    end = re.findall("<pre>(.*?)</pre>", head, re.DOTALL)[0].splitlines()
    assert (len(end), end[0], end[-1]) == (40, "line 10 at https://ada:***@host", "line 49 at https://ada:***@host")


def test_link_in_place_of_a_log_is_not_shown(tmp_path: Path, scene: ReportScene) -> None:
    scene.attempt_file("failure.json", failure("was killed by SIGKILL"))
    scene.failed("rank 1 on n2 was killed by SIGKILL")
    scene.state(status="failed")
    (tmp_path / "private").write_text("secret\n")
    log = scene.run.attempt(1).log(1)
    log.symlink_to(tmp_path / "private")
    assert "secret" not in page_of(scene)
    log.unlink()
    log.write_text("secret\n")
    assert "secret" in page_of(scene)


def test_texts_of_the_user_do_not_become_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = ReportScene(tmp_path, name="<script>alert(1)<")
    scene.state(reason=HOSTILE)
    scene.write_config({"trainer": {"target": HOSTILE}, HOSTILE: HOSTILE})
    scene.run.environment.write_text(json.dumps({"host": HOSTILE, HOSTILE: HOSTILE}))
    scene.log({f"train/{HOSTILE}": [1.0, 2.0], f"eval/{HOSTILE}": [1.0, math.nan], f"a{HOSTILE}": [1.0]})
    scene.attempt_file("failure.json", failure(HOSTILE, host=HOSTILE))
    scene.failed(HOSTILE)
    scene.attempt_file("stragglers.jsonl", {"role": "", "name": "n2", "event": HOSTILE, "text": HOSTILE})
    scene.figure("a", Matrix(title=HOSTILE, row_label=HOSTILE, column_label=HOSTILE, names=[HOSTILE], values=[[1]]))
    scene.figure("c", Curves(title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, lines={HOSTILE: [[0, 1], [1, 1]]}))
    scene.figure("d", Histogram(title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, edges=[0, 1], counts=[1]))
    scene.figure("e", Text(title=HOSTILE, text=f"{HOSTILE}\udc80"))
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
    text = Elements(render_report(full.run, lambda run: series, read_last_values)).text
    assert "state.json is damaged" in text
    assert "config.yaml: must hold keys and values" in text
    assert "figures/text.json is not a figure" in text
    assert "figures/curve.json is not a figure: its kind must be one of matrix, curves, histogram, text" in text
    assert "train/loss" in text
    full.run.config.write_text("trainer: [ddp]")
    assert "train/loss" in Elements(render_report(full.run, lambda run: series, read_last_values)).text


def test_primary_metric_comes_first(scene: ReportScene) -> None:
    scene.log({"eval/accuracy": [0.6, 0.8, 0.75]})
    scene.log({"eval/accuracy": [0.7]}, attempt=2, first=4)
    scene.attempt_file("training.json", {"first_step": 2, "began": 5.0}, attempt=2)
    scene.state(attempt=2)
    checkpoint = scene.run.checkpoints / "step-00000002"
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "manifest.json", {"step": 2, "metrics": {"eval/accuracy": 0.8}})
    page = page_of(scene)
    assert page.index("<h3>eval/accuracy</h3>") < page.index("<h2>Run</h2>")
    assert page.count("<h3>eval/accuracy</h3>") == 1, "it is not repeated among the other metrics"
    chart = page[: page.index("</svg>")]
    left = LEFT + (2 - 1) / (4 - 1) * (RIGHT - LEFT)
    assert f'class="band" d="M{left:.1f} {TOP}H{RIGHT}.0V' in chart, "the second attempt from its first step"
    assert 'class="dot"' in chart
    assert "best checkpoint: 0.8 at step 2" in Elements(page).text, "the legend"
    assert "<b>eval/accuracy 0.8 at step 2</b>" in page


def test_curve_of_the_compared_run_is_below_that_of_the_run(tmp_path: Path, scene: ReportScene) -> None:
    original = ReportScene(tmp_path, "original")
    for run, value in ((original, 1.0), (scene, 0.75)):
        run.log({"eval/accuracy": [0.5, value]})
        checkpoint = run.run.checkpoints / "step-00000002"
        checkpoint.mkdir(parents=True)
        write_json(checkpoint / "manifest.json", {"step": 2, "metrics": {"eval/accuracy": value}})
    alone = page_of(scene)
    write_json(scene.run.environment, {"like": {"run": "digits/original"}})
    chart, _, below = page_of(scene).partition("</svg>")
    lines = re.findall(r'<polyline class="line" style="stroke:var\(--(\w+)\)".*?<title>(.*?)</title>', chart)
    assert lines == [("muted", "digits/original"), ("c0", "this run")], "the run is drawn over the other one"
    assert re.findall(r'class="row"[^>]*>([^<]*)', chart) == [
        "this run", "digits/original", "best checkpoint: 0.75 at step 2",
    ]  # fmt: skip
    note = "eval/accuracy: too few seeds to tell from digits/original (-0.25)"
    assert below.startswith(f'<p class="muted">{note}</p></div>')
    original.run.config.unlink()
    without_folder = page_of(scene)
    assert without_folder[: without_folder.index("</svg>")] == alone[: alone.index("</svg>")]


def test_compared_run_without_the_metric_is_not_shown(tmp_path: Path, scene: ReportScene) -> None:
    original = ReportScene(tmp_path, "original")
    original.log({"train/loss": [0.5, 0.25]})
    scene.log({"eval/accuracy": [0.5, 0.75]})
    alone = page_of(scene)
    write_json(scene.run.environment, {"like": {"run": "digits/original"}})
    page = page_of(scene)
    assert page[: page.index("</svg>")] == alone[: alone.index("</svg>")]
    original.log({"eval/accuracy": [0.5, 0.6]}, attempt=2)
    chart, _, below = page_of(scene).partition("</svg>")
    assert chart.count("<polyline") == 2
    assert below.startswith("</div>"), "no verdict without a best checkpoint"


def numbers_in(chart: str) -> list[float]:
    """Return the numbers beside the vertical axis."""
    return [float(text) for text in re.findall(r">(-?[0-9.e+-]+)</text>", chart)]


def test_constant_value_is_in_the_middle_of_its_axis() -> None:
    for value in (3e-4, 4e9):
        labels = numbers_in(line_chart({"train/lr": [(0, value), (10, value)]}, x_label="step"))
        near = {label for label in labels if abs(label / value - 1) < 0.5}
        assert len(near) > 1


def test_wide_band_keeps_the_logarithmic_axis() -> None:
    curve = [(0.0, 1.0), (10.0, 0.001)]
    band = [(0.0, 1.2), (10.0, 0.002), (10.0, -0.001), (0.0, 0.8)]
    labels = numbers_in(line_chart({"train/loss": curve}, x_label="step", areas={"train/loss": band}))
    assert {0.001, 0.01, 0.1, 1.0} <= set(labels)


def test_losses_that_span_a_power_of_ten_have_a_logarithmic_axis() -> None:
    def ticks(name: str, *values: float) -> list[str]:
        return re.findall(r'class="tick" [^>]*>([^<]*)', line_chart({name: list(enumerate(values))}, x_label="step"))

    assert ticks("train/loss", 3, 0.3, 0.03) == ["0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert ticks("train/loss", 1e6, 1e-6) == ["1e-06", "0.001", "1", "1,000", "1e+06"]
    assert ticks("train/loss", 3, 0.3, 0)[0] == ticks("eval/accuracy", 3, 0.3, 0.03)[0] != "0.05"
    assert ticks("train/loss", 3, 2) == ["2", "2.5", "3"]


def test_each_cause_has_one_colour_and_only_lost_time_is_red(full: ReportScene) -> None:
    page = page_of(full)
    for scheme in page[: page.index("</style>")].split("@media")[:2]:
        colours = {cause: re.findall(rf"--{cause}: (#\w+);", scheme) for cause in ("queue", *CAUSES)}
        rgb = {cause: [int(found[i : i + 2], 16) for i in (1, 3, 5)] for cause, (found,) in colours.items()}
        assert len(set(map(tuple, rgb.values()))) == len(colours)
        is_red = {cause for cause, (red, green, blue) in rgb.items() if red > 1.6 * max(green, blue)}
        assert is_red == {"redone", "discarded", "down"}
    assert set(re.findall(r"fill:var\(--([a-z]+)\)", page)) == {"queue", *CAUSES}
    assert re.search(r'background:var\(--redone\)"></i>redone', page), "the ledger is the legend"


def test_report_of_a_sweep_has_its_settings_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "read_ledger", lambda run: some_ledger())
    cells = []
    for lr, size, seed, value in ((0.1, 16, 1, 0.8), (0.1, 16, 2, 0.9), (0.1, 32, 1, 0.5), (0.2, 16, 1, None)):
        scene = ReportScene(tmp_path, f"tune-{lr}-{size}-{seed}")
        scene.state(status="finished" if value else "failed")
        if value:
            checkpoint = scene.run.checkpoints / "step-00000002"
            checkpoint.mkdir(parents=True)
            write_json(checkpoint / "manifest.json", {"step": 2, "metrics": {"eval/accuracy": value}})
        values = {"optim.lr": lr, "data.batch_size": size, "seed": seed}
        cells.append({"name": scene.run.name, "label": f"<b>lr={lr} batch_size={size} seed={seed}", "values": values})
    write_report(scene.run, read_series, read_last_values)
    sweep = SweepDir.create(scene.run.path.parent / "tune")
    keys = ["optim.lr", "data.batch_size", "seed"]
    write_json(sweep.file, {"uid": "1", "created": 1.0, "keys": keys, "base": {}, "cells": cells})
    assert write_report(sweep, read_series, read_last_values)
    page = sweep.report.read_text()
    text = re.sub(r"(<[^>]*>|\s)+", " ", page)
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Charts", "Settings", "Runs", "Setup of &lt;b&gt;lr=0.1 batch_size=16 seed=1", "Cost",
    ]  # fmt: skip
    assert re.search(r"★ (\S+ \S+) 0.85 ± 0.07 s.d. \(n=2\) 2 [\d.]+ core-hours", text)
    assert re.search(r" goodput .+ % wall time ", text), "how much of the cost was training"
    assert " wall time 1 min 4 s 1 min 4 s with a run allocated " in text, "runs at the same time count once"
    assert " 0.5 (n=1) too few seeds (-0.35) 1 " in text, "one run against two seeds"
    settings, runs = page.split("<h2>Runs</h2>")
    assert "<td>batch_size=16 lr=0.2</td>" in settings, "a setting whose runs have failed has a cost, too"
    assert "Each verdict is about one difference" in settings
    assert "Each verdict is about one difference" not in runs, "its table has no verdicts"
    links = [attributes["href"] for tag, attributes in Elements(page).found if tag == "a"]
    assert links == ["../tune-0.2-16-1/report.html"]
    assert re.search("&lt;b&gt;lr=0.2 batch_size=16 seed=1 [0-9.]+ core-hours failed", text)
    keys.remove("seed")
    write_json(sweep.file, {"uid": "1", "created": 1.0, "keys": keys, "base": {}, "cells": cells[1:]})
    spent = ledgers_of(sweep.cells())
    facts = read_sweep_facts(sweep, sweep.read_state(), read_last_values)
    without_seeds = render_sweep(sweep, facts, spent, {})
    assert "<h2>Settings</h2>" not in without_seeds
    assert without_seeds.count("★ ") == 1
    assert "Each verdict is about one difference" in without_seeds


def test_counters_have_no_chart_but_a_row_of_values(scene: ReportScene) -> None:
    scene.log({"train/loss": [0.5, 0.25], "train/epoch": [1.0, 2.0], "samples": [32.0, 64.0]})
    page = page_of(scene)
    assert re.findall(r"<h3>(.*?)</h3>", page) == ["train/loss"]
    assert "<td>samples</td>" in page


def test_primary_metric_and_constant_ranks_have_one_chart(scene: ReportScene) -> None:
    scene.log({"eval/accuracy": [0.5, 0.6], "world_size": [2.0, 2.0]})
    charts = metric_charts(read_series(scene.run), {"quality": ["eval/accuracy"]}, "eval/accuracy")
    assert charts == ([], []), "the head of the page has the primary metric"
    scene.log({"world_size": [3.0]}, attempt=2, first=3)
    _, (changed,) = metric_charts(read_series(scene.run), {"quality": ["eval/accuracy"]}, "eval/accuracy")
    assert changed.title == "world_size"


def test_long_names_of_a_legend_are_below_each_other() -> None:
    for longest, num_places in ((28, 2), (29, 1)):
        points = [(1.0, 1.0), (2.0, 2.0)]
        chart = str(line_chart({"a": points, "b" * longest: points}, x_label="step"))
        assert len(set(re.findall(r'<text class="row" x="([\d.]+)"', chart))) == num_places


def test_commands_in_reasons_are_code(full: ReportScene) -> None:
    full.state(status="stopped", reason="`hpcdist resume first` continues it")
    page = page_of(full)
    assert "<code>hpcdist resume first</code> continues it" in page
    assert "`" not in Elements(page).text


def test_report_is_rewritten_only_if_it_changes(full: ReportScene) -> None:
    assert [
        write_report(full.run, read_series, read_last_values),
        write_report(full.run, read_series, read_last_values),
    ] == [True, False]
    full.state(reason="another one")
    assert write_report(full.run, read_series, read_last_values)
    assert "another one" in full.run.report.read_text()
    full.run.report.unlink()
    os.mkfifo(full.run.report)
    assert write_report(full.run, read_series, read_last_values), "a pipe is replaced; reading it would never end"


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
