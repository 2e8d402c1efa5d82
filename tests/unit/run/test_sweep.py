"""Parsing of sweep axes, and the cells of a sweep and their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError
from hpcdist.run.sweeps import Sweep, changes, make_sweep, parse_axes, reordered, text_of

Make = Callable[..., Sweep]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes a sweep from `--sweep` arguments and overrides."""
    path = tmp_path / "run.yaml"
    path.write_text(f"{{experiment: exp, runs_dir: {tmp_path}/runs, params: {{a: 1}}}}\n")

    def make(axes: Sequence[str], *overrides: str) -> Sweep:
        return make_sweep(
            parse_axes(axes, overrides), lambda more: load_config(path, [*overrides, *more]), lambda config: "ddp"
        )

    return make


def problems_of(call: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call()
    return list(caught.value.problems)


# --- parsing


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a.b=1", ("1",)),
        ("a.b=0.1, 0.01,1e-3", ("0.1", "0.01", "1e-3")),
        ("a=[1,2],[3]", ("[1,2]", "[3]")),
        ("a={x: [1,2], y: 3},null", ("{x: [1,2], y: 3}", "null")),
        ("a='x,y',\"z,\"", ("'x,y'", '"z,"')),
        ("a=['x]',2],it's,b", ("['x]',2]", "it's", "b")),
        ("a=b=c,d", ("b=c", "d")),
    ],
)
def test_comma_inside_brackets_or_quotes_belongs_to_the_value(text: str, words: tuple[str, ...]) -> None:
    assert parse_axes([text], []) == {text.partition("=")[0]: words}


@pytest.mark.parametrize(
    ("axes", "overrides", "problem"),
    [
        (["seed"], [], "'seed' is not an axis: write key=value,value as in optim.lr=0.1,0.01"),
        (["=1,2"], [], "'=1,2' is not an axis: write key=value,value as in optim.lr=0.1,0.01"),
        (["--seed=1,2"], [], "'--seed=1,2' is not an axis: write key=value,value as in optim.lr=0.1,0.01"),
        (["name=a,b"], [], "name cannot be swept: all cells share it"),
        (["experiment=a,b"], [], "experiment cannot be swept: all cells share it"),
        (["runs_dir=a,b"], [], "runs_dir cannot be swept: all cells share it"),
        (["cluster.nodes=1,2"], [], "cluster.nodes cannot be swept: all cells share it"),
        (["cluster={nodes: 1},null"], [], "cluster cannot be swept: all cells share it"),
        (["tracking.uri=a,b"], [], "tracking.uri cannot be swept: all cells share it"),
        (["seed=1,2", "seed=3"], [], "seed is swept twice: write its values in one --sweep"),
        (["params={a: 1}", "params.a=3"], [], "params.a is swept twice: write its values in one --sweep"),
        (["seed=1,2"], ["seed=3"], "seed is both swept and overridden: remove one of them"),
        (["params={a: 1}"], ["params.a=3"], "params is both swept and overridden: remove one of them"),
        (["params.a=[1,2"], [], "params.a: a bracket or quote is not closed in '[1,2'"),
        (["params.a='1,2"], [], 'params.a: a bracket or quote is not closed in "\'1,2"'),
        (["seed="], [], "seed has an empty value in '': write null for none, '' for an empty text"),
        (["seed=1,,2"], [], "seed has an empty value in '1,,2': write null for none, '' for an empty text"),
    ],
)
def test_mistake_in_an_axis_is_reported(axes: list[str], overrides: list[str], problem: str) -> None:
    assert problems_of(lambda: parse_axes(axes, overrides)) == [problem]


def test_all_mistakes_are_reported_at_once() -> None:
    assert len(problems_of(lambda: parse_axes(["x", "name=a", "seed=1,"], []))) == 3


# --- cells


def test_cells_are_named_by_their_values(make: Make) -> None:
    sweep = make(["optim.lr=0.1,1e-2", "seed=1,2"], "name=tune")
    assert [cell.name for cell in sweep.cells] == [
        "tune-lr_0.1-seed_1",
        "tune-lr_0.1-seed_2",
        "tune-lr_0.01-seed_1",
        "tune-lr_0.01-seed_2",
    ]
    last = sweep.cells[-1]
    assert (last.label, last.values) == ("lr=0.01 seed=2", {"optim.lr": 0.01, "seed": 2})
    assert (last.config.name, last.config.optim.lr, last.config.seed) == (last.name, 0.01, 2)
    assert sweep.folder == Path(last.config.runs_dir) / "exp" / "tune"


def test_keys_with_equal_last_parts_are_written_in_full(make: Make) -> None:
    sweep = make(["data.name=digits,mnist", "model.name=simple_cnn"], "name=tune")
    assert sweep.cells[0].label == "data.name=digits model.name=simple_cnn"
    assert sweep.cells[0].name == "tune-data.name_digits-model.name_simple_cnn"


