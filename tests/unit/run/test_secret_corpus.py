"""Hits of the detector on the corpus, in the patch and in untracked files."""

from __future__ import annotations

from pathlib import Path

from secret_corpus import FALSE, TOKENS, TRUE

from hpcdist.config.redaction import holds_secret, redact_text
from hpcdist.run.snapshot import _CODE, clean_patch, without_secrets


def _found(cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(line, name) for line, name in cases if holds_secret(line, code=Path(name).suffix in _CODE)]


def test_all_100_secrets_are_found_and_none_of_100_other_lines() -> None:
    assert (len(set(TRUE)), len(set(FALSE))) == (100, 100)
    assert [case for case in TRUE if case not in _found(TRUE)] == []
    assert _found(FALSE) == []


def test_tokens_are_redacted_in_messages() -> None:
    for token in TOKENS.values():
        shown = redact_text(f"refused: {token} is not valid")
        assert "***" in shown, token
        assert token not in shown


def test_patch_and_untracked_files_use_the_detector(tmp_path: Path) -> None:
    line = next(line for line, _ in TRUE if "os.environ[" in line)
    patch = f"diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1,2 @@\n x = 1\n+{line}\n"
    assert clean_patch(patch, ["a.py"], lambda _: False) == ("", ["a.py:2"])
    file = tmp_path / "Dockerfile"
    file.write_text("FROM x\n" + next(line for line, name in TRUE if name == "Dockerfile"))
    assert without_secrets(tmp_path, [file], [file]) == ([], ["Dockerfile:2"])
