"""Figures of a trainer: their files, and what is none."""

import json
import math
from pathlib import Path

import pytest

from hpcdist.run.figures import Curves, Figure, Histogram, Matrix, Text, histogram, read_figures, write_figure


def test_figures_are_read_as_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    figures: list[Figure] = [
        Matrix(title="m", row_label="r", column_label="c", names=["a", "b"], values=[[1, 2], [3, 4]], step=7),
        Curves(title="k", x_label="x", y_label="y", lines={"one": [[0, 1], [1, 2]]}, step=7),
        Histogram(title="h", x_label="x", y_label="y", edges=[0, 1, 2], counts=[1, 2], step=7),
        Text(title="t", text="Once upon\na time", step=7),
    ]
    for number, figure in enumerate(figures):
        write_figure(tmp_path, f"f{number}", figure)
    assert read_figures(tmp_path) == (figures, [])
    assert read_figures(tmp_path / "nowhere") == ([], [])
    write_figure(tmp_path / "figures" / "f0.json", "f", figures[2])
    assert "f.json cannot be written" in caplog.text
    found = histogram("h", [1.0, 2.0, 3.0, 3.0], x_label="x", y_label="y")
    assert (sum(found.counts), found.edges[0], found.edges[-1]) == (4, 1.0, 3.0)
    finite = histogram("h", [float("nan"), 5.0, float("inf")], x_label="x", y_label="y")
    assert (finite.counts, finite.edges[0]) == ([1.0], 5.0)
    assert histogram("h", [float("nan")], x_label="x", y_label="y").counts == [0.0]
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
        matrix | {"values": [[1, 2]]},
        matrix | {"names": [1]},
        matrix | {"values": ["1"]},
        curves | {"lines": {"one": [[0, 1, 2]]}},
        curves | {"lines": {"one": [[0, math.nan]]}},
        curves | {"lines": {"one": 3}},
        histogram | {"edges": [1, 0]},
        histogram | {"counts": []},
        {"kind": "text", "title": "t", "text": 1},
    ):
        (tmp_path / "figures" / "one.json").write_text(json.dumps(content))
        found, (problem,) = read_figures(tmp_path)
        assert found == [], content
        assert problem.startswith("figures/one.json is not a figure: ")