def test_unusual_values_get_distinct_names(make: Make) -> None:
    long = "x" * 300
    words = ["1", "'1'", "true", "'true'", "null", "[1,2]", "a b", "a/b", "''", "-0.5", long, f"{long}y", "ä"]
    names = [cell.name for cell in make([f"params.b={','.join(words)}"], "name=t").cells]
    assert len(set(names)) == len(words)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) and len(name) < 110 for name in names)
    assert (names[0], names[2], names[9]) == ("t-b_1", "t-b_true", "t-b_-0.5")


def test_names_of_many_axes_are_shortened(make: Make) -> None:
    axes = [f"params.a_rather_long_name_{index}=1,2" for index in range(6)]
    names = [cell.name for cell in make(axes, "name=t").cells]
    assert len(set(names)) == 64
    assert max(map(len, names)) <= 102


def test_text_that_parses_as_another_type_is_quoted() -> None:
    assert [text_of(value) for value in ("a", "1", 1, None, "null", [1, "b"])] == [
        "a", '"1"', "1", "null", '"null"', '[1, "b"]'
    ]  # fmt: skip


def test_equal_config_values_are_an_error(make: Make) -> None:
    assert problems_of(lambda: make(["optim.lr=0.1,1e-1"])) == ["optim.lr: 0.1 and 1e-1 are the same value"]
    assert problems_of(lambda: make(["optim.lr=1,1.0"])) == ["optim.lr: 1 and 1.0 are the same value"]
    assert problems_of(lambda: make(["seed=1,2,1"])) == ["seed: 1 is given twice"]
    assert len(make(["params.b=1,'1'"]).cells) == 2


def test_mistakes_of_all_cells_are_reported_once(make: Make) -> None:
    problems = problems_of(lambda: make(["optim.lr=0.1,-1,x", "seed=1,2"]))
    assert problems[0] == "optim.lr must be > 0, got -1.0"
    assert problems[1].startswith("optim.lr must be float, got 'x'")
    assert len(problems) == 2
    assert problems_of(lambda: make(["optim.lrr=1,2"])) == ["optim.lrr is not a key: did you mean 'optim.lr'?"]


def test_mistake_of_a_single_cell_is_reported(make: Make) -> None:
    axes = ["launch.device=auto,cpu", "launch.backend=gloo,nccl"]
    (problem,) = problems_of(lambda: make(axes))
    assert problem.startswith("launch.backend=nccl needs GPUs, but launch.device=cpu")


def test_secrets_cannot_be_swept(make: Make) -> None:
    (problem,) = problems_of(lambda: make(["launch.env.API_TOKEN=abc,def"]))
    assert (
        problem == "launch.env.API_TOKEN looks like a secret, and cells are named by their values: it cannot be swept"
    )


def test_short_form_of_a_section_can_be_swept(make: Make) -> None:
    sweep = make(["trainer=mine:train,theirs:train"], "name=t")
    assert [cell.config.trainer.target for cell in sweep.cells] == ["mine:train", "theirs:train"]
    assert sweep.cells[0].label == "trainer=mine:train"


# --- identity of a sweep


def test_derived_name_depends_on_config_and_keys(make: Make) -> None:
    name = make(["optim.lr=0.1", "seed=1,2"]).name
    assert re.fullmatch(r"ddp-lr-seed-[0-9a-f]{8}", name)
    assert make(["optim.lr=0.1,0.2", "seed=3"]).name == name, "values can be added"
    assert make(["optim.lr=0.1", "seed=1"], "cluster.time_limit_min=7", "launch.max_restarts=9").name == name
    assert make(["optim.lr=0.1", "seed=1"], "optim.momentum=0.5").name != name
    assert make(["optim.lr=0.1"]).name != name


def test_reordered_keys_rename_the_cells(make: Make) -> None:
    sweep = reordered(make(["seed=1,2", "optim.lr=0.1"], "name=t"), ["optim.lr", "seed"])
    assert (sweep.keys, sweep.cells[1].name) == (("optim.lr", "seed"), "t-lr_0.1-seed_2")
    assert sweep.cells[1].config.name == "t-lr_0.1-seed_2"


def test_base_holds_values_that_all_cells_share(make: Make) -> None:
    base = make(["seed=1,2"]).base
    assert "seed" not in base
    assert not [key for key in base if key.startswith(("cluster.", "launch.", "tracking."))]
    assert changes(base, make(["seed=3"], "launch.num_threads=2", "tracking.log_every_steps=7").base) == []
    assert changes(base, make(["seed=3"], "optim.lr=0.5").base) == ["optim.lr was 0.001, is 0.5"]
    assert changes(base, make(["seed=3"], "params.b=2").base) == ["params.b was None, is 2"]
    older = {key: value for key, value in base.items() if key != "optim.momentum"}
    assert changes(older, base) == [], "a key that a newer version has added"
