"""Charts of a sweep: curves of settings, the metric against swept keys and against the cost."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

from hpcdist.review.ledger import Entry, Ledger
from hpcdist.review.metric_series import Series
from hpcdist.review.report import as_image
from hpcdist.review.sweep_charts import sweep_charts
from hpcdist.review.sweep_facts import CellFacts, SweepFacts
from hpcdist.run.folder import State


def sweep_of(cells: Sequence[tuple[Mapping[str, Any], float | None]], mode: str = "max") -> SweepFacts:
    """Return the facts of a sweep with these swept values and metrics of its cells `c0`, `c1`, …"""
    facts = []
    for index, (values, metric) in enumerate(cells):
        facts.append(CellFacts(name=f"c{index}", values=dict(values), label="cell", status="finished", value=metric))
    keys = tuple(cells[0][0])
    state = State(status="finished")
    return SweepFacts(state=state, keys=keys, monitor="eval/accuracy", monitor_mode=mode, cells=tuple(facts))


def logged(*values: float) -> Mapping[str, Series]:
    """Return the series of a cell with these values at steps 1, 2, …"""
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(step, value)
    return {"eval/accuracy": series}


def drawn(facts: SweepFacts, series: Mapping[str, Any] | None = None, hours: Sequence[float] = ()) -> dict[str, str]:
    spent = {}
    for index, number in enumerate(hours):
        entry = Entry(cause="compute", attempt=1, node="n1", seconds=3600 * number)
        spent[f"c{index}"] = Ledger(entries=(entry,))
    return {name: str(chart.figure) for name, chart in sweep_charts(facts, series or {}, spent).items()}


def count(figure: str, element: str) -> int:
    return len(re.findall(f"<{element} ", figure))


SEEDS = [({"optim.lr": lr, "seed": seed}, 0.5 + lr) for lr in (0.1, 0.2) for seed in (1, 2)]


def test_seeds_of_a_setting_are_one_curve_in_a_band() -> None:
    series = {f"c{index}": logged(0.1, 0.2 + index / 10, 0.5) for index in range(4)}
    curves = drawn(sweep_of(SEEDS), series)["curves"]
    assert (count(curves, "polyline"), count(curves, "polygon")) == (2, 2)
    assert re.findall(r'class="row"[^>]*>([^<]*)', curves) == ["lr=0.2", "lr=0.1"], "the best setting first"


def test_setting_has_the_same_colour_in_all_charts() -> None:
    series = {f"c{index}": logged(0.1, 0.2) for index in (0, 1)}  # the best setting has logged nothing
    charts = drawn(sweep_of(SEEDS), series, hours=(1, 3, 4, 6))
    assert re.findall(r"stroke:var\(--c(\d)\)", charts["curves"]) == ["1"]
    assert re.findall(r"<circle style=\"fill:var\(--c(\d)\)[^>]*><title>(\S+):", charts["cost"]) == [
        ("0", "lr=0.2"),
        ("1", "lr=0.1"),
    ]


def test_losses_over_a_power_of_ten_have_a_logarithmic_axis() -> None:
    series = {f"c{index}": {"eval/loss": logged(1.0, 0.1, 0.01)["eval/accuracy"]} for index in range(4)}
    curves = drawn(replace(sweep_of(SEEDS, "min"), monitor="eval/loss"), series)["curves"]
    first, second, third = (float(place.split(",")[1]) for place in re.findall(r'points="([^"]*)"', curves)[0].split())
    assert abs((second - first) - (third - second)) < 0.2


def test_curve_has_only_steps_that_all_seeds_have_logged() -> None:
    series = {f"c{index}": logged(0.1, 0.2, *([0.9] * (index % 2))) for index in range(4)}
    curves = drawn(sweep_of(SEEDS), series)["curves"]
    (first, *_) = re.findall(r'<polyline [^>]*points="([^"]*)"', curves)
    assert len(first.split()) == 2


def test_seed_that_failed_early_does_not_end_the_curve() -> None:
    facts = sweep_of(SEEDS)
    cells = (replace(facts.cells[0], status="failed"), *facts.cells[1:])
    series = {"c0": logged(0.9), **{f"c{index}": logged(0.1, 0.2, 0.5) for index in (1, 2, 3)}}
    curves = drawn(replace(facts, cells=cells), series)["curves"]
    assert [len(line.split()) for line in re.findall(r'<polyline [^>]*points="([^"]*)"', curves)] == [3, 3]
    assert count(curves, "polygon") == 0, "equal seeds have no band"


def test_long_curves_are_averaged_over_ranges_of_steps() -> None:
    series = {f"c{index}": logged(*([0.1 + index / 10] * 5000)) for index in range(4)}
    curves = drawn(sweep_of(SEEDS), series)["curves"]
    lines = re.findall(r'<polyline [^>]*points="([^"]*)"', curves)
    assert [200 < len(line.split()) <= 240 for line in lines] == [True, True]
    assert [len({place.split(",")[1] for place in line.split()}) for line in lines] == [1, 1], "constant"


def test_legend_says_what_is_not_drawn_and_what_is_grey() -> None:
    cells = [({"optim.lr": lr / 10, "model": name}, 0.5) for lr in (1, 2) for name in "abcdefghij"]
    series = {f"c{index}": logged(0.1, 0.2) for index in range(20)}
    charts = drawn(sweep_of(cells), series)
    assert "12 more are not drawn" in charts["curves"]
    assert "2 more" in charts["optim.lr"]
    assert count(charts["optim.lr"], "circle") == 20, "all cells, also those without a line"
    assert charts["optim.lr"].count("fill:var(--muted)") == 5, "four dots and the legend"


def test_numbers_over_a_power_of_ten_have_a_logarithmic_axis() -> None:
    cells = [({"optim.lr": lr}, 0.5 + index / 10) for index, lr in enumerate((0.001, 0.01, 0.1))]
    chart = drawn(sweep_of(cells))["optim.lr"]
    (line,) = re.findall(r'<polyline [^>]*points="([^"]*)"', chart)
    first, second, third = (float(place.split(",")[0]) for place in line.split())
    assert abs((second - first) - (third - second)) < 0.2, "equal factors are equally far apart"
    assert count(chart, "circle") == 3


def test_words_of_a_key_are_named_below_the_axis() -> None:
    cells = [({"optim.name": name}, value) for name, value in (("adam", 0.5), ("sgd", 0.6))]
    chart = drawn(sweep_of(cells))["optim.name"]
    assert ">adam<" in chart
    assert ">sgd<" in chart


def test_two_keys_have_a_line_for_each_value_of_the_other() -> None:
    cells = [({"optim.lr": lr, "model": name}, 0.5) for lr in (0.1, 0.2) for name in ("a", "b", "c")]
    charts = drawn(sweep_of(cells))
    assert (count(charts["optim.lr"], "polyline"), count(charts["model"], "polyline")) == (3, 2)


def test_cost_chart_has_a_dot_for_each_setting() -> None:
    chart = drawn(sweep_of(SEEDS), hours=(1, 3, 4, 6))["cost"]
    assert count(chart, "circle") == 2
    assert "core-hours of a run" in chart


def test_without_two_values_nothing_is_drawn() -> None:
    assert drawn(sweep_of([({"optim.lr": 0.1, "seed": 1}, 0.5), ({"optim.lr": 0.2, "seed": 1}, None)])) == {}
    assert drawn(sweep_of([({"optim.lr": 0.1}, 1e300), ({"optim.lr": 0.2}, 0.5)])) == {}


def test_image_is_a_file_with_a_size_and_its_colours() -> None:
    facts = sweep_of([({"optim.lr": lr, "model": "<b>"}, lr) for lr in (0.1, 0.2)])
    chart = sweep_charts(facts, {}, {})["optim.lr"]
    image = ElementTree.fromstring(as_image(chart))
    assert image.tag == "{http://www.w3.org/2000/svg}svg"
    assert int(image.attrib["width"]) > int(image.attrib["height"]) > 0
    assert "--c0" in (image[0].text or "")
