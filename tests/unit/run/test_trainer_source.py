"""The source of a trainer, read without executing it."""

import ast
from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.errors import ConfigError
from hpcdist.run.create import check_trainer
from hpcdist.run.trainer_source import defined_names, sections_read, unread_keys

MODULE = """\
import os.path
from a import b as c
print("executed")
if True:
    def train(ctx, cfg): ...
try:
    (first, *others), named = values()
except ValueError:
    class Trainer:
        inner = 1
with open("x") as file:
    def build():
        local = 1
"""


def test_names_of_a_module_are_those_of_its_statements() -> None:
    assert defined_names(ast.parse(MODULE)) == {
        "os", "c", "train", "first", "others", "named", "Trainer", "file", "build",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["from a import *", "def __getattr__(name): ...", "def f():\n    global x", "globals()['train'] = 1", "exec('')"],
)
def test_module_that_defines_names_in_other_ways_is_not_judged(text: str) -> None:
    assert defined_names(ast.parse(text)) is None


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mine:trian", "trainer.target: {folder}/mine.py has no function 'trian': did you mean 'train'?"),
        ("mine:fit", "trainer.target: {folder}/mine.py has no function 'fit': it has train, helper"),
        ("pkg.mian:train", "trainer.target: no module 'mian' in the package {folder}/pkg: did you mean 'main'?"),
        ("mine.part:train", "trainer.target: 'mine' is a module, not a package, and so has no module 'part'"),
        ("pkg.main:train", ""),
        ("lazy.part:train", ""),
        ("mine:train", ""),
        ("star:train", ""),
    ],
)
def test_misspelt_trainer_is_found_before_a_run_is_created(target: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "lazy").mkdir()
    for name, text in {
        "mine.py": "raise SystemExit('executed')\ndef train(ctx, cfg): ...\ndef helper(): ...\n",
        "star.py": "from mine import *\n",
        "pkg/__init__.py": "",
        "pkg/main.py": "def train(ctx, cfg): ...\n",
        "lazy/__init__.py": "__path__ = ['elsewhere']\n",
    }.items():
        (tmp_path / name).write_text(text)
    config = load_config("ddp_digits", [f"trainer={target}"])
    if message:
        with pytest.raises(ConfigError) as caught:
            check_trainer(config, tmp_path)
        assert str(caught.value) == message.format(folder=tmp_path)
    else:
        check_trainer(config, tmp_path)


@pytest.mark.parametrize(
    ("body", "sections"),
    [
        ("x = cfg.optim.lr + ctx.rank; cfg.stop.max_steps", {"optim", "stop"}),
        ("ctx.steps(10)", set()),
        ("build(cfg)", None),
        ("Progress(ctx, 10)", None),
        ("ctx.config.stop", None),
        ("getattr(cfg, 'stop')", None),
    ],
)
def test_sections_that_a_function_reads(body: str, sections: set[str] | None) -> None:
    assert sections_read(ast.parse(f"def train(ctx, cfg):\n    {body}\n"), "train") == sections
    assert sections_read(ast.parse("from a import train"), "train") is None
    declared = ast.parse("def train(ctx, cfg, params: Params): ...")
    assert sections_read(declared, "train") == {"params"}


def test_keys_that_a_trainer_cannot_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def train(ctx, cfg):\n    for step in ctx.steps(cfg.params['total_steps']):\n        cfg.optim.lr\n"
    )
    (tmp_path / "plain.py").write_text("print('hello')\n")
    (tmp_path / "reads.py").write_text("import os\nopen(os.environ['HPCDIST_RUN_DIR'] + '/config.yaml')\n")
    keys = ["stop.max_steps", "stop.nan_losses", "optim.lr", "params.total_steps", "checkpoint.every_steps", "seed"]

    def unread(*words: str) -> str:
        return unread_keys(load_config("ddp_digits", [*words]), keys, tmp_path)

    assert unread("trainer=mine:train") == (
        "without effect: stop.max_steps, since mine:train does not read them from its config"
    )
    assert unread("trainer.script=[plain.py]") == (
        "without effect: stop.max_steps, optim.lr, params.total_steps, since plain.py does not get the config:"
        " give it arguments behind its name"
    )
    assert unread("trainer.script=[reads.py]") == ""
    assert unread("trainer=ddp") == "without effect: params.total_steps, since the trainer ddp does not read them"
    assert unread("trainer=missing:train") == "", "another check names it"
