"""The outcome file of a failed rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.files.atomic import read_json
from hpcdist.rank.outcome import Outcome
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
