"""What is checked before a submission, and how a refusal reads; nothing is submitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdist.errors import UserMistake
from hpcdist.launch import slurm
from hpcdist.schema import Config


def test_where_no_slurm_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserMistake, match=r"^no sbatch here: submit from a login node, or look at .* --dry-run$"):
        slurm.check(Config())


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("allocation failure: Invalid partition", "Slurm would not take this job: Invalid partition"),
        ("sbatch: error: Bad\nsecond line", "Slurm would not take this job: Bad second line"),
    ],
)
def test_a_refusal_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, told: str) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nprintf '%s\\n' '{said}' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserMistake) as caught:
        slurm.check(Config(name="probe"))
    assert str(caught.value) == told
