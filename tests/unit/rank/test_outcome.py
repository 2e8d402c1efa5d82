"""The outcome file of a failed rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcdist.errors import TrainerError
from hpcdist.host.files import read_json, write_json
from hpcdist.rank.outcome import Outcome
from hpcdist.rank.worker import load_trainer
from hpcdist.run.folder import RunDir


def test_middle_of_a_long_exception_is_removed(runs_dir: Path) -> None:
    attempt = RunDir.create(runs_dir / "exp" / "run").new_attempt()
    outcome = Outcome(attempt, 0)
    with pytest.raises(ValueError, match="begin") as caught:
        raise ValueError("begin" + "x" * 2_000_000 + "end")
    assert outcome.write_error(caught.value) == 1
    assert attempt.outcome(0).stat().st_size < 30_000
    found = read_json(attempt.outcome(0))
    assert found is not None
    for text in (found["error"], "".join(found["traceback"])):
        assert "beginxxx" in text
        assert text.rstrip().endswith("xxxend")
        assert "characters, see the log" in text
    assert "".join(found["traceback"]).startswith("Traceback (most recent call last)")


def failed_in_user_code(run: RunDir, error: type[Exception], text: str) -> dict[str, Any]:
    """Return the outcome of a rank whose code, imported from the snapshot, raises an exception."""
    attempt = run.new_attempt()
    code = f"def train():\n    raise {error.__name__}({text!r})\n"
    found: dict[str, Any] = {}
    exec(compile(code, str(run.code / "pkg" / "train.py"), "exec"), found)
    with pytest.raises(error) as caught:
        found["train"]()
    assert Outcome(attempt, 0).write_error(caught.value) == 1
    return read_json(attempt.outcome(0)) or {}


def test_traceback_and_log_name_the_original_of_a_copied_file(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir.create(runs_dir / "exp" / "run")
    text = f"see {run.code}/pkg/data.py"
    frame = f'File "{run.code}/pkg/train.py", line 2, in train'
    assert frame in "".join(failed_in_user_code(run, ValueError, text)["traceback"])
    write_json(run.environment, {"code": {"copied": True, "root": "/me/project"}})
    caplog.clear()
    found = failed_in_user_code(run, ValueError, text)
    assert found["error"] == "ValueError: see /me/project/pkg/data.py"
    for shown in ("".join(found["traceback"]), caplog.text):
        assert 'File "/me/project/pkg/train.py", line 2, in train' in shown
        assert str(run.code) not in shown


def outcome_of_import(run: RunDir, target: str, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    attempt = run.new_attempt()
    caplog.clear()
    with pytest.raises((TrainerError, SyntaxError)) as caught:
        load_trainer(target)
    assert Outcome(attempt, 0).write_error(caught.value) == 2
    return read_json(attempt.outcome(0)) or {}


def test_errors_during_the_import_of_a_trainer_keep_their_traceback(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(runs_dir / "exp" / "run")
    run.code.mkdir()
    (run.code / "lacks_module.py").write_text("import os\nimport no_such_module_of_mine\n")
    (run.code / "lacks_name.py").write_text("from os import no_such_name\n")
    (run.code / "imports_broken.py").write_text("\nimport is_broken\n")
    (run.code / "is_broken.py").write_text("x = 1\ny = = 2\n")
    monkeypatch.syspath_prepend(str(run.code))
    for target, error, frame in (
        (
            "lacks_module:train",
            "ModuleNotFoundError: No module named 'no_such_module_of_mine'",
            'lacks_module.py", line 2',
        ),
        ("lacks_name:train", "ImportError: cannot import name 'no_such_name'", 'lacks_name.py", line 1'),
        ("imports_broken:train", "SyntaxError: invalid syntax", 'is_broken.py", line 2'),
    ):
        found = outcome_of_import(run, target, caplog)
        assert found["outcome"] == "rejected"
        assert error in found["error"]
        for shown in ("".join(found["traceback"]), caplog.text):
            assert frame in shown
            assert error in shown
    for target in ("no_such_module_of_mine:train", "lacks_module_too.train:train"):
        found = outcome_of_import(run, target, caplog)
        assert found["traceback"] == []
        assert "Traceback" not in caplog.text
