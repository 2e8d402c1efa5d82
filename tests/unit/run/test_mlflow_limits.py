"""Names that MLflow accepts for metrics, parameters and tags."""

import random

import pytest
from mlflow.utils.validation import _validate_metric_name, _validate_tag_name

from hpcdist.run import mlflow_limits


def test_only_a_cleaned_name_ends_with_a_hash_of_the_original(caplog: pytest.LogCaptureFixture) -> None:
    mlflow_limits.clean_name.cache_clear()
    mlflow_limits._note_change.cache_clear()
    stems = {"loss[0]": "loss_0_", "a//b/./../c/": "a/b/c", "/abs": "abs", "..": "_", "..x": "_.x", "": "_"}
    stems |= {"k" * 300: "k" * 236, "a/" * 200: ("a/" * 118)[:-1], "acc--0123456789ab": "acc--0123456789ab"}
    for name, stem in stems.items():
        clean = mlflow_limits.clean_name(name)
        assert (clean[:-14], clean[-14:-12]) == (stem, "--")
        assert mlflow_limits.is_allowed(clean)
    for number in range(10_001):
        mlflow_limits.clean_name(f"metric-{number}")
    warning = f"MLflow does not accept the name 'loss[0]': it is uploaded as '{mlflow_limits.clean_name('loss[0]')}'"
    assert caplog.messages.count(warning) == 1, "once, however many names a run has"
    for name in ("train/loss", "a b:c-d_e.f", "größe", "k" * 250, "a/...", ".x", "a--b", "client-0a"):
        assert mlflow_limits.is_allowed(name)
        assert mlflow_limits.clean_name(name) == name


def test_cleaned_names_are_allowed_and_unique() -> None:
    generator = random.Random(0)
    alphabet = "ab_./-: %#é\n\ud800/."
    names = {"".join(generator.choices(alphabet, k=generator.choice((1, 2, 3, 5, 400)))) for _ in range(4000)}
    names |= {"x" * 300 + str(number) for number in range(100)} | {mlflow_limits.clean_name(name) for name in names}
    cleaned = [mlflow_limits.clean_name(name) for name in names]
    assert len(set(cleaned)) == len(names)
    for clean in cleaned:
        _validate_metric_name(clean)
        _validate_tag_name(clean)
        assert len(clean) <= mlflow_limits.MAX_NAME
