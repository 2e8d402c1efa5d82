"""Names that MLflow accepts: unique, with the original recorded."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from mlflow.utils.validation import _validate_metric_name, _validate_tag_name

from hpcdist.errors import TrackingError
from hpcdist.tracking.journal import MAX_NAME, ChangedNames, clean_metric_name, clean_name, is_allowed


@pytest.mark.parametrize("name", ["train/loss", "a b:c-d_e.f", "größe", "k" * 250, "a/...", ".x", "a--b", "client-0a"])
def test_allowed_name_is_unchanged(name: str) -> None:
    assert is_allowed(name)
    assert clean_name(name) == clean_metric_name(name) == name


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("loss[0]", "loss_0_"),
        ("a//b/./../c/", "a/b/c"),
        ("/abs", "abs"),
        ("..", "_"),
        ("..x", "_.x"),
        ("...", "_"),
        ("", "_"),
        ("x\ny", "x_y"),
        ("k" * 300, "k" * 236),
        ("a/" * 200, ("a/" * 118)[:-1]),
        ("acc--0123456789ab", "acc--0123456789ab"),
    ],
)
def test_cleaned_name_ends_with_a_hash_of_the_original(name: str, stem: str) -> None:
    clean = clean_name(name)
    assert clean[:-14] == stem
    assert clean[-14:-12] == "--"
    assert is_allowed(clean)


def test_hash_of_a_name_is_stable() -> None:
    assert clean_name("acc%") == "acc_--0a78af425a78"


def test_cleaned_names_are_allowed_and_unique() -> None:
    generator = random.Random(0)
    alphabet = "ab_./-: %#é\n\ud800/."
    names = {"".join(generator.choices(alphabet, k=generator.choice((1, 2, 3, 5, 400)))) for _ in range(4000)}
    names |= {"x" * 300 + str(number) for number in range(100)} | {clean_name(name) for name in names}
    cleaned = [clean_name(name) for name in names]
    assert len(set(cleaned)) == len(names)
    for clean in cleaned:
        _validate_metric_name(clean)
        _validate_tag_name(clean)
        assert len(clean) <= MAX_NAME


def test_metric_name_attempt_is_reserved() -> None:
    assert clean_metric_name("attempt") == clean_metric_name("attempt") != "attempt"


def test_original_names_are_recorded_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "names.json"
    pairs = [(name, clean_name(name)) for name in ("acc%", "acc#", "acc", "n" * 5000)]
    with caplog.at_level(logging.WARNING):
        ChangedNames(path).note(pairs[2:3])
        assert not path.exists()
        changed = ChangedNames(path)
        changed.note(pairs)
        changed.note(pairs)
        ChangedNames(path).note(pairs)
    assert [record.message.partition(":")[0][:60] for record in caplog.records] == [
        "MLflow does not accept the name 'acc%'",
        "MLflow does not accept the name 'acc#'",
        "MLflow does not accept the name 'nnnnnnnnnnnnnnnnnnnnnnnnnnn",
    ]
    assert '"acc%"' in path.read_text()
    assert len(path.read_text()) < 1500
    with pytest.raises(TrackingError, match=r"names\.json cannot be written .No such file.*: free space there"):
        ChangedNames(tmp_path / "missing" / "names.json").note(pairs)
