"""Figures of a trainer: written, read again, and refused if they are not what their kind says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcdist.review.figures import Curves, Figure, Histogram, Matrix, Text, histogram, read_figures, write_figure

FIGURES: list[Figure] = [
    Matrix(title="m", row_label="r", column_label="c", names=["a", "b"], values=[[1, 2], [3, 4]]),
    Curves(title="k", x_label="x", y_label="y", lines={"one": [[0, 1], [1, 2]]}),
    Histogram(title="h", x_label="x", y_label="y", edges=[0, 1, 2], counts=[1, 2]),
    Text(title="t", text="words"),
]


def test_figures_are_read_as_written(tmp_path: Path) -> None:
    for number, figure in enumerate(FIGURES):
        write_figure(tmp_path, f"f{number}", figure, step=7)
    found = read_figures(tmp_path)
    assert found.problems == []
    assert [figure.step for figure in found.figures] == [7] * 4
    assert [type(figure) for figure in found.figures] == [type(figure) for figure in FIGURES]
    assert found.figures[1].lines == {"one": [[0, 1], [1, 2]]}  # type: ignore[union-attr]
    assert read_figures(tmp_path / "nowhere").figures == []


@pytest.mark.parametrize(
    "content",
    [
        {"kind": "photo"},
        {"kind": "text", "title": "t"},
        {"kind": "text", "title": "t", "text": 3},
        {"kind": "matrix", "title": "m", "row_label": "r", "column_label": "c", "names": ["a"], "values": [[1, 2]]},
        {"kind": "matrix", "title": "m", "row_label": "r", "column_label": "c", "names": [1], "values": [[1]]},
        {"kind": "matrix", "title": "m", "row_label": "r", "column_label": "c", "names": ["a"], "values": ["1"]},
        {"kind": "curves", "title": "k", "x_label": "x", "y_label": "y", "lines": {"one": [[0, 1, 2]]}},
        {"kind": "curves", "title": "k", "x_label": "x", "y_label": "y", "lines": {"one": [[0, float("nan")]]}},
        {"kind": "curves", "title": "k", "x_label": "x", "y_label": "y", "lines": {"one": 3}},
        {"kind": "histogram", "title": "h", "x_label": "x", "y_label": "y", "edges": [1, 0], "counts": [1]},
        {"kind": "histogram", "title": "h", "x_label": "x", "y_label": "y", "edges": [0, 1], "counts": []},
    ],
)
def test_other_content_is_no_figure(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "one.json").write_text(json.dumps(content))
    found = read_figures(tmp_path)
    assert found.figures == []
    assert found.problems[0].startswith("figures/one.json is not a figure: ")


def test_a_figure_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "figures").write_text("a file")
    write_figure(tmp_path, "f", FIGURES[3])
    assert "f.json cannot be written" in caplog.text


def test_histogram_counts_each_value_once() -> None:
    found = histogram("h", [1.0, 2.0, 3.0, 3.0], x_label="x", y_label="y")
    assert (sum(found.counts), found.edges[0], found.edges[-1]) == (4, 1.0, 3.0)
    equal = histogram("h", [5.0, 5.0], x_label="x", y_label="y")
    assert equal.counts == [2.0]
    assert equal.edges[0] < equal.edges[1]
