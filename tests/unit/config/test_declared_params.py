"""Values of `params` for the types that a trainer declares: on submission, in the run folder and in a rank."""

import sys
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import arguments_of, run_yaml
from hpcdist.errors import ConfigError

MODULE = """
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

IMPORTED = 1

@dataclass
class Inner:
    text: str = ""

@dataclass
class Params:
    value: KIND = DEFAULT
    UNREADABLE

def train(ctx, cfg, params: Params): ...
"""
#: A field that only the ranks can execute: the values reach them without their types.
ONLY_RANKS = "count: int = IMPORTED"


class Project:
    """A current folder with a trainer that has one value as its parameters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def declare(self, kind: str, default: str, more: str = "") -> None:
        module = MODULE.replace("KIND", kind).replace("DEFAULT", default).replace("UNREADABLE", more)
        (self.folder / "mine.py").write_text(module)
        sys.modules.pop("mine", None)

    def in_rank(self, params: str, *overrides: str, later: tuple[str, ...] = ()) -> Any:
        """Return the value in a rank of a new run, or of one that a resume has changed by `later`."""
        import importlib

        (self.folder / "mine.yaml").write_text(f"trainer: mine:train\nparams: {params}\n")
        stored = self.folder / "config.yaml"
        stored.write_text(run_yaml(load_config("mine.yaml", overrides)))
        if later:
            stored.write_text(run_yaml(load_run_config(stored, later, {})))
        config = load_run_config(stored, [], {})
        train = importlib.import_module("mine").train
        return arguments_of(train, config.params, config.param_texts)[0].value


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return Project(tmp_path)


@pytest.mark.parametrize("more", ["", ONLY_RANKS], ids=["submission", "ranks"])
@pytest.mark.parametrize("text", ["1.10", "0123", "123e456", "on", "true", "0x1f", "1_0", "2020-01-01", "7"])
def test_text_stays_as_it_is_written(project: Project, text: str, more: str) -> None:
    project.declare("str", "''", more)
    assert project.in_rank(f"{{value: {text}}}") == text
    assert project.in_rank("{}", f"params.value={text}") == text
    assert project.in_rank("{value: 1.0}", later=(f"params.value={text}",)) == text


@pytest.mark.parametrize("more", ["", ONLY_RANKS], ids=["submission", "ranks"])
@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("list[str]", "[1.10, on, a]", ["1.10", "on", "a"]),
        ("tuple[str, ...]", "[1.10, 010]", ("1.10", "010")),
        ("dict[str, str]", "{1.10: 1.10, on: off}", {"1.10": "1.10", "on": "off"}),
        ("dict[str, list[str]]", "{a: [1.10]}", {"a": ["1.10"]}),
        ("Literal['1.10', 'on', 'null', '1']", "1.10", "1.10"),
        ("Literal['1.10', 'on', 'null', '1']", "null", "null"),
        ("Literal['1.10', 'on', 'null', '1']", "1", "1"),
        ("Path", "0123", Path("0123")),
        ("Path", "7", Path("7")),
        ("Any", "1.10", 1.1),
        ("list", "[1.10, 010]", [1.1, 10]),
        ("float", "1.10", 1.1),
        ("bool", "on", True),
    ],
)
def test_type_of_the_trainer_decides(project: Project, kind: str, text: str, expected: object, more: str) -> None:
    project.declare(kind, "None", more)
    assert project.in_rank(f"{{value: {text}}}") == expected
    assert project.in_rank("{}", f"params.value={text}") == expected


def test_nested_class_and_merged_keys_keep_their_texts(project: Project) -> None:
    project.declare("Inner", "field(default_factory=Inner)")
    assert project.in_rank("{value: {text: 1.10}}").text == "1.10"
    assert project.in_rank("{value: {<<: {text: 1.10}}}").text == "1.10"
    assert project.in_rank("{}", "params.value.text=010").text == "010"
    assert project.in_rank("{value: {text: 1.10}}", "params.value={text: 1.0}").text == "1.0"


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("Literal['auto'] | float", "auto", "auto"),
        ("Literal['auto'] | float", "3", 3.0),
        ("str | list[str]", "[a, 1.10]", ["a", "1.10"]),
        ("str | list[str]", "a", "a"),
        ("int | Path", "/data", Path("/data")),
        ("int | Path", "3", 3),
        ("None | float", "1", 1.0),
        ("str | float", "1", 1.0),
        ("str | float", "1.5", 1.5),
        ("str | float", "'1'", "1"),
        ("bool | float", "1", 1.0),
        ("int | str", "1.10", "1.10"),
        ("str | None", "1.10", "1.10"),
        ("str | None", "null", None),
        ("Literal['on', 'off'] | bool", "on", "on"),
        ("Literal['on', 'off'] | bool", "true", True),
        ("list[int] | dict[str, int]", "{a: 1}", {"a": 1}),
        ("list[int | str]", "[1, 1.10]", [1, "1.10"]),
        ("dict[str, float | None]", "{a: 1, b: null}", {"a": 1.0, "b": None}),
    ],
)
@pytest.mark.parametrize("more", ["", ONLY_RANKS], ids=["submission", "ranks"])
def test_union_takes_the_nearest_member(project: Project, kind: str, text: str, expected: object, more: str) -> None:
    project.declare(kind, "None", more)
    value = project.in_rank(f"{{value: {text}}}")
    assert repr(value) == repr(expected)


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        ("Literal['auto'] | float", "'auto'", "'auto'"),
        ("str | Path", "Path('a')", repr(Path("a"))),
        ("tuple", "(1, 2)", "(1, 2)"),
        ("list[int] | tuple[int, ...]", "(1, 2)", "(1, 2)"),
        ("set[int]", "field(default_factory=lambda: {1})", "{1}"),
        ("bytes", "b'a'", "b'a'"),
        ("complex", "1j", "1j"),
        ("float", "1", "1"),
        ("int", "field(init=False, default=3)", "3"),
        ("float", "float('nan')", "nan"),
    ],
)
def test_default_of_the_trainer_is_valid_in_the_rank(project: Project, kind: str, default: str, expected: str) -> None:
    project.declare(kind, default)
    assert repr(project.in_rank("{}")) == expected


@pytest.mark.parametrize(("kind", "text"), [("int | Literal['auto']", "autoo"), ("None | float", "[1]")])
def test_value_of_no_member_is_a_mistake(project: Project, kind: str, text: str) -> None:
    project.declare(kind, "None")
    with pytest.raises(ConfigError, match=r"params\.value must be .*, got "):
        project.in_rank(f"{{value: {text}}}")
