"""The generated parts of the reference pages contain every key, command, variable, message and failure of the code."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import hooks
import pytest
from doc_blocks import ROOT
from generators import commands, config, environment, findings, messages, packages, runtimes
from typer.testing import CliRunner

from hpcdist.cli.app import make_app
from hpcdist.config.describe import describe
from hpcdist.containers.spec import RUNTIMES
from hpcdist.review.explain import PATTERNS, WAITING


def test_every_marker_has_a_generator() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    markers = {name for page in pages for name in re.findall(r"<!-- generated: (\S+) -->", page.read_text())}
    assert markers == set(hooks.GENERATORS)


def test_hook_replaces_markers_and_refuses_unknown_ones() -> None:
    page = hooks.on_page_markdown("# Config\n\n<!-- generated: configs -->\n")
    assert page.startswith("# Config\n\n| config | content |\n")
    with pytest.raises(KeyError, match="unknown"):
        hooks.on_page_markdown("<!-- generated: unknown -->")


def test_run_folder_reference_has_its_files() -> None:
    text = packages.run_folder()
    names = ("state.json", "journal/sent-points.json", "attempts/001/", "srun.log")
    assert [name for name in names if name not in text] == []


def test_config_reference_has_every_key() -> None:
    text = config.config_keys()
    keys = describe()
    assert len(keys) > 100
    assert [key for key, *_ in keys if f"`{key}`" not in text] == []
    assert [key for key, _, _, documentation in keys if not documentation] == []


def test_json_schema_beside_the_config_reference_is_current() -> None:
    """If this test fails, run: hpcdist config --json-schema > docs/config.schema.json"""
    printed = CliRunner().invoke(make_app(), ["config", "--json-schema"]).stdout
    assert json.loads(config.SCHEMA.read_text()) == json.loads(printed)


@pytest.mark.parametrize("content", [None, "{}"], ids=["missing", "stale"])
def test_config_reference_is_not_built_without_current_json_schema(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "ROOT", tmp_path)
    monkeypatch.setattr(config, "SCHEMA", tmp_path / "config.schema.json")
    if content is not None:
        config.SCHEMA.write_text(content)
    with pytest.raises(RuntimeError, match=r"missing or stale: hpcdist config --json-schema > config\.schema\.json"):
        config.config_keys()


def test_command_reference_has_every_command() -> None:
    import typer.main

    text = commands.commands()
    group = typer.main.get_command(make_app())
    visible = [name for name, command in group.commands.items() if not command.hidden]  # type: ignore[attr-defined]
    assert {"run", "submit", "doctor"} <= set(visible)
    assert [name for name in visible if f"## `hpcdist {name}`" not in text] == []
    assert "`hpcdist worker`" not in text
    assert "* `--dry-run`: " in text


def test_environment_reference_has_every_variable() -> None:
    text = environment.environment_variables()
    assert {"HPCDIST_RUNS_DIR", "HPCDIST_RANK"} <= set(environment.used_variables())
    assert [name for name in environment.used_variables() if f"`{name}`" not in text] == []


def test_variable_without_description_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    used = environment.used_variables()
    monkeypatch.setattr(environment, "used_variables", lambda: {**used, "HPCDIST_NEW": {"x.py"}})
    with pytest.raises(RuntimeError, match=r"has no description of \['HPCDIST_NEW'\]"):
        environment.environment_variables()
    monkeypatch.setattr(environment, "used_variables", lambda: {k: v for k, v in used.items() if k != "HPCDIST_RANK"})
    with pytest.raises(RuntimeError, match=r"describes unused variables \['HPCDIST_RANK'\]"):
        environment.environment_variables()


def test_troubleshooting_has_every_known_failure() -> None:
    failures, waiting = findings.failure_patterns(), findings.waiting_reasons()
    assert [pattern.name for pattern in PATTERNS if pattern.fix not in failures] == []
    assert [reason for reason in WAITING if f"`{reason}`" not in waiting] == []
    assert findings.preflight_findings().count("\n") >= 20
    assert findings.doctor_findings().count("\n") >= 40


def test_messages_come_from_raise_statements_and_validation() -> None:
    tree = ast.parse(
        "def f(value):\n    raise DataError(f'{value.path} cannot be read: fetch it again')\n"
        "def g(config):\n    problems = []\n    problems.append(f'optim.lr must be > 0, got {config.lr}')\n"
        "    raise ValueError('is not a message to users')\n"
        "def h():\n    raise ExportError(f'onnx is not installed: {install_command(\"export\")}')\n"
    )
    assert set(messages.raised_messages(tree)) == {
        ("{path} cannot be read: fetch it again", "DataError"),
        ("optim.lr must be > 0, got {lr}", "ConfigError"),
        ("onnx is not installed: `pip install '.[export]'` in a checkout of hpcdist", "ExportError"),
    }


def test_recorded_tests_name_runtimes_and_faults_of_the_matrix() -> None:
    for one in runtimes.RECORDED:
        assert set(one.passed) <= set(runtimes.FAULTS)
        assert one.user in (runtimes.ROOT, runtimes.USER)
    assert {one.runtime for one in runtimes.RECORDED} == {*RUNTIMES, "pyxis"}
