"""The generated parts of the reference: nothing of the code is left out."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from doc_blocks import ROOT

from hpcdist.diagnostics.failure_patterns import PATTERNS, WAITING


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["docs_hooks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_marker_has_a_generator(hooks: ModuleType) -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    markers = {name for page in pages for name in re.findall(r"<!-- generated: (\S+) -->", page.read_text())}
    assert markers == set(hooks.GENERATORS)


def test_the_config_reference_has_every_key(hooks: ModuleType) -> None:
    text = hooks.generate_config()
    keys = [row[0] for row in hooks.config_keys()]
    assert len(keys) > 100
    assert [key for key in keys if f"`{key}`" not in text] == []
    assert [row[0] for row in hooks.config_keys() if not row[3]] == [], "keys without documentation"


def test_the_command_reference_has_every_command(hooks: ModuleType) -> None:
    import typer.main

    from hpcdist.cli.app import app

    text = hooks.generate_cli()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = [name for name, command in commands.items() if not command.hidden]
    assert {"run", "submit", "doctor"} <= set(shown)
    assert [name for name in shown if f"`hpcdist {name}`" not in text] == []
    assert "`hpcdist worker`" not in text
    assert "| `--dry-run` |" in text


def test_the_environment_reference_has_every_variable(hooks: ModuleType) -> None:
    text = hooks.generate_environment()
    assert {"HPCDIST_RUNS_DIR", "HPCDIST_RANK"} <= set(hooks.used_variables())
    assert [name for name in hooks.used_variables() if f"`{name}`" not in text] == []


def test_a_variable_without_description_fails_the_build(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    used = hooks.used_variables()
    monkeypatch.setattr(hooks, "used_variables", lambda: {**used, "HPCDIST_NEW": {"x.py"}})
    with pytest.raises(RuntimeError, match=r"has no description of \['HPCDIST_NEW'\]"):
        hooks.generate_environment()
    monkeypatch.setattr(hooks, "used_variables", lambda: {k: v for k, v in used.items() if k != "HPCDIST_RANK"})
    with pytest.raises(RuntimeError, match=r"describes unused variables \['HPCDIST_RANK'\]"):
        hooks.generate_environment()


def test_troubleshooting_has_every_known_failure(hooks: ModuleType) -> None:
    failures, waiting = hooks.generate_failures(), hooks.generate_waiting()
    assert [pattern.name for pattern in PATTERNS if pattern.fix not in failures] == []
    assert [reason for reason in WAITING if f"`{reason}`" not in waiting] == []
    assert hooks.generate_preflight().count("\n") >= 20
    assert hooks.generate_doctor().count("\n") >= 40


def test_messages_come_from_raise_statements_and_validation(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "hpcdist").mkdir()
    (tmp_path / "hpcdist" / "module.py").write_text(
        "def f(value):\n    raise DataError(f'{value.path} cannot be read: fetch it again')\n"
        "def g(config):\n    problems = []\n    problems.append(f'optim.lr must be > 0, got {config.lr}')\n"
        "    raise ValueError('is not a message to users')\n"
    )
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setattr(hooks, "PACKAGE", tmp_path / "hpcdist")
    assert {(message.error, message.text) for message in hooks.messages()} == {
        ("DataError", "{path} cannot be read: fetch it again"),
        ("ConfigError", "optim.lr must be > 0, got {lr}"),
    }
